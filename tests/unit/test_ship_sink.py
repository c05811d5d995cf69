"""Wherever the destination of a shipment is killed, the next shipment arrives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash.ship import sink


class Killed(BaseException):
    """The process is gone."""


class Mute:
    """A voice that nobody hears."""

    def say(self, *_: object, **__: object) -> None:
        pass


def shipment(source: Path) -> tuple[list[dict[str, Any]], str]:
    files = sink.hash_all(str(source), sink.listing(str(source), []), lambda count: None)
    return files, sink.root_digest(files)


def arrive(source: Path, place: Path) -> None:
    """Ships a folder, all in this process. The lock ends with it, as with its process."""
    files, root = shipment(source)
    destination = sink.Destination(Mute())  # type: ignore[arg-type]
    try:
        destination.prepare({"path": str(place), "root": root, "files": files, "session": "s", "wait": 1})
        if not hasattr(destination, "partial"):
            return
        if not destination.in_place:
            data = Path(destination.partial, "data")
            for path in source.iterdir():
                (data / path.name).write_bytes(path.read_bytes())
            lines = b"".join(sink.journal_line(chunk) for chunk in destination.chunks)
            Path(destination.partial, "journal").write_bytes(lines)
        destination.finish({"root": root, "seconds": 0.0, "bytes": 1})
    finally:
        if hasattr(destination, "_lock"):
            os.close(destination._lock)


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "weights").write_text(content)
    return path


@pytest.mark.parametrize("after", ["the same", "another"])
@pytest.mark.parametrize("deed", range(4))
def test_a_kill_at_any_moment_of_the_exchange_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: int, after: str
) -> None:
    place = tmp_path / "shipped" / "step_1"
    arrive(folder(tmp_path / "old", "the old"), place)
    new = folder(tmp_path / "new", "the new one")
    done: list[str] = []

    def until_killed(module: object, name: str) -> None:
        act = getattr(module, name)

        def counted(*arguments: Any) -> None:
            if str(place) in str(arguments) or ".shipment.json" in str(arguments):
                if len(done) == deed:
                    raise Killed
                done.append(name)
            act(*arguments)

        monkeypatch.setattr(module, name, counted)

    with monkeypatch.context() as monkeypatch:
        until_killed(os, "rename")
        until_killed(os, "remove")
        until_killed(sink, "write_json")
        with pytest.raises(Killed):
            arrive(new, place)
    assert len(done) == deed
    last = new if after == "the same" else folder(tmp_path / "another", "yet another content")
    arrive(last, place)
    assert (place / "weights").read_text() == (last / "weights").read_text()
    assert json.loads(Path(sink.receipt_path(str(place))).read_text())["root"] == shipment(last)[1]
    if after == "the same" or deed == 3:
        assert sorted(path.name for path in place.parent.iterdir()) == [".step_1.shipment.json", "step_1"]


def test_what_no_shipment_brought_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "shipped" / "step_1"
    place.parent.mkdir()
    folder(place, "somebody's")
    with pytest.raises(sink.Failure, match="no shipment brought"):
        arrive(folder(tmp_path / "new", "the new one"), place)
    assert (place / "weights").read_text() == "somebody's"


def test_a_file_name_that_is_not_utf8_is_refused_and_named(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).write_text("")
    with pytest.raises(sink.Failure, match="not UTF-8") as refused:
        sink.listing(str(tmp_path), [])
    assert refused.value.fields["kind"] == "permanent"
    assert refused.value.fields["where"] == f"{tmp_path}/caf\\xe9"


SEND = """
import os, sys
from dflash.ship import sink
def refuse(path, flags):
    raise PermissionError(13, "Permission denied", path)
os.open = refuse
sys.argv = ["sink.py", "send"]
sink.main()
"""


def test_a_source_that_may_not_be_read_is_told_and_is_not_tried_again(tmp_path: Path) -> None:
    request = {"compress": "none", "chunks": [[0, "weights", 0, 1, "0" * 64]], "base": str(tmp_path)}
    sender = subprocess.Popen([sys.executable, "-c", SEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sender.stdin is not None
    assert sender.stdout is not None
    sender.stdin.write(sink.encode(request))
    sender.stdin.flush()
    header = sink.HEADER.unpack(sender.stdout.read(sink.HEADER.size))
    told = json.loads(sender.stdout.read(header[4]))
    sender.stdin.close()
    sender.wait(60)
    assert header[1] == sink.FAILED
    assert (told["kind"], told["where"]) == ("permanent", str(tmp_path / "weights"))
