"""Packed is padded is one by one, where documents stay apart; where they would not, packing is refused."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import DENSE, HYBRID
from torch import Tensor
from train_store import again, make_training

from dflash.base.errors import PermanentError
from dflash.base.records import CheckpointManifest
from dflash.model import kernels
from dflash.model.kernels import bind_document_convolution, bound_kernels, documents_stay_apart, packing_arguments
from dflash.model.target import Target, random_target
from dflash.train import trainer
from dflash.train.prepare import load_checked_target

LENGTHS = [17, 1, 70, 66, 5]
TAPS = [1, 4]


def batch() -> tuple[Tensor, Tensor]:
    """Five rows of different lengths, longer and shorter than a chunk and a convolution, padded on the right."""
    drawn = torch.randint(0, 250, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    return torch.where(mask, drawn, 256), mask.long()


def packing(target: Target) -> Target:
    """The target, packing although it is on a CPU."""
    target.kernels = replace(target.kernels, packed=True)
    return target


def one_by_one(target: Target, ids: Tensor) -> list[Tensor]:
    return [target.features(ids[row : row + 1, :length], None, TAPS)[0] for row, length in enumerate(LENGTHS)]


def stand_in(plain: Callable[..., Any], *, heeds_ends: bool = True) -> Callable[..., Any]:
    """A delta rule that passes for fla's: the reference, document by document when it is told where documents end."""

    def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
        ends = given.pop("cu_seqlens", None)
        g, beta = given.pop("g"), given.pop("beta")
        names = ("output_final_state", "use_qk_l2norm_in_kernel")
        kept = {name: given[name] for name in names if name in given}
        bounds = [0, query.shape[1]] if ends is None or not heeds_ends else ends.tolist()
        pieces = [
            plain(*(x[:, start:end] for x in (query, key, value)), g=g[:, start:end], beta=beta[:, start:end], **kept)[
                0
            ]
            for start, end in itertools.pairwise(bounds)
        ]
        return torch.cat(pieces, dim=1), None

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    return chunk_gated_delta_rule


@pytest.fixture(params=["dense", "hybrid"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """In float64: a dense target, and a hybrid one bound as on a GPU with fla and without causal-conv1d."""
    if request.param == "dense":
        yield random_target(DENSE, "float64")
        return
    made = random_target(HYBRID, "float64")
    bind_stand_in(made, monkeypatch)
    yield made


def bind_stand_in(made: Target, monkeypatch: pytest.MonkeyPatch, *, heeds_ends: bool = True) -> None:
    source = sys.modules[type(made.model).__module__]
    rule = "torch_chunk_gated_delta_rule"
    convolution = kernels.FUNCTIONS["causal_conv1d"]
    for name in (rule, convolution):
        monkeypatch.setattr(source, name, getattr(source, name))  # put back afterwards
    setattr(source, rule, stand_in(getattr(source, rule), heeds_ends=heeds_ends))
    bind_document_convolution(made.model)
    made.kernels = bound_kernels(made.model)


def test_packed_is_padded_is_one_by_one(target: Target) -> None:
    ids, mask = batch()
    padded = target.features(ids, mask, TAPS)
    calls: list[tuple[int, ...]] = []
    hook = target.model.model.layers[0].register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape))
    packed = packing(target).features(ids, mask, TAPS)
    hook.remove()
    assert calls == [(1, sum(LENGTHS), 32)], "it ran without padding"
    torch.testing.assert_close(packed, padded, atol=1e-12, rtol=1e-12)
    assert bool((packed[mask == 0] == 0).all())
    for row, alone in enumerate(one_by_one(target, ids)):
        torch.testing.assert_close(packed[row, : LENGTHS[row]], alone, atol=1e-12, rtol=1e-12)


def test_another_document_of_the_row_changes_nothing(target: Target) -> None:
    ids, mask = batch()
    before = packing(target).features(ids, mask, TAPS)
    ids[2] = torch.where(mask[2] > 0, (ids[2] + 1) % 250, 256)
    after = target.features(ids, mask, TAPS)
    others = [0, 1, 3, 4]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[2], after[2])


def test_nothing_of_the_packing_stays_behind(target: Target) -> None:
    ids, mask = batch()
    before = target.features(ids, mask, TAPS)
    packing(target).features(ids, mask, TAPS)
    assert target.model.config._attn_implementation == "sdpa"
    target.kernels = replace(target.kernels, packed=False)
    assert torch.equal(target.features(ids, mask, TAPS), before)


def test_a_batch_without_padding_is_left_as_it_is(target: Target) -> None:
    ids = torch.randint(0, 250, (2, 9))
    whole = torch.ones_like(ids)
    before = target.features(ids, whole, TAPS)
    assert torch.equal(packing(target).features(ids, whole, TAPS), before)


def test_on_a_cpu_batches_are_padded() -> None:
    assert not random_target(DENSE).kernels.packed
    assert not random_target(HYBRID).kernels.packed


def test_the_torch_reference_refuses_packed_documents() -> None:
    made = random_target(HYBRID)
    assert not made.can_pack()
    with pytest.raises(PermanentError, match="run into each other"):
        packing(made).features(*batch(), TAPS)


def test_a_reference_that_would_mix_documents_in_silence_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As transformers 5.17 binds it on a GPU without the fast packages."""
    made = random_target(HYBRID)
    source = sys.modules[type(made.model).__module__]
    for ours in kernels.WHOLE_SEQUENCE:
        name = kernels.FUNCTIONS[ours]
        monkeypatch.setattr(source, name, inspect.unwrap(getattr(source, name)))
    made.kernels = bound_kernels(made.model)
    with pytest.raises(PermanentError, match="chunk_gated_delta_rule, causal_conv1d run on the torch reference"):
        packing(made).features(*batch(), TAPS)


def test_the_convolution_is_bound_only_beside_a_fast_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_target(HYBRID)
    bind_document_convolution(made.model)
    assert bound_kernels(made.model).functions["causal_conv1d"].startswith("transformers.")
    bind_stand_in(made, monkeypatch)
    assert made.kernels.functions["causal_conv1d"] == "dflash.model.kernels.convolution_by_document"
    assert made.can_pack()


def test_a_delta_rule_that_does_not_heed_where_documents_end_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is right; the argument is lost on the way."""
    made = random_target(HYBRID, "float64")
    bind_stand_in(made, monkeypatch, heeds_ends=False)
    assert kernels.leaking_functions(made.kernels) == []
    assert not documents_stay_apart(made.model, made.kernels)


def test_a_convolution_that_reaches_over_the_end_of_a_document_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_target(HYBRID, "float64")
    bind_stand_in(made, monkeypatch)
    source = sys.modules[type(made.model).__module__]
    name = kernels.FUNCTIONS["causal_conv1d"]
    plain = getattr(source, name).__wrapped__
    monkeypatch.setattr(source, name, lambda *args, **_: plain(*args, activation="silu"))
    assert not documents_stay_apart(made.model, made.kernels)


def test_sliding_layers_are_not_packed() -> None:
    made = random_target(DENSE)
    assert made.can_pack()
    made.facts = replace(made.facts, layer_types=("sliding_attention", "full_attention"))
    assert not made.can_pack()


def test_a_layer_with_a_config_of_its_own_would_not_be_told_how_to_attend() -> None:
    made = random_target(DENSE)
    attention = made.model.model.layers[2].self_attn
    attention.config = copy.deepcopy(attention.config)
    assert not made.can_pack()


def test_what_kernels_are_told_of_the_documents_fits_together() -> None:
    told = packing_arguments([3, 1, 2], torch.device("cpu"))
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert told["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]
    assert told["document_lengths"] == (3, 1, 2)


def test_a_packed_training_has_the_same_batches_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = make_training(tmp_path / "padded", dtype="float64")
    padded.run(3)
    packed = again(padded, tmp_path / "packed")
    monkeypatch.setattr(trainer, "load_checked_target", lambda *args: packing(load_checked_target(*args)))
    packed.run(3)
    assert packed.batch_ids() == padded.batch_ids()
    ours, theirs = packed.weights(3), padded.weights(3)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-11, rtol=1e-9) for name in theirs)
    manifest = CheckpointManifest.read(packed.directory / "step_3/manifest.json")
    assert manifest.kernels["packed"] is True


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", ["dense", "hybrid"])
def test_on_a_gpu_packed_is_padded_within_the_noise_of_its_type(spec: str) -> None:
    fields = {
        **(DENSE if spec == "dense" else HYBRID),
        "hidden_size": 256,
        "head_dim": 64,
        "num_attention_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {**HYBRID["rope_parameters"], "mrope_section": [6, 5, 5]},
    }
    if spec == "dense":
        fields = {name: value for name, value in fields.items() if name in {*DENSE, "hidden_size", "head_dim"}}
    made = random_target(fields, "bfloat16", "cuda")
    if not made.kernels.packed:
        pytest.skip(f"{made.kernels.linear} is bound, which is not packed")
    ids, mask = (tensor.cuda() for tensor in batch())
    packed = made.features(ids, mask, TAPS).double()
    alone = one_by_one(made, ids)
    made.kernels = replace(made.kernels, packed=False)
    padded = made.features(ids, mask, TAPS).double()
    for row, length in enumerate(LENGTHS):
        noise = float((padded[row, :length] - alone[row].double()).norm() / alone[row].double().norm())
        found = float((packed[row, :length] - alone[row].double()).norm() / alone[row].double().norm())
        assert found <= max(2 * noise, 0.02), (row, found, noise)
