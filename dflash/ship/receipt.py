"""What an evaluator asks before it opens what was shipped to it: is there a receipt, and are these its bytes?

The first look reads every byte (1 to 2 GB/s); later ones cost one stat a file, because the digest cache remembers that these
inodes, sizes and times had this root.
"""

from __future__ import annotations

from pathlib import Path

from dflash.base.errors import CorruptError
from dflash.base.files import DigestCache
from dflash.base.records import ShipmentReceipt
from dflash.ship import sink

REMEDY = "Ship it again: `dflash ship SRC DST` or `dflash run`."


def receipt_path(place: Path) -> Path:
    """Where the receipt of a shipped file or folder lies: beside it."""
    return Path(sink.receipt_path(str(place)))


def content_root(place: Path) -> str:
    """The root of a folder or of a single file, by reading every byte of it.

    Raises:
        CorruptError: it is missing or unreadable, or holds something that is neither a regular file nor a folder.
    """
    try:
        return sink.root_digest(sink.hash_all(str(place), sink.listing(str(place), []), lambda count: None))
    except sink.Failure as error:
        raise CorruptError(error.fields["what"], where=error.fields["where"]) from error
    except OSError as error:
        raise CorruptError(f"cannot be read ({error.strerror})", where=str(error.filename or place)) from error


def require_receipt(place: Path, cache: DigestCache | None = None) -> ShipmentReceipt:
    """The receipt of a shipped file or folder whose bytes are those that it tells of.

    Args:
        place: the file or folder as it was shipped. cache: where verified looks are remembered; the user's when left out.

    Raises:
        CorruptError: no receipt, an unreadable one, or other bytes than were shipped.
    """
    path = receipt_path(place)
    if not path.exists():
        raise CorruptError("it has no receipt of a shipment: it may be half there", where=str(place), remedy=REMEDY)
    receipt = ShipmentReceipt.read(path)
    cache = cache or DigestCache()
    try:
        fact = f"shipment:{receipt.root}:{sink.seal(str(place))}"
    except (OSError, sink.Failure) as error:
        raise CorruptError(f"it has a receipt but cannot be read ({error})", where=str(place), remedy=REMEDY) from error
    if not cache.knows(fact):
        if content_root(place) != receipt.root:
            raise CorruptError("its bytes are not those of its receipt", where=str(place), remedy=REMEDY)
        cache.remember(fact)
        cache.save()
    return receipt
