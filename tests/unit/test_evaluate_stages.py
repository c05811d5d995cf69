"""The two stages as the runner calls them: references of a tiny target, and a checkpoint judged against them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from evaluate_road import HELD_OUT, TRAINED, Road, context, references_params, samples, upstream
from evaluate_samples import DENSE, TAPS, drafter_config, half_trained, identity, target

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.stage import Inputs, Outputs
from dflash.data.schemas import REFERENCES, SAMPLES
from dflash.data.tables import read_rows, write_table
from dflash.evaluate import evaluate, references
from dflash.evaluate.ends import load_ends
from dflash.evaluate.evaluate_params import Online
from dflash.evaluate.features import FeatureReader
from dflash.evaluate.metrics import COLUMNS
from dflash.evaluate.references_params import PromptSet
from dflash.evaluate.samples import text_pieces
from dflash.model.drafter import Drafter
from dflash.model.identity import target_digest
from dflash.model.probe import Probe
from dflash.model.target import byte_tokenizer
from dflash.model.target_params import TargetIdentity


@pytest.fixture
def road(tmp_path: Path) -> Road:
    return Road(tmp_path / "road")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Road, Outputs, Outputs]:
    """A road with references of two prompt sets and one judged checkpoint."""
    road = Road(tmp_path_factory.mktemp("judged"))
    prompt_set, files = road.prompts("extra", [{"prompt": "something else"}, {"prompt": "and again"}])
    sets = [PromptSet(name="held_out", held_out=True), prompt_set]
    made = road.references(files=files, prompt_sets=sets)
    road.checkpoint(half_trained("dense")[0].drafter)
    return road, made, road.evaluate(road.inputs(prompt_sets=sets))


def test_references_are_the_targets_greedy_continuations(judged: tuple[Road, Outputs, Outputs]) -> None:
    road, made, _ = judged
    rows = read_rows(road.root / "references" / "references.parquet", REFERENCES)
    assert [row["prompt_set"] for row in rows] == ["held_out", "held_out", "extra", "extra"]
    model = target("dense")
    for row in rows:
        assert bytes(token for token in row["prompt_ids"] if token < 256).decode().endswith("assistant\n")
        assert model.generate([row["prompt_ids"]], 20) == [(row["output_ids"], row["finish_reason"])]
    assert made.counts.total == made.counts.ok == 4
    cut = sum(row["finish_reason"] == "length" for row in rows[:2])
    assert made.results["prompt_sets"]["held_out"]["truncated_share"] == cut / 2
    assert sorted(made.files) == sorted(path.name for path in (road.root / "references").iterdir())


def test_cached_and_recomputed_features_give_the_same_evaluation_bit_for_bit(road: Road) -> None:
    road.checkpoint(half_trained("dense")[0].drafter)
    for name, cap in (("all", 1.0), ("one", 2e-5), ("none", 0.0)):
        made = road.references(name, placement={"features_cache_gb": cap})
        assert made.results["features"]["cached_requests"] == {"all": 2, "one": 1, "none": 0}[name]
        road.evaluate(road.inputs(name), f"evaluate-{name}")
    rows = [(road.root / f"evaluate-{name}" / "step_7" / "rows.json").read_bytes() for name in ("all", "one", "none")]
    assert rows[0] == rows[1] == rows[2]


def test_a_target_spread_over_devices_gives_the_same_references_and_the_same_evaluation(road: Road) -> None:
    road.checkpoint(half_trained("dense")[0].drafter)
    spread = {"target_devices": ["cpu", "cpu", "cpu"]}
    for name, placed in (("whole", {}), ("spread", spread)):
        road.references(name, placement={"features_cache_gb": 0.0, **placed})
        done = road.evaluate(
            road.inputs(name), f"evaluate-{name}", placement=placed, online=Online(prompts=1, budget=4)
        )
        assert done.results["tau"]["torch"]["held_out"]["chain"] > 1
    for file in ("references.parquet", "probe.safetensors"):
        assert (road.root / "whole" / file).read_bytes() == (road.root / "spread" / file).read_bytes(), file
    judged = [
        (road.root / f"evaluate-{name}" / "step_7" / "requests.parquet").read_bytes() for name in ("whole", "spread")
    ]
    assert judged[0] == judged[1]


def test_more_devices_than_the_target_has_layers_are_refused(road: Road) -> None:
    with pytest.raises(ConfigError, match="9 devices for a target of 6 layers"):
        road.references(placement={"target_devices": ["cpu"] * 9})


def test_the_target_does_not_run_while_features_are_cached(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(evaluate, "load_target", refuse)
    assert road.evaluate(road.inputs()).counts.ok == 2


def test_every_method_and_metric_has_rows_with_the_columns_of_the_interface(
    judged: tuple[Road, Outputs, Outputs],
) -> None:
    road, _, done = judged
    rows = json.loads((road.root / "evaluate" / "step_7" / "rows.json").read_text())
    assert all(set(row) == set(COLUMNS) for row in rows)
    key = road.inputs().one("train").params.key
    assert {(row["train_key"], row["step"], row["drafter"], row["kernel"]) for row in rows} == {
        (key, 7, "trained", "torch")
    }
    methods = {("chain", 3), ("tree", 4), ("tree", 8), ("prompt_lookup", 3), ("ngram", 3)}
    for prompt_set in ("held_out", "extra"):
        own = [row for row in rows if row["prompt_set"] == prompt_set and row["length_bucket"] == "all"]
        assert {(row["method"], row["budget"]) for row in own if row["metric"] == "tau_pooled"} == methods
        slots = {row["metric"] for row in own if row["method"] == "chain"} - {"tau_pooled", "tau_request_mean"}
        every = {f"slot_accuracy_{kind}{k}" for kind in ("", "given_prefix_") for k in (1, 2, 3)}
        # No row where no anchor has the prefix right.
        assert every - {"slot_accuracy_given_prefix_2", "slot_accuracy_given_prefix_3"} <= slots <= every
    assert all(1 <= row["value"] <= 4 for row in rows if row["metric"].startswith("tau") and row["method"] != "tree")
    assert sorted(done.files) == [f"step_7/{name}" for name in ("requests.parquet", "rows.json", "samples.json")]


def test_the_numbers_follow_from_the_acceptance_lengths_of_the_requests(
    judged: tuple[Road, Outputs, Outputs],
) -> None:
    road, _, done = judged
    table = pq.read_table(road.root / "evaluate" / "step_7" / "requests.parquet").to_pylist()
    assert len(table) == 4 * 5
    for row in table:
        assert sum(row["acceptance_lengths"]) == row["output_tokens"] - 1
        assert len(row["anchors"]) == len(row["acceptance_lengths"])
    lengths = [
        length
        for row in table
        if (row["prompt_set"], row["method"]) == ("held_out", "chain")
        for length in row["acceptance_lengths"]
    ]
    assert done.results["tau"]["torch"]["held_out"]["chain"] == pytest.approx(sum(lengths) / len(lengths))
    assert set(done.results["tau"]["torch"]["held_out"]) == {"chain", "tree_4", "tree_8", "prompt_lookup", "ngram"}
    assert done.results["ngram_tokens"] == sum(len(row["input_ids"]) for row in samples(TRAINED))


def test_samples_show_which_tokens_were_drafted_and_accepted(judged: tuple[Road, Outputs, Outputs]) -> None:
    road, _, _ = judged
    shown = json.loads((road.root / "evaluate" / "step_7" / "samples.json").read_text())
    table = pq.read_table(road.root / "evaluate" / "step_7" / "requests.parquet").to_pylist()
    chains = {row["id"]: row for row in table if row["method"] == "chain"}
    assert len(shown) == 4
    for sample in shown:
        row = chains[sample["id"]]
        assert len(sample["output"]) == len(sample["origin"]) == row["output_tokens"]
        assert [item["committed"] for item in sample["verifications"]] == row["acceptance_lengths"]
        accepted = sum(item["accepted"] for item in sample["verifications"])
        assert sample["origin"].count("draft") == accepted
        assert sample["origin"][0] == "prefill"
        assert sample["prompt"].endswith("assistant\n")


def test_a_drafter_that_a_baseline_beats_is_flagged(road: Road) -> None:
    model = target("dense")
    ((output, _),) = model.generate([prompt_ids("held out one")], 20)
    memorised = samples(["something"])
    memorised[0]["input_ids"] = memorised[0]["input_ids"][: memorised[0]["prompt_length"]] + output
    write_table(road.root / "train.parquet", SAMPLES, memorised)
    road.references()
    road.checkpoint(Drafter(drafter_config(4, 6), seed=3))
    beaten = road.evaluate(road.inputs()).results["beaten_by"]
    assert "ngram" in {entry["method"] for entry in beaten}
    assert all(entry["tau"] > entry["drafter_tau"] for entry in beaten)


def prompt_ids(text: str) -> list[int]:
    """The tokens of a question under the byte tokenizer's template."""
    return references.render(byte_tokenizer(), [{"role": "user", "content": text}], thinking=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"taps": [1, 3]}, r"taps \[1, 2\], the evaluation is for \[1, 3\]"),
        ({"block_size": 8}, "block size 4, the evaluation is for 8"),
        ({"target": identity(DENSE).model_copy(update={"vocab_size": 300})}, "vocabulary size 260, .* for 300"),
        ({"target": identity(DENSE).model_copy(update={"hidden_size": 64})}, "hidden size 32, .* for 64"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_naming_both_values(
    road: Road, values: dict[str, Any], message: str
) -> None:
    road.checkpoint(Drafter(drafter_config(4, 6), seed=0))
    with pytest.raises(PermanentError, match=message):
        road.evaluate(road.inputs(), **values)


def test_features_of_other_taps_or_tokens_are_refused(road: Road) -> None:
    road.references()

    def never() -> Any:
        raise AssertionError

    with pytest.raises(PermanentError, match=r"taps \[1, 2\], the evaluation asks for \[2, 1\]"):
        FeatureReader(road.root / "references", [2, 1], "torch", never)
    with pytest.raises(PermanentError, match="kernels torch, the evaluation asks for fla"):
        FeatureReader(road.root / "references", TAPS, "fla", never)
    reader = FeatureReader(road.root / "references", TAPS, "torch", never)
    with pytest.raises(CorruptError, match="other tokens"):
        reader.read(0, [1, 2, 3], "held_out/0")


def test_an_empty_prompt_set_is_refused(road: Road) -> None:
    road.dataset(TRAINED, [])
    with pytest.raises(ConfigError, match=r"held_out: the prompt set is empty.*validation_share"):
        road.references()


def test_a_prompt_that_stands_twice_is_refused(road: Road) -> None:
    prompt_set, files = road.prompts("twice", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    with pytest.raises(ConfigError, match=r"twice: 1 prompts stand in it more than once"):
        road.references(files=files, prompt_sets=[prompt_set])


def test_evaluation_prompts_that_were_trained_on_are_refused_with_their_count(road: Road) -> None:
    lines = [{"prompt": TRAINED[0]}, {"prompt": TRAINED[2]}, {"prompt": "fresh"}]
    prompt_set, files = road.prompts("seen", lines)
    road.references(files=files, prompt_sets=[prompt_set])
    road.checkpoint(half_trained("dense")[0].drafter)
    with pytest.raises(PermanentError, match=r"2 of 3 in 'seen'.*dataset\.exclude"):
        road.evaluate(road.inputs(prompt_sets=[prompt_set]))


def test_a_trained_question_under_another_system_message_is_still_refused(road: Road) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TRAINED[1]}]
    prompt_set, files = road.prompts("seen", [{"messages": messages}])
    road.references(files=files, prompt_sets=[prompt_set])
    road.checkpoint(half_trained("dense")[0].drafter)
    with pytest.raises(PermanentError, match="1 of 1 in 'seen'"):
        road.evaluate(road.inputs(prompt_sets=[prompt_set]))


def test_a_prompt_longer_than_the_context_is_refused(road: Road) -> None:
    prompt_set, files = road.prompts("long", [{"prompt": "x" * 300}])
    with pytest.raises(ConfigError, match=r"long: prompt \w{12} has \d+ tokens, the target's context 256"):
        road.references(files=files, prompt_sets=[prompt_set])


def test_a_prompt_near_the_context_is_continued_as_far_as_it_reaches(road: Road) -> None:
    room = 256 - len(prompt_ids(""))
    prompt_set, files = road.prompts("near", [{"prompt": "y" * (room - 5)}])
    road.references(files=files, prompt_sets=[prompt_set])
    (row,) = read_rows(road.root / "references" / "references.parquet", REFERENCES)
    assert len(row["prompt_ids"]) + len(row["output_ids"]) <= 256
    assert len(row["output_ids"]) <= 5


def test_a_limit_takes_the_first_prompts(road: Road) -> None:
    road.references(prompt_sets=[PromptSet(name="held_out", held_out=True, limit=1)])
    rows = read_rows(road.root / "references" / "references.parquet", REFERENCES)
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == HELD_OUT[:1]


def test_batches_of_one_give_the_same_continuations(road: Road) -> None:
    road.references("together")
    road.references("alone", placement={"batch_size": 1})
    tables = [pq.read_table(road.root / name / "references.parquet") for name in ("together", "alone")]
    assert tables[0].equals(tables[1])


def test_evaluation_without_a_step_is_refused(road: Road) -> None:
    with pytest.raises(PermanentError, match="no step"):
        road.evaluate(replace(road.inputs(), step=None))


def test_the_ends_of_a_saved_target_are_those_of_the_whole(tmp_path: Path) -> None:
    model = target("dense")
    model.model.save_pretrained(tmp_path)
    ends = load_ends(tmp_path, "float32", "cpu")
    ids = torch.tensor([[1, 2, 259]])
    assert torch.equal(ends.embed(ids), model.embed(ids))
    assert torch.equal(ends.head(ends.embed(ids)), model.lm_head(model.embed(ids)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptError, match="no tensor called"):
        load_ends(tmp_path, "float32", "cpu")


def test_text_pieces_join_to_the_decoded_text_with_characters_of_several_tokens() -> None:
    ids = list("naïve 日本 🙂!".encode())
    pieces = text_pieces(byte_tokenizer(), ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == "naïve 日本 🙂!"
    assert text_pieces(byte_tokenizer(), ids[:-2])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_an_evaluation_compares_its_kernels_with_those_of_the_training_and_says_the_gap(road: Road) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)
    assert road.evaluate(road.inputs(), "unprobed").results["kernel_gap"] == {"torch": None}
    recorded = Probe.read(road.root / "references" / "probe.safetensors")
    recorded.write(road.root / "train" / "probe.safetensors")
    assert road.evaluate(road.inputs(), "same").results["kernel_gap"]["torch"]["error"] == 0.0
    other = {**recorded.tensors, "features.0": recorded.tensors["features.0"] * 1.0005}
    Probe(other, recorded.facts).write(road.root / "train" / "probe.safetensors")
    gap = road.evaluate(road.inputs(), "near").results["kernel_gap"]["torch"]
    assert gap["error"] == pytest.approx(0.0005, rel=0.01)
    other["features.0"] = recorded.tensors["features.0"] * 1.01
    Probe(other, recorded.facts).write(road.root / "train" / "probe.safetensors")
    with pytest.raises(PermanentError, match="under torch kernels are not those it was trained on"):
        road.evaluate(road.inputs(), "far")


def test_a_target_loaded_again_for_an_evaluation_must_be_that_of_the_references(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    road.references(placement={"features_cache_gb": 0.0})
    road.checkpoint(half_trained("dense")[0].drafter)
    real = evaluate.load_target

    def nudged(*arguments: Any, **named: Any) -> Any:
        target = real(*arguments, **named)
        target.model.model.layers[0].mlp.up_proj.weight.data[3] += 0.1
        return target

    monkeypatch.setattr(evaluate, "load_target", nudged)
    with pytest.raises(PermanentError, match="other features than when its references were made"):
        road.evaluate(road.inputs())


def test_references_made_again_are_the_same_bytes(road: Road) -> None:
    for number in range(6):  # the metadata of a file would come in a random order
        road.references(f"made-{number}")
    folders = [road.root / f"made-{number}" for number in range(6)]
    for name in ("references.parquet", "features-0.safetensors", "features.json", "probe.safetensors"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name


def damaged_target(folder: Path, damage: str) -> TargetIdentity:
    """A saved target with one thing wrong, named by the digest that it has."""
    model = target("dense")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "corrupt":
        weights.write_bytes(b"\xff" * 16 + weights.read_bytes()[16:])
    elif damage == "half a tokenizer":
        tokenizer.write_text(tokenizer.read_text()[:500])
    elif damage == "foreign tokenizer":
        other = byte_tokenizer()
        other.add_tokens([f"word{number}" for number in range(40)])
        other.save_pretrained(folder)
    plain = {"random": None, "digest": target_digest(folder)}
    return identity(DENSE).model_copy(update=plain)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        ("truncated", CorruptError, "not a whole checkpoint"),
        ("corrupt", CorruptError, "not a whole checkpoint"),
        ("half a tokenizer", CorruptError, "not a whole checkpoint"),
        ("foreign tokenizer", ConfigError, "the tokenizer gives tokens up to 299, the target knows 260"),
    ],
)
def test_a_damaged_target_is_refused_and_nothing_is_written(
    road: Road, damage: str, error: type[Exception], said: str
) -> None:
    params = references_params(target=damaged_target(road.root / "target", damage))
    (road.root / "references").mkdir()
    inputs = Inputs({"dataset": upstream(road.root, "dataset")}, target_path=road.root / "target")
    with pytest.raises(error, match=said) as caught:
        references.run(params, inputs, road.root / "references", context())
    assert caught.value.exit_code in (1, 2)  # type: ignore[attr-defined]
    assert list((road.root / "references").iterdir()) == []


def test_a_damaged_checkpoint_leaves_no_part_of_a_table(road: Road) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)
    weights = road.root / "train" / "step_7" / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CorruptError, match="unreadable"):
        road.evaluate(road.inputs())
    assert list((road.root / "evaluate").iterdir()) == []


def test_damaged_features_are_named(road: Road) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)
    shard = road.root / "references" / "features-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CorruptError, match=r"features-0\.safetensors: unreadable"):
        road.evaluate(road.inputs())


def test_the_chat_template_and_the_thinking_mode_are_recorded(judged: tuple[Road, Outputs, Outputs]) -> None:
    _, made, _ = judged
    digest = references.template_digest(byte_tokenizer())
    assert made.results["chat"] == {"thinking": False, "template_sha256": digest}
    other = byte_tokenizer()
    other.chat_template += " "
    assert references.template_digest(other) != digest


def test_tau_is_told_by_tag_in_rows_of_their_own_and_leaves_those_of_the_set_as_they_are(road: Road) -> None:
    texts = [("one", ["code", "short"]), ("two of them", ["code"]), ("and three", []), ("four", ["short", "odd"])]
    road.checkpoint(half_trained("dense")[0].drafter)
    for name, tagged in (("plain", False), ("tagged", True)):
        lines = [{"prompt": text, **({"tags": [*tags, "everybody"]} if tagged else {})} for text, tags in texts]
        prompt_set, files = road.prompts("extra", lines)
        asked: dict[str, Any] = {"prompt_sets": [PromptSet(name="held_out", held_out=True), prompt_set]}
        made = road.references(name, files=files, **asked)
        done = road.evaluate(road.inputs(name, **asked), f"evaluate-{name}", budgets=[8])
        assert ("tags.json" in made.files) == tagged
        assert ("step_7/tags.json" in done.files) == tagged
    folder = road.root / "evaluate-tagged" / "step_7"
    assert folder.joinpath("rows.json").read_bytes() == (road.root / "evaluate-plain/step_7/rows.json").read_bytes()
    assert json.loads((road.root / "tagged" / "tags.json").read_text()) == {
        "extra": {"code": [0, 1], "short": [0, 3], "odd": [3]}
    }, "a tag of all prompts of its set is left out"
    rows = json.loads(folder.joinpath("tags.json").read_text())
    assert all(set(row) == {*COLUMNS, "tag"} and row["prompt_set"] == "extra" for row in rows)
    judged = [row for row in pq.read_table(folder / "requests.parquet").to_pylist() if row["prompt_set"] == "extra"]
    for tag, places in (("code", [0, 1]), ("short", [0, 3]), ("odd", [3])):
        for method, budget in (("chain", 3), ("tree", 8), ("ngram", 3)):
            own = [row for row in judged if (row["method"], row["budget"]) == (method, budget)]
            lengths = [length for place in places for length in own[place]["acceptance_lengths"]]
            (row,) = [
                row
                for row in rows
                if (row["tag"], row["method"], row["metric"], row["convention"])
                == (tag, method, "tau_pooled", "committed_with_bonus")
            ]
            assert row["value"] == pytest.approx(sum(lengths) / len(lengths))
            assert row["n"] == len(places)
            assert row["ci_low"] <= row["value"] <= row["ci_high"]
