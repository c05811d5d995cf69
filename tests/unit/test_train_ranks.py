"""Roles in processes of their own: the same training at any topology, and nothing that is not what it should be.

Every training here is five small steps of six batches; ranks are forked, so a topology costs a second.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_store import Ran, run_topology
from train_store import Training, again, make_samples, make_training, wait_until

from dflash.base.records import CheckpointManifest, last_attempts
from dflash.data.batches import BatchPlan
from dflash.train import agreement, checkpoint, drafter_rank, stream, target_rank
from dflash.train.roles import Roles
from dflash.train.stream import Label

torch.set_num_threads(1)

STEPS = 5
BATCHING = {"batches_per_step": 6, "max_batch_size": 2}
TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (3, 2)]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}
"""Most that a weight or moment may differ from the colocated training's, after `STEPS` steps (measured: 3e-16 and 6e-8)."""


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, int, int], tuple[Training, Ran | None]]:
    """The same training colocated (0, 0) and at every topology, in both precisions."""
    root = tmp_path_factory.mktemp("topologies")
    found: dict[tuple[str, int, int], tuple[Training, Ran | None]] = {}
    for dtype in TOLERANCE:
        whole = make_training(root / dtype, batching=BATCHING, dtype=dtype)
        whole.run(2, STEPS)
        found[dtype, 0, 0] = whole, None
        for targets, drafters in TOPOLOGIES:
            ranked = again(whole, root / f"{dtype}-{targets}-{drafters}")
            found[dtype, targets, drafters] = ranked, run_topology(ranked, targets, drafters, 2, STEPS)
    return found


def distance(first: Training, second: Training, step: int = STEPS) -> float:
    """The largest difference of any weight, master or moment."""
    ours, theirs = first.weights(step), second.weights(step)
    names = [name for name in ours if "generator." not in name]
    assert names == [name for name in theirs if "generator." not in name]
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in names)


def succeeded(ran: Ran | None) -> bool:
    assert ran is not None
    assert ran.ok, "\n".join(ran.said)
    return True


@pytest.fixture(scope="module")
def small(trained: dict[Any, tuple[Training, Any]], tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The float32 training, untrained."""
    return again(trained["float32", 0, 0][0], tmp_path_factory.mktemp("small"))


# ---------------------------------------------------------------- the same at any topology


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("targets", "drafters"), TOPOLOGIES)
def test_any_topology_trains_on_the_same_batches_to_the_same_weights(
    trained: dict[Any, tuple[Training, Ran | None]], dtype: str, targets: int, drafters: int
) -> None:
    whole, _ = trained[dtype, 0, 0]
    ranked, ran = trained[dtype, targets, drafters]
    assert succeeded(ran)
    assert ranked.batch_ids() == whole.batch_ids()
    assert distance(whole, ranked) <= TOLERANCE[dtype]
    assert distance(whole, ranked) == 0 or drafters > 1, "one drafter adds up in the order of the single process"
    ours, theirs = (last_attempts(training.directory / "metrics.jsonl") for training in (whole, ranked))
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert (one.anchors, one.tokens, one.accuracy_by_slot) == (other.anchors, other.tokens, other.accuracy_by_slot)


@pytest.mark.parametrize(("first", "second"), [((2, 2), (0, 0)), ((0, 0), (2, 2)), ((2, 1), (3, 2))])
def test_a_state_resumes_under_another_topology(
    trained: dict[Any, tuple[Training, Any]], tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    whole, _ = trained["float64", 0, 0]
    resumed = again(whole, tmp_path)
    for attempt, ((targets, drafters), step) in enumerate(((first, 2), (second, STEPS)), start=1):
        if targets:
            assert succeeded(run_topology(resumed, targets, drafters, step, attempt=attempt))
        else:
            resumed.run(step, attempt=attempt)
    lines = last_attempts(resumed.directory / "metrics.jsonl")
    assert [line.attempt for line in lines] == [1, 1, 2, 2, 2]
    assert resumed.batch_ids() == whole.batch_ids()
    assert distance(whole, resumed) <= TOLERANCE["float64"]


@pytest.mark.parametrize(("done", "left_of_epoch"), [(1, 2), (2, 4), (3, 6), (4, 0)])
def test_a_resume_at_the_same_topology_is_bit_for_bit(
    trained: dict[Any, tuple[Training, Any]], tmp_path: Path, done: int, left_of_epoch: int
) -> None:
    """In mid-epoch, and where an epoch ends: it has eight batches, a step six."""
    assert -done * 6 % 8 == left_of_epoch
    whole, _ = trained["float32", 2, 2]
    resumed = again(whole, tmp_path)
    assert succeeded(run_topology(resumed, 2, 2, done))
    assert succeeded(run_topology(resumed, 2, 2, STEPS, attempt=2))
    lines = [json.loads(line) for line in (resumed.directory / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(n, 1 + (n > done)) for n in range(1, STEPS + 1)]
    assert resumed.batch_ids() == whole.batch_ids()
    assert distance(whole, resumed) == 0


def test_a_resume_in_bfloat16_begins_on_every_rank_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """Only there are the weights that compute other tensors than the masters that are read back."""
    whole = make_training(tmp_path / "whole", batching=BATCHING, dtype="bfloat16")
    assert succeeded(run_topology(whole, 1, 2, 3))
    resumed = again(whole, tmp_path / "resumed")
    assert succeeded(run_topology(resumed, 1, 2, 2))
    assert succeeded(run_topology(resumed, 1, 2, 3, attempt=2))
    assert distance(whole, resumed, 3) == 0


def test_a_checkpoint_says_who_made_it_and_holds_the_generators_of_every_rank(
    trained: dict[Any, tuple[Training, Any]],
) -> None:
    training, _ = trained["float32", 3, 2]
    manifest = CheckpointManifest.read(training.directory / f"step_{STEPS}" / "manifest.json")
    assert manifest.topology == {"targets": 3, "drafters": 2, "colocate": False, "world_size": 5}
    assert manifest.kernels["linear"] == "none needed"
    state = checkpoint.load_state(training.directory, STEPS, training.directory.name)
    assert sorted(state.generators) == ["cpu", *(f"rank{rank}.cpu" for rank in range(5))]
    assert state.next_step == STEPS


def test_metrics_say_who_waits_for_whom(trained: dict[Any, tuple[Training, Any]]) -> None:
    training, ran = trained["float32", 3, 2]
    lines = last_attempts(training.directory / "metrics.jsonl")
    for line in lines:
        assert set(line.tokens_per_second) == {"target", "drafter"}
        assert set(line.stalled_seconds) == {
            "data",
            "drafter_features",
            "drafter_reduce",
            "target_credit",
            "checkpoint",
        }
        assert len(line.features_waiting) == 2
    assert max(max(line.features_waiting) for line in lines) > 0
    shares = re.search(r"waited for features (\d+)% .* room to send (\d+)%", ran.said[3])
    assert shares is not None
    assert all(0 <= int(share) <= 100 for share in shares.groups())


@pytest.mark.parametrize(
    ("role", "side", "said"),
    [("target", "drafter", "the drafters starve by"), ("drafter", "target", "the targets have to wait, by")],
)
def test_the_side_that_starves_is_named_with_its_share(
    small: Training, tmp_path: Path, role: str, side: str, said: str
) -> None:
    def slow() -> None:
        kind, name = (target_rank.TargetRank, "_features") if role == "target" else (drafter_rank.DrafterRank, "_learn")
        real = getattr(kind, name)

        def slowed(self: Any, *arguments: Any) -> Any:
            time.sleep(0.05)
            return real(self, *arguments)

        setattr(kind, name, slowed)

    def often() -> None:
        drafter_rank.BALANCE_EVERY = 0.0
        if role == "drafter":
            slow()

    training = again(small, tmp_path)
    ran = run_topology(training, 1, 1, STEPS, changes={0: slow if role == "target" else lambda: None, 1: often})
    assert succeeded(ran)
    told = re.findall(rf"{said} (\d+)%: a drafter waited for features (\d+)% .* room to send (\d+)%", ran.said[1])
    assert len(told) >= 3, "while it trains, and at the end"
    share, drafter, target = (int(number) for number in told[-1])
    assert abs(share - (drafter if side == "drafter" else target)) <= 1
    assert share > 30
    lines = last_attempts(training.directory / "metrics.jsonl")[1:]
    assert [list(line.starving) for line in lines] == [[side]] * len(lines)
    for line in lines:
        waited = line.stalled_seconds["drafter_features" if side == "drafter" else "target_credit"]
        assert line.starving[side] == pytest.approx(waited / line.seconds, abs=2e-4)


# ---------------------------------------------------------------- steps that are odd


def test_a_drafter_without_a_valid_anchor_neither_hangs_nor_bends_the_gradient(tmp_path: Path) -> None:
    rows = make_samples(8, prompt_only=range(1, 8))
    whole = make_training(
        tmp_path / "whole", rows=rows, batching={"max_batch_size": 1, "batches_per_step": 2}, dtype="float64"
    )
    whole.run(4)
    lines = last_attempts(whole.directory / "metrics.jsonl")
    assert any(line.anchors for line in lines), "in some step one drafter has all the anchors and the other none"
    ranked = again(whole, tmp_path / "ranked")
    assert succeeded(run_topology(ranked, 2, 2, 4))
    assert [line.anchors for line in last_attempts(ranked.directory / "metrics.jsonl")] == [
        line.anchors for line in lines
    ]
    assert distance(whole, ranked, 4) <= TOLERANCE["float64"]


def test_features_in_flight_never_exceed_the_limit(small: Training, tmp_path: Path) -> None:
    training = again(small, tmp_path)
    limit = 60

    def watch() -> None:
        done = stream.Receiver.end

        def end(self: stream.Receiver) -> None:
            done(self)
            print(json.dumps({"most": self.most_in_flight, "left": self.in_flight, "limit": self.limit}), flush=True)

        stream.Receiver.end = end  # type: ignore[method-assign]

    ran = run_topology(training, 2, 2, STEPS, changes={2: watch, 3: watch}, features_in_flight=limit)
    assert succeeded(ran)
    for said in ran.said[2:]:
        counted = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert counted["limit"] == limit
        assert 0 < counted["most"] <= limit
        assert counted["left"] == 0
    refused = run_topology(training, 1, 1, STEPS, features_in_flight=40)
    assert "40 tokens in flight cannot hold the largest batch, 48 tokens" in refused.said[1]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_request_to_end_is_agreed_on_whoever_is_asked(small: Training, tmp_path: Path, rank: int) -> None:
    def ask() -> None:
        kind = target_rank.TargetRank if rank < 2 else drafter_rank.DrafterRank
        name = "_features" if rank < 2 else "_learn"
        real = getattr(kind, name)

        def asked(self: Any, *arguments: Any) -> Any:
            if self.step == 1:
                self.ending.set()
            return real(self, *arguments)

        setattr(kind, name, asked)

    training = again(small, tmp_path)
    assert succeeded(run_topology(training, 2, 2, 1000, changes={rank: ask}))
    (step,) = checkpoint.schedule.existing_steps(training.directory)
    assert step <= 4
    checkpoint.load_state(training.directory, step, training.directory.name)


# ---------------------------------------------------------------- what is refused


def relabel(**changed: Any) -> Any:
    """Makes a target put another value into its second header."""

    def change() -> None:
        real = stream.pack_header
        sent = []

        def pack(label: Label, note: dict[str, Any]) -> torch.Tensor:
            sent.append(label)
            values = {**vars(label), **changed} if len(sent) == 2 else vars(label)
            return real(Label(**values), note)

        stream.pack_header = pack

    return change


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_id", "0123456789ab"),
        ("tokens", "0" * 16),
        ("taps", (3, 1)),
        ("kernels", "fla"),
        ("shape", (1, 2, 3)),
        ("dtype", "bfloat16"),
    ],
)
def test_a_payload_that_is_not_what_is_due_is_refused_with_both_named(
    small: Training, tmp_path: Path, field: str, value: Any
) -> None:
    ran = run_topology(again(small, tmp_path), 1, 1, STEPS, changes={0: relabel(**{field: value})})
    assert ran.statuses[1] == 4
    assert f"features from rank 0 (target 0) have {field} {value!r}, but " in ran.said[1]
    assert "PermanentError: rank 1 (drafter 0) on local, step 1: batch " in ran.said[1]
    assert ran.statuses[0] == 6, "the target has lost its drafter, which is not its fault"


def test_a_target_that_works_on_another_batch_is_refused_before_it_sends(small: Training, tmp_path: Path) -> None:
    def late() -> None:
        real = BatchPlan.batch
        BatchPlan.batch = lambda self, number: real(self, number + (number > 0))  # type: ignore[method-assign]

    ran = run_topology(again(small, tmp_path), 1, 1, STEPS, changes={0: late})
    assert ran.statuses[0] == 4
    assert "rank 1 (drafter 0) asks for batch " in ran.said[0]


@pytest.mark.parametrize(
    ("factor", "said"), [(float("nan"), "hold NaN"), (0.0, "are zero for a whole token"), (None, "are constant")]
)
def test_broken_features_are_refused_with_the_batch_named(
    small: Training, tmp_path: Path, factor: float | None, said: str
) -> None:
    def poison() -> None:
        real = target_rank.TargetRank._part

        def broken(self: Any, batch: Any) -> torch.Tensor:
            features = real(self, batch)
            return torch.ones_like(features) if factor is None else features * factor

        target_rank.TargetRank._part = broken  # type: ignore[method-assign]

    ran = run_topology(again(small, tmp_path), 2, 2, STEPS, changes={1: poison})
    assert ran.statuses[3] == 4, "batch 1 goes from target 1 to drafter 1"
    assert re.search(rf"rank 3 \(drafter 1\) on local, step 1: batch [0-9a-f]{{12}}: features .*{said}", ran.said[3])


@pytest.mark.parametrize("fact", ["kernels", "taps"])
def test_ranks_that_have_loaded_different_things_do_not_begin(small: Training, tmp_path: Path, fact: str) -> None:
    def other() -> None:
        if fact == "kernels":
            agreement.kernel_tag = lambda *_: "fla"
        else:
            real = target_rank.common_facts
            target_rank.common_facts = lambda *arguments: {**real(*arguments), "taps": [0]}

    training = again(small, tmp_path)
    ran = run_topology(training, 2, 1, STEPS, changes={1: other})
    assert ran.statuses == [4, 4, 4]
    assert f"rank 1 (target 1) has {fact} " in ran.said[2]
    assert "rank 0 (target 0) has" in ran.said[2] or "rank 2 (drafter 0) has" in ran.said[2]
    assert not (training.directory / "metrics.jsonl").exists()


def test_drafters_that_have_drifted_apart_save_nothing(small: Training, tmp_path: Path) -> None:
    def drift() -> None:
        real = drafter_rank.StreamLearner.update

        def update(self: Any, norm: float, step: int) -> None:
            real(self, norm, step)
            self.masters["norm.weight"].data[0] += 1e-7

        drafter_rank.StreamLearner.update = update  # type: ignore[method-assign]

    training = again(small, tmp_path)
    ran = run_topology(training, 1, 2, STEPS, changes={2: drift})
    assert ran.statuses[1:] == [4, 4]
    assert "rank 2 (drafter 1) has weights " in ran.said[1]
    assert checkpoint.schedule.existing_steps(training.directory) == []


@pytest.mark.parametrize(("targets", "drafters", "named"), [(7, 1, "targets"), (1, 7, "drafters")])
def test_ranks_that_would_idle_are_refused(targets: int, drafters: int, named: str) -> None:
    from dflash.base.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"train\.topology\.{named}: 7 {named} share the 6 batches of a step"):
        Roles(targets, drafters).refuse_idle(6)


# ---------------------------------------------------------------- a rank that dies


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_when_a_rank_dies_the_others_end_at_once_and_the_next_start_resumes(
    trained: dict[Any, tuple[Training, Any]], small: Training, tmp_path: Path, victim: int
) -> None:
    training = again(small, tmp_path)

    def die() -> None:
        kind = target_rank.TargetRank if victim < 2 else drafter_rank.DrafterRank
        name = "_features" if victim < 2 else "_learn"
        real = getattr(kind, name)

        def dying(self: Any, *arguments: Any) -> Any:
            if self.step == 3:
                os.kill(os.getpid(), 9)
            return real(self, *arguments)

        setattr(kind, name, dying)

    ran = run_topology(training, 2, 2, 2, STEPS, changes={victim: die})
    assert ran.statuses[victim] == -9
    assert all(status == 6 for rank, status in enumerate(ran.statuses) if rank != victim), "\n".join(ran.said)
    assert ran.seconds < 15
    assert succeeded(run_topology(training, 2, 2, 2, STEPS, attempt=2))
    undisturbed, _ = trained["float32", 2, 2]
    assert training.batch_ids() == undisturbed.batch_ids()
    assert distance(undisturbed, training) == 0


# ---------------------------------------------------------------- pieces


def test_places_go_round_by_role() -> None:
    roles = Roles(3, 2)
    assert [roles.target_of(place) for place in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [roles.drafter_of(place) for place in range(6)] == [3, 4, 3, 4, 3, 4]
    assert (roles.places(1, 6), roles.places(4, 6)) == ([1, 4], [1, 3, 5])
    assert roles.partners(3, 3) == [0, 2]
    assert (roles.lead, roles.name(4)) == (3, "rank 4 (drafter 1)")


def test_a_header_survives_the_way(small: Training) -> None:
    label = Label("0123456789ab", "f" * 16, (1, 3), "none needed", (2, 3, 4), "float32")
    note = {"seconds": 0.5, "generators": agreement.pack_tensors({"cpu": torch.get_rng_state()})}
    assert stream.unpack_header(stream.pack_header(label, note)) == (label, note)
    assert torch.equal(agreement.unpack_tensors(note["generators"])["cpu"], torch.get_rng_state())


def test_the_digest_of_tokens_sees_a_token_and_padding() -> None:
    ids, mask = torch.tensor([[1, 2, 0]]), torch.tensor([[1, 1, 0]])
    found = {stream.token_digest(ids, mask), stream.token_digest(ids, torch.ones_like(mask))}
    found |= {stream.token_digest(torch.tensor([[1, 3, 0]]), mask), stream.token_digest(ids.T, mask.T)}
    assert len(found) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_of_weights_sees_a_bit_a_place_and_a_name(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    weights = {"b": torch.linspace(-2, 2, 15).to(dtype), "a": torch.ones(4, dtype=dtype)}
    nudged, swapped = weights["b"].clone(), weights["b"].clone()
    nudged[14] = 2.015625
    swapped[[0, 14]] = swapped[[14, 0]]  # they differ in the sign's bit alone
    others = [{**weights, "b": nudged}, {**weights, "b": swapped}, {"c": weights["b"], "a": weights["a"]}]
    assert len({agreement.weights_digest(one) for one in (weights, *others)}) == 4
    assert agreement.weights_digest(dict(reversed(weights.items()))) == agreement.weights_digest(weights)
    # What a GPU does in their place.
    sums = [int(agreement._sum_of_bits(one)) for one in (weights["b"], nudged, swapped)]
    assert len(set(sums)) == 3
    monkeypatch.setattr(agreement, "PIECE", 4)
    assert int(agreement._sum_of_bits(weights["b"])) == sums[0], "pieces do not matter"


def test_pieces_of_gradients_cover_every_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash.train import peers

    monkeypatch.setattr(peers, "PIECE", 4)
    tensors = [torch.arange(3.0), torch.arange(3.0, 13.0).view(2, 5), torch.arange(13.0, 14.0)]
    groups = list(peers._pieces(tensors))
    assert [sum(map(len, group)) for group in groups] == [4, 4, 4, 2]
    assert torch.cat([piece for group in groups for piece in group]).tolist() == list(range(14))
    for group in groups:
        for piece in group:
            piece += 1
    assert tensors[1][0, 0] == 4


def test_a_drafter_that_learnt_nothing_adds_zeros(small: Training) -> None:
    params = small.params()
    config = target_rank.drafter_config(params)
    learner = drafter_rank.StreamLearner(params, drafter_rank.load_target_ends(params, None, "cpu"), config, "cpu")
    gradients = learner.whole_gradients()
    assert [gradient.shape for gradient in gradients] == [
        learner.masters[name].shape for name in sorted(learner.masters)
    ]
    assert not any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize(("targets", "drafters"), [(1, 1)])
def test_ranks_on_gpus_give_what_one_gpu_gives(tmp_path: Path, targets: int, drafters: int) -> None:
    """Real processes, since CUDA does not survive a fork. Needs as many GPUs as ranks."""
    if torch.cuda.device_count() < targets + drafters:
        pytest.skip(f"{torch.cuda.device_count()} GPUs for {targets + drafters} ranks")
    found = []
    for name, topology in (("one", {}), ("ranks", {"targets": targets, "drafters": drafters, "colocate": False})):
        training = make_training(tmp_path / name, batching=BATCHING, dtype="float64", placed={"topology": topology})
        training.placement.write_text(json.dumps({"device": "cuda", "values": {"topology": topology}}))
        training.ensure_alive(2, STEPS)
        training.wait(STEPS)
        wait_until(lambda training=training: training.holder() is None)  # which holds the GPU until it is gone
        found.append(training)
    assert found[0].batch_ids() == found[1].batch_ids()
    assert distance(*found) <= TOLERANCE["float64"]
