"""What stands beside the checkpoint's own numbers: other drafters, other kernels, and real decodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate_road import HELD_OUT, Road, evaluate_params, references_params, upstream
from evaluate_samples import DENSE, HYBRID, drafter_config, half_trained, identity, target, train

from dflash.base.canonical import canonical_json
from dflash.base.errors import PermanentError
from dflash.base.files import sha256_file
from dflash.base.stage import Inputs
from dflash.data.chat import render
from dflash.evaluate.acceptance import Continuation
from dflash.evaluate.decode import Decoded, Decoder
from dflash.evaluate.evaluate_params import Online, OtherDrafter
from dflash.evaluate.metrics import COLUMNS
from dflash.evaluate.online import Prompt, decode_all
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.export import save_drafter

BOTH = ["torch", "torch_recurrent"]


@pytest.fixture
def road(tmp_path: Path) -> Road:
    return Road(tmp_path / "road")


def rows_of(road: Road, name: str = "evaluate") -> list[dict[str, Any]]:
    return json.loads((road.root / name / "step_7" / "rows.json").read_text())


def chosen(rows: list[dict[str, Any]], **labels: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in labels.items())]


# Other drafters ---------------------------------------------------------------------------------------------------


def elsewhere(
    folder: Path, name: str, made: DrafterConfig | Drafter, metadata: dict[str, str] | None = None
) -> OtherDrafter:
    """A drafter that somebody else trained, in a directory of its own; with random weights where only a config is given."""
    save_drafter(made if isinstance(made, Drafter) else Drafter(made, seed=5), folder / name, metadata)
    files = {path.name: sha256_file(path) for path in sorted((folder / name).iterdir())}
    return OtherDrafter(name=name, path=str(folder / name), files=files)


def fitted(config: DrafterConfig) -> Drafter:
    """A drafter that has seen what it will be judged on, so that its numbers depend on the features it is given."""
    model, drafter = target("dense"), Drafter(config, seed=5)
    data = []
    for text in HELD_OUT:
        prompt = render(model.tokenizer, [{"role": "user", "content": text}], thinking=False)
        ((output, _),) = model.generate([prompt], 20)
        features = model.features(torch.tensor([[*prompt, *output]]), None, config.target_layer_ids)[0]
        data.append((Continuation(prompt, output, 20), features))
    train(drafter, model, data, 240)
    return drafter


def judged_beside(road: Road, drafters: list[OtherDrafter], taps: list[int]) -> list[dict[str, Any]]:
    """The rows of an evaluation with other drafters, whose references hold the features of `taps`."""
    road.references(taps=taps)
    road.checkpoint(half_trained("dense")[0].drafter)
    inputs = road.inputs(taps=taps)
    files = {digest: Path(item.path) / name for item in drafters for name, digest in item.files.items()}
    road.evaluate(Inputs(inputs.upstream, files, step=7), drafters=drafters)
    return rows_of(road)


def other_taps(**changes: Any) -> DrafterConfig:
    values = {**drafter_config(4, 6).to_dict(), "target_layer_ids": [4, 1], "block_size": 3, **changes}
    return DrafterConfig.from_dict(values)


def test_a_drafter_of_other_taps_and_another_block_is_a_column_that_says_so(road: Road) -> None:
    other = elsewhere(road.root, "theirs", other_taps())
    rows = judged_beside(road, [other], [1, 2, 4])
    label = "theirs [taps 4 1; block 3; target unknown]"
    assert {row["drafter"] for row in rows} == {"trained", label}
    theirs = chosen(rows, drafter=label, metric="tau_pooled", length_bucket="all", convention="committed_with_bonus")
    assert [(row["method"], row["budget"], row["block_size"], row["horizon"]) for row in theirs] == [
        ("chain", 2, 3, 2),
        ("tree", 4, 3, 2),
        ("tree", 8, 3, 2),
    ]


def test_the_runs_own_numbers_are_the_same_with_and_without_other_drafters(road: Road) -> None:
    road.references("alone")
    road.checkpoint(half_trained("dense")[0].drafter)
    road.evaluate(road.inputs("alone"), "evaluate-alone")
    rows = judged_beside(road, [elsewhere(road.root, "theirs", other_taps())], [1, 2, 4])
    assert chosen(rows, drafter="trained") == rows_of(road, "evaluate-alone")


def test_the_column_of_another_drafter_is_what_it_scores_as_the_runs_own(road: Road) -> None:
    drafter = fitted(other_taps())
    rows = judged_beside(road, [elsewhere(road.root, "theirs", drafter)], [1, 2, 4])
    road.references("swapped", taps=[4, 1])
    save_drafter(drafter, road.root / "train" / "step_7" / "drafter")
    road.evaluate(road.inputs("swapped", taps=[4, 1]), "evaluate-swapped", taps=[4, 1], block_size=3)

    def numbers(listed: list[dict[str, Any]]) -> list[Any]:
        return [{name: row[name] for name in COLUMNS if name not in ("drafter", "train_key")} for row in listed]

    theirs = [row for row in rows if row["drafter"] != "trained"]
    own = [row for row in rows_of(road, "evaluate-swapped") if row["method"] in ("chain", "tree")]
    assert numbers(theirs) == numbers(own)
    assert chosen(theirs, method="chain", metric="tau_pooled", length_bucket="all")[0]["value"] > 1.5, (
        "it knows too little"
    )


def test_a_drafter_that_names_this_target_in_its_weights_is_not_called_unknown(road: Road) -> None:
    def told(target: Any) -> dict[str, str]:
        config = {"train": {"target": target.model_dump(mode="json")}}
        return {"dflash": canonical_json({"config": config}).decode()}

    same = elsewhere(road.root, "same", drafter_config(4, 6), told(identity(DENSE)))
    other = elsewhere(road.root, "other", drafter_config(4, 6), told(identity(DENSE.model_copy(update={"seed": 1}))))
    rows = judged_beside(road, [same, other], [1, 2])
    assert {row["drafter"] for row in rows} == {"trained", "same", "other [another target]"}


def test_two_drafters_that_share_a_config_file_keep_their_own_weights(road: Road) -> None:
    one = elsewhere(road.root, "one", drafter_config(4, 6))
    save_drafter(half_trained("dense")[0].drafter, road.root / "two")
    files = {path.name: sha256_file(path) for path in sorted((road.root / "two").iterdir())}
    two = OtherDrafter(name="two", path=str(road.root / "two"), files=files)
    assert one.files["config.json"] == two.files["config.json"]
    rows = judged_beside(road, [one, two], [1, 2])
    own, copied, untrained = (
        chosen(rows, drafter=name, metric="slot_accuracy_1", length_bucket="all")[0]["value"]
        for name in ("trained", "two [target unknown]", "one [target unknown]")
    )
    assert own == copied != untrained


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 300}, "vocabulary size 300, the target 260"),
        ({"hidden_size": 64}, "hidden size 64, the target 32"),
    ],
)
def test_a_drafter_of_another_vocabulary_or_hidden_size_is_refused(
    road: Road, changes: dict[str, int], said: str
) -> None:
    with pytest.raises(PermanentError, match=f"drafter 'theirs' has {said}"):
        judged_beside(road, [elsewhere(road.root, "theirs", other_taps(**changes))], [1, 2, 4])


def test_a_drafter_whose_files_changed_is_refused(road: Road) -> None:
    other = elsewhere(road.root, "theirs", other_taps())
    save_drafter(Drafter(other_taps(), seed=6), road.root / "theirs")
    with pytest.raises(PermanentError, match="not handed to the stage together"):
        judged_beside(road, [other], [1, 2, 4])


# Two kernels ------------------------------------------------------------------------------------------------------


def under_both(road: Road, **values: Any) -> list[dict[str, Any]]:
    """A hybrid target under both forms of the reference, and a checkpoint judged under each."""
    given = {"target": identity(HYBRID)}
    upstreams = {}
    for kernel in BOTH:
        road.references(kernel, kernels=kernel, **given)
        params = references_params(kernels=kernel, **given).keyed_values()
        upstreams[f"references/{kernel}"] = upstream(road.root / kernel, "references", params)
    road.checkpoint(half_trained("hybrid")[0].drafter)
    inputs = road.inputs(BOTH[0], **given)
    road.evaluate(replace(inputs, upstream={**inputs.upstream, **upstreams}), kernels=BOTH, **given, **values)
    return rows_of(road)


def test_two_kernels_are_compared_on_the_same_requests_with_an_interval(road: Road) -> None:
    rows = under_both(road)
    taus = {
        kernel: chosen(
            rows,
            kernel=kernel,
            method="chain",
            metric="tau_pooled",
            length_bucket="all",
            convention="committed_with_bonus",
        )[0]
        for kernel in BOTH
    }
    (gap,) = chosen(rows, kernel="torch_recurrent-torch", method="chain", metric="tau_difference")
    assert gap["value"] == taus["torch_recurrent"]["value"] - taus["torch"]["value"]
    assert gap["ci_low"] <= gap["value"] <= gap["ci_high"]
    assert gap["n"] == 2
    (same,) = chosen(rows, kernel="torch_recurrent-torch", metric="same_continuation")
    assert same["value"] == 1.0
    methods = [row["method"] for row in chosen(rows, metric="tau_difference")]
    assert methods == ["chain", "tree", "tree", "prompt_lookup", "ngram"]


def test_the_recurrent_form_really_ran(road: Road) -> None:
    under_both(road)
    features = {
        kernel: torch.frombuffer(
            bytearray((road.root / kernel / "features-0.safetensors").read_bytes()), dtype=torch.uint8
        )
        for kernel in BOTH
    }
    assert not torch.equal(features["torch"], features["torch_recurrent"])


# Real decodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_real_decodes_say_lossless_the_offline_lengths_and_a_speedup(road: Road, kind: str) -> None:
    given = {"target": identity(DENSE if kind == "dense" else HYBRID)}
    road.references(**given)
    road.checkpoint(half_trained(kind)[0].drafter)
    online = Online(prompts=2, budget=8, every_checkpoint=True)
    road.evaluate(road.inputs(**given), online=online, **given)
    rows = rows_of(road)
    for method, like in (("online", "chain"), ("online_tree", "tree")):
        found = {row["metric"]: row for row in chosen(rows, method=method)}
        assert set(found) == {"tau_pooled", "tau_request_mean", "lossless", "same_lengths_as_offline", "speedup"}
        assert found["lossless"]["value"] == found["same_lengths_as_offline"]["value"] == 1.0
        assert found["speedup"]["value"] > 0
        assert found["speedup"]["n"] == 2
        budget = 3 if method == "online" else 8
        offline = chosen(rows, method=like, budget=budget, metric="tau_pooled", length_bucket="all")[0]
        assert found["tau_pooled"]["value"] == offline["value"]
        assert found["tau_pooled"]["budget"] == budget


def test_a_sampled_decode_is_labelled_and_claims_no_equality(road: Road) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)
    road.evaluate(road.inputs(), online=Online(prompts=1, temperature=0.7, every_checkpoint=True))
    found = {row["metric"]: row["sampling"] for row in chosen(rows_of(road), method="online")}
    assert found == dict.fromkeys(("tau_pooled", "tau_request_mean", "speedup"), "temperature 0.7")


def test_each_prompt_that_is_sampled_draws_from_a_stream_of_its_own() -> None:
    decoder = Decoder.of(target("dense"), half_trained("dense")[0].drafter)
    drawn: list[tuple[int, list[int]]] = []

    class Noting(Decoder):
        def sampled(self, prompt: Sequence[int], limit: int, temperature: float, seed: int) -> Decoded:
            made = super().sampled(prompt, limit, temperature, seed)
            drawn.append((seed, made.output))
            return made

    noting = Noting(decoder.target, decoder.drafter, decoder.embed, decoder.head, decoder.stops)
    same = [Prompt(Continuation([65, 66, 67], [68] * 12, 12), {}) for _ in range(4)]
    decode_all(noting, same, Online(prompts=4, temperature=1.0), seed=3, progress=lambda done: None)
    seeds, texts = [seed for seed, _ in drawn[1:]], [output for _, output in drawn[1:]]  # the first warms up
    assert len(set(seeds)) == 4
    assert len({tuple(text) for text in texts}) == 4, "one prompt asked for four times is four draws"
    again = len(drawn)
    decode_all(noting, same, Online(prompts=4, temperature=1.0), seed=3, progress=lambda done: None)
    assert drawn[again:] == drawn[:again]


def test_a_tree_above_temperature_0_is_refused_and_not_left_out_in_silence() -> None:
    with pytest.raises(ValueError, match="trees are decoded greedily alone"):
        Online(budget=8, temperature=0.5)


def test_answers_of_one_token_have_no_verification_and_make_no_number_up(road: Road) -> None:
    road.references(max_new_tokens=1)
    road.checkpoint(half_trained("dense")[0].drafter)
    online = Online(prompts=2, budget=4, every_checkpoint=True)
    done = road.evaluate(road.inputs(max_new_tokens=1), online=online)
    rows = rows_of(road)
    assert {row["metric"] for row in rows} == {"lossless", "same_lengths_as_offline", "speedup"}, (
        "of real decodes alone"
    )
    assert done.results["beaten_by"] == []


def test_real_decodes_wait_for_the_last_checkpoint_of_the_schedule_unless_told_otherwise(road: Road) -> None:
    road.references()
    road.checkpoint(half_trained("dense")[0].drafter)
    for last, wanted in ((7, True), (8, False)):
        inputs = road.inputs()
        trained = upstream(road.root / "train", "train", {"schedule_steps": last})
        road.evaluate(
            replace(inputs, upstream={**inputs.upstream, "train": trained}),
            f"evaluate-{last}",
            online=Online(prompts=1),
        )
        assert bool(chosen(rows_of(road, f"evaluate-{last}"), method="online")) == wanted


def test_evaluation_params_refuse_a_drafter_called_trained_and_two_of_one_name() -> None:
    with pytest.raises(ValueError, match="the run's own drafter"):
        OtherDrafter(name="trained", path="p")
    with pytest.raises(ValueError, match="names must be distinct"):
        evaluate_params(drafters=[OtherDrafter(name="a", path="p"), OtherDrafter(name="a", path="q")])


def test_what_a_stored_result_keeps_of_a_drafter_is_enough_to_read_its_params_again() -> None:
    params = evaluate_params(
        drafters=[OtherDrafter(name="a", path="p", files={"config.json": "0" * 64})], online=Online(prompts=2)
    )
    kept = params.keyed_values()
    assert "path" not in kept["drafters"][0]
    assert type(params).model_validate(kept).keyed_values() == kept
    with pytest.raises(ValueError, match="drafter 'a' has no `path`"):
        OtherDrafter(name="a")
