"""A rehearsal says whether a training fits and how long it takes, and leaves nothing behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_store import Training, make_training

from dflash.base.errors import PermanentError
from dflash.base.progress import Progress
from dflash.base.stage import HostContext
from dflash.base.store import read_params
from dflash.train import preflight
from dflash.train.rehearse import Rehearsal, rehearse

torch.set_num_threads(1)


def rehearsed(training: Training, **placed: Any) -> Rehearsal:
    context = HostContext(progress=Progress(quiet=True))
    document = read_params(training.directory)
    return rehearse(document, training.params(**placed), training.store, None, context, "demo")


def tree(folder: Path) -> dict[str, int]:
    """Every path below a folder with its inode."""
    return {str(path.relative_to(folder)): path.lstat().st_ino for path in folder.rglob("*")}


def test_it_works_before_anything_was_trained_and_leaves_nothing_behind(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    before = tree(training.store)
    found = rehearsed(training, stop_at=20, checkpoint_every=5, keep_states=1)
    assert tree(training.store) == before
    assert (found.steps, found.checkpoints) == (20, 4)
    assert [(rate.samples, rate.length) for _, rate in sorted(found.buckets.items())] == [(6, 15), (4, 24)]
    assert all(rate.target_seconds > 0 and rate.drafter_seconds > 0 for rate in found.buckets.values())
    drafter, state = found.checkpoint_bytes
    assert found.disk_needed == 4 * drafter + 2 * state
    assert found.total_seconds > 20 * found.step_seconds > 0
    assert found.tau >= 1.0
    assert found.headroom > 0
    said = "\n".join(found.lines())
    for words in (
        "memory: the longest batch",
        "headroom|are left",
        r"target [\d,]+ tok/s",
        "20 steps",
        "the whole run needs",
    ):
        assert re.search(words, said), words


def test_what_it_foretells_is_what_a_training_then_writes(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    found = rehearsed(training)
    training.run(1)
    written = [
        sum(path.stat().st_size for path in (training.directory / "step_1" / name).iterdir())
        for name in ("drafter", "state")
    ]
    assert list(found.checkpoint_bytes) == pytest.approx(written, abs=100)  # the history in cursor.json may differ


def test_a_rehearsal_beside_what_was_trained_does_not_touch_it(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(1)
    before = tree(training.store)
    rehearsed(training)
    assert tree(training.store) == before
    training.run(2, attempt=2)


def test_a_missing_dataset_or_bucket_says_what_to_run_first(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    upstream = read_params(training.directory).upstream
    receipt = training.store / "buckets" / upstream["buckets"] / "receipt.json"
    receipt.unlink()
    with pytest.raises(PermanentError, match=rf"the buckets that .*snakemake {re.escape(str(receipt))}"):
        rehearsed(training)
    (training.store / "dataset" / upstream["dataset"] / "receipt.json").unlink()
    with pytest.raises(PermanentError, match=rf"the dataset that .*snakemake {re.escape(str(receipt))}"):
        rehearsed(training)


def test_what_does_not_fit_is_refused_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(tmp_path)
    before = tree(training.store)
    monkeypatch.setattr(preflight, "host_memory_free", lambda: 1000)
    with pytest.raises(PermanentError, match="the longest batch"):
        rehearsed(training)
    assert tree(training.store) == before


def test_too_small_a_disk_for_the_whole_run_is_told(tmp_path: Path) -> None:
    found = rehearsed(make_training(tmp_path))
    assert "free: fits" in "\n".join(found.lines())
    assert "DOES NOT FIT" in "\n".join(replace(found, disk_free=found.disk_needed - 1).lines())
