"""Completions: what the target wrote, kept exactly, whatever the batches and the interruptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from data_road import (
    ENDS,
    HYBRID,
    completions_params,
    context,
    identity,
    read_ledger,
    run_completions,
    run_prompts,
    target,
    upstream,
    write_lines,
)

from dflash.base.errors import PermanentError
from dflash.base.stage import Inputs
from dflash.data import completions, dataset
from dflash.data.chat import render
from dflash.data.completions import GENERATION_BATCH, generation_batches, requests_of
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompts import messages_id
from dflash.data.requests import sample_seed
from dflash.data.schemas import COMPLETIONS, PROMPTS
from dflash.data.tables import read_rows

NUMBER = GENERATION_BATCH * 2 + 10


@pytest.fixture(scope="module")
def prompts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of many lengths, three batches of them."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [{"prompt": "a" * (1 + number * 7 % 23) + str(number)} for number in range(NUMBER)]
    run_prompts(write_lines(folder / "source.jsonl", lines), folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(prompts_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Completions made in one go."""
    out = tmp_path_factory.mktemp("undisturbed")
    run_completions(prompts_dir, out)
    return out


class Dying:
    """A target that is killed after so many batches."""

    def __init__(self, batches: int) -> None:
        self.real = target()
        self.tokenizer, self.kernels, self.left = self.real.tokenizer, self.real.kernels, batches

    def generate(self, prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[tuple[list[int], str]]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.real.generate(prompts, *args, **kwargs)


def use(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Makes the stage load `model`."""
    monkeypatch.setattr(completions, "load_target", lambda *_args, **_kwargs: model)


def test_every_completion_is_what_the_target_writes_alone(prompts_dir: Path, undisturbed: Path) -> None:
    rows = read_rows(undisturbed / "completions.parquet", COMPLETIONS)
    prompts = read_rows(prompts_dir / "prompts.parquet", PROMPTS)
    assert [row["id"] for row in rows] == [prompt["id"] for prompt in prompts]
    assert [row["messages"] for row in rows] == [prompt["messages"] for prompt in prompts]
    for row in rows[::20]:
        ((written, reason),) = target().generate([row["prompt_ids"]], 6, stop_ids=ENDS)
        assert (row["completion_ids"], row["finish_reason"]) == (written, reason)


def test_the_prompt_is_rendered_with_the_chat_template_up_to_the_assistants_turn(undisturbed: Path) -> None:
    row = read_rows(undisturbed / "completions.parquet", COMPLETIONS)[0]
    text = target().tokenizer.decode(row["prompt_ids"])
    assert text == "<|im_start|>user\na0<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_reaches_the_template() -> None:
    tokenizer = type(target().tokenizer)(tokenizer_object=target().tokenizer.backend_tokenizer)
    tokenizer.chat_template = "{{ 'T' if enable_thinking else 'F' }}{{ 'G' if add_generation_prompt }}"
    messages = [{"role": "user", "content": "a"}]
    assert render(tokenizer, messages, thinking=True) == list(b"TG")
    assert render(tokenizer, messages, thinking=False) == list(b"FG")


@pytest.mark.parametrize("batch_size", [3, 1000])
def test_greedy_completions_do_not_depend_on_the_batch_size(
    prompts_dir: Path, undisturbed: Path, tmp_path: Path, batch_size: int
) -> None:
    run_completions(prompts_dir, tmp_path, placement={"batch_size": batch_size})
    assert (tmp_path / "completions.parquet").read_bytes() == (undisturbed / "completions.parquet").read_bytes()
    assert (tmp_path / "ledger.jsonl").read_bytes() == (undisturbed / "ledger.jsonl").read_bytes()


def test_sampled_completions_depend_on_seed_and_id_and_not_on_batch_mates(prompts_dir: Path, tmp_path: Path) -> None:
    drawn: dict[str, list[Any]] = {}
    for name, values, batch_size in (("a", {"seed": 1}, 64), ("b", {"seed": 1}, 5), ("c", {"seed": 2}, 64)):
        run_completions(prompts_dir, tmp_path / name, placement={"batch_size": batch_size}, temperature=1.0, **values)
        drawn[name] = read_rows(tmp_path / name / "completions.parquet", COMPLETIONS)
    assert drawn["a"] == drawn["b"]
    assert sum(a["completion_ids"] == c["completion_ids"] for a, c in zip(drawn["a"], drawn["c"], strict=True)) < 10
    assert {row["seed"] for row in drawn["a"]} == {sample_seed(1, row["id"]) for row in drawn["a"]}
    assert len({row["seed"] for row in drawn["a"]}) == NUMBER


def test_a_hybrid_target_answers_and_says_that_the_reference_kernels_ran(tmp_path: Path) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": "a"}, {"prompt": "bcd"}]), tmp_path)
    outputs = run_completions(tmp_path, tmp_path / "out", target=identity(HYBRID))
    assert outputs.kernels["linear"] == "torch"
    for row in read_rows(tmp_path / "out" / "completions.parquet", COMPLETIONS):
        assert target(HYBRID).generate([row["prompt_ids"]], 6, stop_ids=ENDS)[0][0] == row["completion_ids"]


def test_kernels_that_are_not_bound_stop_the_stage(tmp_path: Path) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": "a"}]), tmp_path)
    with pytest.raises(PermanentError, match="kernels fla were asked for"):
        run_completions(tmp_path, tmp_path / "out", target=identity(HYBRID), kernels="fla")


@pytest.mark.parametrize("alive", [0, 1, 2])
def test_a_killed_run_resumes_to_the_bytes_of_an_undisturbed_one(
    prompts_dir: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    scratch = tmp_path / "scratch"
    use(monkeypatch, Dying(alive))
    with pytest.raises(KeyboardInterrupt):
        run_completions(prompts_dir, tmp_path / "first", placement={"scratch": str(scratch)})
    assert len(list(scratch.glob("shard-*.parquet"))) == alive
    # Exactly the batches that are missing are generated: one more call would be refused.
    use(monkeypatch, Dying(3 - alive))
    outputs = run_completions(prompts_dir, tmp_path / "second", placement={"scratch": str(scratch)})
    assert (tmp_path / "second" / "completions.parquet").read_bytes() == (
        undisturbed / "completions.parquet"
    ).read_bytes()
    assert outputs.counts.balanced()
    assert [path.name for path in (tmp_path / "second").iterdir() if path.name.startswith("shard")] == []


def test_torn_and_foreign_shards_are_ignored(
    prompts_dir: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    use(monkeypatch, target())
    run_completions(prompts_dir, tmp_path / "first", placement={"scratch": scratch})
    torn, flipped, swapped = sorted(scratch.glob("shard-*.parquet"))
    swapped.write_bytes(torn.read_bytes())
    torn.write_bytes(torn.read_bytes()[:-20])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 3] ^= 255
    flipped.write_bytes(data)
    use(monkeypatch, Dying(3))
    run_completions(prompts_dir, tmp_path / "second", placement={"scratch": scratch})
    assert (tmp_path / "second" / "completions.parquet").read_bytes() == (
        undisturbed / "completions.parquet"
    ).read_bytes()
    # Other params in the same folder: nothing of it is taken.
    use(monkeypatch, Dying(0))
    with pytest.raises(KeyboardInterrupt):
        run_completions(prompts_dir, tmp_path / "third", placement={"scratch": scratch}, max_new_tokens=5)


def test_truncated_completions_are_counted_and_reported(undisturbed: Path, prompts_dir: Path, tmp_path: Path) -> None:
    outputs = run_completions(prompts_dir, tmp_path)
    rows = read_rows(undisturbed / "completions.parquet", COMPLETIONS)
    cut = [row for row in rows if row["completion_ids"][-1] not in ENDS]
    assert 0 < len(cut) < NUMBER
    assert all(len(row["completion_ids"]) == 6 for row in cut)
    assert [row["finish_reason"] for row in cut] == ["length"] * len(cut)
    assert outputs.results["truncated"] == len(cut)
    assert outputs.results["truncated_share"] == len(cut) / NUMBER
    assert outputs.results["completion_tokens"] == sum(len(row["completion_ids"]) for row in rows)
    assert outputs.results["tokens_per_second"] > 0


def test_too_many_truncated_completions_stop_the_stage_with_the_numbers(prompts_dir: Path, tmp_path: Path) -> None:
    share = run_completions(prompts_dir, tmp_path / "free").results["truncated_share"]
    run_completions(prompts_dir, tmp_path / "exact", max_truncated_share=share)
    with pytest.raises(PermanentError) as caught:
        run_completions(prompts_dir, tmp_path / "over", max_truncated_share=share / 2)
    assert f"of all {NUMBER}" in str(caught.value)
    assert "max_new_tokens = 6" in str(caught.value)
    assert "Raise completions.max_new_tokens" in str(caught.value)


def test_the_ledger_accounts_for_every_prompt(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b" * 200}, {"prompt": "c"}]
    run_prompts(write_lines(tmp_path / "source.jsonl", lines), tmp_path)
    small = identity().model_copy(update={"max_position_embeddings": 100})
    outputs = run_completions(tmp_path, tmp_path / "out", target=small)
    ledger = read_ledger(tmp_path / "out")
    assert [line["status"] for line in ledger] == ["ok", "skipped", "ok"]
    assert [line["id"] for line in ledger] == [
        messages_id([{"role": "user", "content": line["prompt"]}]) for line in lines
    ]
    assert (outputs.counts.total, outputs.counts.ok, outputs.counts.skipped) == (3, 2, 1)
    assert outputs.counts.reasons == {"prompt too long": 1}
    assert outputs.files == ["completions.parquet", "ledger.jsonl"]
    with pytest.raises(PermanentError, match="none of 3 prompts can be answered"):
        run_completions(
            tmp_path, tmp_path / "none", target=identity().model_copy(update={"max_position_embeddings": 10})
        )


def test_a_prompt_that_the_template_refuses_is_an_error_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path)
    strict = Dying(1)
    strict.tokenizer = type(strict.tokenizer)(tokenizer_object=strict.tokenizer.backend_tokenizer)
    strict.tokenizer.chat_template = (
        "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}a{{ add_generation_prompt }}"
    )
    use(monkeypatch, strict)
    outputs = run_completions(tmp_path, tmp_path / "out")
    assert (outputs.counts.ok, outputs.counts.error, outputs.counts.balanced()) == (1, 1, True)
    assert outputs.counts.reasons == {"template: no b": 1}
    strict.tokenizer.chat_template = None
    with pytest.raises(PermanentError, match="no chat template"):
        run_completions(tmp_path, tmp_path / "out")


def test_batches_are_neighbours_in_length_longest_first(prompts_dir: Path) -> None:
    rows = read_rows(prompts_dir / "prompts.parquet", PROMPTS)
    requests, _ = requests_of(rows, target().tokenizer, completions_params())
    batches = generation_batches(requests)
    lengths = [len(request.prompt_ids) for batch in batches for request in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in batches] == [GENERATION_BATCH, GENERATION_BATCH, 10]


def test_a_target_directory_that_was_not_handed_over_is_named(prompts_dir: Path, tmp_path: Path) -> None:
    fixed = identity().model_copy(update={"random": None, "digest": "0" * 64})
    with pytest.raises(PermanentError, match="directory was not handed"):
        completions.run(
            completions_params(target=fixed), Inputs({"prompts": upstream(prompts_dir)}), tmp_path, context()
        )


def test_the_shards_of_a_source_answer_every_prompt_once_and_merge_to_what_one_job_gives(
    prompts_dir: Path, undisturbed: Path, tmp_path: Path
) -> None:
    given = {}
    for shard in range(3):
        run_completions(prompts_dir, tmp_path / str(shard), shard=shard, shards=3)
        given[f"completions/numbers@{shard}"] = upstream(tmp_path / str(shard), "completions")
    parts = [read_rows(tmp_path / str(shard) / "completions.parquet", COMPLETIONS) for shard in range(3)]
    whole = read_rows(undisturbed / "completions.parquet", COMPLETIONS)
    by_id = {row["id"]: row for rows in parts for row in rows}
    assert sum(map(len, parts)) == len(by_id) == len(whole)
    assert all(by_id[row["id"]] == row for row in whole)
    (tmp_path / "merged").mkdir()
    dataset.run(DatasetParams(min_completion_tokens=1), Inputs(given), tmp_path / "merged", context())
    record = json.loads((tmp_path / "merged/dataset.json").read_text())
    assert record["sources"].keys() == {"numbers"}
    assert record["sources"]["numbers"]["total"] == len(whole)
