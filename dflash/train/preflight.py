"""Before the first step: does the longest batch fit into memory, and do the next checkpoints fit on the disk?

Numbers are bytes. With P parameters of the drafter, masters of m and compute of c bytes, a batch of b samples of S tokens with n
anchors of B slots, K taps of H, L draft layers of width I with h heads (v of keys and values) of d, V tokens in the vocabulary,
q = anchors of a chunk (n when there is one chunk) and T = q * B:

    gradients    P * m, and P * c beside masters of another type
    moments      2 * P * m (AdamW), P * m (Muon), unless they are there already
    features     3 * b * S * K * H * c                           the taps, joined, and masked
    target       b * S * c * (8 * H + 3 * width of its MLP)      one layer at work, nothing kept; twice that for linear layers
                                                                  on the torch reference
    context      b * S * c * (4 * H + 8 * L * v * d)             projected, normed; keys and values of every layer
    blocks       kept layers * b * T * c * (14 * H + 5 * I + 8 * h * d) + b * n * B * H * c
                                                                  kept layers: L, or 1 and L * H a token when checkpointing
    attention    kept layers * b * h * d * 4 * (S + T) * c + b * T * (S + T) * (2 + c)       heads repeated; the masks
    objective    4 * b * n * B * H * c + logit_chunk * V * (c + 12)

A rank that only computes features needs `target`, and features for what it sends; one that only learns needs the rest, features
for `features_in_flight`, and (M + 1) * 16 M * m to add up the gradients of M > 1 drafters.

It is an estimate of what is allocated from the last start on, meant to err upwards. Costs a few file reads; no forward.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.base.errors import PermanentError
from dflash.data.batches import BatchPlan
from dflash.model.drafter import DrafterConfig, parameter_count
from dflash.model.target import Target
from dflash.train.forward import Shape, bucket_shapes
from dflash.train.peers import PIECE, Peers
from dflash.train.stream import UNSENT
from dflash.train.train_params import TrainParams

ITEM = {"float32": 4, "float64": 8, "bfloat16": 2}
SMALL_FILES = 1 << 20
"""Bytes of a checkpoint beside its tensors, at most in practice."""
KNOBS = {
    "features": "train.micro_batch (fewer samples in one forward), or batching.token_budget, which makes a new training",
    "target": "train.micro_batch (fewer samples in one forward), or batching.token_budget, which makes a new training",
    "context": "train.micro_batch (fewer samples in one forward), or batching.token_budget, which makes a new training",
    "blocks": "train.anchor_chunk (fewer anchors at a time), then train.activation_checkpointing and train.micro_batch",
    "attention": "train.anchor_chunk (fewer anchors at a time), then train.micro_batch",
    "objective": "train.logit_chunk (fewer rows of logits), then train.micro_batch",
}
"""What lowers each part of the need. `gradients` and `moments` are as large as the drafter is."""
NO_KNOB = "Nothing but a larger machine helps: the drafter's own weights, gradients and moments take most of it."


@dataclass(frozen=True)
class Need:
    """What a batch of a shape will allocate, by part of the docstring's table."""

    shape: Shape
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def remedy(self) -> str:
        """Which knob lowers the largest part that a knob lowers."""
        name = max(KNOBS, key=lambda part: self.parts.get(part, 0))
        fixed = self.parts.get("gradients", 0) + self.parts.get("moments", 0)
        return NO_KNOB if fixed > 0.9 * self.total else f"Most of it is {name}: lower {KNOBS[name]}."

    def told(self) -> str:
        """`4 samples of 8,192 tokens with 512 anchors`."""
        return f"{self.shape.rows:,} samples of {self.shape.length:,} tokens with {self.shape.anchors:,} anchors"


def batch_need(
    params: TrainParams, config: DrafterConfig, shape: Shape, *, target_width: int, has_moments: bool = False
) -> Need:
    """The estimate for one shape.

    Args:
        target_width: width of the target's MLP, twice that if its linear layers run on the torch reference.
        has_moments: the optimizer's state is in memory already.
    """
    compute = ITEM[params.dtype]
    master = max(4, compute)
    parameters = parameter_count(config)
    rows, length, anchors = shape.rows, shape.length, shape.anchors
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads * config.head_dim
    key_heads = config.num_key_value_heads * config.head_dim
    at_once = min(anchors, params.anchor_chunk or anchors) * config.block_size
    kept = 1 if params.activation_checkpointing else layers
    beside = layers * rows * at_once * hidden * compute if params.activation_checkpointing else 0
    everything = rows * anchors * config.block_size * hidden * compute
    return Need(
        shape,
        {
            "gradients": parameters * (master + (compute if compute != master else 0)),
            "moments": 0 if has_moments else parameters * master * (2 if params.optimizer == "adamw" else 1),
            "features": 3 * rows * length * config.feature_size * compute,
            "target": rows * length * compute * (8 * hidden + 3 * target_width),
            "context": rows * length * compute * (4 * hidden + 8 * layers * key_heads),
            "blocks": kept * rows * at_once * compute * (14 * hidden + 5 * config.intermediate_size + 8 * heads)
            + everything
            + beside,
            "attention": kept * rows * heads * 4 * (length + at_once) * compute
            + rows * at_once * (length + at_once) * (2 + compute),
            "objective": 4 * everything
            + min(params.logit_chunk, rows * anchors * config.block_size) * config.vocab_size * (compute + 12),
        },
    )


def largest_need(
    params: TrainParams, config: DrafterConfig, plan: BatchPlan, target: Target, *, has_moments: bool = False
) -> Need:
    """The need of the bucket that needs most."""
    width = target_width(target)
    shapes = bucket_shapes(plan, params).values()
    needs = [batch_need(params, config, shape, target_width=width, has_moments=has_moments) for shape in shapes]
    return max(needs, key=lambda need: need.total)


def target_width(target: Target) -> int:
    """Width of a target's MLP, twice that if its linear layers run on the torch reference."""
    found = target.model.config.get_text_config()
    width = int(getattr(found, "intermediate_size", 4 * target.facts.hidden_size))
    return 2 * width if target.facts.hybrid and target.kernels.linear != "fla" else width


def target_need(params: TrainParams, config: DrafterConfig, plan: BatchPlan, target: Target) -> Need:
    """The need of a rank that computes features: taps, joined; a batch ahead of its credit and `UNSENT` on their way."""
    width, sizes = target_width(target), bucket_sizes(plan)
    needs = []
    for bucket, shape in bucket_shapes(plan, params).items():
        whole = batch_need(params, config, shape, target_width=width).parts
        one = sizes[bucket] * shape.length * config.feature_size * ITEM[params.dtype]
        needs.append(
            Need(shape, {"features": whole["features"] * 2 // 3 + (1 + UNSENT) * one, "target": whole["target"]})
        )
    return max(needs, key=lambda need: need.total)


def drafter_need(
    params: TrainParams, config: DrafterConfig, plan: BatchPlan, limit: int, drafters: int, *, has_moments: bool
) -> Need:
    """The need of a rank that learns, and has `limit` tokens of features and the buffers of `drafters` gradients."""
    master = max(4, ITEM[params.dtype])
    held = limit * config.feature_size * ITEM[params.dtype]
    pieces = (drafters + 1) * PIECE * master if drafters > 1 else 0
    needs = []
    for shape in bucket_shapes(plan, params).values():
        parts = dict(batch_need(params, config, shape, target_width=0, has_moments=has_moments).parts)
        parts["features"] += held
        needs.append(Need(shape, {**parts, "target": 0, "gathered": pieces}))
    return max(needs, key=lambda need: need.total)


def bucket_sizes(plan: BatchPlan) -> dict[int, int]:
    """Samples of a whole batch of each bucket."""
    return {
        bucket: min(int(size), int(count))
        for bucket, (size, count) in enumerate(zip(plan.batch_sizes, plan.samples, strict=True))
    }


def refuse_ranks(peers: Peers, need: Need, device: str, checkpoint: int = 0) -> None:
    """Compares what every rank needs with what its GPU, or all ranks of a host without one, have free. All ranks call it.

    Args:
        checkpoint: bytes that this rank copies to host memory at a checkpoint.

    Raises:
        PermanentError: on every rank, when one does not fit; names rank, host, both numbers and the knob.
    """
    on_gpu = device.startswith("cuda")
    own = {
        "host": socket.gethostname(),
        "device": device,
        "need": need.total,
        "host_need": checkpoint + (0 if on_gpu else need.total),
        "free": gpu_memory_free(device) if on_gpu else 0,
        "host_free": host_memory_free(),
        "told": need.told(),
        "remedy": need.remedy(),
    }
    found = peers.gather(own)
    for rank, claim in enumerate(found):
        name = f"{peers.roles.name(rank)} on {claim['host']}"
        if claim["device"].startswith("cuda") and claim["need"] > claim["free"]:
            raise PermanentError(
                f"the longest batch ({claim['told']}) needs about {gigabytes(claim['need'])} of GPU memory, "
                f"{gigabytes(claim['free'])} are free",
                where=f"{name}, {claim['device']}",
                remedy=claim["remedy"],
            )
    for host in sorted({claim["host"] for claim in found}):
        here = [(rank, claim) for rank, claim in enumerate(found) if claim["host"] == host]
        wanted = sum(claim["host_need"] for _, claim in here)
        free = min(claim["host_free"] for _, claim in here)
        rank, largest = max(here, key=lambda one: one[1]["host_need"])
        if wanted > free:
            raise PermanentError(
                f"the {len(here)} ranks on {host} need about {gigabytes(wanted)} of host memory for the longest batch and the copy "
                f"of a checkpoint, {gigabytes(free)} are free; most of it, {gigabytes(largest['host_need'])}, is for "
                f"{peers.roles.name(rank)} ({largest['told']})",
                where=largest["device"],
                remedy=largest["remedy"],
            )


def checkpoint_bytes(params: TrainParams, config: DrafterConfig) -> tuple[int, int]:
    """(`drafter/`, `state/`) of one checkpoint, in bytes, small files included."""
    compute = ITEM[params.dtype]
    master = max(4, compute)
    parameters = parameter_count(config)
    moments = 2 if params.optimizer == "adamw" else 1
    return parameters * compute + SMALL_FILES // 16, parameters * master * (1 + moments) + SMALL_FILES // 16


def check_disk(params: TrainParams, config: DrafterConfig, directory: Path, checkpoints_left: int) -> None:
    """Refuses a disk on which the next two checkpoints will not fit. Needs no model, so it comes before one is loaded.

    Args:
        directory: the training's folder, whose disk is asked.
        checkpoints_left: scheduled checkpoints still to write.

    Raises:
        PermanentError: gives both numbers and the knobs.
    """
    count = min(2, checkpoints_left)
    wanted = count * sum(checkpoint_bytes(params, config))
    room = disk_free(directory)
    if wanted > room:
        raise PermanentError(
            f"the next {count} checkpoints need {gigabytes(wanted)} of disk, {gigabytes(room)} are free",
            where=str(directory),
            remedy="Free some space; train.keep_states (fewer resumable states) and train.checkpoint_every (fewer "
            "checkpoints) lower what a whole run needs.",
        )


def check_memory(
    params: TrainParams,
    config: DrafterConfig,
    plan: BatchPlan,
    target: Target,
    device: str,
    *,
    has_moments: bool = False,
) -> Need:
    """Refuses a longest batch that will not fit into the memory that is free now, the models being loaded.

    Args:
        device: what the drafter trains on.
        has_moments: the optimizer's state is in memory already.

    Raises:
        PermanentError: memory of the device, or of the host, is too small; gives both numbers and the knob.
    """
    need = largest_need(params, config, plan, target, has_moments=has_moments)
    on_gpu = device.startswith("cuda")
    copies = sum(checkpoint_bytes(params, config))
    free = gpu_memory_free(device) if on_gpu else host_memory_free() - copies  # which the copy of a checkpoint takes
    if need.total > free:
        raise PermanentError(
            f"the longest batch ({need.told()}) needs about {gigabytes(need.total)} of {'GPU' if on_gpu else 'host'} memory, "
            f"{gigabytes(max(0, free))} are free",
            where=device,
            remedy=need.remedy(),
        )
    if on_gpu and copies > host_memory_free():
        raise PermanentError(
            f"a checkpoint is copied to host memory and needs {gigabytes(copies)} of it, "
            f"{gigabytes(host_memory_free())} are free",
            where=device,
            remedy="Free some memory, or train on a host with more.",
        )
    return need


def gpu_memory_free(device: str) -> int:
    """Bytes that this process can still allocate on a GPU: what is free, and what torch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_memory_free() -> int:
    """Bytes of host memory that can be had without swapping, the container's limit considered."""
    found = _available_memory()
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        cached = _cgroup_cache()
        found = min(found, limit - used + cached)
    return found


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_cache() -> int:
    """Bytes of file cache that the container's memory counts as used and the kernel gives back when asked."""
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def disk_free(directory: Path) -> int:
    """Bytes that this user may still write on the disk of a folder."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def gigabytes(count: float) -> str:
    """`12.34 GB`, or MB and kB below."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1e3:,.1f} kB"


# ---------------------------------------------------------------- when it does not fit after all


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is full: torch names it in words on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("not enough memory", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextlib.contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Turns running out of memory into an error that names the knobs: trying again as it is cannot help.

    Args:
        what: what was being done, for the message: `step 12`.

    Raises:
        PermanentError: memory was full.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise PermanentError(
            f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=what,
            remedy="Lower train.anchor_chunk, train.logit_chunk or train.micro_batch, or set train.activation_checkpointing: "
            "none of them retrains anything. Then run again; it goes on from the last checkpoint.",
        ) from error
