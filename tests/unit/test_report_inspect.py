"""`dflash inspect`: a result explains itself anywhere, in a glance, and nothing damaged or foreign is taken for one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from report_store import Made, make_run, rewrite_json
from safetensors.torch import save_file
from train_store import make_training  # type: ignore[import-not-found]

from dflash.base.errors import ConfigError, CorruptError
from dflash.base.records import SCHEMA_VERSION
from dflash.plan.code import source_root
from dflash.report.inspect import describe, show

ASKED = ("token_budget", "max_batch_size", "max_anchors", "block_size", "gamma", "max_seq_len", "num_draft_layers")
"""What an old checkpoint was once asked for and could not say."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = make_training(tmp_path_factory.mktemp("training"))
    training.run(2)
    return training.directory / "step_2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_run(tmp_path_factory.mktemp("run"))


def elsewhere(path: Path, folder: Path) -> Path:
    """A copy with nothing of the store around it."""
    copy = folder / path.name
    return shutil.copytree(path, copy) if path.is_dir() else Path(shutil.copy(path, copy))


@pytest.mark.parametrize("lone", [False, True], ids=["the folder", "the lone weights"])
def test_every_hyperparameter_is_told_without_an_option_far_from_the_store(
    checkpoint: Path, tmp_path: Path, lone: bool
) -> None:
    path = elsewhere(checkpoint / "drafter/model.safetensors" if lone else checkpoint, tmp_path)
    text = show(path, everything=False)
    for name in (*ASKED, "lr", "weight_decay", "warmup", "seed", "optimizer", "target_layer_ids", "split_seed"):
        assert f"{name}: " in text, name
    assert "token_budget: 96" in text
    assert "gamma: " in text
    assert len(text.splitlines()) < 60
    assert "NOT SET" not in text


def test_the_first_ten_lines_say_what_made_it(checkpoint: Path, tmp_path: Path) -> None:
    first = "\n".join(show(elsewhere(checkpoint, tmp_path), everything=False).splitlines()[:12])
    for words in ("step 2 of train", "kernels", "linear attention", "torch 2", "tensors", "python 3", "1 attempt"):
        assert words in first


def test_everything_is_one_option_away(checkpoint: Path) -> None:
    assert len(show(checkpoint, everything=True).splitlines()) > 120
    assert describe(checkpoint)["config"]["train"]["lr"] == 3e-3


def test_inspect_needs_no_store_config_network_or_torch_and_no_second(checkpoint: Path, tmp_path: Path) -> None:
    copy = elsewhere(checkpoint, tmp_path)
    script = (
        "import sys, socket\n"
        "def no(*a, **k): raise SystemExit('a network was asked for')\n"
        "socket.socket.connect = no\n"
        "from dflash.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'snakemake', 'pandas'} & set(sys.modules)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source_root()), "HOME": str(tmp_path / "nobody")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(copy)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "token_budget: 96" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0, "seconds of a core"


def test_a_drafter_that_somebody_else_wrote_says_what_cannot_be_known(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"block_size": 16, "num_hidden_layers": 5, "hidden_size": 4, "dflash_config": {"mask_token_id": 7}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = show(tmp_path, everything=False)
    assert "block_size: 16" in text
    assert "num_draft_layers: 5" in text
    assert "mask_token_id: 7" in text
    line = next(part for part in text.split("\n\n")[0].split("not known")[1:])
    assert "token_budget" in line
    assert "max_anchors" in line


@pytest.mark.parametrize(
    ("name", "content", "kind", "words"),
    [
        ("notes.md", "# notes", ConfigError, "not a file that dflash writes. Give a checkpoint"),
        ("other.json", '{"a": 1}', ConfigError, "not a receipt, manifest or params file of dflash. Give a checkpoint"),
        ("old.pt", "x", ConfigError, "`dflash import"),
        ("receipt.json", '{"stage": "tr', CorruptError, "cut short"),
        ("model.safetensors", "short", CorruptError, "not a whole safetensors file"),
    ],
)
def test_what_is_nothing_of_ours_or_cut_short_is_named_with_what_to_do(
    tmp_path: Path, name: str, content: str, kind: type[Exception], words: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    for everything in (False, True):
        with pytest.raises(kind) as caught:
            show(path, everything)
        assert words in str(caught.value)
        assert name in str(caught.value)


def test_a_manifest_of_a_later_schema_is_named_and_not_read(made: Made, tmp_path: Path) -> None:
    path = elsewhere(made.manifest_path, tmp_path)
    rewrite_json(path, lambda document: document | {"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(CorruptError, match=r"schema version 2 is newer .* Read it with the dflash that wrote it"):
        show(path, everything=False)


def test_params_edited_by_hand_are_not_trusted_wherever_they_stand(
    made: Made, checkpoint: Path, tmp_path: Path
) -> None:
    params = elsewhere(made.directory("train") / "params.json", tmp_path)
    rewrite_json(params, lambda document: document | {"params": document["params"] | {"lr": 5.0}})
    folder = elsewhere(checkpoint, tmp_path)

    def edit(document: dict) -> dict:  # type: ignore[type-arg]
        document["params_files"]["train"]["params"]["gamma"] = 99.0
        return document

    rewrite_json(folder / "manifest.json", edit)
    for path in (params, folder):
        with pytest.raises(CorruptError, match="edited after they were written"):
            show(path, everything=False)
