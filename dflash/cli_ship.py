"""`dflash ship`: one verified copy from host to host. Thin, as `dflash/cli.py` is."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.base.errors import ConfigError
from dflash.base.progress import Progress
from dflash.base.words import number_of

if TYPE_CHECKING:
    from dflash.hosts.host import Host
    from dflash.hosts.inventory import Inventory

DEFAULT = Path("config/hosts.yaml")
PLANES, CODINGS, WHAT = ("ssh", "paramiko"), ("none", "zlib", "zstd"), ("full", "drafter")


def register(app: typer.Typer) -> None:
    """Adds the command to `dflash`."""
    app.command()(ship)


def ship(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="HOST:PATH of a folder or file; `local` is this machine")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="HOST:PATH it shall have there")],
    hosts: Annotated[Path | None, typer.Option("--hosts", help="The hosts file [config/hosts.yaml].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt.")] = False,
    what: Annotated[str, typer.Option("--what", help="Of a checkpoint: full, or drafter only.")] = "full",
    streams: Annotated[int, typer.Option("--streams", min=1, max=16, help="More where the round trip is long.")] = 1,
    plane: Annotated[str, typer.Option("--plane", help="ssh or paramiko.")] = "ssh",
    compress: Annotated[
        str, typer.Option("--compress", help="none, zlib or zstd; where the link is the limit.")
    ] = "none",
    direct: Annotated[
        str, typer.Option("--direct", help="Host to host: how SRC reaches DST (`ssh -oBatchMode=yes user@address`).")
    ] = "",
) -> None:
    """Copy a folder or file from host to host; done when it is verified and in place, resumed when called again."""
    from dflash.hosts.inventory import load_inventory
    from dflash.ship.ship import ship as ship_verified

    for name, value, known in (("--what", what, WHAT), ("--plane", plane, PLANES), ("--compress", compress, CODINGS)):
        if value not in known:
            raise ConfigError(f"`{name} {value}`: unknown", remedy=f"Say {', '.join(known)}.")
    inventory = load_inventory(hosts or (DEFAULT if DEFAULT.exists() else None))
    near, near_path = _place("SRC", source, inventory)
    far, far_path = _place("DST", destination, inventory)
    meter = Meter(f"{near.id} to {far.id}")
    before = time.time()
    receipt = ship_verified(
        near,
        near_path,
        far,
        far_path,
        what=what,  # type: ignore[arg-type]
        streams=streams,
        plane=plane,  # type: ignore[arg-type]
        compress=compress,  # type: ignore[arg-type]
        route="direct" if direct else "relay",
        direct=shlex.split(direct),
        progress=meter.update,
        tell=meter.say,
    )
    meter.end()
    if as_json:
        print(receipt.model_dump_json(indent=2))
        return
    print(
        f"{destination}: {number_of(receipt.files, 'file')}, {number_of(receipt.bytes, 'byte')}, verified, "
        f"root {receipt.root[:12]}; {receipt.bytes_per_second / 1e6:,.0f} MB/s in {time.time() - before:.1f} s, "
        f"{receipt.chunks_reused} of {receipt.chunks} chunks were there"
    )


def _place(which: str, text: str, inventory: Inventory) -> tuple[Host, Path]:
    host, colon, path = text.partition(":")
    if not colon or not path:
        raise ConfigError(
            f"`{text}` names no host and path",
            where=which,
            remedy=f"Say HOST:PATH; hosts: {', '.join(dict.fromkeys(['local', *inventory.entries]))}.",
        )
    return inventory.get(host), Path(path)


class Meter:
    """Bytes, rate and time left: one live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, label: str) -> None:
        self.live = sys.stderr.isatty()
        self.plain = Progress(label)
        self.label = label
        self._began: tuple[float, int] | None = None
        self._shown = 0.0

    def update(self, done: int, total: int) -> None:
        """Shows how far it is."""
        if not self.live:
            self.plain.update(done, total, "bytes")
            return
        clock = time.monotonic()
        began, first = self._began = self._began or (clock, done)
        if clock - self._shown < 0.2 and done < total:
            return
        self._shown = clock
        rate = (done - first) / max(clock - began, 0.05)
        left = f", {(total - done) / rate:,.0f} s left" if rate > 0 and done < total else ""
        text = f"{self.label}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s{left}"
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        self.end()
        self.plain.say(text)

    def end(self) -> None:
        """Ends the live line."""
        if self.live and self._shown:
            print(file=sys.stderr, flush=True)
            self._shown = 0.0
