"""The tensors of a checkpoint in host memory, and the thread that writes them while training goes on.

On a GPU the copy runs beside the next step's forward and backward, on a stream of its own that begins after the update that
it shows; only the next update waits for it, on the GPU. So training waits less than the copy takes. The memory it goes to is
page-locked, laid out in the background after the first step of an attempt, and kept for the next checkpoint. On a CPU the copy
is made at once. One checkpoint is written at a time: one that comes due meanwhile waits for the one before it.

Costs host memory for one checkpoint (27B: 24 GB), for the life of the process; a copy of 24 GB takes 0.5 s over PCIe 5 and is
written to disk at the disk's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.train.telemetry import alert

ALIGNMENT = 64
"""Bytes at whose multiples a tensor begins: enough for any type."""


class HostCopy:
    """Host memory with the layout of some tensors.

    Args:
        device: where the tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes the memory ready; nothing when it is. It takes seconds for gigabytes, which `begin` then does not."""
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if layout == self._layout:
            return
        if self._stream is not None:
            _unlock_pages(self._memory, self._stream.device)
        self._buffers = {}
        starts, size = {}, 0
        for name, tensor in tensors.items():
            starts[name] = size
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._memory = torch.empty(size, dtype=torch.uint8)
        if self._stream is not None:
            _lock_pages(self._memory, self._stream.device)
        for name, tensor in tensors.items():
            room = self._memory[starts[name] : starts[name] + tensor.numel() * tensor.element_size()]
            self._buffers[name] = room.view(tensor.dtype).view(tensor.shape)
        self._layout = layout

    def begin(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begins to copy; returns the copies, which hold the numbers once `wait` has returned."""
        self.prepare(tensors)
        if self._stream is None:
            self._copy(tensors)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the update comes first
            with torch.cuda.stream(self._stream):
                self._copy(tensors)
            self._copied = self._stream.record_event()
        return dict(self._buffers)

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Waits until the copies hold the numbers; for the thread that writes them."""
        if self._copied is not None and self._stream is not None:
            with torch.cuda.device(self._stream.device):  # a thread of its own would wake up GPU 0
                self._copied.synchronize()

    def before_update(self) -> None:
        """Lets what the GPU does from here on wait for the copy. Call it before a tensor that is being copied changes."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)


def _lock_pages(memory: Tensor, device: torch.device) -> None:
    """Locks pages, so that the GPU writes to them by itself. Exactly as many: torch's own would round up to a power of two."""
    if not memory.numel():
        return
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        alert(f"host memory cannot be page-locked (CUDA error {status}): training waits while a checkpoint is copied")


def _unlock_pages(memory: Tensor, device: torch.device) -> None:
    """Before memory is given back: whoever gets it next must find pages like any other."""
    if memory.numel() and memory.is_pinned():
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@dataclass(frozen=True)
class Written:
    """What became of a checkpoint: seconds that the thread took, and the error if there was one."""

    step: int
    seconds: float
    error: BaseException | None


class Background:
    """Does one thing at a time in a thread of its own.

    Attributes:
        step: of the checkpoint that is being written, None when none is.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._preparing: Future[None] | None = None
        self._pending: Future[float] | None = None
        self.step: int | None = None

    def prepare(self, work: Callable[[], None]) -> None:
        """Begins to do `work`, which `prepared` waits for."""
        self._preparing = self._pool.submit(work)

    def prepared(self) -> None:
        """Waits for what `prepare` was given; raises what it raised."""
        if self._preparing is not None:
            self._preparing.result()
            self._preparing = None

    def submit(self, step: int, work: Callable[[], object]) -> None:
        """Begins to write a checkpoint. The one before it must have been collected."""
        if self._pending is not None:
            raise RuntimeError(f"step {self.step} is still being written")
        self.step, self._pending = step, self._pool.submit(_timed, work)

    def collect(self, *, wait: bool) -> Written | None:
        """What became of the checkpoint that was being written; None when there is none, or it is not done and `wait` is False."""
        if self._pending is None or self.step is None or not (wait or self._pending.done()):
            return None
        error = self._pending.exception()
        found = Written(self.step, 0.0 if error else self._pending.result(), error)
        self.step = self._pending = None
        return found

    def close(self) -> None:
        """Waits for what is being done; what failed and nobody collected is told."""
        left = self.collect(wait=True)
        if left is not None and left.error is not None:
            alert(f"step {left.step} was not saved: {left.error}")
        self._pool.shutdown(wait=True)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
