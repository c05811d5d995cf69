"""The dataset: each prompt once, on one side, with the tokens the target read and wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_road import completion, read_ledger, run_completions, run_dataset, run_prompts, target, write_lines

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.data.schemas import COMPLETIONS, SAMPLES
from dflash.data.tables import ROW_GROUP, read_rows


def both(folder: Path) -> dict[str, list[dict[str, object]]]:
    """The rows of both sides."""
    return {split: read_rows(folder / f"{split}.parquet", SAMPLES) for split in ("train", "validation")}


def test_the_rendered_prompt_is_an_exact_prefix_and_the_rest_is_what_was_written(tmp_path: Path) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": f"é{n}?"} for n in range(20)]), tmp_path)
    run_completions(tmp_path, tmp_path / "made", temperature=1.0)
    made = {row["id"]: row for row in read_rows(tmp_path / "made" / "completions.parquet", COMPLETIONS)}
    run_dataset(tmp_path / "out", {"a": list(made.values())}, validation_share=0.3, min_completion_tokens=1)
    sides = both(tmp_path / "out")
    samples = [*sides["train"], *sides["validation"]]
    assert {sample["id"] for sample in samples} == set(made)
    for sample in samples:
        rendered = target().tokenizer.apply_chat_template(
            json.loads(sample["messages"]), add_generation_prompt=True, return_dict=False
        )
        assert sample["input_ids"][: sample["prompt_length"]] == rendered
        assert sample["input_ids"][sample["prompt_length"] :] == made[sample["id"]]["completion_ids"]
        assert sample["finish_reason"] == made[sample["id"]]["finish_reason"]


def test_tokens_are_never_tokenised_again(tmp_path: Path) -> None:
    # Two tokens that no tokenizer would produce for their text: they must come through as they are.
    row = completion("a", [300, 301, 302], prompt_ids=[5, 4, 3])
    run_dataset(tmp_path / "out", {"a": [row]}, validation_share=0.0)
    (sample,) = both(tmp_path / "out")["train"]
    assert sample["input_ids"] == [5, 4, 3, 300, 301, 302]
    assert sample["prompt_length"] == 3


def test_of_two_sources_with_the_same_prompt_the_first_by_name_wins(tmp_path: Path) -> None:
    sources = {
        "b": [completion("same", [2, 2, 2], source="b"), completion("own", source="b")],
        "a": [completion("same", [1, 1, 1], source="a")],
    }
    outputs = run_dataset(tmp_path / "out", sources, validation_share=0.0)
    rows = both(tmp_path / "out")["train"]
    assert [(row["source"], row["input_ids"][-1]) for row in rows] == [("a", 1), ("b", 257)]
    assert outputs.counts.reasons["duplicate"] == 1
    record = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert record["sources"]["b"] == {"total": 2, "train": 1, "validation": 0, "skipped": {"duplicate": 1}}


def test_a_second_usable_completion_stands_in_for_an_unusable_first(tmp_path: Path) -> None:
    sources = {"a": [completion("same", [1])], "b": [completion("same", [2, 2], source="b")]}
    outputs = run_dataset(tmp_path / "out", sources, validation_share=0.0)
    assert [row["source"] for row in both(tmp_path / "out")["train"]] == ["b"]
    assert outputs.counts.reasons == {"short": 1, "train": 1}


def test_short_and_truncated_completions_are_dropped_when_asked_and_counted(tmp_path: Path) -> None:
    rows = [
        completion("good", [1, 2, 3, 4]),
        completion("short", [1, 2]),
        completion("cut", [1, 2, 3, 4], finish_reason="length"),
    ]
    outputs = run_dataset(
        tmp_path / "drop", {"a": rows}, validation_share=0.0, min_completion_tokens=3, truncated="drop"
    )
    assert outputs.counts.reasons == {"train": 1, "short": 1, "truncated": 1}
    run_dataset(tmp_path / "keep", {"a": rows}, validation_share=0.0, min_completion_tokens=2)
    record = json.loads((tmp_path / "keep" / "dataset.json").read_text())
    assert record["train"]["samples"] == 3
    assert record["train"]["truncated"] == 1
    assert record["truncated_share"] == pytest.approx(1 / 3)


def test_excluded_prompts_are_dropped_whatever_their_instructions(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [
        completion("kept"),
        completion("judged"),
        completion("", conversation=[system, {"role": "user", "content": "judged"}], prompt_ids=[1, 2]),
    ]
    exclude = write_lines(tmp_path / "evaluation.jsonl", [{"prompt": "judged"}, {"prompt": "other"}])
    outputs = run_dataset(tmp_path / "out", {"a": rows}, [exclude], validation_share=0.0)
    assert outputs.counts.reasons == {"train": 1, "excluded": 2}
    broken = write_lines(tmp_path / "broken.jsonl", [{"prompt": 3}])
    with pytest.raises(ConfigError, match=r"broken.jsonl:1: `prompt` is a number"):
        run_dataset(tmp_path / "broken", {"a": rows}, [broken])


def test_the_split_follows_the_prompt_and_leaks_none(tmp_path: Path) -> None:
    rows = [completion(f"prompt {number}") for number in range(400)]
    run_dataset(tmp_path / "one", {"a": rows}, validation_share=0.25)
    run_dataset(tmp_path / "two", {"b": rows[100:], "c": rows[:300]}, validation_share=0.25)
    run_dataset(tmp_path / "other", {"a": rows}, validation_share=0.25, split_seed=1)
    sides = {}
    for name in ("one", "two", "other"):
        found = both(tmp_path / name)
        train, validation = ({row["id"] for row in found[split]} for split in ("train", "validation"))
        assert not train & validation
        assert len(train | validation) == len(found["train"]) + len(found["validation"]) == 400
        sides[name] = validation
    assert 70 <= len(sides["one"]) <= 130
    assert sides["one"] == sides["two"]
    assert sides["one"] != sides["other"]


def test_the_same_question_under_other_instructions_stays_on_its_side_whatever_the_answer(tmp_path: Path) -> None:
    rows = []
    for number in range(100):
        ask = {"role": "user", "content": f"prompt {number}"}
        rows.append(completion("", conversation=[ask], prompt_ids=[number]))
        for rule, written in (("Be brief.", (7, 257)), ("Be long.", (8, 8, 8, 8, 257))):
            system = {"role": "system", "content": rule}
            rows.append(completion("", written, conversation=[system, ask], prompt_ids=[number]))
    run_dataset(tmp_path / "out", {"a": rows}, validation_share=0.5)
    sides = both(tmp_path / "out")
    train, validation = ({row["input_ids"][0] for row in sides[split]} for split in ("train", "validation"))
    assert not train & validation
    assert len(train | validation) == 100


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ([], {}),
        ([completion("a", [1]), completion("b", [1])], {"min_completion_tokens": 1}),
        ([completion("a", [1, 2])], {"min_completion_tokens": 3}),
        ([completion("a", [1, 2])], {"validation_share": 0.999999}),
        ([completion("a", [1, 2], finish_reason="length")], {"truncated": "drop"}),
    ],
    ids=["no completion", "no two trainable tokens in a row", "all short", "all held out", "all truncated"],
)
def test_a_training_set_that_trains_nothing_aborts(tmp_path: Path, rows: list, values: dict) -> None:
    with pytest.raises(PermanentError, match="nothing to train on"):
        run_dataset(tmp_path / "out", {"a": rows}, **{"validation_share": 0.0, **values})


def test_a_completion_without_a_prompt_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="rendered prompt has no tokens"):
        run_dataset(tmp_path / "out", {"a": [completion("a", prompt_ids=[])]})


def test_ledger_and_counts_account_for_every_completion(tmp_path: Path) -> None:
    rows = [completion(f"{number % 30}", [1] * (1 + number % 4)) for number in range(60)]
    outputs = run_dataset(tmp_path / "out", {"a": rows[:40], "b": rows[40:]}, validation_share=0.2)
    ledger = read_ledger(tmp_path / "out")
    assert [line["id"] for line in ledger] == [row["id"] for row in rows]
    assert outputs.counts.balanced()
    assert outputs.counts.total == 60
    assert outputs.counts.ok == sum(line["status"] == "ok" for line in ledger)
    record = json.loads((tmp_path / "out" / "dataset.json").read_text())
    for tally in record["sources"].values():
        assert tally["total"] == tally["train"] + tally["validation"] + sum(tally["skipped"].values())
    sides = both(tmp_path / "out")
    for split, samples in sides.items():
        lengths = [len(sample["input_ids"]) for sample in samples]
        assert record[split]["samples"] == len(samples)
        assert record[split]["tokens"] == sum(lengths)
        assert record[split]["trainable_tokens"] == sum(lengths) - sum(s["prompt_length"] for s in samples)
        assert record[split]["length"]["mean"] == pytest.approx(np.mean(lengths))
        assert record[split]["length"]["quantiles"]["0.5"] in lengths


def test_bytes_and_digest_follow_the_content_alone(tmp_path: Path) -> None:
    rows = [completion(f"prompt {number}", [1, 2, number % 250]) for number in range(ROW_GROUP + 300)]
    for name in ("one", "two"):
        run_dataset(tmp_path / name / "out", {"a": rows[:700], "b": rows[700:]})
    for file in ("train.parquet", "validation.parquet", "ledger.jsonl", "dataset.json"):
        assert (tmp_path / "one/out" / file).read_bytes() == (tmp_path / "two/out" / file).read_bytes()
    rows[5]["completion_ids"][0] = 9
    run_dataset(tmp_path / "three/out", {"a": rows[:700], "b": rows[700:]})
    digests = {
        name: json.loads((tmp_path / name / "out/dataset.json").read_text())["digest"]
        for name in ("one", "two", "three")
    }
    assert digests["one"] == digests["two"] != digests["three"]
