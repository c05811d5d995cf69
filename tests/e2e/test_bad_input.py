"""Bad input ends with exit 2 and one line that names file, key and value; nothing is written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Workspace  # type: ignore[import-not-found]

CONFIG = "config/config.yaml"


def refused(space: Workspace, *words: str) -> None:
    """`dflash run` exits 2, its last line holds all words, no traceback, and no file was written."""
    before = sorted(space.folder.rglob("*"))
    done = space.call("run", expect=2)
    assert sorted(space.folder.rglob("*")) == before
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, f"{word!r} is not in: {last}"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"learning_rate": 1}}, ["train.learning_rate", "1", "unknown key"]),
        ({"trian": {"lr": 1}}, ["trian"]),
        ({"train": {"lr": "fast"}}, ["train.lr", "fast"]),
        ({"train": {"schedule_steps": "many"}}, ["train.schedule_steps", "many"]),
        ({"train": {"schedule_steps": True}}, ["schedule_steps"]),
        ({"batching": {"token_budget": -5}}, ["batching.token_budget", "-5"]),
        ({"evaluate": {"budgets": [-4]}}, ["evaluate.budgets", "-4"]),
        ({"train": {"block_size": 1}}, ["train.block_size", "1"]),
        ({"train": {"mask_token_id": 260}}, ["mask_token_id 260", "260"]),
        ({"train": {"mask_token_id": 257}}, ["mask_token_id 257"]),
        ({"train": {"target_layer_ids": [1, 6]}}, ["target_layer_ids", "6", "0 to 5"]),
        ({"train": {"target_layer_ids": [1, 1]}}, ["target_layer_ids", "[1, 1]"]),
        ({"train": {"target_layer_ids": [-1, 1]}}, ["target_layer_ids", "-1"]),
        ({"train": {"stop_at": 7}}, ["stop_at 7", "schedule_steps 6"]),
        ({"train": {"topology": {"targets": 2}}}, ["train.topology.targets", "2"]),
        ({"train": {"kernels": "triton"}}, ["train.kernels", "triton"]),
        ({"prompts": [{"name": "x", "path": "no/such.jsonl"}]}, ["prompts.0.path", "no/such.jsonl"]),
        ({"target": {"path": "no/target"}}, ["target"]),
        ({"run": "a/b"}, ["a/b"]),
        ({"dataset": {"validation_share": 1.5}}, ["dataset.validation_share", "1.5"]),
        ({"dataset": {"exclude_digests": []}}, ["dataset.exclude_digests", "computed"]),
        ({"hosts": "no/hosts.yaml"}, ["no/hosts.yaml"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_name(fresh: Workspace, sections: dict[str, Any], words: list[str]) -> None:
    fresh.write_config(**sections)
    refused(fresh, CONFIG if "hosts" not in sections else "", *words)


def test_the_message_names_the_line(fresh: Workspace) -> None:
    text = (fresh.folder / CONFIG).read_text()
    (fresh.folder / CONFIG).write_text(text.replace("block_size: 4", "block_size: 1"))
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "block_size" in row)
    refused(fresh, f"{CONFIG}:{line}")


def test_a_number_that_yaml_reads_as_text_works(fresh: Workspace) -> None:
    (fresh.folder / CONFIG).write_text(
        (fresh.folder / CONFIG).read_text().replace("'1e-3'", "1e-3").replace("0.001", "1e-3")
    )
    assert "lr: 1e-3" in (fresh.folder / CONFIG).read_text()
    assert isinstance(yaml.safe_load("lr: 1e-3")["lr"], str)
    written = fresh.node("train")["key"]
    fresh.write_config(train={"lr": 0.001})
    assert fresh.node("train")["key"] == written


def test_a_number_with_a_leading_zero_is_refused(fresh: Workspace) -> None:
    text = (fresh.folder / CONFIG).read_text()
    (fresh.folder / CONFIG).write_text(text.replace("max_anchors: 8", "max_anchors: 010"))
    refused(fresh, "train.max_anchors", "010")


def test_duplicate_run_names(fresh: Workspace) -> None:
    del fresh.config["run"]
    fresh.write_config(runs=[{"name": "twin"}, {"name": "twin", "train": {"lr": 0.1}}])
    refused(fresh, "twin", "twice", CONFIG)


def test_a_key_given_twice(fresh: Workspace) -> None:
    with (fresh.folder / CONFIG).open("a") as stream:
        stream.write("run: again\n")
    refused(fresh, "run", "twice")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "unfinished\n', ["short.jsonl:3"]),
        (b'["a list"]\n', ["short.jsonl:3"]),
        (b'{"text": "no prompt"}\n', ["short.jsonl:3", "prompt"]),
        (b'{"prompt": 5}\n', ["short.jsonl:3", "prompt", "5"]),
        (b'{"prompt": ""}\n', ["short.jsonl:3", "prompt"]),
        (b'{"prompt": "\xff"}\n', ["short.jsonl:3"]),
    ],
    ids=["json", "list", "field", "type", "empty", "utf8"],
)
def test_a_malformed_prompt_line_is_named(fresh: Workspace, line: bytes, words: list[str]) -> None:
    path = fresh.folder / "config/micro/short.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    refused(fresh, *words)


@pytest.fixture
def foreign(fresh: Workspace) -> Path:
    """A drafter that was trained elsewhere for the micro target, as far as its config says."""
    folder = fresh.folder / "theirs"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    layer = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"hidden_size": 32, "vocab_size": 260, "head_dim": 16, "block_size": 4, "rope_theta": 1e7, **layer}
    taps = {"mask_token_id": 259, "target_layer_ids": [1, 3]}
    (folder / "config.json").write_text(json.dumps({**shape, "num_target_layers": 6, "dflash_config": taps}))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 300}, ["vocab_size is 300", "260"]),
        ({"hidden_size": 64}, ["hidden_size is 64", "32"]),
        ({"dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 6]}}, ["taps [6]", "0 to 5"]),
        ({"block_size": None, "rope_theta": None}, ["rope_theta is missing"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
    ],
    ids=["vocabulary", "hidden size", "taps", "field", "option"],
)
def test_another_drafter_that_does_not_fit_the_target_is_refused(
    fresh: Workspace, foreign: Path, changes: dict[str, Any], words: list[str]
) -> None:
    file = foreign / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    fresh.write_config(evaluate={"drafters": [{"name": "theirs", "path": "theirs"}]})
    refused(fresh, CONFIG, "evaluate.drafters.0.path: theirs", *words)


def test_a_folder_without_a_drafter_and_prompts_with_one_id_are_refused(fresh: Workspace) -> None:
    fresh.write_config(evaluate={"drafters": [{"name": "theirs", "path": "config"}]})
    refused(fresh, "evaluate.drafters.0.path: config", "holds no drafter")
    path = fresh.folder / "judge.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    sets = {"prompt_sets": [{"name": "set", "path": "judge.jsonl"}]}
    fresh.write_config(evaluate={"drafters": []}, references=sets)
    refused(fresh, "judge.jsonl:2", "id: a", "line 1")
    path.write_text("\n")
    refused(fresh, "judge.jsonl", "holds no prompt")


def test_an_export_for_an_unknown_client_or_from_nothing_is_refused(fresh: Workspace) -> None:
    assert "names no client" in fresh.call("export", "config", "--for", "tgi", expect=2).stderr
    assert "no drafter here" in fresh.call("export", "config", "--for", "vllm", expect=2).stderr
    assert "no prompt set `alpaca`" in fresh.call("prompts", "alpaca", "--to", "a.jsonl", expect=2).stderr


def test_a_missing_config_file(fresh: Workspace) -> None:
    done = fresh.call("run", "--configfile", "config/none.yaml", expect=2)
    assert "config/none.yaml" in done.stderr
    assert not fresh.results.exists()


def test_plain_snakemake_ends_with_the_same_code_and_line(fresh: Workspace) -> None:
    fresh.write_config(train={"block_size": 1})
    done = fresh.snakemake(expect=2)
    assert "train.block_size: 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not fresh.results.exists()


@pytest.fixture
def read_only(tmp_path: Path, require_or_skip: Callable[[str, str], None]) -> Any:
    """A read-only mount (root ignores permissions)."""
    folder = tmp_path / "readonly"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        require_or_skip("mount", f"tmpfs cannot be mounted ({mounted.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_an_unwritable_results_folder(fresh: Workspace, read_only: Path) -> None:
    fresh.write_config(results=str(read_only / "results"))
    refused(fresh, "results", str(read_only))


def test_an_unknown_command_and_a_bad_option(fresh: Workspace) -> None:
    assert fresh.call("fly", expect=2).stderr
    assert fresh.call("plan", "--fast", expect=2).stderr
    assert "recompute" in fresh.call("run", "--recompute", "dataset", expect=2).stderr
