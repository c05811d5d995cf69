"""Each check of the report fails when, and only when, its cause is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from report_store import FLA_KERNELS, TORCH_KERNELS, Made, Story, make_run, rewrite_json

from dflash.base.records import CheckpointManifest, Environment
from dflash.report.checks import Check, all_checks
from dflash.report.evidence import gather
from dflash.report.tables import tau_tables, tidy


def checks_of(made: Made) -> dict[str, Check]:
    evidence = gather(made.manifest, made.store)
    return {check.name: check for check in all_checks(evidence, tau_tables(tidy(evidence.rows, "demo")))}


def test_a_sound_run_passes_every_check(tmp_path: Path) -> None:
    found = checks_of(make_run(tmp_path))
    assert {name: check.standing for name, check in found.items()} == dict.fromkeys(found, "holds")
    assert len(found) == 8


@pytest.mark.parametrize(
    ("name", "standing", "story", "words"),
    [
        ("kernels", "fails", Story(judge_kernels={"fla": FLA_KERNELS}), "trained on torch, judged on fla"),
        ("kernels", "look", Story(judge_kernels={"torch": TORCH_KERNELS, "fla": FLA_KERNELS}), "others (fla)"),
        (
            "kernels",
            "fails",
            Story(judge_kernels={"torch": {**TORCH_KERNELS, "form": "recurrent"}}),
            "judged on torch_recurrent",
        ),
        ("kernels", "unknown", Story(train_kernels={}), "No record says"),
        ("baselines", "fails", Story(ngram=2.6), "does not beat n-gram (2.60)"),
        ("baselines", "look", Story(ngram=2.35), "within the intervals"),
        ("held_out", "fails", Story(shared=3), "3 of held_out"),
        ("held_out", "unknown", Story(unchecked=3), "3 imported samples came without messages"),
        ("truncated", "look", Story(truncated=570), "570 of 1,900 completions (30.0%)"),
        ("code", "look", Story(git={"commit": "ab" * 20, "dirty": True, "changed": ["dflash/a.py"]}), "Uncommitted"),
        ("code", "unknown", Story(git={}), "no commit"),
        ("adoptions", "look", Story(adoptions=[{"stage": "train", "why": "renamed"}]), "1 older result was kept"),
        ("lossless", "fails", Story(lossless=0.75), "exact arithmetic does not excuse"),
        ("determinism", "look", Story(determinism="statistical"), "within the intervals only"),
    ],
)
def test_a_planted_cause_flips_its_own_check_and_no_other(
    tmp_path: Path, name: str, standing: str, story: Story, words: str
) -> None:
    found = checks_of(make_run(tmp_path, story))
    assert found[name].standing == standing
    assert words in found[name].words
    assert [other for other, check in found.items() if check.standing != "holds"] == [name]


def test_code_that_was_kept_can_be_had_again_without_a_commit(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(git={}))
    made.manifest.code = "c" * 64
    check = checks_of(made)["code"]
    assert check.standing == "holds"
    assert f"kept as {'c' * 16}" in check.words


def swap_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def edit_receipt(path: Path) -> None:
    rewrite_json(path, lambda receipt: receipt | {"host": "elsewhere"})


def unbalance(path: Path) -> None:
    def lose_one(receipt: dict) -> dict:  # type: ignore[type-arg]
        receipt["counts"]["ok"] -= 1
        return receipt

    rewrite_json(path, lose_one)


@pytest.mark.parametrize(
    ("stage", "file", "damage", "why"),
    [
        ("evaluate", "step_100.json", Path.unlink, "missing"),
        ("train", "receipts/step_50.json", Path.unlink, "missing"),
        ("buckets", "buckets.json", Path.unlink, "missing"),
        ("dataset", "train.parquet", swap_bytes, "not those that its receipt records"),
        ("evaluate", "step_300/rows.json", lambda path: path.write_text("[]"), "its receipt says"),
        ("buckets", "receipt.json", lambda path: path.write_text('{"schema'), "not readable JSON"),
        ("buckets", "receipt.json", edit_receipt, "not the receipt that the run's manifest records"),
        ("dataset", "receipt.json", unbalance, "accounted for"),
        ("train", "params.json", lambda path: rewrite_json(path, lambda p: p | {"stage": "evaluate"}), "has key"),
    ],
)
def test_a_lost_or_altered_file_fails_the_receipts_and_is_named(
    tmp_path: Path, stage: str, file: str, damage: Callable[[Path], object], why: str
) -> None:
    made = make_run(tmp_path)
    path = made.directory(stage) / file
    damage(path)
    check = checks_of(made)["receipts"]
    assert check.standing == "fails"
    named = [line for line in check.details if line.startswith(str(path.relative_to(made.store)))]
    assert len(named) == 1
    assert why in named[0]


def test_numbers_that_their_receipt_disowns_are_not_shown(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    path = made.directory("evaluate") / "step_300" / "rows.json"
    path.write_text(path.read_text().replace("held_out", "held_in_"))
    evidence = gather(made.manifest, made.store)
    assert {row["step"] for row in evidence.rows} == {50, 100, 150, 200, 250}
    assert "step_300/rows.json" in evidence.troubles["tau"][0].file


def test_a_result_made_from_another_state_of_its_input_fails_the_receipts(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    path = made.directory("buckets") / "receipt.json"
    rewrite_json(path, lambda receipt: receipt | {"inputs": {"dataset": "00" * 32}})
    entry = next(entry for entry in made.manifest.stages if entry.name == "buckets")
    entry.receipts.clear()
    check = checks_of(made)["receipts"]
    assert check.standing == "fails"
    assert "another state of dataset" in check.details[0]


def test_files_that_stay_on_another_host_are_counted_and_not_called_lost(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    directory = made.directory("completions/arithmetic")
    edit_receipt(directory / "receipt.json")
    (directory / "completions.parquet").unlink()
    next(entry for entry in made.manifest.stages if entry.stage == "completions").receipts.clear()
    check = checks_of(made)["receipts"]
    assert check.standing == "holds"
    assert "1 lies on another host and was not checked here" in check.words


def test_kernels_that_change_in_the_middle_of_training_are_named(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    path = made.directory("train") / "step_200" / "manifest.json"
    manifest = CheckpointManifest.read(path)
    manifest.model_copy(update={"kernels": FLA_KERNELS}).write(path)
    entry = made.directory("train") / "receipts" / "step_200.json"
    rewrite_json(entry, lambda receipt: receipt | {"outputs": []})
    check = checks_of(made)["kernels"]
    assert check.standing == "fails"
    assert any(line.startswith("training at step 200: linear is fla") for line in check.details)


def test_an_environment_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    receipt = json.loads((made.directory("references/torch") / "receipt.json").read_text())
    path = made.store / "environments" / f"{receipt['environment']}.json"
    Environment.read(path).model_copy(update={"kernels": {"target": FLA_KERNELS}}).write(path)
    evidence = gather(made.manifest, made.store)
    assert receipt["environment"] not in evidence.environments
    assert "digest of its name" in evidence.troubles["environments"][0].why
    assert checks_of(made)["kernels"].standing == "unknown"


def test_real_decodes_that_give_the_targets_own_text_hold(tmp_path: Path) -> None:
    check = checks_of(make_run(tmp_path, Story(lossless=1.0)))["lossless"]
    assert check.standing == "holds"
    assert "In all 4 decodes" in check.words
