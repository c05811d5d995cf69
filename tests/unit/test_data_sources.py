"""Sources as they come: every form is read, every bad row is named and counted, and ready samples come through unchanged."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_road import (
    completion,
    completions_params,
    context,
    identity,
    read_ledger,
    run_completions,
    run_dataset,
    run_prompts,
    source,
    target,
    upstream,
    write_lines,
)
from pydantic import ValidationError

from dflash.base.errors import ConfigError, CorruptError, PermanentError, TransientError
from dflash.base.stage import Inputs, Outputs
from dflash.data import dataset, prompts
from dflash.data.batches import Batch, Samples, collate
from dflash.data.completions import requests_of
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompts import messages_id
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import PROMPTS, SAMPLES
from dflash.data.tables import ROW_GROUP, ShardedWriter, read_rows, shards_of

ASK = {"role": "user", "content": "2+2?"}
TOLD = {"role": "assistant", "content": "4"}
COMMIT = "0123456789" * 4


def asked(folder: Path) -> list[list[dict[str, str]]]:
    """The conversations of a prompts stage's folder."""
    return [json.loads(row["messages"]) for row in read_rows(folder / "prompts.parquet", PROMPTS)]


def read(tmp_path: Path, *lines: Any, **values: Any) -> Outputs:
    """The prompts stage on these lines; its folder is `out`."""
    return run_prompts(write_lines(tmp_path / "source.jsonl", lines), tmp_path / "out", **values)


# ---- forms


def test_sharegpt_messages_and_prompts_in_one_file_are_each_read_as_what_they_are(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2+2?"},
        {"from": "gpt", "value": "4"},
    ]
    read(
        tmp_path,
        {"conversations": turns},
        {"messages": [ASK, TOLD]},
        {"prompt": "3+3?", "response": "6"},
        answers="drop",
    )
    assert asked(tmp_path / "out") == [
        [{"role": "system", "content": "Be brief."}, ASK],
        [ASK],
        [{"role": "user", "content": "3+3?"}],
    ]


def test_a_mapping_that_is_named_reads_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source.jsonl:1: the line has neither `prompt`"):
        read(tmp_path, {"messages": [ASK]}, mapping="prompt")
    with pytest.raises(ConfigError, match=r"`conversations\[0\].value` is missing"):
        read(tmp_path, {"conversations": [{"from": "human"}]}, mapping="sharegpt")


def test_parquet_rows_are_read_like_lines_and_named_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "source.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [ASK]}, {"messages": [{"role": "user", "content": "3?"}]}]), path)
    run_prompts(path, tmp_path / "out")
    assert asked(tmp_path / "out") == [[ASK], [{"role": "user", "content": "3?"}]]
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "messages": None}, {"prompt": "", "messages": None}]), path)
    with pytest.raises(ConfigError, match=r"source.parquet:2: `prompt` is empty"):
        run_prompts(path, tmp_path / "bad")
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="cannot read row 1"):
        run_prompts(path, tmp_path / "worse")


def hub(**values: Any) -> PromptsParams:
    return PromptsParams(name="hub", huggingface="owner/name", revision=COMMIT, **values)


def test_a_dataset_of_the_hub_is_read_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Any] = []

    def load_dataset(*names: Any, **values: Any) -> Iterator[dict[str, Any]]:
        asked_for.append((names, values))
        return iter([{"messages": [ASK]}, {"prompt": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    outputs = prompts.run(hub(split="test", licence="MIT"), Inputs({}), tmp_path, context())
    assert asked_for == [(("owner/name", None), {"split": "test", "revision": COMMIT, "streaming": True})]
    assert len(asked(tmp_path)) == 2
    assert (outputs.results["revision"], outputs.results["licence"]) == (COMMIT, "MIT")


def test_a_hub_that_is_not_installed_or_not_reachable_or_has_no_such_thing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PermanentError, match="pip install datasets"):
        prompts.run(hub(), Inputs({}), tmp_path, context())
    for error, kind, words in (
        (ConnectionError("offline"), TransientError, "not reachable"),
        (FileNotFoundError("no such"), PermanentError, "no such dataset"),
        (ValueError("bad split"), PermanentError, "no such dataset"),
    ):

        def load_dataset(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        with pytest.raises(kind, match=words):
            prompts.run(hub(), Inputs({}), tmp_path, context())


def test_a_source_says_exactly_where_it_is() -> None:
    for values, words in (
        ({}, "exactly one of `path` and `huggingface`"),
        ({"path": "a", "huggingface": "b/c"}, "exactly one"),
        ({"huggingface": "b/c", "revision": "main"}, "`revision: main` is not a commit"),
        ({"path": "a", "kind": "imported", "shards": 2}, "prompts to be answered"),
        ({"path": "a", "kind": "dataset", "limit": 2}, "taken whole"),
    ):
        with pytest.raises(ValidationError, match=words):
            PromptsParams(name="s", **values)


# ---- bad input: named, counted, nothing lost

BAD = {
    "not JSON": b'{"prompt": "a',
    "not UTF-8": b'{"prompt": "\xff"}',
    "empty": b'{"prompt": ""}',
    "no known field": b'{"text": "other schema"}',
    "tool calls": json.dumps(
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}
    ).encode(),
    "no user turn": b'{"messages": [{"role": "system", "content": "only this"}]}',
    "ends with an answer": json.dumps({"messages": [ASK, TOLD]}).encode(),
    "unknown role": b'{"messages": [{"role": "bot", "content": "a"}]}',
}


@pytest.mark.parametrize(("reason", "line"), BAD.items(), ids=BAD.keys())
def test_a_bad_row_stops_the_stage_by_file_and_line_or_is_skipped_counted_and_named(
    tmp_path: Path, reason: str, line: bytes
) -> None:
    path = tmp_path / "source.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n' + line + b'\n{"prompt": "two"}\n')
    with pytest.raises(ConfigError) as caught:
        run_prompts(path, tmp_path / "stopped")
    assert caught.value.where == f"{path}:2"
    outputs = run_prompts(path, tmp_path / "out", malformed="skip")
    assert asked(tmp_path / "out") == [[{"role": "user", "content": text}] for text in ("one", "two")]
    assert (outputs.counts.total, outputs.counts.ok, outputs.counts.error) == (3, 2, 1)
    assert outputs.counts.reasons == {reason: 1}
    (named,) = [json.loads(text) for text in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert (named["row"], named["reason"]) == (2, reason)
    assert named["error"].startswith(f"{path}:2: ")
    assert "rejected.jsonl" in outputs.files


def test_a_tools_answer_is_not_taken_for_text(tmp_path: Path) -> None:
    for bad in (
        [ASK, {"role": "tool", "content": "4"}, ASK],
        [ASK, {"role": "assistant", "content": "calling", "tool_calls": [{"id": 1}]}, ASK],
    ):
        with pytest.raises(ConfigError, match="calls a tool or holds a tool's answer"):
            read(tmp_path, {"messages": bad})
    read(tmp_path, {"messages": [{**ASK, "tool_calls": None}]})


def test_a_message_of_ten_megabytes_is_read_skipped_as_too_long_and_counted(tmp_path: Path) -> None:
    read(tmp_path, {"prompt": "x" * 10_000_000}, {"prompt": "short"})
    small = identity().model_copy(update={"max_position_embeddings": 200})
    outputs = run_completions(tmp_path / "out", tmp_path / "made", target=small)
    assert (outputs.counts.ok, outputs.counts.skipped) == (1, 1)
    assert outputs.counts.reasons["prompt too long"] == 1


def test_a_template_without_generation_prompt_is_refused() -> None:
    tokenizer = type(target().tokenizer)(tokenizer_object=target().tokenizer.backend_tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"
    row = {"id": "0" * 64, "source": "s", "messages": json.dumps([ASK])}
    with pytest.raises(PermanentError, match="no generation prompt"):
        requests_of([row], tokenizer, completions_params())


def test_two_sources_with_the_same_id_keep_one_sample_and_count_the_other(tmp_path: Path) -> None:
    rows = {"a": [completion("same")], "b": [completion("same", [9, 9, 257], source="b")]}
    outputs = run_dataset(tmp_path / "out", rows, validation_share=0.0)
    assert outputs.counts.reasons == {"train": 1, "duplicate": 1}
    assert [line["status"] for line in read_ledger(tmp_path / "out")] == ["ok", "skipped"]


# ---- ready samples


def imported(tmp_path: Path, rows: list[dict[str, Any]], name: str = "old", **values: Any) -> Path:
    """The folder of an imported source."""
    out = tmp_path / f"imported-{name}"
    run_prompts(write_lines(tmp_path / f"{name}.jsonl", rows), out, kind="imported", name=name, **values)
    return out


def merge(workdir: Path, folders: dict[str, Path], files: dict[str, Path] | None = None, **values: Any) -> Outputs:
    """The dataset stage on ready samples."""
    workdir.mkdir()
    inputs = Inputs({f"prompts/{name}": upstream(folder) for name, folder in folders.items()}, files or {})
    return dataset.run(DatasetParams(**{"validation_share": 0.0, **values}), inputs, workdir, context())


ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]},
    {"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0, 1, 1, 0, 0, 1, 1]},
    {"input_ids": [9, 8, 7, 6], "loss_mask": [True, True, True, False]},
    {"input_ids": [7, 7, 7], "loss_mask": [0, 1, 1], "messages": [ASK, TOLD], "finish_reason": "stop"},
]


def test_imported_ids_and_masks_reach_the_batch_verbatim(tmp_path: Path) -> None:
    merge(tmp_path / "out", {"old": imported(tmp_path, ROWS)})
    samples = Samples(tmp_path / "out/train.parquet")
    assert [samples.tokens(row).tolist() for row in range(4)] == [row["input_ids"] for row in ROWS]
    masks = [[bool(mark) for mark in row["loss_mask"]] for row in ROWS]
    assert [samples.loss_mask(row).tolist() for row in range(4)] == masks
    assert samples.trainable(100).tolist() == [sum(mask) for mask in masks]
    assert samples.trainable(3).tolist() == [sum(mask[:3]) for mask in masks]
    batch = Batch("", 0, 0, 0, np.arange(4), np.minimum(samples.lengths, 6))
    arrays = collate(batch, samples, pad_token_id=0)
    for place, mask in enumerate(masks):
        assert arrays["loss_mask"][place].tolist() == (mask + [False] * 6)[:6]
    record = json.loads((tmp_path / "out/dataset.json").read_text())
    assert record["train"]["trainable_tokens"] == sum(map(sum, masks))
    rows = read_rows(tmp_path / "out/train.parquet", SAMPLES)
    assert rows[3]["id"] == messages_id([ASK])
    assert [row["finish_reason"] for row in rows] == ["unknown", "unknown", "unknown", "stop"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`input_ids` has 2 entries and `loss_mask` 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "`loss_mask` is zero throughout"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "`loss_mask` holds 2, not 0 or 1"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "`input_ids` holds -2"),
        ({"input_ids": [1, 2**31], "loss_mask": [0, 1]}, "`input_ids` holds 2147483648"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "holds more than whole numbers"),
        ({"input_ids": [], "loss_mask": []}, "`input_ids` is an empty list"),
        ({"loss_mask": [1]}, "`input_ids` is null"),
        ({"input_ids": [[1]], "loss_mask": [1]}, "holds more than whole numbers"),
    ],
)
def test_a_bad_imported_row_is_named_or_counted(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"old.jsonl:2: .*{words}"):
        imported(tmp_path, [ROWS[0], row])
    out = imported(tmp_path, [ROWS[0], row], malformed="skip")
    assert len(read_rows(out / "samples.parquet", SAMPLES)) == 1
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 1


def test_an_imported_sample_meets_the_same_prompt_and_the_same_tokens_of_another_source(tmp_path: Path) -> None:
    first = imported(tmp_path, [{**ROWS[3]}, {"input_ids": [5, 5, 5], "loss_mask": [0, 1, 1]}], name="a")
    second = imported(
        tmp_path,
        [
            {"input_ids": [8, 8, 8], "loss_mask": [0, 1, 1], "messages": [ASK]},
            {"input_ids": [5, 5, 5], "loss_mask": [0, 0, 1]},
        ],
        name="b",
    )
    outputs = merge(tmp_path / "out", {"a": first, "b": second}, min_completion_tokens=1)
    assert outputs.counts.reasons == {"train": 2, "duplicate": 1, "same tokens": 1}


def test_evaluation_prompts_are_removed_from_imported_samples_and_what_cannot_be_checked_is_counted(
    tmp_path: Path,
) -> None:
    judged = write_lines(tmp_path / "judged.jsonl", [{"messages": [ASK]}])
    wanted = source(judged).digest
    out = imported(tmp_path, ROWS)
    outputs = merge(tmp_path / "out", {"old": out}, {wanted: judged}, exclude=[str(judged)], exclude_digests=[wanted])
    assert outputs.counts.reasons == {"train": 3, "excluded": 1}
    assert json.loads((tmp_path / "out/dataset.json").read_text())["unchecked_against_exclude"] == 3


def test_an_earlier_version_is_the_base_of_an_expansion(tmp_path: Path) -> None:
    rows = [completion(f"prompt {n}", [n % 200 + 1] * (3 + n % 5)) for n in range(60)]
    run_dataset(tmp_path / "v1", {"first": rows}, validation_share=0.2)
    record = tmp_path / "v1/dataset.json"
    base = tmp_path / "base"
    run_prompts(record, base, kind="dataset", name="base")
    made = tmp_path / "new"
    made.mkdir()
    new = [completion("prompt 3", [4, 4, 4], source="new"), completion("another", [1, 2, 3, 4], source="new")]
    run_dataset(tmp_path / "only new", {"new": new}, validation_share=0.0)
    folder = next(tmp_path.glob("only new-*"))
    inputs = Inputs({"prompts/base": upstream(base), "completions/new": upstream(folder, "completions")})
    (tmp_path / "v2").mkdir()
    outputs = dataset.run(DatasetParams(validation_share=0.2), inputs, tmp_path / "v2", context())
    assert outputs.counts.reasons.get("duplicate") == 1
    for split in ("train", "validation"):
        old, now = (
            {row["id"] for row in read_rows(tmp_path / version / f"{split}.parquet", SAMPLES)}
            for version in ("v1", "v2")
        )
        assert old <= now
    grown = json.loads((tmp_path / "v2/dataset.json").read_text())
    first = json.loads(record.read_text())
    assert grown["parent"] == {
        "digest": first["digest"],
        "samples": first["train"]["samples"],
        "length_counts": first["train"]["length_counts"],
    }
    assert grown["sources"]["base"]["total"] == 60
    kept = {row["source"] for row in read_rows(tmp_path / "v2/train.parquet", SAMPLES)}
    assert "hand" in kept


def test_an_earlier_version_that_is_not_what_its_record_says_is_refused(tmp_path: Path) -> None:
    run_dataset(tmp_path / "v1", {"a": [completion(f"{n}") for n in range(9)]}, validation_share=0.0)
    path = tmp_path / "v1/dataset.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "digest": "0" * 64}))
    with pytest.raises(CorruptError, match="it says 000000000000"):
        run_prompts(path, tmp_path / "base", kind="dataset")


# ---- shards and near duplicates


def test_a_large_table_is_cut_into_shards_that_read_as_one_and_a_missing_one_is_noticed(tmp_path: Path) -> None:
    rows = [completion(f"{n}", [n % 250 + 1] * 3) for n in range(2 * ROW_GROUP + 100)]
    run_dataset(tmp_path / "whole", {"a": rows}, validation_share=0.0)
    whole = read_rows(tmp_path / "whole/train.parquet", SAMPLES)
    path = tmp_path / "train.parquet"
    table = pa.Table.from_pylist(whole, schema=SAMPLES)
    with ShardedWriter(path, SAMPLES, shard_rows=ROW_GROUP) as writer:
        for start in range(0, table.num_rows, 700):
            writer.append(table.slice(start, 700))
    assert [file.name for file in writer.files] == ["train.parquet", "train-00001.parquet", "train-00002.parquet"]
    assert read_rows(path, SAMPLES) == whole
    samples = Samples(path, cache_bytes=0)
    for row in (0, ROW_GROUP - 1, ROW_GROUP, len(whole) - 1):
        assert samples.ids[row] == whole[row]["id"]
        assert samples.tokens(row).tolist() == whole[row]["input_ids"]
    writer.files[1].unlink()
    with pytest.raises(CorruptError, match=r"train-00001\.parquet: a shard is missing"):
        shards_of(path)


def test_near_duplicates_are_dropped_when_asked_and_counted(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    texts = [generator.integers(1, 250, 400).tolist() for _ in range(20)]
    near = [list(text) for text in texts[:10]]
    for text in near:
        text[200] = 0
    rows = [completion(f"{n}", text) for n, text in enumerate(texts)]
    rows += [completion(f"near {n}", text) for n, text in enumerate(near)]
    off = run_dataset(tmp_path / "off", {"a": rows}, validation_share=0.0)
    assert off.counts.reasons == {"train": 30}
    on = run_dataset(tmp_path / "on", {"a": rows}, validation_share=0.0, near_duplicates=0.8)
    assert on.counts.reasons == {"train": 20, "near duplicate": 10}
    strict = run_dataset(tmp_path / "strict", {"a": rows}, validation_share=0.0, near_duplicates=1.0)
    assert strict.counts.reasons["train"] >= 28


def test_too_little_room_is_said_with_numbers_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.data.preflight.available_memory", lambda: 1_200_000_000)
    with pytest.raises(
        PermanentError, match=r"a dataset of up to 1 samples needs up to 0.60 GB of memory .* 1.20 GB are free"
    ):
        run_dataset(tmp_path / "out", {"a": [completion("a")]})
    assert list((tmp_path / "out").iterdir()) == []
