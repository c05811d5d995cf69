"""A stage on another host, seen from the controller.

    the code of this checkout, once a digest  ->  <workdir>/code/<digest>/
    params, receipts and prompt files         ->  one request over one connection (`bundle.py`)
    the stage runs there (`there.py`); its stderr is ours; its life hangs on our connection
    the receipt and small outputs come back   <-  one answer; weights, features and large tables stay

A connection that is lost is made again: a trainer does not notice, another stage begins anew from what it has published. Time
without any connection is bounded. Costs two processes and a thread here, mostly asleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from dflash import bundle
from dflash.base.environment import GIT_VARIABLE, git_facts
from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.files import sha256_file
from dflash.base.progress import Progress
from dflash.base.records import ParamsFile, Receipt
from dflash.base.store import (
    read_params,
    receipt_path,
    stage_directory,
    stays_there,
)
from dflash.hosts.code import send_code
from dflash.hosts.entry import with_file
from dflash.hosts.host import Host
from dflash.hosts.inventory import load_inventory
from dflash.hosts.lease import CLONE, USER, clone_name, user_name
from dflash.hosts.ssh import SshHost
from dflash.plan.places import Home, home_path, not_here, read_home
from dflash.runner import INVOCATION, Job, beside_copies, changed_inputs
from dflash.stages import BY_NAME

STORE = PurePosixPath("results/store")
"""The store of a host, in its workdir."""
BEAT = 5.0
"""Seconds between two signs of life."""
SILENCE = 300.0
"""Seconds without any connection after which a host counts as lost."""
LIVED = 30.0
"""A connection that held for so many seconds shows that the host is well."""
ATTEMPTS = 3
"""How often a stage other than training is begun when its connection breaks."""
KINDS: dict[str, type[DflashError]] = {
    "config": ConfigError,
    "permanent": PermanentError,
    "transient": TransientError,
    "corrupt": CorruptError,
}
T = TypeVar("T")


class LinkLost(TransientError):
    """The connection broke, or the process there was killed: from here they look the same."""


class Unreachable(LinkLost):
    """There was no connection at all."""


# ---------------------------------------------------------------- one question to a host


def open_host(hosts_file: str | Path | None, host_id: str) -> Host:
    """A host of a hosts file.

    Raises:
        ConfigError: the file is damaged or names no such host.
    """
    return load_inventory(Path(hosts_file) if hosts_file is not None else None).get(host_id)


def ask(
    host: Host, role: str, request: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Sends one request to a host and waits for its answer; stderr of the other side is ours.

    Returns:
        The answer's document and its files. `error` in the document is None, or what `raise_error` raises.

    Raises:
        Unreachable: no connection. LinkLost: no answer came and the connection is gone.
        PermanentError: the other side ended without an answer.
    """
    try:
        code = send_code(host)
    except TransientError as error:
        raise Unreachable(error.what, where=error.where, remedy=error.remedy) from error
    argv = ["env", f"PYTHONPATH={code}", "PYTHONDONTWRITEBYTECODE=1", host.python(role), "-m", "dflash.there"]
    process = subprocess.Popen(
        host.command([*argv, str(host.workdir)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    done = threading.Event()
    message = bundle.pack({**request, "environment": {**_environment(), **request.get("environment", {})}}, files)
    feeder = threading.Thread(target=_feed, args=(process, message, done), daemon=True, name=f"feed-{host.id}")
    feeder.start()
    assert process.stdout is not None
    try:
        return bundle.unpack(process.stdout)
    except bundle.Torn as torn:
        status = process.wait()
        if status == 255 or status < 0:
            raise LinkLost(f"{host.id}: the connection broke", remedy="It is tried again.") from torn
        doctor = with_file(f"dflash doctor --host {host.id}", host.file if isinstance(host, SshHost) else None)
        raise PermanentError(
            f"the stage ended there without an answer (exit status {status})",
            where=host.id,
            remedy=f"Its last words are above. Does `{host.python(role)}` there have the locked dependencies? "
            f"`{doctor}` looks.",
        ) from torn
    except BaseException:
        process.kill()  # Ctrl-C: the other side sees the end of our connection, and ends
        raise
    finally:
        done.set()
        with contextlib.suppress(OSError):
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()


def _feed(process: subprocess.Popen[bytes], message: bytes, done: threading.Event) -> None:
    """Writes the request, then a byte every few seconds: the other side ends when they stop coming."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(message)
        process.stdin.flush()
        while not done.wait(BEAT):
            process.stdin.write(b"\n")
            process.stdin.flush()
    with contextlib.suppress(OSError, ValueError):
        process.stdin.close()


def _environment() -> dict[str, str]:
    """What the other side must know of who asks. Nothing secret: others there can read it."""
    found = {CLONE: clone_name(), USER: user_name(), GIT_VARIABLE: json.dumps(git_facts())}
    if INVOCATION in os.environ:
        found[INVOCATION] = f"{socket.gethostname()}/{os.environ[INVOCATION]}"
    return found


def raise_error(document: Mapping[str, Any], host: Host) -> None:
    """Raises the failure that an answer tells of, if it does."""
    told = document.get("error")
    if told:
        kind = KINDS.get(told["kind"], PermanentError)
        where = f"{host.id}:{told['where']}" if str(told["where"]).startswith("/") else f"{told['where']} ({host.id})"
        raise kind(told["what"], where=where, remedy=told["remedy"])


def persist(host: Host, say: Callable[[str], None], attempt: Callable[[], T], limit: int | None = None) -> T:
    """Does `attempt` until it is not cut off by a lost connection.

    Args:
        limit: attempts at most; None bounds only the time without a connection.

    Raises:
        TransientError: no connection for `SILENCE` seconds, or too many attempts. PermanentError: the host refuses us.
    """
    count = 0
    last_heard = time.monotonic()
    while True:
        started = time.monotonic()
        count += 1
        try:
            return attempt()
        except LinkLost as lost:
            if count == 1 and isinstance(lost, Unreachable):
                raise  # nobody waits for a host that has not answered once
            if time.monotonic() - started > LIVED:
                last_heard = time.monotonic()
            if limit is not None and count >= limit:
                raise
            if time.monotonic() - last_heard > SILENCE:
                raise TransientError(
                    f"the connection breaks again and again for {SILENCE:.0f} s", where=host.id
                ) from lost
            say(f"the connection to {host.id} is lost; trying again")
            _await(host, last_heard, say)


def _await(host: Host, last_heard: float, say: Callable[[str], None]) -> None:
    """Waits until the host answers again."""
    told = time.monotonic()
    while True:
        try:
            host.run(["true"], timeout=30)
            return
        except TransientError as error:
            quiet = time.monotonic() - last_heard
            if quiet > SILENCE:
                raise TransientError(
                    f"nothing heard from it for {quiet:.0f} s ({error.what})",
                    where=host.id,
                    remedy="A training there goes on; `dflash run` attaches to it when the host can be reached.",
                ) from error
            if time.monotonic() - told > 20:
                say(f"{host.id} has not answered for {quiet:.0f} s; a training there goes on")
                told = time.monotonic()
            time.sleep(2)


# ---------------------------------------------------------------- a stage there


def run_there(job: Job) -> Receipt:
    """Runs a stage on the host that its placement names, and brings back what the controller keeps.

    Raises:
        DflashError: of the kind that the stage failed with, or of the connection's.
    """
    host = open_host(job.placement["hosts"], str(job.placement["host"]))
    progress = Progress(job.label)
    role = job.stage.role
    document = read_params(job.directory)
    placement, external = _placement(job)
    beside = {str(STORE / name): content for name, content in beside_copies(job, document).items()}
    files = {**params_closure(job.store, document), **beside, **external}
    request = {
        "do": "stage",
        "stage": job.stage.name,
        "key": document.key,
        "step": job.step,
        "placement": placement,
        "run": job.run,
        "asker": asker(job.store),
    }
    if job.stage.name == "train":
        (job.directory / "attempts").mkdir(exist_ok=True)  # planning sees that it has begun
        request["have"] = _have(job.store, document.key)
    limit = None if job.stage.name == "train" else ATTEMPTS
    with _at_home(job):
        answer, back = persist(host, progress.say, lambda: ask(host, role, request, files), limit)
    receipts = {name: content for name, content in back.items() if _is_receipt(name, job)}
    bundle.place(_into_store(answer, back, job.store, without=receipts), job.store)
    raise_error(answer, host)
    return _accept(job, document, receipts, host)


@contextlib.contextmanager
def _at_home(job: Job) -> Iterator[None]:
    """Notes where a training lives before its host is asked for the first time; a host that was never reached has nothing.

    Raises:
        PermanentError: it lives elsewhere.
    """
    if job.stage.name != "train":
        yield
        return
    place = str(job.placement["host"])
    home = read_home(job.directory)
    if home is not None and (home.place != place or home.moving is not None):
        raise not_here(job.directory.name, home.place, home.moving, place, str(home_path(job.directory)))
    if home is None:
        Home(place=place).write(home_path(job.directory))
    try:
        yield
    except Unreachable:
        if home is None:
            home_path(job.directory).unlink(missing_ok=True)  # several steps are asked for at the same time
        raise


def _placement(job: Job) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The placement as it holds there, and the external files by their path there."""
    placement = {name: value for name, value in job.placement.items() if name != "hosts"}
    external = {f"files/{digest}": Path(path).read_bytes() for digest, path in placement.get("files", {}).items()}
    placement["files"] = {digest: f"files/{digest}" for digest in placement.get("files", {})}
    return placement, external


def params_closure(store: Path, document: ParamsFile) -> dict[str, bytes]:
    """`params.json` of a result and of everything before it, by path in a host's workdir."""
    found: dict[str, bytes] = {}
    waiting = [document]
    while waiting:
        params = waiting.pop()
        name = str(STORE / params.stage / params.key / "params.json")
        if name in found:
            continue
        found[name] = (stage_directory(store, params.stage, params.key) / "params.json").read_bytes()
        waiting += [
            read_params(stage_directory(store, upstream.split("/", 1)[0], key))
            for upstream, key in params.upstream.items()
        ]
    return found


def _is_receipt(name: str, job: Job) -> bool:
    return name == str(receipt_path(Path(STORE / job.stage.name / job.directory.name), job.stage.name, job.step))


def _have(store: Path, key: str) -> dict[str, list[Any]]:
    """The growing file of a training, as far as it is here."""
    name = PurePosixPath("train", key, "metrics.jsonl")
    return {str(STORE / name): bundle.prefix_of(store / name)}


def _into_store(
    answer: Mapping[str, Any], back: Mapping[str, bytes], store: Path, without: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Files by path in a host's workdir -> by path in this store, whole; only what belongs into a store."""
    inside = {}
    for name, content in back.items():
        pure = PurePosixPath(name)
        if name not in (without or {}) and pure.is_relative_to(STORE):
            own = pure.relative_to(STORE)
            offset = int(answer.get("offsets", {}).get(name, 0))
            inside[str(own)] = (store / own).read_bytes()[:offset] + content if offset else content
    return inside


def _accept(job: Job, document: ParamsFile, receipts: Mapping[str, bytes], host: Host) -> Receipt:
    """Checks what came back against its receipt, and writes the receipt last.

    Raises:
        CorruptError: no receipt came, it is another result's, it was made from other inputs than those that stand, or a
            file that came has other bytes than it says.
    """
    if len(receipts) != 1:
        raise CorruptError("the answer holds no receipt", where=f"{host.id}: {job.label}")
    (content,) = receipts.values()
    receipt = Receipt.model_validate_json(content)
    if (receipt.stage, receipt.key, receipt.step) != (job.stage.name, document.key, job.step):
        raise CorruptError(f"the answer is of {receipt.stage} {receipt.key} step {receipt.step}", where=host.id)
    for name in changed_inputs(job, receipt):
        raise CorruptError(f"the answer was made from another {name}", where=f"{host.id}: {job.label}")
    for output in receipt.outputs:
        path = job.directory / output.path
        if not stays_there(output) and (not path.is_file() or sha256_file(path) != output.sha256):
            raise CorruptError("the file that came back is not the one that its receipt names", where=str(path))
    # A host may have made it under another name, for another controller; planning looks for it where this one asked.
    receipt = receipt.model_copy(update={"host": str(job.placement["host"])})
    receipt.write(job.receipt)
    job.failure.unlink(missing_ok=True)
    return receipt


# ---------------------------------------------------------------- trainings there


def of_training(host: Host, store: Path, key: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Asks a host about a training of its, or for something of it, and keeps the small files that come back.

    Raises:
        DflashError: what the host answered.
    """
    answer, back = ask(host, BY_NAME["train"].role, {"key": key, "have": _have(store, key), **request}, {})
    bundle.place(_into_store(answer, back, store), store)
    raise_error(answer, host)
    return answer


def check_there(host: Host, files: list[list[Any]], shipped: list[str], *, deep: bool) -> dict[str, str]:
    """Which files of a host (path in its workdir, size, sha256) and which copies are not what they should be, and why."""
    answer, _ = ask(host, "", {"do": "check", "check": files, "shipped": shipped, "deep": deep}, {})
    raise_error(answer, host)
    return dict(answer["faults"])


# ---------------------------------------------------------------- what may go there


def asker(store: Path) -> str:
    """Whose results a host works for, `machine:folder`: two controllers may share a workdir."""
    return f"{socket.gethostname()}:{store.resolve().parent}"


def garbage_there(host: Host, needs: Mapping[str, Any], delete: list[list[str]] | None = None) -> dict[str, Any]:
    """What of a host's workdir nothing needs; see `there.do_gc`.

    Args:
        needs: `sweep.Needs` as JSON. delete: path and mark of what was listed and is to go.

    Raises:
        Unreachable: no connection. DflashError: what the host answered.
    """
    answer, _ = ask(host, "", {"do": "gc", "needs": dict(needs), "delete": delete}, {})
    raise_error(answer, host)
    return answer
