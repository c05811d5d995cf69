"""A result is what its receipt says, byte for byte, or it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.base.errors import CorruptError
from dflash.base.files import sha256_file
from dflash.base.records import OutputFile, Receipt
from dflash.base.store import check_outputs


@pytest.mark.parametrize(
    ("content", "why"), [("mode", "bytes"), ("longer", "bytes"), (None, "missing")], ids=["bytes", "size", "missing"]
)
def test_an_output_that_is_not_what_its_receipt_says_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "out.txt"
    path.write_text("made")
    outputs = [OutputFile(path="out.txt", size=4, sha256=sha256_file(path))]
    said = dict.fromkeys(("key", "host", "started", "finished", "environment"), "")
    receipt = Receipt(stage="dataset", outputs=outputs, inputs={}, attempt=1, **said)  # type: ignore[arg-type]
    check_outputs(tmp_path, receipt)
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CorruptError, match=rf"out\.txt.*{why}"):
        check_outputs(tmp_path, receipt)
    check_outputs(tmp_path, receipt, names=["another"])
