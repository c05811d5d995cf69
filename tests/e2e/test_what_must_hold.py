"""What reruns after which change: the table of the design, one test a row, on real Snakemake."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace  # type: ignore[import-not-found]

from dflash.base.files import sha256_file

EVALUATED = ["evaluate:4", "evaluate:6"]
TRAINED = ["train:4", "train:6"]


def test_nothing_changed_reruns_nothing_in_under_three_seconds(finished: Workspace) -> None:
    finished.call("plan")
    seconds = []
    for _ in range(3):  # a busy machine may be slow once
        start = time.monotonic()
        assert finished.reruns() == []
        seconds.append(time.monotonic() - start)
        if seconds[-1] < 3.0 * PATIENCE:
            break
    assert min(seconds) < 3.0 * PATIENCE


def test_plain_snakemake_finds_nothing_to_do_either(finished: Workspace) -> None:
    before = finished.receipts()
    done = finished.snakemake()
    assert "Nothing to be done" in done.stderr
    assert finished.made_since(before) == []


def test_an_evaluation_param_reruns_evaluation_and_report_and_changing_it_back_reruns_nothing(
    finished: Workspace,
) -> None:
    latest = finished.results / "runs/micro/latest"
    first = latest.readlink()
    finished.write_config(evaluate={"bootstrap": 60})
    assert finished.reruns() == [*EVALUATED, "report"]
    assert latest.readlink() != first
    finished.write_config(evaluate={"bootstrap": 50})
    assert finished.reruns() == []
    assert latest.readlink() == first


def test_a_batching_param_reruns_from_buckets_on(finished: Workspace) -> None:
    finished.write_config(batching={"max_batch_size": 4})
    assert finished.reruns() == sorted(["buckets", *EVALUATED, "report", *TRAINED])
    assert finished.attempts() == 2


def test_a_training_param_reruns_training_and_what_follows(finished: Workspace) -> None:
    finished.write_config(train={"lr": "2e-3"})
    assert finished.reruns() == sorted([*EVALUATED, "report", *TRAINED])
    assert finished.attempts() == 2


def test_one_more_prompt_source_reruns_no_other_completions(finished: Workspace) -> None:
    path = finished.folder / "config/micro/more.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(6)))
    finished.write_config(prompts=[*finished.config["prompts"], {"name": "more", "path": "config/micro/more.jsonl"}])
    made = finished.reruns()
    # one prompts and one completions receipt: those of the new source
    assert made == sorted(
        ["prompts", "completions", "dataset", "buckets", "references", *TRAINED, *EVALUATED, "report"]
    )


def test_the_same_prompts_under_another_path_and_touched_files_rerun_nothing(finished: Workspace) -> None:
    shutil.move(finished.folder / "config/micro/short.jsonl", finished.folder / "elsewhere.jsonl")
    os.utime(finished.folder / "elsewhere.jsonl")
    finished.write_config(prompts=[{"name": "short", "path": "elsewhere.jsonl"}])
    for path in finished.results.glob("store/*/*/params.json"):
        os.utime(path)
    assert finished.reruns() == []
    before = finished.receipts()
    finished.snakemake()
    assert finished.made_since(before) == []


def test_a_comment_a_docstring_and_an_inert_module_rerun_nothing(finished: Workspace) -> None:
    finished.edited_code(
        "dflash/train/objective.py", "from __future__ import annotations", "# why\nfrom __future__ import annotations"
    )
    finished.edited_code("dflash/evaluate/tree.py", '"""', '"""More words. ')
    finished.edited_code("dflash/base/progress.py", "import time", "import time\n\nUNUSED = 1")
    assert finished.reruns() == []


def test_a_change_to_the_tree_reruns_evaluation_and_report(finished: Workspace) -> None:
    finished.edited_code(
        "dflash/evaluate/tree.py", "from __future__ import annotations", "from __future__ import annotations\n\nX = 1"
    )
    assert finished.reruns() == [*EVALUATED, "report"]


def test_a_code_only_change_to_training_stops_and_asks_then_recomputes(finished: Workspace) -> None:
    finished.edited_code(
        "dflash/train/objective.py", "from __future__ import annotations", "from __future__ import annotations\n\nX = 1"
    )
    before = finished.receipts()
    refused = finished.call("run", expect=1)
    last = refused.stderr.strip().splitlines()[-1]
    assert "dflash.train.objective" in last
    assert "dflash adopt train" in last
    assert "--recompute train" in last
    assert finished.call("plan", expect=1).stdout
    assert finished.snakemake(expect=1).stderr.count("dflash adopt train") == 1
    assert finished.made_since(before) == []
    assert finished.reruns("--recompute", "train") == sorted([*TRAINED, *EVALUATED, "report"])
    assert finished.reruns() == []


def test_a_code_only_change_to_training_can_be_adopted(finished: Workspace) -> None:
    old = finished.node("train")["key"]
    finished.edited_code(
        "dflash/train/objective.py", "from __future__ import annotations", "from __future__ import annotations\n\nX = 1"
    )
    finished.call("run", expect=1)
    finished.call("adopt", "train", old, "--why", "only a constant was added")
    # evaluation and training keep their keys; the run's state names the adoption
    assert finished.reruns() == ["report"]
    assert finished.node("train")["key"] == old
    manifest = json.loads((finished.results / "runs/micro/latest/manifest.json").read_text())
    assert [entry["why"] for entry in manifest["adoptions"]] == ["only a constant was added"]
    assert finished.reruns() == []


def test_a_lost_snakemake_folder_makes_nothing_stale(finished: Workspace) -> None:
    shutil.rmtree(finished.folder / ".snakemake")
    assert finished.reruns() == []
    shutil.rmtree(finished.folder / ".snakemake", ignore_errors=True)
    before = finished.receipts()
    finished.snakemake()
    assert finished.made_since(before) == []


def test_raising_stop_at_trains_only_the_new_steps(begun: Workspace) -> None:
    begun.write_config(train={"stop_at": 4})
    assert "train:4" in begun.reruns()
    begun.write_config(train={"stop_at": 6})
    assert begun.reruns() == ["evaluate:6", "report", "train:6"]
    assert begun.attempts() == 2
    lines = [json.loads(line) for line in (begun.train_directory() / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_file_is_found_and_only_its_stage_is_made_again(finished: Workspace) -> None:
    path = next(finished.results.glob("store/dataset/*/train.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = finished.call("plan", "--verify", expect=1)
    assert "train.parquet" in done.stderr
    assert finished.reruns() == ["dataset"]
    assert path.read_bytes() == whole


def test_a_deleted_output_is_made_again_and_nothing_downstream(finished: Workspace) -> None:
    path = next(finished.results.glob("store/references/*/references.parquet"))
    path.unlink()
    assert finished.reruns() == ["references"]


def test_a_lost_receipt_reruns_that_job_alone(finished: Workspace) -> None:
    for step in (4, 6):
        next(finished.results.glob(f"store/evaluate/*/step_{step}.json")).unlink()
    next(finished.results.glob("store/train/*/receipts/step_4.json")).unlink()
    before = finished.receipts()
    finished.snakemake()
    assert finished.made_since(before) == ["evaluate:4", "evaluate:6", "train:4"]
    assert finished.attempts() == 1


def test_a_damaged_checkpoint_asks_before_training_again(finished: Workspace) -> None:
    path = next(finished.results.glob("store/train/*/step_4/drafter/model.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = finished.call("run", expect=1)
    assert "--recompute train" in refused.stderr.splitlines()[-1]
    made = finished.reruns("--recompute", "train")
    # trained again from the checkpoint before; equal bytes, so that no evaluation is stale
    assert "train:4" in made
    assert "evaluate:4" not in made
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"anchor_chunk": 2, "logit_chunk": 7, "keep_states": 1}},
        {"completions": {"batch_size": 3}},
        {"evaluate": {"anchor_chunk": 3}, "references": {"batch_size": 2}},
    ],
    ids=["train", "completions", "evaluate"],
)
def test_placement_reruns_nothing(finished: Workspace, change: dict[str, dict[str, int]]) -> None:
    finished.write_config(**change)
    assert finished.reruns() == []
    assert finished.reruns("--cores", "3") == []


def test_a_report_whose_evaluation_was_made_again_with_other_content_is_made_again(finished: Workspace) -> None:
    receipt = next(finished.results.glob("store/evaluate/*/step_4.json"))
    document = json.loads(receipt.read_text())
    (rows,) = [output for output in document["outputs"] if output["path"].endswith("rows.json")]
    path = receipt.parent / rows["path"]
    path.write_text(path.read_text() + "\n")
    rows.update(size=path.stat().st_size, sha256=sha256_file(path))
    receipt.write_text(json.dumps(document))
    assert finished.reruns() == ["report"]
    assert finished.reruns() == []


def test_training_refuses_data_whose_bytes_changed_behind_its_receipt(finished: Workspace) -> None:
    path = next(finished.results.glob("store/dataset/*/train.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    finished.write_config(train={"lr": 3e-3})
    done = finished.snakemake(expect=1)
    assert "train.parquet" in done.stderr
    assert finished.attempts() == 1


def test_a_complete_training_is_not_marked_stopped(finished: Workspace) -> None:
    assert "nothing to stop" in finished.call("stop", "micro", expect=1).stderr
    assert not list(finished.results.glob("store/train/*/stop.json"))


def test_a_mistyped_option_is_named(finished: Workspace) -> None:
    assert "--configfile" in finished.call("run", "--confgfile", "x.yaml", expect=2).stderr


def test_a_step_that_training_has_passed_unsaved_is_refused_with_the_steps_that_exist(finished: Workspace) -> None:
    finished.write_config(train={"checkpoint_every": 3})
    before = finished.receipts()
    for refused in (finished.call("run", expect=1), finished.call("plan", expect=1), finished.snakemake(expect=1)):
        assert "passed step 3 without saving it" in refused.stderr
        assert "saved are 4, 6" in refused.stderr
    assert finished.made_since(before) == []


def test_two_runs_that_share_a_dataset_build_it_once(fresh: Workspace) -> None:
    del fresh.config["run"]
    fresh.write_config(
        runs=[{"name": "one"}, {"name": "two", "train": {"lr": 2e-3}}],
        train={"schedule_steps": 2, "checkpoint_every": 2},
    )
    made = fresh.reruns()
    for stage in ("prompts", "completions", "dataset", "buckets", "references"):
        assert made.count(stage) == 1, stage
    assert made.count("train:2") == 2
    assert made.count("report") == 2
    assert (fresh.results / "runs/one/latest/report.html").exists()
    assert (fresh.results / "runs/two/latest/report.html").exists()


def test_a_dry_run_writes_nothing(fresh: Workspace) -> None:
    before = set(fresh.folder.rglob("*"))
    done = fresh.call("run", "-n")
    assert "to make" in done.stdout
    assert set(fresh.folder.rglob("*")) == before


def test_receipts_name_their_inputs_and_nothing_lies_half_made(finished: Workspace) -> None:
    for path in finished.results.glob("store/*/*/receipt.json"):
        receipt = json.loads(path.read_text())
        for output in receipt["outputs"]:
            assert (path.parent / output["path"]).stat().st_size == output["size"]
        assert not list(Path(path.parent).glob(".work*"))
