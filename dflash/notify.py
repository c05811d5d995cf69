"""Tells somebody who is not looking: a command or a webhook, as `notify:` of the hosts file says.

    notify: {command: [notify-send, dflash], webhook: "https://...", on: [failure, finish, low_disk, starvation]}

The message is one JSON object: event, text, run, host, time. The command reads it from standard input, the webhook gets it
as the body of a POST. What cannot be delivered is said on stderr and changes nothing: a run never fails for want of a
listener. Costs a thread that looks once a minute at trainings that are at work.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash.base.errors import DflashError
from dflash.base.records import now
from dflash.hosts.entry import Notify

DEADLINE = 20.0
"""Seconds that a command or a webhook may take."""
LOOK = 60.0
"""Seconds between two looks at trainings."""
LOW_DISK_BYTES = 2 << 30
STARVED = 0.5
"""A training is starved when its slowest role waits for this share of its steps, at two looks in a row."""


class Notifier:
    """Delivers messages; every event about one thing once."""

    def __init__(self, settings: Notify, run: str) -> None:
        self.settings = settings
        self.run = run
        self._told: set[tuple[str, str]] = set()

    def tell(self, event: str, text: str, about: str = "") -> None:
        """Delivers a message if the hosts file asks for this event and it was not told before. Never raises for a failed
        delivery."""
        if event not in self.settings.on or (event, about) in self._told:
            return
        self._told.add((event, about))
        message = {"event": event, "text": text, "run": self.run, "host": socket.gethostname(), "time": now()}
        body = json.dumps(message, ensure_ascii=False).encode()
        for deliver in (self._command, self._webhook):
            try:
                deliver(body)
            except (OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
                why = _webhook_fault(error) if deliver == self._webhook else error
                print(f"dflash: the notification of `{event}` was not delivered: {why}", file=sys.stderr, flush=True)

    def _command(self, body: bytes) -> None:
        if self.settings.command:
            subprocess.run(
                list(self.settings.command), input=body, timeout=DEADLINE, check=True, stdout=subprocess.DEVNULL
            )

    def _webhook(self, body: bytes) -> None:
        if self.settings.webhook:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.settings.webhook, data=body, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                answer.read(1)


def _webhook_fault(error: Exception) -> str:
    """What went wrong, without the message of the error: it may hold the address, and whoever knows that may post to it."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the webhook answered with status {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    told = reason.strerror if isinstance(reason, OSError) else ""
    return f"the webhook could not be reached ({told or type(reason).__name__})"


class Lookout:
    """Looks at trainings and at the disk while a run goes on. `trainings`: name -> what says how it is (`launch.health`)."""

    def __init__(
        self, notifier: Notifier, results: Path, trainings: Mapping[str, Callable[[], dict[str, Any]]]
    ) -> None:
        self.notifier = notifier
        self.results = results
        self.trainings = trainings
        self._starved: set[str] = set()
        self._ended = threading.Event()

    def __enter__(self) -> Lookout:
        if {"low_disk", "starvation"} & set(self.notifier.settings.on):
            threading.Thread(target=self._watch, daemon=True, name="lookout").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK):
            self.look()

    def look(self) -> None:
        """One look; a host that cannot be asked is passed over."""
        free = shutil.disk_usage(self.results).free
        if free < LOW_DISK_BYTES:
            self.notifier.tell("low_disk", f"{self.results} has {free / 1e9:.1f} GB left", str(self.results))
        for name, health in self.trainings.items():
            try:
                found = health()
            except DflashError:
                continue
            if found["alert"]:
                self.notifier.tell("low_disk", f"{name}: {found['alert']}", name)
            if found["stalled"] < STARVED:
                self._starved.discard(name)
            elif name in self._starved:
                share = found["stalled"]
                self.notifier.tell("starvation", f"{name}: waits for {share:.0%} of the time; see metrics.jsonl", name)
            else:
                self._starved.add(name)
