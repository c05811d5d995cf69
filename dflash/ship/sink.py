"""The far ends of a shipment: one file of standard library, sent over as source, run by any python3 >= 3.8.

    python3 sink.py source        control: pins a folder or file, hashes it, says at the end whether it changed
    python3 sink.py send          data: reads chunks from the pin and writes frames
    python3 sink.py destination   control: says what is missing, holds the lock, makes the result visible, writes the receipt
    python3 sink.py store         data: verifies each frame, writes it, syncs it, and only then journals it

All requests come over standard input, so that no path ever meets a shell. Control lines are `crc32 json`; an empty line
is a sign of life. Every process ends by itself when its input ends or is silent for `idle` seconds, so that a controller
that was killed or lost leaves nothing at work.

A frame is a header (magic, kind, coding, index, length, sha256 of the chunk) and `length` bytes. `store` believes neither the
header nor the bytes: what counts is the manifest's digest of the chunk.

Costs 16 MiB of memory a process; hashing runs at 1 to 2 GB/s a core; `send` copies nothing (sendfile).
Cannot pin where hard links are refused (other owner, other filesystem, read-only parent): then files are read where they
lie, and a removal in mid-copy fails the shipment instead of being survived.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import hashlib
import json
import os
import queue
import select
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

CHUNK = 8 << 20
PIECE = 1 << 18
"""Bytes hashed at a time: small enough to be still in the cache of the core that has just read them."""

MARGIN = 16 << 20
"""Bytes that must stay free beyond the copy."""

HEADER = struct.Struct("!2sBBQI32s")
MAGIC = b"df"
DATA, END, ALIVE, FAILED = range(4)
PLAIN, ZLIB, ZSTD = range(3)
CODINGS = {"none": PLAIN, "zlib": ZLIB, "zstd": ZSTD}

UNSYNCED_BYTES = 128 << 20
UNSYNCED_FILES = 400
"""How far writing may run ahead of the disk."""

SINGLE = "."
"""The path of the only file of a shipment that is a file, so that its root does not depend on its name."""


class Failure(Exception):
    """What the controller is told. kind: permanent, transient, corrupt (as in dflash/base/errors.py), or changed."""

    def __init__(self, kind: str, what: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.fields = {"kind": kind, "what": what, "where": where, "remedy": remedy}


class Chunk(NamedTuple):
    """One chunk of one file: `number` counts over the whole manifest."""

    number: int
    path: str
    offset: int
    length: int
    digest: str


# ---------------------------------------------------------------- words between controller and far end


def encode(message: Dict[str, Any]) -> bytes:
    """One control line; the checksum makes a damaged line recognisable."""
    body = json.dumps(message).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> Dict[str, Any]:
    """Raises ValueError for anything that `encode` did not write."""
    if line[8:9] != b" " or int(line[:8], 16) != zlib.crc32(line[9:]):
        raise ValueError("a damaged control line")
    message = json.loads(line[9:].decode())
    if not isinstance(message, dict):
        raise ValueError("a control line that is not an object")
    return message


class Voice:
    """Standard output: messages, and a sign of life every second with the bytes received and whether we are at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.received = 0
        self.stored = 0
        self.busy = True
        self.silent = False

    def say(self, name: str, /, **fields: Any) -> None:
        """Writes one message whole."""
        fields["is"] = name
        rest = memoryview(encode(fields))
        with self._lock:
            while rest:
                rest = rest[os.write(1, rest) :]

    def start(self) -> None:
        """Signs of life from now on."""
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(0.5)
            if not self.silent:
                self.say("beat", received=self.received, stored=self.stored, busy=self.busy)


class Lifeline:
    """Reads control lines on a thread. When the controller is gone, runs `cleanup` and ends this process, whatever it does."""

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self.lines = queue.Queue()  # type: queue.Queue[Dict[str, Any]]
        self.cleanup = cleanup
        self.idle = 60.0
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Dict[str, Any]:
        """The next request."""
        return self.lines.get()

    def _read(self) -> None:
        held = b""
        try:
            while select.select([0], [], [], self.idle)[0]:
                piece = os.read(0, 1 << 20)
                if not piece:
                    break
                held += piece
                if b"\n" not in piece:
                    continue
                *whole, held = held.split(b"\n")
                for line in whole:
                    if line:
                        message = decode(line)
                        self.idle = float(message.get("idle", self.idle))
                        self.lines.put(message)
        finally:
            try:
                self.cleanup()
            finally:
                os._exit(3)


# ---------------------------------------------------------------- manifests


def root_digest(files: List[Dict[str, Any]]) -> str:
    """As dflash/ship/artifact.py: sha256 of the canonical JSON of [[path, size, chunks]...] sorted by path."""
    rows = [[item["path"], item["size"], item["chunks"]] for item in sorted(files, key=lambda item: item["path"])]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def chunks_of(files: List[Dict[str, Any]]) -> List[Chunk]:
    """All chunks of a manifest, numbered in its order."""
    found = []  # type: List[Chunk]
    for item in files:
        for index, wanted in enumerate(item["chunks"]):
            offset = index * CHUNK
            found.append(Chunk(len(found), item["path"], offset, min(CHUNK, item["size"] - offset), wanted))
    return found


def check_manifest(files: List[Dict[str, Any]], root: str) -> None:
    """Refuses a manifest that contradicts itself or would write outside its folder."""
    for item in files:
        parts = item["path"].split("/")
        inside = item["path"] == SINGLE or not ({"", ".", ".."} & set(parts))
        if not inside or "\0" in item["path"] or len(item["chunks"]) != -(-item["size"] // CHUNK):
            raise Failure("corrupt", "the manifest has an impossible entry", item["path"])
    if root_digest(files) != root:
        raise Failure("transient", "the manifest does not have the root it claims")


def below(base: str, path: str) -> str:
    """Where a path of a manifest lies."""
    return base if path == SINGLE else os.path.join(base, path)


def listing(base: str, include: List[str]) -> Dict[str, Tuple[int, int, int]]:
    """path -> (inode, size, mtime in ns) of every regular file; `include` restricts to files and folders directly below."""
    found = {}  # type: Dict[str, Tuple[int, int, int]]

    def look(path: str, relative: str) -> None:
        state = os.lstat(path)
        if stat.S_ISREG(state.st_mode):
            found[relative] = (state.st_ino, state.st_size, state.st_mtime_ns)
        elif stat.S_ISDIR(state.st_mode):
            for name in sorted(os.listdir(path)):
                if relative != SINGLE or not include or name in include:
                    require_utf8(path, name)
                    look(os.path.join(path, name), name if relative == SINGLE else relative + "/" + name)
        else:
            raise Failure("permanent", "neither a regular file nor a folder", path, "Ship what it points to instead.")

    look(base, SINGLE)
    missing = [name for name in include if not any(path.split("/")[0] == name for path in found)]
    if missing:
        raise Failure("permanent", "there is no `%s` in it" % missing[0], base, "Is it a checkpoint?")
    return found


def require_utf8(folder: str, name: str) -> None:
    """Refuses a file name that a manifest, which is JSON, cannot hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(os.path.join(folder, name)).decode("utf-8", "backslashreplace")
        raise Failure("permanent", "the file name is not UTF-8", shown, "Rename it.") from None


def hash_range(path: str, offset: int, length: int, moved: Callable[[int], None]) -> str:
    """sha256 of a part of a file; of what there is of it when the file is shorter."""
    state = hashlib.sha256()
    view = memoryview(bytearray(min(PIECE, length)))
    with open(path, "rb", buffering=0) as stream:
        stream.seek(offset)
        while length:
            count = stream.readinto(view[: min(PIECE, length)])
            if not count:
                break
            state.update(view[:count])
            moved(count)
            length -= count
    return state.hexdigest()


def hash_all(base: str, found: Dict[str, Tuple[int, int, int]], moved: Callable[[int], None]) -> List[Dict[str, Any]]:
    """The manifest of files; chunks are hashed on two cores."""
    with ThreadPoolExecutor(2) as pool:

        def digests(path: str, size: int) -> List[Any]:
            place = below(base, path)
            return [
                pool.submit(hash_range, place, offset, min(CHUNK, size - offset), moved)
                for offset in range(0, size, CHUNK)
            ]

        waiting = [(path, found[path][1], digests(path, found[path][1])) for path in sorted(found)]
        return [
            {"path": path, "size": size, "chunks": [future.result() for future in futures]}
            for path, size, futures in waiting
        ]


# ---------------------------------------------------------------- source


class Source:
    """What is shipped: pinned, described, and looked at again at the end."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.pin = ""
        self._lock = -1

    def describe(self, path: str, include: List[str], known: Optional[List[Dict[str, Any]]]) -> None:
        """Pins, hashes (or takes the digests known already: what arrives is verified against them) and says the manifest."""
        self.path, self.include = path, include
        self.found = settled(path, include)
        self._pin()
        base = self.pin or path
        if known is None:
            files = hash_all(base, self.found, self._moved)
            self.restat()
        else:
            files = known
            wrong = [item["path"] for item in known if self.found.get(item["path"], (0, -1))[1] != item["size"]]
            surplus = sorted(set(self.found) - {item["path"] for item in known})
            if wrong or surplus:
                raise Failure("corrupt", "the files are not those recorded", below(path, (wrong + surplus)[0]))
        self.voice.say("manifest", root=root_digest(files), files=files, base=base, pinned=bool(self.pin))

    def _moved(self, count: int) -> None:
        self.voice.received += count

    def _pin(self) -> None:
        parent, name = os.path.split(os.path.abspath(self.path))
        try:
            sweep_pins(parent, name)
            self.pin, self._lock = locked_folder(parent, ".%s.%s.pin" % (shortened(name), uuid.uuid4().hex[:12]))
            base = os.path.join(self.pin, "data")
            for path in self.found:
                place = below(base, path)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.link(below(self.path, path), place, follow_symlinks=False)
            os.makedirs(base, exist_ok=True) if SINGLE not in self.found else None
            self.pin = base
        except OSError:
            self.unpin()

    def unpin(self) -> None:
        """Removes the pin."""
        folder = os.path.dirname(self.pin) if os.path.basename(self.pin) == "data" else self.pin
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        self.pin = ""

    def restat(self) -> None:
        """Raises when a file is not the one described. A file that is gone is still whole in the pin."""
        for path, (inode, size, modified) in self.found.items():
            for base in (self.path, self.pin):
                if not base:
                    continue
                place = below(base, path)
                try:
                    state = os.lstat(place)
                except (FileNotFoundError, NotADirectoryError):
                    if self.pin and base != self.pin:
                        continue
                    raise Failure("changed", "the source was removed while it was copied", place) from None
                if (state.st_ino, state.st_size, state.st_mtime_ns) != (inode, size, modified):
                    raise Failure(
                        "changed",
                        "the source changed while it was copied",
                        place,
                        "Ship it again when it stands still.",
                    )
        try:
            surplus = set(listing(self.path, self.include)) - set(self.found)
        except (OSError, Failure):
            return
        if surplus:
            raise Failure("changed", "a file was added while the source was copied", below(self.path, min(surplus)))


def settled(path: str, include: List[str]) -> Dict[str, Tuple[int, int, int]]:
    """The listing, taken when the last change is older than the clock tick that dates changes: a later one shows."""
    while True:
        found = listing(path, include)
        newest = max([modified for _, _, modified in found.values()], default=0)
        if not 0 <= time.time_ns() - newest < 20_000_000:
            return found
        time.sleep(0.02)


def shortened(name: str) -> str:
    """A name that leaves room for a root and a suffix within 255 bytes."""
    return os.fsdecode(os.fsencode(name)[:150])


def locked_folder(parent: str, name: str, wait: Callable[[], None] = lambda: None) -> Tuple[str, int]:
    """Makes a folder and locks it; `wait` is called between tries. The lock dies with its process."""
    path = os.path.join(parent, name)
    while True:
        os.makedirs(path, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        except BlockingIOError:
            os.close(descriptor)
            wait()
            continue
        except FileNotFoundError:
            pass
        os.close(descriptor)


def remove_unlocked(path: str) -> None:
    """Removes a folder of `locked_folder` unless somebody holds it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def sweep_pins(parent: str, name: str) -> None:
    """Removes pins whose process was killed."""
    prefix = ".%s." % shortened(name)
    for entry in os.listdir(parent):
        if entry.startswith(prefix) and entry.endswith(".pin"):
            path = os.path.join(parent, entry)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass
            finally:
                os.close(descriptor)


def source_main() -> None:
    """Serves one shipment's source until the controller leaves."""
    voice = Voice()
    source = Source(voice)
    line = Lifeline(source.unpin)
    voice.start()
    while True:
        request = line.next()
        try:
            if request["do"] == "describe":
                source.describe(request["path"], request["include"], request.get("known"))
            elif request["do"] == "restat":
                source.restat()
                voice.say("unchanged")
            elif request["do"] == "leave":
                source.unpin()
                voice.say("left")
        except (Failure, OSError) as error:
            complain(voice, error, request.get("path", ""))


def complain(voice: Voice, error: Exception, where: str) -> None:
    """Tells the controller what went wrong, in its own kinds of error."""
    if isinstance(error, Failure):
        voice.say("error", **error.fields)
        return
    assert isinstance(error, OSError)
    place = str(error.filename or where)
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Free some space and ship again: what has arrived is kept."
        voice.say("error", kind="permanent", what="the disk is full (%s)" % reason, where=place, remedy=remedy)
        return
    remedies = {
        errno.ENOENT: "Check the path.",
        errno.EACCES: "Check the permissions.",
        errno.EROFS: "Mount it writable.",
    }
    gone = error.errno in (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EMFILE, errno.ENOMEM)
    kind = "transient" if gone else "permanent"
    voice.say("error", kind=kind, what=reason, where=place, remedy=remedies.get(error.errno or 0, ""))


# ---------------------------------------------------------------- data: sending


class Frames:
    """Frames onto a descriptor, and a sign of life when a slow disk keeps us from sending."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lock = threading.Lock()
        self._last = time.monotonic()
        threading.Thread(target=self._alive, daemon=True).start()

    def _alive(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - self._last > 1:
                self.write(ALIVE, PLAIN, 0, b"", b"")

    def _all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def write(self, kind: int, coding: int, number: int, digest: bytes, data: bytes) -> None:
        """One frame from memory."""
        with self._lock:
            self._all(HEADER.pack(MAGIC, kind, coding, number, len(data), digest))
            self._all(data)
            self._last = time.monotonic()

    def send_file(self, chunk: Chunk, stream: int) -> None:
        """One frame from a file, without a copy. A file that ends early ends the whole stream: nothing else can be true."""
        with self._lock:
            self._all(HEADER.pack(MAGIC, DATA, PLAIN, chunk.number, chunk.length, bytes.fromhex(chunk.digest)))
            offset, end = chunk.offset, chunk.offset + chunk.length
            while offset < end:
                count = os.sendfile(self.descriptor, stream, offset, end - offset)
                if not count:
                    print("the source ends before its described size: %s" % chunk.path, file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(4)
                offset += count
            self._last = time.monotonic()


def zstd(options: List[str], data: bytes) -> bytes:
    """Runs the zstd program, which python of this age does not bring along."""
    try:
        return subprocess.run(["zstd", "-q", "-c", *options], input=data, stdout=subprocess.PIPE, check=True).stdout
    except FileNotFoundError:
        raise Failure("permanent", "there is no program `zstd`", "", "Install it, or compress by zlib.") from None


def pack(coding: int, data: bytes) -> Tuple[int, bytes]:
    """The data as it goes over the wire: left as it is when packing gains nothing."""
    if coding == ZLIB:
        packed = zlib.compress(data, 1)
    elif coding == ZSTD:
        packed = zstd(["-1"], data)
    else:
        return PLAIN, data
    return (coding, packed) if len(packed) < len(data) else (PLAIN, data)


def unpack(coding: int, data: bytes) -> bytes:
    """Undoes `pack`; never grows beyond a chunk."""
    if coding == ZLIB:
        return zlib.decompressobj().decompress(data, CHUNK + 1)
    if coding == ZSTD:
        return zstd(["-d"], data)[: CHUNK + 1]
    return data


def send_main() -> None:
    """Sends the chunks of one request. With `command`, to a process that this one starts: the direct route."""
    line = Lifeline(lambda: None)
    request = line.next()
    child = None
    output = 1
    if request.get("command"):
        child = subprocess.Popen(request["command"], stdin=subprocess.PIPE)
        assert child.stdin is not None
        output = child.stdin.fileno()
        line.cleanup = child.kill
        os.write(output, encode(request["header"]))
    widen(output)
    frames = Frames(output)
    coding = CODINGS[request["compress"]]
    chunks = [Chunk(*row) for row in request["chunks"]]
    stream, opened = -1, ""
    try:
        for chunk in chunks:
            if chunk.path != opened:
                if stream >= 0:
                    os.close(stream)
                stream, opened = os.open(below(request["base"], chunk.path), os.O_RDONLY), chunk.path
            if coding == PLAIN:
                frames.send_file(chunk, stream)
            else:
                used, data = pack(coding, os.pread(stream, chunk.length, chunk.offset))
                frames.write(DATA, used, chunk.number, bytes.fromhex(chunk.digest), data)
    except (FileNotFoundError, NotADirectoryError, PermissionError, Failure) as error:
        if isinstance(error, Failure):
            fields = error.fields
        elif isinstance(error, PermissionError):
            what, remedy = "the source may not be read", "Check the permissions."
            fields = {"kind": "permanent", "what": what, "where": str(error.filename), "remedy": remedy}
        else:
            what = "the source was removed while it was copied"
            fields = {"kind": "changed", "what": what, "where": str(error.filename)}
        frames.write(FAILED, PLAIN, 0, b"", json.dumps(fields).encode())
        sys.exit(4)
    frames.write(END, PLAIN, len(chunks), b"", b"")
    if child is not None:
        assert child.stdin is not None
        child.stdin.close()
        os._exit(child.wait())
    os._exit(0)


def widen(descriptor: int) -> None:
    """A larger pipe means fewer wake-ups."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, 1031, 1 << 20)  # F_SETPIPE_SZ


# ---------------------------------------------------------------- data: storing


class Input:
    """Standard input that must not stay silent."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.idle = 60.0

    def read_into(self, view: memoryview) -> int:
        """Reads what there is, up to the length of `view`. Raises Failure when the stream ends or stays silent."""
        self.voice.busy = False
        if not select.select([0], [], [], self.idle)[0]:
            raise Failure("transient", "no data for %.0f s" % self.idle)
        count = os.readv(0, [view])
        self.voice.busy = True
        if not count:
            raise Failure("transient", "the stream ended early")
        self.voice.received += count
        return count

    def exactly(self, length: int) -> bytearray:
        """That many bytes."""
        held = bytearray(length)
        view = memoryview(held)
        while view:
            view = view[self.read_into(view) :]
        return held

    def line(self) -> bytes:
        """The next line that is not empty: empty ones are signs of life."""
        held = b""
        while True:
            byte = bytes(self.exactly(1))
            if byte != b"\n":
                held += byte
            elif held:
                return held


class Writer:
    """Writes verified chunks; a thread syncs them and journals what is on the disk."""

    def __init__(self, partial: str, journal: str, voice: Voice) -> None:
        self.base = os.path.join(partial, "data")
        self.voice = voice
        self._folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        # Held until this process ends: see Destination._wait_for_stores.
        fcntl.flock(os.open(os.path.join(partial, "stores"), os.O_RDONLY), fcntl.LOCK_SH)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._changed = threading.Condition()
        self._written = []  # type: List[Tuple[Chunk, int]]
        self._unsynced = [0, 0]
        self._stop = False
        self._error = None  # type: Optional[OSError]
        self._opened = ("", -1)
        self._retired = []  # type: List[int]
        self._thread = threading.Thread(target=self._sync, daemon=True)
        self._thread.start()

    def write(self, chunk: Chunk, data: memoryview) -> None:
        """Writes one chunk where it belongs."""
        with self._changed:
            while self._unsynced[0] > UNSYNCED_BYTES or self._unsynced[1] > UNSYNCED_FILES:
                self._changed.wait()
            if self._error:
                raise self._error
        if self._opened[0] != chunk.path:
            with self._changed:
                self._retired.append(self._opened[1])
            place = below(self.base, chunk.path)
            self._opened = (chunk.path, os.open(place, os.O_WRONLY | os.O_NOFOLLOW))
            self._unsynced[1] += 1
        offset = chunk.offset
        while data:
            count = os.pwrite(self._opened[1], data, offset)
            data, offset = data[count:], offset + count
        with self._changed:
            self._written.append((chunk, self._opened[1]))
            self._unsynced[0] += chunk.length
            self._changed.notify_all()

    def _sync(self) -> None:
        while True:
            with self._changed:
                while not self._written and not self._stop:
                    self._changed.wait()
                if not self._written:
                    return
                batch, self._written = self._written, []
                retired, self._retired = self._retired, []
                self._unsynced = [0, 0]
            try:
                descriptors = {descriptor for _, descriptor in batch}
                if len(descriptors) < 16 or not sync_filesystem(self._folder):
                    for descriptor in descriptors:
                        os.fdatasync(descriptor)
                os.write(self._journal, b"".join(journal_line(chunk) for chunk, _ in batch))
                os.fdatasync(self._journal)
                self.voice.stored += sum(chunk.length for chunk, _ in batch)
            except OSError as error:
                self._error = error
            for descriptor in retired:
                if descriptor >= 0:
                    os.close(descriptor)
            with self._changed:
                self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything written is on the disk and journaled."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        if self._error:
            raise self._error


def journal_line(chunk: Chunk) -> bytes:
    """One chunk that is on the disk."""
    return encode({"chunk": chunk.number, "digest": chunk.digest})


def sync_filesystem(descriptor: int) -> bool:
    """syncfs(2), where the C library has it: one call for many small files."""
    try:
        return bool(ctypes.CDLL(None).syncfs(descriptor) == 0)
    except (AttributeError, OSError):
        return False


def matches(digest: str, wanted: str) -> bool:
    """Whether bytes that hash to `digest` are the bytes of a manifest."""
    return digest == wanted


def store_main() -> None:
    """Stores one stream. Its first line says where; then come frames until the END frame."""
    voice = Voice()
    source = Input(voice)
    widen(0)
    voice.start()
    writer = None  # type: Optional[Writer]
    try:
        request = decode(source.line())
        source.idle = float(request["idle"])
        partial = request["partial"]
        files = read_json(os.path.join(partial, "manifest.json"))
        check_manifest(files, request["root"])
        journal = os.path.join(partial, "journal.%s.%s" % (request["session"], request["stream"]))
        writer = Writer(partial, journal, voice)
        count = store_frames(source, chunks_of(files), writer)
        writer.finish()
        voice.say("done", chunks=count, stored=voice.stored, received=voice.received)
        code = 0
    except (Failure, OSError, ValueError, subprocess.CalledProcessError) as error:
        voice.busy = True
        if writer is not None and not isinstance(error, OSError):
            try:
                writer.finish()
            except OSError as worse:
                error = worse
        known = error if isinstance(error, (Failure, OSError)) else Failure("transient", "a damaged stream: %s" % error)
        complain(voice, known, "")
        code = 1
    os._exit(code)


def store_frames(source: Input, chunks: List[Chunk], writer: Writer) -> int:
    """Verifies and writes frames. Returns how many."""
    count = 0
    room = memoryview(bytearray(CHUNK))
    while True:
        magic, kind, coding, number, length, _ = HEADER.unpack(bytes(source.exactly(HEADER.size)))
        if magic != MAGIC or length > CHUNK:
            raise Failure("transient", "a damaged frame")
        if kind == END:
            if number != count:
                raise Failure("transient", "%d frames came of %d" % (count, number))
            return count
        if kind == FAILED:
            raise Failure(**json.loads(bytes(source.exactly(length)).decode()))
        if kind == ALIVE:
            continue
        if kind != DATA or number >= len(chunks):
            raise Failure("transient", "a damaged frame")
        chunk = chunks[number]
        if coding == PLAIN and length != chunk.length:
            raise Failure("transient", "a frame of another length than its chunk")
        state = hashlib.sha256()
        have = 0
        while have < length:
            got = source.read_into(room[have : min(have + PIECE, length)])
            if coding == PLAIN:
                state.update(room[have : have + got])
            have += got
        data = room[:length]
        if coding != PLAIN:
            data = memoryview(unpack(coding, bytes(data)))
            state.update(data)
        if len(data) != chunk.length or not matches(state.hexdigest(), chunk.digest):
            raise Failure("transient", "the bytes from offset %d are not those described" % chunk.offset, chunk.path)
        writer.write(chunk, data)
        count += 1


def read_json(path: str) -> Any:
    """Reads JSON; a damaged file is a ValueError."""
    with open(path, "rb") as stream:
        return json.loads(stream.read().decode())


def write_json(path: str, value: Any) -> None:
    """Writes JSON whole and durably, by rename."""
    temporary = "%s.%s.tmp" % (path, uuid.uuid4().hex[:8])
    with open(temporary, "wb") as stream:
        stream.write(json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- destination


def receipt_path(destination: str) -> str:
    """Where the receipt of a shipped file or folder lies: beside it, so that the content stays what was shipped."""
    parent, name = os.path.split(os.path.abspath(destination))
    return os.path.join(parent, ".%s.shipment.json" % name)


def seal(destination: str) -> str:
    """What a look without reading shows of all files (inode, size, mtime): unchanged, they need no second hashing."""
    found = listing(destination, [])
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


class Destination:
    """Where it arrives: lock, partial, journal, and the moment it becomes visible."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.in_place = False
        self.reused = 0

    def prepare(self, request: Dict[str, Any]) -> None:
        """Says `skip` (with the receipt), or which chunks are missing."""
        self.path = os.path.abspath(request["path"])
        self.root, self.files = request["root"], request["files"]
        check_manifest(self.files, self.root)
        self.chunks = chunks_of(self.files)
        self.session = request["session"]
        parent, name = os.path.split(self.path)
        os.makedirs(parent, exist_ok=True)
        if self._skipped():
            return
        self.deadline = time.monotonic() + request["wait"]
        self.partial, self._lock = locked_folder(
            parent, ".%s.%s.partial" % (shortened(name), self.root), self._wait_for_other
        )
        if self._skipped():
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        self._wait_for_stores()
        self._look_in_place()
        verified = set() if self.in_place else self._resume()
        missing = [] if self.in_place else [chunk for chunk in self.chunks if chunk.number not in verified]
        self.reused = len(self.chunks) - len(missing)
        self._require_room(missing)
        self.voice.say("missing", partial=self.partial, chunks=[chunk.number for chunk in missing])
        if missing and not self.in_place:
            self._allocate(missing)

    def _wait_for_other(self) -> None:
        if time.monotonic() > self.deadline:
            raise Failure("transient", "another shipment of the same content is still at work", self.path)
        time.sleep(0.1)

    def _wait_for_stores(self) -> None:
        """Lets streams of an attempt that was cut off write down what they have: what is journaled is not sent again."""
        descriptor = os.open(os.path.join(self.partial, "stores"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    self._wait_for_other()
        finally:
            os.close(descriptor)

    def _receipt(self) -> Optional[Dict[str, Any]]:
        try:
            found = read_json(receipt_path(self.path))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _skipped(self) -> bool:
        receipt = self._receipt()
        if receipt is None or receipt.get("root") != self.root or not os.path.lexists(self.path):
            return False
        if receipt.get("seal") != seal(self.path):
            if not self._content_is_root():
                return False
            receipt["seal"] = seal(self.path)
            write_json(receipt_path(self.path), receipt)
        self.voice.say("skip", receipt=receipt)
        return True

    def _content_is_root(self) -> bool:
        return root_digest(hash_all(self.path, listing(self.path, []), self._moved)) == self.root

    def _moved(self, count: int) -> None:
        pass

    def _look_in_place(self) -> None:
        """What is there already: the very content without a receipt (its writer was killed), an old shipment, or a stranger."""
        if not os.path.lexists(self.path):
            return
        if os.path.isdir(self.path) and not os.path.islink(self.path) and not os.listdir(self.path) and self.files:
            os.rmdir(self.path)
            return
        if self._content_is_root():
            self.in_place = True
        elif self._receipt() is None and not self._left_without_receipt():
            if os.listdir(self.partial) == ["stores"]:
                shutil.rmtree(self.partial)
            raise Failure(
                "permanent",
                "something else is there that no shipment brought",
                self.path,
                "Remove it or ship to another path.",
            )

    def _left_without_receipt(self) -> str:
        """The partial folder of a shipment that was killed after its content came into place and before its receipt: it has
        a manifest, of the files that are there, and no data."""
        parent, name = os.path.split(self.path)
        for entry in sorted(os.listdir(parent)):
            folder = os.path.join(parent, entry)
            ours = entry.startswith(".%s." % shortened(name)) and entry.endswith(".partial") and folder != self.partial
            if not ours or os.path.lexists(os.path.join(folder, "data")):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                files = read_json(os.path.join(folder, "manifest.json"))
                sizes = {path: size for path, (_, size, _) in listing(self.path, []).items()}
                if sizes == {item["path"]: item["size"] for item in files}:
                    return folder
        return ""

    def _resume(self) -> Set[int]:
        """Chunks that are on the disk already. What the journal claims is read and verified; a broken one claims all."""
        claimed = self._claimed()
        base = os.path.join(self.partial, "data")
        for item in self.files:
            place = below(base, item["path"])
            os.makedirs(os.path.dirname(place), exist_ok=True)
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            if os.fstat(descriptor).st_size != item["size"]:
                os.ftruncate(descriptor, item["size"])
            os.close(descriptor)
        if not os.path.exists(base):
            os.makedirs(base)
        write_json(os.path.join(self.partial, "manifest.json"), self.files)
        hole = hashlib.sha256(bytes(CHUNK)).hexdigest()  # a chunk of zeros is there as soon as its file has its size
        candidates = [c for c in self.chunks if c.number in claimed or c.digest == hole]
        with ThreadPoolExecutor(2) as pool:
            digests = pool.map(lambda c: hash_range(below(base, c.path), c.offset, c.length, self._moved), candidates)
            verified = {c.number for c, found in zip(candidates, digests) if matches(found, c.digest)}
        self._forget_journals(verified)
        return verified

    def _journals(self) -> List[str]:
        return sorted(name for name in os.listdir(self.partial) if name.startswith("journal"))

    def _claimed(self) -> Set[int]:
        everything = {chunk.number for chunk in self.chunks}
        names = self._journals()
        if not names:
            return everything if os.path.exists(os.path.join(self.partial, "data")) else set()
        try:
            return self._read_journals(names, torn_tail=True)
        except (OSError, ValueError, KeyError, TypeError):
            return everything

    def _read_journals(self, names: List[str], torn_tail: bool) -> Set[int]:
        found = set()  # type: Set[int]
        for name in names:
            with open(os.path.join(self.partial, name), "rb") as stream:
                *lines, tail = stream.read().split(b"\n")
            if tail and not torn_tail:
                raise ValueError("a torn journal")
            for line in lines:
                record = decode(line)
                if self.chunks[record["chunk"]].digest == record["digest"]:
                    found.add(record["chunk"])
        return found

    def _forget_journals(self, verified: Set[int]) -> None:
        """One journal of what was verified just now replaces all older ones."""
        for name in self._journals():
            path = os.path.join(self.partial, name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        with open(os.path.join(self.partial, "journal"), "wb") as stream:
            for number in sorted(verified):
                stream.write(journal_line(self.chunks[number]))
            stream.flush()
            os.fsync(stream.fileno())

    def _require_room(self, missing: List[Chunk]) -> None:
        """Refuses a copy that has no room before its first byte comes."""
        if not missing:
            return
        base = os.path.join(self.partial, "data")
        remainder = sum(chunk.length for chunk in missing)
        held = sum(os.stat(below(base, item["path"])).st_blocks * 512 for item in self.files)
        have = sum(chunk.length for chunk in self.chunks) - remainder
        needed = max(0, remainder - max(0, held - have)) + MARGIN
        room = os.statvfs(self.partial)
        free = room.f_bavail * room.f_frsize
        if free < needed:
            raise Failure(
                "permanent",
                "the disk is full: %d MB are needed, %d MB are free" % (needed / 1e6, free / 1e6),
                self.path,
                "Free some space and ship again: what has arrived is kept.",
            )

    def _allocate(self, missing: List[Chunk]) -> None:
        """Takes the space while the first bytes are on their way: a disk that fills up fails the copy now, not at its end."""
        base = os.path.join(self.partial, "data")
        ranges = []  # type: List[List[Any]]
        for chunk in missing:
            if ranges and ranges[-1][0] == chunk.path and ranges[-1][2] == chunk.offset:
                ranges[-1][2] += chunk.length
            else:
                ranges.append([chunk.path, chunk.offset, chunk.offset + chunk.length])
        for path, start, end in ranges:
            reserve(below(base, path), start, end - start)

    def finish(self, facts: Dict[str, Any]) -> None:
        """All chunks verified -> files and folders synced -> renamed -> folder synced -> receipt, last."""
        began = time.monotonic()
        parent = os.path.dirname(self.path)
        if not self.in_place:
            self._require_all()
            self._sync_all()
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            killed = self._left_without_receipt() if not self.in_place and self._receipt() is None else ""
            old = self._make_visible() if not self.in_place else ""
            receipt = dict(facts, seal=seal(self.path))
            receipt["seconds"] = round(facts["seconds"] + time.monotonic() - began, 3)
            receipt["finished"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
            receipt["bytes_per_second"] = round(facts["bytes"] / max(receipt["seconds"], 1e-3), 1)
            write_json(receipt_path(self.path), receipt)
        finally:
            os.close(descriptor)
        shutil.rmtree(self.partial, ignore_errors=True)
        if old:
            shutil.rmtree(old, ignore_errors=True)
        if killed:
            remove_unlocked(killed)
        self.voice.say("receipt", receipt=receipt)

    def _require_all(self) -> None:
        names = [name for name in self._journals() if name == "journal" or name.split(".")[1:2] == [self.session]]
        arrived = self._read_journals(names, torn_tail=False)
        missing = [chunk for chunk in self.chunks if chunk.number not in arrived]
        if missing:
            raise Failure("transient", "%d chunks have not arrived" % len(missing), self.path)
        found = listing(os.path.join(self.partial, "data"), [])
        if {path: size for path, (_, size, _) in found.items()} != {i["path"]: i["size"] for i in self.files}:
            raise Failure("transient", "the files that arrived are not those of the manifest", self.partial)

    def _sync_all(self) -> None:
        base = os.path.join(self.partial, "data")
        if len(self.files) > 64:
            descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
            done = sync_filesystem(descriptor)
            os.close(descriptor)
            if done:
                return
        for item in self.files:
            descriptor = os.open(below(base, item["path"]), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        for folder, _, _ in os.walk(base):
            sync_folder(folder)

    def _make_visible(self) -> str:
        """Renames the whole into place. What an older shipment left there is put aside first and its receipt removed after:
        content without a receipt would be a stranger's to whoever ships after a kill in between."""
        aside = ""
        if os.path.lexists(self.path):
            aside = os.path.join(self.partial, "old")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.path, aside)
        if os.path.exists(receipt_path(self.path)):
            os.remove(receipt_path(self.path))
        os.rename(os.path.join(self.partial, "data"), self.path)
        sync_folder(os.path.dirname(self.path))
        return aside


def reserve(path: str, offset: int, length: int) -> None:
    """fallocate(2) where the filesystem has it; raises OSError when there is no room."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    descriptor = os.open(path, os.O_RDWR)
    try:
        if call(descriptor, 0, offset, length) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
                raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


def destination_main() -> None:
    """Serves one shipment's destination until the controller leaves."""
    voice = Voice()
    destination = Destination(voice)
    line = Lifeline(lambda: None)
    voice.start()
    while True:
        request = line.next()
        try:
            if request["do"] == "prepare":
                destination.prepare(request)
            elif request["do"] == "finish":
                destination.finish(request["facts"])
        except (Failure, OSError) as error:
            complain(voice, error, request.get("path", ""))


def main() -> None:
    """One of the four modes; any other word is answered with the digest of this file."""
    modes = {"source": source_main, "send": send_main, "destination": destination_main, "store": store_main}
    mode = modes.get(sys.argv[1])
    if mode is not None:
        mode()
        return
    with open(__file__, "rb") as stream:
        print(hashlib.sha256(stream.read()).hexdigest())


if __name__ == "__main__":
    main()
