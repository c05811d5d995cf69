"""Whoever goes on with a training is told when the machine no longer computes what its first step was taken with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_store import TINY, Training, again, identity, make_training, put_receipt

from dflash.base.environment import collect, store_environment
from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import CheckpointManifest, Environment, Receipt
from dflash.model import drafter
from dflash.model import probe as common
from dflash.model.identity import target_source
from dflash.model.probe import ACROSS_KERNELS, TOLERANCE, Probe, kernel_gap, largest_drift, probe_features, probe_tokens
from dflash.model.target import Target, load_target
from dflash.train import forward, prepare, trainer
from dflash.train.probe import drafter_part

torch.set_num_threads(1)
HYBRID = TINY.model_copy(update={"model_type": "qwen3_5_text"})


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = make_training(tmp_path_factory.mktemp("begun"), target=identity(HYBRID))
    training.run(1)
    return training


@pytest.fixture
def training(begun: Training, tmp_path: Path) -> Training:
    """A training of one step, to go on with; of a hybrid target."""
    import shutil

    copied = again(begun, tmp_path)
    shutil.copytree(begun.directory, copied.directory, dirs_exist_ok=True)
    return copied


def nudge_target(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """One weight of one layer of the target is another than it was."""
    real = prepare.load_target

    def load(*arguments: Any, **named: Any) -> Target:
        target = real(*arguments, **named)
        weight = next(
            w for name, w in sorted(target.model.named_parameters()) if name.endswith("layers.1.mlp.up_proj.weight")
        )
        weight.data[3, 5] += by
        return target

    monkeypatch.setattr(prepare, "load_target", load)


def other_machine(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Fields of the environment's torch facts are others than they were."""
    real = trainer.collect

    def collect(kernels: Any = None) -> Environment:
        made = real(kernels)
        return made.model_copy(update={"torch": {**made.torch, **changed}})

    monkeypatch.setattr(trainer, "collect", collect)


def accepted(training: Training, step: int) -> list[dict[str, Any]]:
    return CheckpointManifest.read(training.directory / f"step_{step}" / "manifest.json").lineage.accepted


def test_the_first_step_writes_it_with_the_environment_and_the_bound_kernels(begun: Training) -> None:
    found = Probe.read(begun.directory / "probe.safetensors")
    assert [len(tokens) for tokens in found.tokens()] == [7, 33, 66, 150]
    assert [list(features.shape) for features in found.features()] == [[n, 2 * 16] for n in (7, 33, 66, 150)]
    assert found.tensors["logits.3"].shape == (3, 3, 260)
    assert float(found.tensors["gradient_norm"]) > 0
    assert found.facts["kernels"]["linear"] == "torch"
    assert found.facts["numerics"]["torch.version"] == torch.__version__
    manifest = CheckpointManifest.read(begun.directory / "step_1" / "manifest.json")
    assert found.facts["environment"] == manifest.environment.digest()[:12]


def test_the_sequences_are_a_function_of_the_vocabulary_and_hold_no_special_token() -> None:
    tokens = probe_tokens(260, [256, 257, 259], 4096)
    assert tokens == probe_tokens(260, [259, 257, 256], 4096)
    assert not {256, 257, 259} & {token for sequence in tokens for token in sequence}
    assert max(len(sequence) for sequence in probe_tokens(260, [], 40)) == 40
    assert len({tuple(sequence[:7]) for sequence in tokens}) == len(tokens)


def test_the_same_machine_goes_on_and_the_file_stays_as_it_is(training: Training) -> None:
    path = training.directory / "probe.safetensors"
    before = path.read_bytes()
    training.run(2, attempt=2)
    assert path.read_bytes() == before
    assert accepted(training, 2) == []


def test_probing_changes_no_weight(begun: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = again(begun, tmp_path)
    monkeypatch.setattr(trainer.probe, "attend", lambda *_, **__: [])
    other.run(1)
    ours, theirs = begun.weights(1), other.weights(1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_nudged_weight_of_the_target_stops_a_resume_on_the_same_machine(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    nudge_target(monkeypatch, 1e-6)
    with pytest.raises(PermanentError, match=r"tap \d of the sequence .*every bit should be the same.*nothing that is"):
        training.run(2, attempt=2)
    assert not (training.directory / "step_2").exists()


def test_another_initial_weight_of_the_drafter_is_blamed_on_the_drafter(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.Drafter.draw_weights
    monkeypatch.setattr(trainer.Drafter, "draw_weights", lambda self, seed: real(self, seed + 1))
    with pytest.raises(PermanentError, match=r"(logits\.\d|gradient norm|loss) is off by"):
        training.run(2, attempt=2)


def test_another_machine_within_the_tolerance_goes_on_and_says_what_has_changed(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other_machine(monkeypatch, cuda="99.9")
    nudge_target(monkeypatch, 1e-6)
    training.run(2, attempt=2)
    assert f"torch.cuda {torch.version.cuda} -> 99.9" in capsys.readouterr().err


def test_other_kernels_of_the_drafter_are_placement_so_a_resume_goes_on_and_says_so(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fused kernels add up in another order, so even a CPU gives other bits; a fault is still a fault."""

    def rounding(by: float) -> Any:
        return lambda function, _backend: lambda *arguments: function(*arguments) * (1 + by)

    monkeypatch.setattr(forward, "fused", lambda function, _backend: function)
    monkeypatch.setattr(drafter, "fused", rounding(1e-6))
    training.run(2, attempt=2, fuse=True)
    assert "train.fuse absent -> True" in capsys.readouterr().err
    monkeypatch.setattr(drafter, "fused", rounding(1e-2))
    with pytest.raises(PermanentError, match=r"(logits\.\d|gradient norm|loss) is off by .*1\.0e-04 is allowed"):
        training.run(3, attempt=3, fuse=True)


def test_the_drafter_is_probed_with_the_kernels_it_trains_with(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = drafter.attend_in_tiles
    monkeypatch.setattr(drafter, "attend_in_tiles", lambda *arguments: 2 * real(*arguments))
    with pytest.raises(PermanentError, match=r"is off by .*train\.attention absent -> flex"):
        training.run(2, attempt=2, attention="flex")
    monkeypatch.undo()
    monkeypatch.setattr(
        forward, "fused", lambda function, _backend: lambda *chunk: (7 * function(*chunk)[0], *function(*chunk)[1:])
    )
    monkeypatch.setattr(drafter, "fused", lambda function, _backend: function)
    with pytest.raises(PermanentError, match=r"loss is off by .*train\.fuse absent -> True"):
        training.run(2, attempt=2, fuse=True)


def test_another_machine_beyond_the_tolerance_is_named_and_refused(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_machine(monkeypatch, cuda="99.9", version="9.9")
    nudge_target(monkeypatch, 0.5)
    with pytest.raises(PermanentError) as refused:
        training.run(2, attempt=2)
    said = refused.value.message()
    assert f"torch.cuda {torch.version.cuda} -> 99.9, torch.version {torch.__version__} -> 9.9" in said
    assert "(1.0e-04 is allowed)" in said
    assert '--accept-env "why"' in said


def test_what_is_accepted_is_recorded_in_later_checkpoints_and_asked_once(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    nudge_target(monkeypatch, 0.5)
    training.run(2, attempt=2, accept_env="new driver, checked")
    training.run(3, attempt=3)
    (entry,) = accepted(training, 3)
    assert accepted(training, 2) == [entry]
    assert (entry["attempt"], entry["why"]) == (2, "new driver, checked")
    assert (training.directory / "probe.before_attempt_2.safetensors").exists()
    monkeypatch.undo()
    with pytest.raises(PermanentError, match="no longer computes"):
        training.run(4, attempt=4)


def test_a_start_without_a_checkpoint_is_no_resume(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    (training.directory / "step_1" / "manifest.json").unlink()
    nudge_target(monkeypatch, 0.5)
    training.run(1, attempt=2)
    monkeypatch.undo()
    with pytest.raises(PermanentError, match="no longer computes"):
        training.run(2, attempt=3)


def test_where_the_recorded_features_lie_in_memory_moves_no_bit(begun: Training) -> None:
    params = begun.params(dtype="float64")
    target = trainer.load_checked_target(params, None, "cpu")
    drafter = trainer.Drafter(trainer.drafter_config(params), seed=3).double()
    tokens = probe_tokens(260, [256, 257, 259], 4096)
    features = list(probe_features(target, tokens, [1, 3]).values())
    shifted = [torch.cat([torch.zeros(1).double(), item.flatten()])[1:].view_as(item) for item in features]
    assert any(item.data_ptr() % 64 for item in shifted)
    ours, theirs = (
        drafter_part(drafter, tokens, f, target.embed, target.lm_head, gamma=4.0) for f in (features, shifted)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_damaged_probe_is_corrupt(training: Training) -> None:
    (training.directory / "probe.safetensors").write_bytes(b"no probe")
    with pytest.raises(CorruptError, match=r"probe\.safetensors"):
        training.run(2, attempt=2)


# ---------------------------------------------------------------- other kernels


def hybrid(form: str = "chunked", dtype: str = "float32") -> Target:
    return load_target(target_source(identity(HYBRID), None), dtype, "cpu", form=form)


def recorded(target: Target) -> Probe:
    return common.target_probe(target, identity(HYBRID), [1, 3])


def forget_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel: the state of the delta rule is lost between chunks."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as source

    real: Callable[..., Any] = source.torch_chunk_gated_delta_rule

    def forgetful(query: Any, key: Any, value: Any, **named: Any) -> Any:
        pieces = []
        for start in range(0, query.shape[1], 64):
            cut = slice(start, start + 64)
            inner = {name: item[:, cut] if name in ("g", "beta") else item for name, item in named.items()}
            pieces.append(real(query[:, cut], key[:, cut], value[:, cut], **inner)[0])
        return torch.cat(pieces, dim=1), None

    monkeypatch.setattr(source, "torch_chunk_gated_delta_rule", forgetful)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_other_form_of_the_same_kernel_is_within_the_tolerance(dtype: str) -> None:
    ours = recorded(hybrid("chunked", dtype))
    found = probe_features(hybrid("recurrent", dtype), ours.tokens(), [1, 3])
    drift = largest_drift(ours, found, ACROSS_KERNELS[dtype])
    assert dtype == "bfloat16" or 0 < drift.error < 1e-5
    hybrid()  # binds the usual form again


def test_a_kernel_that_forgets_between_chunks_is_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = recorded(hybrid())
    target = hybrid()
    forget_state(monkeypatch)
    drift = largest_drift(ours, probe_features(target, ours.tokens(), [1, 3]), ACROSS_KERNELS["float32"])
    assert drift.beyond
    assert "150 tokens" in drift.sentence() or "66 tokens" in drift.sentence()


def test_a_number_that_is_none_is_beyond_every_tolerance() -> None:
    ours = Probe({"loss": torch.tensor(1.0)}, {})
    assert largest_drift(ours, {"loss": torch.tensor(float("nan"))}, 1e9).beyond
    assert largest_drift(ours, {"loss": torch.ones(2)}, 1e9).beyond
    assert largest_drift(ours, {"other": torch.ones(())}, 1e9).beyond
    assert not largest_drift(ours, {"loss": torch.tensor(1.00005)}, TOLERANCE["float32"]).beyond
    assert largest_drift(ours, {"loss": torch.tensor(1.0002)}, TOLERANCE["float32"]).beyond


def test_an_evaluation_compares_its_kernels_with_those_of_the_training(begun: Training, tmp_path: Path) -> None:
    ours = recorded(hybrid())
    ours.write(tmp_path / "probe.safetensors")
    gap = kernel_gap(begun.directory, tmp_path, "torch")
    assert gap is not None
    assert gap["error"] == 0.0
    wrong = {**ours.tensors, "features.2": ours.tensors["features.2"] * 1.01}
    Probe(wrong, ours.facts).write(tmp_path / "probe.safetensors")
    with pytest.raises(PermanentError, match=r"under fla kernels .*then: torch.*tap \d of the sequence of 66 tokens"):
        kernel_gap(begun.directory, tmp_path, "fla")
    (tmp_path / "probe.safetensors").unlink()
    assert kernel_gap(begun.directory, tmp_path, "torch") is None


def test_a_target_that_is_loaded_again_must_give_the_features_of_its_references(tmp_path: Path) -> None:
    target = hybrid()
    recorded(target).write(tmp_path / "probe.safetensors")
    common.check_target(target, tmp_path)
    target.model.model.layers[0].mlp.up_proj.weight.data[3] += 0.1
    with pytest.raises(PermanentError, match="other features than when its references were made"):
        common.check_target(target, tmp_path)


def test_an_evaluation_that_stops_names_the_torch_and_the_kernel_form_that_changed(tmp_path: Path) -> None:
    target = hybrid()
    folder = tmp_path / "references/0123"
    folder.mkdir(parents=True)
    recorded(target).write(folder / "probe.safetensors")
    kernels = {"target": {**target.kernels.to_dict(), "form": "recurrent"}}
    made = collect(kernels)
    made = made.model_copy(update={"torch": {**made.torch, "version": "2.11.0"}})
    put_receipt(folder, "references", [])
    receipt = Receipt.read(folder / "receipt.json").model_copy(
        update={"environment": store_environment(tmp_path, made)}
    )
    receipt.write(folder / "receipt.json")
    target.model.model.layers[0].mlp.up_proj.weight.data[3] += 0.1
    with pytest.raises(PermanentError) as caught:
        common.check_target(target, folder)
    assert f"torch.version 2.11.0 -> {torch.__version__}" in caught.value.message()
    assert "kernels.target.form recurrent -> chunked" in caught.value.message()
