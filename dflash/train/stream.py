"""The feature stream: from the target that computed a batch to the drafter that learns from it, in bounded memory.

A drafter asks for batches in its own order, which the plan fixes: it sends a credit that names the batch, and has a buffer
ready before the target may send. It holds, or has asked for, at most `limit` tokens of features; a target that runs ahead
computes one batch more and then waits for its credit. So nothing depends on timing, nobody can flood anybody, and a
drafter computes while its next batches arrive. Both sides walk through the batches in one global order, in which the
first batch not yet sent can always be: there is no deadlock.

Tokens do not travel: the drafter makes its own from the plan. What travels is a header of 16 kB and the features, and the
header says which batch, tokens, taps and kernels they come from. Anything else than expected is refused, on both sides.

    drafter -> target    credit     the id of the batch that may be sent, or END
    target -> drafter    header     `Label` and a note (seconds, generators)
    target -> drafter    features   [b, S, K*H]

Costs: `limit` tokens of K * H numbers on a drafter (51 kB a token at 5 taps of 5120 in bfloat16), three batches on a target;
a thread on the drafter that sleeps until a header comes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.base.errors import ConfigError, PermanentError
from dflash.data.batches import Batch, Samples, collate
from dflash.train.peers import Peers, lost_peer
from dflash.train.roles import Roles

CREDIT, HEADER, FEATURES = 1, 2, 3
"""What a message is, as gloo's tag; NCCL carries nothing but features."""
HEADER_BYTES = 16 << 10
CREDIT_BYTES = 12
END = "end".ljust(CREDIT_BYTES)
UNSENT = 2
"""Payloads that a target keeps while they are on their way."""


@dataclass(frozen=True)
class Label:
    """What a payload claims to be, and what its receiver expects it to be.

    batch_id: of the plan. tokens: `token_digest`. taps: layer ids in their order. kernels: `kernel_tag` of the target.
    shape, dtype: of the features.
    """

    batch_id: str
    tokens: str
    taps: tuple[int, ...]
    kernels: str
    shape: tuple[int, ...]
    dtype: str

    def refuse_other(self, found: Label, sender: str) -> None:
        """Raises PermanentError when `found` is not this; names the field and both values."""
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(found, field.name)
            if ours != theirs:
                raise PermanentError(
                    f"features from {sender} have {field.name} {theirs!r}, but {ours!r} is due",
                    where=f"batch {self.batch_id}",
                    remedy="Every rank must run this checkout, on this dataset, target and kernels.",
                )


def token_digest(input_ids: Tensor, attention_mask: Tensor) -> str:
    """16 hex digits that stand for the tokens of a batch and their padding."""
    found = hashlib.sha256(str(tuple(input_ids.shape)).encode())
    found.update(input_ids.to(device="cpu", dtype=torch.int64).numpy().tobytes())
    found.update(attention_mask.to(device="cpu", dtype=torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def batch_tokens(batch: Batch, samples: Samples, pad_id: int) -> str:
    """`token_digest` of a whole batch, however it will be cut."""
    collated = collate(batch, samples, pad_id)
    return token_digest(torch.from_numpy(collated["input_ids"]), torch.from_numpy(collated["attention_mask"]))


class Plan(Protocol):
    """What the stream needs of a `BatchPlan`."""

    def step(self, step_index: int) -> list[Batch]:
        """The batches of one step, in their places."""


def pack_header(label: Label, note: dict[str, Any]) -> Tensor:
    """The header message, uint8 [HEADER_BYTES]."""
    text = json.dumps({"label": dataclasses.asdict(label), "note": note}).encode()
    if len(text) > HEADER_BYTES:
        raise PermanentError(f"a header of {len(text)} bytes does not fit in {HEADER_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def unpack_header(message: Tensor) -> tuple[Label, dict[str, Any]]:
    """What `pack_header` packed."""
    content = json.loads(message.numpy().tobytes())
    label: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content["label"].items()
    }
    return Label(**label), content["note"]


def own_batches(roles: Roles, rank: int, first_step: int, batches_per_step: int) -> Iterator[tuple[int, int]]:
    """The batches of a rank, for ever: (step, place in it), from step `first_step` (from 0)."""
    places = roles.places(rank, batches_per_step)
    for step in count(first_step):
        for place in places:
            yield step, place


def token_limit(given: int | None, largest_batch: int, roles: Roles) -> int:
    """Tokens of features that a drafter may hold: as given, else two of the largest batches for each target it hears.

    Raises:
        ConfigError: less than one batch.
    """
    if given is None:
        return 2 * largest_batch * -(-roles.targets // roles.drafters)
    if given < largest_batch:
        raise ConfigError(
            f"{given} tokens in flight cannot hold the largest batch, {largest_batch} tokens",
            where="train.features_in_flight",
            remedy=f"Raise it to {2 * largest_batch}, so that one arrives while one is learnt from.",
        )
    return given


def warm_up(peers: Peers, batches_per_step: int) -> None:
    """Opens the channels between GPUs, pair by pair in the order of ranks; between CPUs they are open already."""
    if peers.device.type != "cuda":
        return
    probe = torch.zeros(1, device=peers.device)
    with lost_peer("opening channels between GPUs"):
        for drafter in range(peers.roles.lead, peers.roles.world_size):
            for target in peers.roles.partners(drafter, batches_per_step):
                if peers.rank == target:
                    dist.send(probe, drafter)
                elif peers.rank == drafter:
                    dist.recv(probe, target)
        torch.cuda.synchronize(peers.device)


class Sender:
    """A target's side of the stream.

    Attributes:
        ended: drafters that want nothing more. credit_seconds: time spent waiting for credit or for the wire.
    """

    def __init__(self, peers: Peers, batches_per_step: int) -> None:
        self.peers = peers
        self.partners = set(peers.roles.partners(peers.rank, batches_per_step))
        self.ended: set[int] = set()
        self.credit_seconds = 0.0
        self._unsent: deque[tuple[list[Any], tuple[Tensor, ...]]] = deque()
        self._credits: dict[int, tuple[Tensor, Any]] = {}
        with lost_peer("opening the stream"):
            for drafter in sorted(self.partners):
                self._expect_credit(drafter)

    def _expect_credit(self, drafter: int) -> None:
        """Makes ready for the next credit, so that it comes while the batch is computed."""
        message = torch.zeros(CREDIT_BYTES, dtype=torch.uint8)
        self._credits[drafter] = message, dist.irecv(message, drafter, tag=CREDIT)

    @property
    def finished(self) -> bool:
        """Whether nobody wants anything more."""
        return self.ended == self.partners

    def credit(self, drafter: int, batch_id: str) -> bool:
        """Waits until the drafter asks for its next batch; False when it wants no more.

        Raises:
            PermanentError: it asks for another batch than this one.
            LostPeer: it is gone.
        """
        started = time.perf_counter()
        message, work = self._credits[drafter]
        with lost_peer(f"waiting for {self.peers.roles.name(drafter)} to ask for batch {batch_id}"):
            work.wait()
        self.credit_seconds += time.perf_counter() - started
        asked = message.numpy().tobytes().decode(errors="replace")
        if asked == END:
            self.ended.add(drafter)
            return False
        if asked != batch_id:
            raise PermanentError(
                f"{self.peers.roles.name(drafter)} asks for batch {asked}, but {batch_id} is due",
                remedy="Every rank must run this checkout, on this dataset and topology.",
            )
        with lost_peer("opening the stream"):
            self._expect_credit(drafter)
        return True

    def send(self, drafter: int, label: Label, features: Tensor, note: dict[str, Any]) -> None:
        """Sends a batch that was asked for, and returns while it is on its way.

        Raises:
            LostPeer: the drafter is gone.
        """
        started = time.perf_counter()
        header, payload = pack_header(label, note), features.contiguous()
        with lost_peer(f"sending batch {label.batch_id} to {self.peers.roles.name(drafter)}"):
            works = [dist.isend(header, drafter, tag=HEADER), dist.isend(payload, drafter, tag=FEATURES)]
            self._unsent.append((works, (header, payload)))
            while len(self._unsent) > UNSENT:
                self._wait_for_oldest()
        self.credit_seconds += time.perf_counter() - started

    def _wait_for_oldest(self) -> None:
        for work in self._unsent.popleft()[0]:
            work.wait()

    def finish(self) -> None:
        """Waits until everything has been sent."""
        with lost_peer("sending the last batches"):
            while self._unsent:
                self._wait_for_oldest()


@dataclass
class _Asked:
    """A batch that was asked for, with the buffers it goes to."""

    batch: Batch
    target: int
    tokens: int
    header: Tensor
    features: Tensor
    credit_work: Any
    header_work: Any
    features_work: Any


class Receiver:
    """A drafter's side of the stream.

    Args:
        plan: of the batches. first_step: from 0. width: K * H. dtype: of the features. limit: tokens, see `token_limit`.

    Attributes:
        in_flight, most_in_flight: tokens asked for and not yet done with; the most there ever were.
        stalled_seconds: time spent waiting for features. notes: the last note of each target, by rank.
    """

    def __init__(
        self,
        peers: Peers,
        plan: Plan,
        batches_per_step: int,
        *,
        first_step: int,
        width: int,
        dtype: torch.dtype,
        limit: int,
    ) -> None:
        self.peers = peers
        self.plan = plan
        self.width = width
        self.dtype = dtype
        self.limit = limit
        self.partners = peers.roles.partners(peers.rank, batches_per_step)
        self.in_flight = self.most_in_flight = 0
        self.stalled_seconds = 0.0
        self.notes: dict[int, dict[str, Any]] = {}
        self._own = own_batches(peers.roles, peers.rank, first_step, batches_per_step)
        self._next = next(self._own)
        self._asked: deque[_Asked] = deque()
        self._learning = 0
        self._to_hear: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[_Asked | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="features", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Batches that have arrived and that nobody has taken yet."""
        return self._heard.qsize()

    def grant(self, steps: int) -> None:
        """Asks for as many batches of the first `steps` steps as there is room for."""
        with lost_peer("asking for features"):
            while (step := self._next[0]) < steps:
                place = self._next[1]
                batch = self.plan.step(step)[place]
                if self.in_flight and self.in_flight + batch.padded_tokens > self.limit:
                    return
                self._ask(batch, self.peers.roles.target_of(place))
                self._next = next(self._own)

    def _ask(self, batch: Batch, target: int) -> None:
        shape = (len(batch.lengths), int(batch.lengths.max()), self.width)
        credit = torch.frombuffer(bytearray(batch.batch_id.ljust(CREDIT_BYTES).encode()), dtype=torch.uint8)
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        features = torch.empty(shape, dtype=self.dtype, device=self.peers.device)
        asked = _Asked(
            batch,
            target,
            batch.padded_tokens,
            header,
            features,
            credit_work=dist.isend(credit, target, tag=CREDIT),
            header_work=dist.irecv(header, target, tag=HEADER),
            features_work=dist.irecv(features, target, tag=FEATURES),
        )
        self.in_flight += asked.tokens
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._asked.append(asked)
        self._to_hear.put(asked)

    def _listen(self) -> None:
        """Waits for headers in order, so that others can see what has arrived. Touches nothing else."""
        while (asked := self._to_hear.get()) is not None:
            try:
                asked.header_work.wait()
            except (RuntimeError, dist.DistError) as error:
                self._heard.put(error)
                return
            self._heard.put(asked)

    def take(self, batch: Batch, expected: Label) -> Tensor:
        """The features of the next batch, [b, S, K*H]; waits until they are there. Call `done` when they are learnt.

        Raises:
            PermanentError: they are not what is expected; names both.
            LostPeer: the target is gone.
        """
        started = time.perf_counter()
        asked = self._asked.popleft()
        sender = self.peers.roles.name(asked.target)
        if asked.batch.batch_id != batch.batch_id:
            raise PermanentError(f"batch {asked.batch.batch_id} was asked for, but {batch.batch_id} is due")
        with lost_peer(f"waiting for batch {batch.batch_id} from {sender}"):
            self._hear()
            found, note = unpack_header(asked.header)
            expected.refuse_other(found, sender)
            asked.features_work.wait()
            asked.credit_work.wait()
        self.notes[asked.target] = note
        self._learning += asked.tokens
        self.stalled_seconds += time.perf_counter() - started
        return asked.features

    def _hear(self) -> None:
        heard = self._heard.get()
        if isinstance(heard, Exception):
            raise heard

    def done(self) -> None:
        """Makes room: the features that were taken are not needed any more."""
        self.in_flight -= self._learning
        self._learning = 0

    def end(self) -> None:
        """Lets come what was asked for, drops it, and tells the targets that this was all."""
        with lost_peer("ending the stream"):
            while self._asked:
                asked = self._asked.popleft()
                self._hear()
                asked.features_work.wait()
                asked.credit_work.wait()
                self.in_flight -= asked.tokens
            self._to_hear.put(None)
            message = torch.frombuffer(bytearray(END.encode()), dtype=torch.uint8)
            works: list[Any] = [dist.isend(message, target, tag=CREDIT) for target in self.partners]
            for work in works:
                work.wait()


def largest_batch(batch_sizes: Sequence[int], longest: Sequence[int]) -> int:
    """Tokens of the largest batch that a plan can make, padding counted."""
    return max(size * length for size, length in zip(batch_sizes, longest, strict=True))
