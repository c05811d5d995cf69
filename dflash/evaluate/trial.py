"""The part of a rehearsal that needs the eval host: a drafter, just trained and shipped, answers some requests.

As the evaluation does it: the shipment's receipt is checked, the drafter is loaded strictly, and for each of the run's kernels
the target writes a greedy continuation, its features are taken and the drafter is walked along them. Nothing is written, and no
references need exist. Costs loading the target once a kernel and seconds a request.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.base.errors import ConfigError, PermanentError
from dflash.data.chat import length_limit
from dflash.evaluate.acceptance import Continuation, draft_continuation
from dflash.evaluate.ends import Ends, load_ends
from dflash.evaluate.evaluate import check_drafter
from dflash.evaluate.evaluate_params import EvaluateParams
from dflash.evaluate.features import compute_features
from dflash.hosts import machine
from dflash.model.drafter import Drafter
from dflash.model.export import load_drafter
from dflash.model.identity import target_source
from dflash.model.target import DTYPES, Target, load_target
from dflash.ship.receipt import require_receipt
from dflash.train.preflight import gpu_memory_free, host_memory_free, is_out_of_memory

OUTPUT_TOKENS = 32
"""Tokens that the target writes for a request."""


@torch.no_grad()
def try_drafter(store: Path, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates a drafter on a few prompts.

    Args:
        name: the rehearsal's folder in `store`. request: `drafter` (its folder, in the rehearsal's), `shipped` (whether it came
        from another host), `params` of the evaluation, `dtypes` of the target by kernel, `devices` that its layers are spread over
        by kernel (none: `device`), `target_path`, `device`, `prompts` (token ids).

    Returns:
        `kernels`: name -> `tau` (mean tokens a verification), `load_seconds`, `seconds` a request, `output_tokens`; and
        `device`, `peak`, `left` (bytes of its memory), `disk_free`.

    Raises:
        CorruptError: the drafter is not what was shipped. PermanentError: target, kernel or drafter do not fit, or memory.
        ConfigError: the device is not there.
    """
    params = EvaluateParams.model_validate(request["params"])
    folder, device = store / name / str(request["drafter"]), str(request["device"])
    if request["shipped"]:
        require_receipt(folder)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device}, but torch sees no GPU", remedy="`dflash doctor` says why.")
    target_path = Path(request["target_path"]) if request.get("target_path") else None
    meter = Meter(device)
    try:
        drafter = load_drafter(folder, dtype=DTYPES[params.dtype]).to(device).eval()
        check_drafter(drafter, params, str(folder))
        source = target_source(params.target, target_path)
        ends = load_ends(source, params.dtype, device)
        kernels = {}
        for kernel in params.kernels:
            began = time.perf_counter()
            devices = request["devices"][kernel] or device
            target = load_target(source, request["dtypes"][kernel], devices, kernels=kernel)
            loaded = time.perf_counter() - began
            kernels[kernel] = {
                "load_seconds": loaded,
                **_answer(target, drafter, ends, params, request["prompts"], device),
            }
            del target
            gc.collect()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise PermanentError(
            f"out of memory: {str(error).splitlines()[0]}",
            where=device,
            remedy="Lower evaluate.anchor_chunk, or give roles.eval another host or device: neither changes a key.",
        ) from error
    return {"kernels": kernels, "device": device, **meter.read(), "disk_free": machine.space(store)["free_bytes"]}


def _answer(
    target: Target, drafter: Drafter, ends: Ends, params: EvaluateParams, prompts: Sequence[list[int]], device: str
) -> dict[str, Any]:
    """Acceptance over some prompts, and the seconds that one takes."""
    lengths: list[int] = []
    tokens = 0
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        limit = length_limit(OUTPUT_TOKENS, params.target.max_position_embeddings, len(prompt))
        ((output, _),) = target.generate([prompt], limit)
        tokens += len(output)
        features = compute_features(target, prompt + output, params.taps, f"request {number}").to(device)
        drafts = draft_continuation(
            drafter,
            Continuation(prompt, output, limit),
            features,
            ends.embed,
            ends.head,
            top=max(params.budgets),
            chunk=params.anchor_chunk,
        )
        lengths += drafts.walk_chain().lengths
        for budget in params.budgets:
            drafts.walk_tree(budget)
    seconds = (time.perf_counter() - began) / max(1, len(prompts))
    return {"tau": float(np.mean(lengths)) if lengths else 1.0, "seconds": seconds, "output_tokens": tokens}


class Meter:
    """The most memory in use from now on."""

    def __init__(self, device: str) -> None:
        self._gpu = device if device.startswith("cuda") else None
        if self._gpu:
            self._room = gpu_memory_free(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, int]:
        """`peak` and `left`, bytes of the device; of the host on a CPU."""
        if self._gpu:
            peak = torch.cuda.max_memory_allocated(self._gpu)
            return {"peak": peak, "left": self._room - peak}
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "left": host_memory_free()}
