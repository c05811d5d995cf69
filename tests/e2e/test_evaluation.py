"""Other drafters, two kernels and real decodes on the whole road: in the csv, in the report, and in the right keys."""

from __future__ import annotations

import shutil

import pandas as pd
from conftest import Workspace  # type: ignore[import-not-found]


def test_columns_join_a_finished_run_without_training_again(finished: Workspace) -> None:
    early = finished.train_directory() / "step_4" / "drafter"
    shutil.copytree(early, finished.folder / "theirs")
    drafters = [{"name": "theirs", "path": "theirs"}]
    spread = {"target_devices": ["cpu", "cpu"]}  # placement: the references under `torch` stand
    judged = {"drafters": drafters, "kernels": ["torch", "torch_recurrent"], "online": {"prompts": 2, "budget": 4}}
    finished.write_config(references=spread, evaluate={**judged, **spread})
    assert finished.reruns() == ["evaluate:4", "evaluate:6", "references", "report"]
    latest = finished.results / "runs/micro/latest"
    frame = pd.read_csv(latest / "evaluations.csv")
    tau = frame[(frame["metric"] == "tau_pooled") & (frame["length_bucket"] == "all") & (frame["method"] == "chain")]
    tau = tau[(tau["convention"] == "committed_with_bonus") & (tau["kernel"] == "torch")].set_index(["step", "drafter"])
    assert set(tau.index.get_level_values("drafter")) == {"trained", "theirs"}
    at_four = tau.loc[(4, "trained"), "value"]
    assert [tau.loc[(step, "theirs"), "value"] for step in (4, 6)] == [at_four] * 2
    gap = frame[frame["metric"] == "tau_difference"]
    assert set(gap["kernel"]) == {"torch_recurrent-torch"}
    assert (gap["value"] == 0).all(), "a dense target has no linear attention"
    online = frame[frame["method"].isin(["online", "online_tree"])]
    assert set(online["step"]) == {6}
    assert set(online["kernel"]) == {"torch", "torch_recurrent"}
    assert (online[online["metric"].isin(["lossless", "same_lengths_as_offline"])]["value"] == 1).all()
    page = (latest / "report.html").read_text()
    for words in ("chain (theirs)", "decoded for real", "torch_recurrent"):
        assert words in page


def test_another_drafter_that_reads_other_layers_has_its_features_made(finished: Workspace) -> None:
    config = finished.train_directory() / "step_4" / "drafter"
    shutil.copytree(config, finished.folder / "theirs")
    file = finished.folder / "theirs" / "config.json"
    text = "".join(file.read_text().split())
    file.write_text(text.replace('"target_layer_ids":[1,3]', '"target_layer_ids":[2,0]'))
    finished.write_config(evaluate={"drafters": [{"name": "theirs", "path": "theirs"}]})
    assert "references" in finished.reruns()
    frame = pd.read_csv(finished.results / "runs/micro/latest/evaluations.csv")
    assert set(frame["drafter"]) == {"trained", "theirs [taps 2 0]"}


def test_an_export_of_a_checkpoint_is_written_for_a_server(finished: Workspace) -> None:
    step = finished.train_directory() / "step_6"
    done = finished.call("export", str(step), "--for", "vllm", "--to", "served")
    assert done.stdout.strip() == "served"
    assert {path.name for path in (finished.folder / "served").iterdir()} == {"config.json", "model.safetensors"}
    assert "holds something" in finished.call("export", str(step), "--for", "vllm", "--to", "served", expect=2).stderr
