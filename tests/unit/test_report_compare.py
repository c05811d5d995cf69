"""`dflash compare`: given two runs of which one is half as fast, the cause is named before what only correlates with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from report_store import FLA_KERNELS, TORCH_KERNELS, Story, make_run, rewrite_json
from safetensors.torch import save_file

from dflash.base.errors import ConfigError
from dflash.base.records import TensorFact
from dflash.report.compare import Comparison, _last_tau, compare, render
from dflash.report.subject import Subject

FAST = {
    "distributions": {"torch": "2.12.1", "causal-conv1d": "1.6.0", "nvidia-cublas-cu12": "12.8.4.1"},
    "torch": {"version": "2.12.1+cu128", "cuda": "12.8", "cudnn": 91002, "driver": "570.86.15"},
    "gpus": [{"name": "H200", "memory_bytes": 150_000_000_000, "power_cap_watts": 700.0}],
}
SLOW = {
    "distributions": {"torch": "2.12.1", "nvidia-cublas": "13.0.2.14"},
    "torch": {"version": "2.12.1+cu130", "cuda": "13.0", "cudnn": 91300, "driver": "580.65.06"},
    "gpus": [{"name": "H200", "memory_bytes": 150_000_000_000, "power_cap_watts": 700.0}],
}


def two(folder: Path, first: Story, second: Story) -> Comparison:
    paths = [make_run(folder / name, story).manifest_path for name, story in (("a", first), ("b", second))]
    return compare(*paths)


def rules(found: Comparison) -> list[str]:
    return [item.rule for item in found.findings]


def test_kernel_path_and_torch_build_come_first_then_token_budget_then_the_dataset_with_its_numbers(
    tmp_path: Path,
) -> None:
    first = Story(environment=FAST, train_kernels=FLA_KERNELS, judge_kernels={"fla": FLA_KERNELS}, mean_length=2068.0)
    second = Story(
        environment=SLOW,
        train_kernels=TORCH_KERNELS,
        judge_kernels={"fla": FLA_KERNELS},
        batching={"token_budget": 65_536},
        mean_length=2202.0,
        rate=0.58,
    )
    found = two(tmp_path, first, second)
    assert rules(found)[:4] == ["kernels", "torch build", "batching", "dataset"]
    kernels, build, batching, dataset = (item.words for item in found.findings[:4])
    assert "training ran on fla (chunked) in A and on torch (chunked) in B" in kernels
    assert "B itself trains on torch (chunked) and is judged on fla (chunked)" in kernels
    assert "causal-conv1d is absent in B" in kernels
    assert "torch cuda 12.8 -> 13.0" in build
    assert "torch version 2.12.1+cu128 -> 2.12.1+cu130" in build
    assert "token_budget" in batching
    assert "-> 65536" in batching
    assert "mean length 2,068.0 -> 2,202.0 tokens (+6.5%)" in dataset
    outcome = {item.name: item.words for item in found.outcomes}["throughput target"]
    assert "(-42%); at equal length -42%: the machine or the code explains it, not the text" in outcome
    for item in found.findings:
        assert f"rule: {item.rule}; can explain {item.explains}" in render(found).replace("\n     ", " ")


def test_longer_text_is_told_from_a_slower_machine(tmp_path: Path) -> None:
    """Both runs compute a bucket equally fast; the second has far more of the slow ones."""
    paths = [make_run(tmp_path / name, Story(mean_length=mean)) for name, mean in (("a", 80.0), ("b", 160.0))]
    rates = {0: 30_000.0, 3: 10_000.0}
    for made, often in zip(paths, (0, 3), strict=True):
        file = made.directory("train") / "metrics.jsonl"
        lines = []
        for number, text in enumerate(file.read_text().splitlines()):
            line = json.loads(text)
            bucket = often if number % 3 else 3 - often
            line["buckets"] = [bucket]
            line["tokens_per_second"] = {"target": rates[bucket]}
            lines.append(json.dumps(line))
        file.write_text("\n".join(lines) + "\n")
    found = compare(paths[0].manifest_path, paths[1].manifest_path)
    (words,) = (item.words for item in found.outcomes if item.name == "throughput target")
    assert "(-67%); at equal length the same: the text explains it, not the machine" in words


def test_bytes_that_are_gone_are_named_by_module(tmp_path: Path) -> None:
    def tensors(*extra: TensorFact) -> list[TensorFact]:
        return [TensorFact(name="fc.weight", shape=[4, 8], dtype="bfloat16", bytes=64), *extra]

    head = TensorFact(name="verifier_lm_head.weight", shape=[248_320, 4832], dtype="bfloat16", bytes=2_399_764_480)
    found = two(tmp_path, Story(tensors=tensors(head)), Story(tensors=tensors()))
    (finding,) = (item for item in found.findings if item.rule == "tensors")
    assert "2.4 GB less: verifier_lm_head is gone" in finding.words


def test_config_values_are_told_with_both_origins(tmp_path: Path) -> None:
    found = two(tmp_path, Story(), Story(batching={"token_budget": 65_536}))
    (finding,) = (item for item in found.findings if item.rule == "batching")
    (detail,) = (item for item in finding.details if item.name == "token_budget")
    assert detail.b == "65536"
    assert detail.origin == "default -> default"


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    found = two(tmp_path, Story(), Story())
    assert found.findings == ()
    assert "nothing that both sides record" in render(found)


def test_a_power_cap_is_a_difference_of_hardware(tmp_path: Path) -> None:
    capped = {**FAST, "gpus": [{**FAST["gpus"][0], "power_cap_watts": 450.0}]}  # type: ignore[index]
    found = two(tmp_path, Story(environment=FAST), Story(environment=capped))
    assert rules(found) == ["hardware"]
    assert "capped at 450 W" in found.findings[0].words


def foreign(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    save_file({"fc.weight": torch.zeros(160, 800, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"block_size": 16, "num_hidden_layers": 2, **config}))
    return folder


def test_a_foreign_drafter_says_what_cannot_be_known_and_is_compared_in_what_it_asserts(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    found = compare(made.directory("train") / "step_300", foreign(tmp_path / "other"))
    assert any("token_budget" in text and "nothing in the file says them" in text for text in found.b.unknown)
    checkpoint = compare(made.manifest_path, tmp_path / "other")
    (training,) = (item for item in checkpoint.findings if item.rule == "training")
    (block,) = (item for item in training.details if item.name == "block_size")
    assert (block.a, block.b) == ("8", "16")
    assert "asserted by whoever wrote it" in block.origin
    assert "lr" not in {item.name for item in training.details}, "what nobody says is no difference"
    assert "B, not known: token_budget" in render(checkpoint)


def test_a_run_whose_metrics_are_missing_is_compared_in_the_rest_and_says_so(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", Story(batching={"token_budget": 65_536}))
    (second.directory("train") / "metrics.jsonl").unlink()
    found = compare(first.manifest_path, second.manifest_path)
    assert rules(found) == ["batching"]
    assert any("metrics.jsonl is missing" in text for text in found.b.unknown)
    assert "throughput target" not in {item.name for item in found.outcomes}


def test_a_manifest_far_from_its_store_is_compared_in_what_it_holds(tmp_path: Path) -> None:
    made = make_run(tmp_path / "a")
    alone = Path(shutil.copy(made.manifest_path, tmp_path / "alone.json"))
    found = compare(made.manifest_path, alone)
    assert found.findings == ()
    assert any("metrics.jsonl is out of reach" in text for text in found.b.unknown)


def test_what_is_nothing_is_refused_by_name(tmp_path: Path) -> None:
    made = make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="nowhere"):
        compare(made.manifest_path, tmp_path / "nowhere")


def test_as_json_every_finding_carries_its_rank_and_rule(tmp_path: Path) -> None:
    document = two(tmp_path, Story(), Story(batching={"token_budget": 65_536})).as_json()
    json.dumps(document)
    assert [(item["rank"], item["rule"]) for item in document["findings"]] == [(1, "batching")]
    assert document["a"]["kind"] == "run"


def test_another_program_is_named_by_module_and_stage(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")

    def change(document: dict[str, Any]) -> dict[str, Any]:
        train = document["params_files"]["train"]
        train["code"]["modules"]["dflash.train.objective"] = "1" * 16
        return document

    rewrite_json(second.manifest_path, change)
    found = compare(first.manifest_path, second.manifest_path)
    assert rules(found) == ["code"]
    assert found.findings[0].words == "other code: dflash.train.objective (train)"


@pytest.mark.parametrize("change", [{"budget": "64"}, {"block_size": "16"}, {"sampling": "temperature 1"}])
def test_tau_of_unlike_quantities_is_never_set_side_by_side(change: dict[str, str]) -> None:
    row = {
        "prompt_set": "held_out",
        "kernel": "torch",
        "method": "online_tree",
        "budget": "16",
        "block_size": "8",
        "sampling": "greedy",
        "step": "10",
        "value": "2.0",
        "ci_low": "",
        "ci_high": "",
    }
    sides = [
        _last_tau(Subject(path=Path(label), label=label, kind="run", tau=[values]))
        for label, values in (("a", row), ("b", {**row, **change}))
    ]
    assert len(sides[0]) == len(sides[1]) == 1
    assert sides[0].keys() != sides[1].keys()
    assert len(_last_tau(Subject(path=Path("a"), label="a", kind="run", tau=[row, {**row, **change}]))) == 2
