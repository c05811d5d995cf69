"""How a batch goes through the drafter: in parts, with activations kept or computed again, as it is or compiled.

All of it is placement, so none of it changes what is learned. Samples in parts add up the same sums; activations computed again
are the same bits on a CPU. Compiled, a batch is padded to the one shape of its bucket (rows, longest sample, anchors), so that
no more graphs are compiled than there are buckets: a shape that would need one more is an error here, and so is anything that
cannot be compiled whole, since a silent fallback is a mystery later. Padding adds blocks that are not valid and rows without a
token: they weigh nothing and move what is learned by rounding alone. Largest difference of a weight after four steps, relative
to the largest of its tensor: padded 1e-12 in float64; compiled 1e-5 in float32 and 4e-8 in float64 (rotary angles are float32
in either); in bfloat16 it is that of bfloat16's rounding, which AdamW's first steps make large.

Costs: compiling takes 35 to 50 s a bucket on one CPU core, once an attempt; padding computes up to the bucket's edge.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.base.errors import PermanentError
from dflash.data.batches import Batch, BatchPlan
from dflash.model.drafter import Drafter, TokensToHidden, compiler_said, fused
from dflash.train.objective import chunk_entropy
from dflash.train.train_params import TrainParams

BACKEND = "inductor"
"""What torch.compile compiles with."""
ALIGNMENT = 64
"""Elements: the rows of an attention mask begin at multiples of this, far above what any kernel asks for."""


def parts(batches: Iterable[Batch], micro_batch: int | None) -> Iterator[Batch]:
    """The batches, cut into parts of at most `micro_batch` samples that keep their batch's id, epoch and bucket."""
    for batch in batches:
        size = micro_batch or len(batch.rows)
        for start in range(0, len(batch.rows), size):
            cut = slice(start, start + size)
            yield replace(batch, rows=batch.rows[cut], lengths=batch.lengths[cut])


@dataclass(frozen=True)
class Shape:
    """What one forward may hold at most: samples, tokens of the longest, anchors of each."""

    rows: int
    length: int
    anchors: int


def bucket_shapes(plan: BatchPlan, params: TrainParams) -> dict[int, Shape]:
    """The shape of each bucket that has samples; what a compiled batch is padded to."""
    found = {}
    for bucket, (count, length, size) in enumerate(zip(plan.samples, plan.longest, plan.batch_sizes, strict=True)):
        if count:
            rows = min(int(size), int(count), params.micro_batch or int(size))
            found[bucket] = Shape(rows, int(length), min(params.max_anchors, max(1, int(length) - 1)))
    return found


def aligned(shape: Shape, block_size: int) -> Shape:
    """The shape with keys (context and blocks) in whole multiples of `ALIGNMENT`.

    CUDA's memory-efficient attention reads its mask in vectors, and eager torch copies a mask of odd width to an aligned one. A
    compiled training with such masks died of an illegal memory access in its backward on an H200 (torch 2.11). That alignment
    cures it has not been tried there: `tests/bench/gpu/compiled.py` will tell.
    """
    anchors = shape.anchors
    while anchors * block_size % ALIGNMENT:
        anchors += 1
    return replace(shape, length=-(-shape.length // ALIGNMENT) * ALIGNMENT, anchors=anchors)


def require_compiler(params: TrainParams, device: str) -> None:
    """Refuses kernels that nothing here can compile: torch's for processors are C++, what launches those for GPUs is C. Needs no
    model, so it comes before one is loaded.

    Raises:
        PermanentError: names the setting, the compiler, and both ways out.
    """
    on_gpu = device.startswith("cuda")
    plain = {"fuse": "false"} if params.fuse else {}
    plain |= {"compile": "false"} if params.compile else {}
    plain |= {"attention": "sdpa"} if on_gpu and params.attention == "flex" else {}
    variable, language, known = ("CC", "C", ("gcc", "clang", "cc")) if on_gpu else ("CXX", "C++", ("g++",))
    sought = (os.environ[variable],) if os.environ.get(variable) else known
    if not plain or BACKEND != "inductor" or any(shutil.which(name) for name in sought):
        return
    where = f"train.{next(iter(plain))}"
    raise PermanentError(
        f"`{where}: {str(getattr(params, next(iter(plain)))).lower()}` needs a {language} compiler, and there is none here "
        f"({', '.join(sought)})",
        where=where,
        remedy=f"Install one (Debian: {known[0]}), name yours in {variable}, or set "
        f"{' and '.join(f'train.{name} to {value}' for name, value in plain.items())}; the weights are the same within rounding.",
    )


def entropy_kernel(params: TrainParams) -> Callable[..., Any]:
    """What computes the loss of a chunk of logits."""
    return fused(chunk_entropy, BACKEND) if params.fuse else chunk_entropy


class DraftForward:
    """Calls the drafter as the placement says.

    Args:
        params: of the training.
        drafter: called as it is when `params.compile` is off.
    """

    def __init__(self, params: TrainParams, drafter: Drafter) -> None:
        self._params = params
        self._drafter = drafter
        self._shapes: dict[int, Shape] = {}
        self._compiled: Any = None
        self.entropy = entropy_kernel(params)
        if params.fuse and not params.compile:  # which fuses all of it anyway
            drafter.fuse(BACKEND)
        if params.compile:
            self._compiled = torch.compile(drafter, fullgraph=True, dynamic=False, backend=BACKEND)

    def fix_shapes(self, plan: BatchPlan) -> None:
        """Takes the shapes of the buckets from the plan; needed before a compiled call."""
        self._shapes = bucket_shapes(plan, self._params)
        if next(self._drafter.parameters()).is_cuda:
            size = self._params.block_size
            self._shapes = {bucket: aligned(shape, size) for bucket, shape in self._shapes.items()}

    def __call__(
        self,
        features: Tensor,
        input_ids: Tensor,
        anchors: Tensor,
        embed: TokensToHidden,
        *,
        anchor_valid: Tensor,
        attention_mask: Tensor,
        bucket: int,
    ) -> Tensor:
        """[b, n, block_size, H]; arguments as `Drafter.forward` has them, and the bucket that the batch came from.

        Raises:
            PermanentError: it cannot be compiled, or needs more graphs than there are buckets.
        """
        how = {
            "anchor_chunk": self._params.anchor_chunk,
            "recompute": self._params.anchor_chunk is not None,
            "recompute_layers": self._params.activation_checkpointing,
            "attention": self._params.attention,
        }
        if self._compiled is None:
            # Said, so that the drafter need not look for padding on the left, and wait for the device to answer.
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            return self._drafter(
                features,
                input_ids,
                anchors,
                embed,
                anchor_valid=anchor_valid,
                attention_mask=attention_mask,
                position_ids=positions,
                **how,
            )
        import torch._dynamo as dynamo  # a second to import, which only a compiled training needs

        shape = self._shapes[bucket]
        rows, count = anchors.shape
        padded_anchors = _padded(anchors, shape.rows, shape.anchors)
        padded_ids = _padded(input_ids, shape.rows, shape.length)
        positions = torch.arange(shape.length, device=input_ids.device).expand_as(padded_ids).contiguous()
        try:
            graphs = len(set(self._shapes.values()))
            with dynamo.config.patch(recompile_limit=graphs, fail_on_recompile_limit_hit=True):
                hidden: Tensor = self._compiled(
                    _padded(features, shape.rows, shape.length),
                    padded_ids,
                    padded_anchors,
                    embed,
                    anchor_valid=_padded(anchor_valid, shape.rows, shape.anchors),
                    attention_mask=_padded(attention_mask, shape.rows, shape.length),
                    position_ids=positions,
                    **how,
                )
        except (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit) as error:
            raise PermanentError(
                f"the drafter cannot be compiled for {rows} samples of bucket {bucket} (one graph each for {len(self._shapes)} "
                f"buckets): {compiler_said(error)}",
                where="train.compile",
                remedy="Set train.compile to false; the weights are the same within rounding.",
            ) from error
        return hidden[:rows, :count]


def _padded(tensor: Tensor, rows: int, length: int) -> Tensor:
    """[b, n, ...] with zeros after it up to [rows, length, ...]."""
    behind = [0, 0] * (tensor.ndim - 2)
    return F.pad(tensor, (*behind, 0, length - tensor.shape[1], 0, rows - tensor.shape[0]))
