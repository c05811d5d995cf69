"""The function that is bound is the truth, not the package that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_samples import DENSE, HYBRID

from dflash.base.errors import ConfigError, PermanentError
from dflash.model.kernels import BoundKernels, bound_kernels, force_reference, kind, refuse_packing, require
from dflash.model.target import load_target, random_target

FLA = BoundKernels(
    linear="fla",
    functions={
        "chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",
        "recurrent_gated_delta_rule": "fla.ops.gated_delta_rule.fused_recurrent.fused_recurrent_gated_delta_rule",
        "causal_conv1d": "causal_conv1d.causal_conv1d_interface.causal_conv1d_fn",
        "causal_conv1d_update": "causal_conv1d.causal_conv1d_interface.causal_conv1d_update",
    },
    form="chunked",
    attention="sdpa",
)


def test_a_dense_target_needs_no_linear_kernel_so_any_request_is_met() -> None:
    bound = random_target(DENSE).kernels
    assert (bound.linear, bound.functions, bound.attention) == ("none needed", {}, "sdpa")
    for asked in ("auto", "fla", "torch"):
        require(bound, asked)
    refuse_packing(bound)


def test_on_a_cpu_the_reference_is_bound_and_named_function_by_function() -> None:
    bound = random_target(HYBRID).kernels
    assert bound.linear == "torch"
    assert set(bound.functions) == set(FLA.functions)
    assert all(name.startswith("transformers.models.qwen3_5.") for name in bound.functions.values())
    assert BoundKernels(**bound.to_dict()) == bound


def test_kernels_other_than_asked_for_stop_the_run() -> None:
    with pytest.raises(PermanentError, match=r"kernels fla were asked for, but torch is bound.*chunk_gated_delta_rule"):
        load_target(HYBRID, kernels="fla")
    with pytest.raises(PermanentError, match="kernels torch were asked for, but fla"):
        require(FLA, "torch")
    require(FLA, "fla")
    with pytest.raises(ConfigError, match="cuda"):
        require(FLA, "cuda")


def test_packing_is_refused_where_one_bound_function_cannot_keep_documents_apart() -> None:
    refuse_packing(FLA)
    slow = {**FLA.functions, "causal_conv1d": "transformers.models.qwen3_5.modeling_qwen3_5.causal_conv1d_fn"}
    with pytest.raises(PermanentError, match="causal_conv1d run on the torch reference"):
        refuse_packing(BoundKernels("fla", slow, "chunked", "sdpa"))
    with pytest.raises(PermanentError, match="Pad the batch"):
        refuse_packing(random_target(HYBRID).kernels)


def test_the_forced_reference_itself_refuses_packed_documents() -> None:
    target = random_target(HYBRID)
    boundaries = torch.tensor([0, 2, 4])
    with pytest.raises(PermanentError, match="run into each other"):
        target.model(torch.tensor([[1, 2, 3, 4]]), cu_seq_lens_q=boundaries)


def test_the_two_forms_of_the_reference_agree_and_can_be_told_apart() -> None:
    ids = torch.arange(100)[None]
    chunked = load_target(HYBRID, form="chunked")
    wide = chunked.features(ids, None, [1, 4])
    recurrent = load_target(HYBRID, form="recurrent")
    assert (chunked.kernels.form, recurrent.kernels.form) == ("chunked", "recurrent")
    torch.testing.assert_close(recurrent.features(ids, None, [1, 4]), wide, atol=2e-4, rtol=0)
    force_reference(chunked.model)
    assert bound_kernels(chunked.model).form == "chunked"
    with pytest.raises(ConfigError, match="sideways"):
        force_reference(chunked.model, form="sideways")


def test_what_is_bound_is_read_from_the_function_not_from_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(HYBRID)
    source = sys.modules[type(target.model).__module__]

    def stand_in() -> None: ...

    stand_in.__module__ = "fla.ops.gated_delta_rule"
    monkeypatch.setattr(source, "torch_chunk_gated_delta_rule", stand_in)
    assert bound_kernels(target.model).linear == "mixed"
    monkeypatch.setattr(source, "torch_recurrent_gated_delta_rule", stand_in)
    assert bound_kernels(target.model).linear == "fla"


def test_only_the_fast_packages_count_as_fla() -> None:
    assert kind("fla.ops.chunk") == kind("causal_conv1d.interface.causal_conv1d_fn") == "fla"
    assert kind("transformers.models.qwen3_5.modeling_qwen3_5.causal_conv1d_fn") == "torch"


WITH_FLA = """
import sys
import torch
from dflash.model.kernels import FUNCTIONS, _implementation, kind, _qualified
from dflash.model.target import random_target
import transformers.models.qwen3_5.modeling_qwen3_5 as source
from model_samples import HYBRID

untouched = getattr(source, FUNCTIONS["chunk_gated_delta_rule"])
assert kind(_qualified(_implementation(untouched))) == "fla", "transformers did not bind fla"
target = random_target(HYBRID)
assert target.kernels.linear == "torch", target.kernels
print(target.features(torch.arange(10)[None], None, [1]).isfinite().all().item())
source.torch_chunk_gated_delta_rule = untouched
try:
    target.features(torch.arange(10)[None], None, [1])
except Exception as error:
    print("unforced it raises", type(error).__name__)
"""


def test_with_fla_and_triton_installed_a_cpu_target_still_runs_on_the_reference(
    require_or_skip: Callable[[str, str], None],
) -> None:
    packages = os.environ.get("DFLASH_FLA_PATH")
    if not packages:
        require_or_skip("fla", "DFLASH_FLA_PATH names no folder with flash-linear-attention and triton")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here), str(packages)])
    done = subprocess.run(
        [sys.executable, "-c", WITH_FLA],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\nunforced it raises"), done.stdout
