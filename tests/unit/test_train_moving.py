"""What leaves a host when a training moves is enough to go on from, and only one of the two hosts ever may."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from train_store import Training, again, make_training

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import Receipt, StopMarker, last_attempts, now
from dflash.base.store import read_params
from dflash.hosts import lease
from dflash.hosts.host import LocalHost
from dflash.plan.sweep import ARRIVING
from dflash.ship.ship import ship
from dflash.train import launch, moving, schedule


@pytest.fixture
def old(tmp_path: Path) -> Training:
    """A training that has got to step 4 of 6 on its first host; the states of 3 and 4 are there."""
    training = make_training(tmp_path / "old", placed={"keep_states": 2})
    schedule.merge_steps(training.directory, [2, 3, 4])
    training.run(4)
    schedule.merge_steps(training.directory, [6])
    return training


@pytest.fixture
def new(old: Training, tmp_path: Path) -> Training:
    """The other host, where the training has never been."""
    return again(old, tmp_path / "new")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = make_training(tmp_path_factory.mktemp("undisturbed"), placed={"keep_states": 9})
    schedule.merge_steps(training.directory, [2, 3, 4, 6])
    training.run(8)
    return training


def leave(
    training: Training, token: str = "one", receipted: Iterable[int] = (2, 3, 4), inputs: dict[str, str] | None = None
) -> Any:
    return moving.leave(
        training.directory,
        training.store,
        to="new",
        token=token,
        run="demo",
        receipted=set(receipted),
        inputs=inputs or {},
    )


def send(source: Training, destination: Training, listed: Any) -> None:
    here = LocalHost()
    ship(here, source.directory / moving.LEAVING, here, destination.directory / ARRIVING, known=listed, wait=1.0)


def arrive(training: Training, root: str, token: str = "one") -> None:
    moving.arrive(
        training.directory, training.store, origin="old", token=token, root=root, run="demo", forget_stop=True
    )


def carry(source: Training, destination: Training, token: str = "one", **what: Any) -> None:
    listed = leave(source, token, **what)
    send(source, destination, listed)
    arrive(destination, listed.root, token)


def same(one: Training, other: Training, step: int) -> bool:
    names = ("drafter/model.safetensors", "drafter/config.json", "state/masters.safetensors")
    folders = [training.directory / f"step_{step}" for training in (one, other)]
    return all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)


def test_a_training_goes_on_from_what_was_carried_over_as_if_it_had_never_moved(
    old: Training, new: Training, undisturbed: Training
) -> None:
    carry(old, new, receipted=[2, 4])
    assert schedule.existing_steps(new.directory) == [3, 4], "2 has a receipt and stays where it is"
    assert schedule.resumable_steps(new.directory) == [4], "one state is enough"
    new.run(6, attempt=2)
    assert same(new, undisturbed, 6)
    assert new.batch_ids() == undisturbed.batch_ids()[:6]
    lines = last_attempts(new.directory / "metrics.jsonl")
    assert [line.attempt for line in lines] == [1, 1, 1, 1, 2, 2]
    assert schedule.read_schedule(new.directory) == [2, 3, 4, 6]


def test_the_old_host_begins_nothing_any_more_and_the_new_one_nothing_before_all_is_there(
    old: Training, new: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = leave(old)
    with pytest.raises(PermanentError, match="was carried over from here to `new` by"):
        old.ensure_alive(6)
    send(old, new, listed)
    with monkeypatch.context() as patch:
        patch.setattr(moving, "_replace_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arrive(new, listed.root)
    assert schedule.existing_steps(new.directory), "it is half there"
    with pytest.raises(PermanentError, match="Set roles"):
        new.ensure_alive(6)
    arrive(new, listed.root)
    assert launch.read_moved(new.directory) is None
    arrive(new, listed.root)
    assert not [path for path in new.directory.iterdir() if "arriving" in path.name or path.name.startswith("replaced")]
    assert (old.directory / "step_4/state").is_dir(), "the copy stays"


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_it_comes_back_the_same_way_with_what_was_trained_meanwhile(
    old: Training, new: Training, undisturbed: Training
) -> None:
    carry(old, new)
    new.run(6, attempt=2)
    carry(new, old, "two", receipted=[2, 3, 4])
    with pytest.raises(PermanentError, match="was carried over"):
        new.ensure_alive(8)
    arrive(new, "", "one")  # a controller that never heard of the answer asks again
    assert launch.read_moved(new.directory) is not None, "it does not come back by that"
    assert schedule.existing_steps(old.directory) == [2, 3, 4, 6]
    old.run(8, attempt=3)
    assert same(old, undisturbed, 8)


def test_nothing_leaves_while_its_trainer_is_at_work_or_after_somebody_stopped_it(old: Training) -> None:
    held = lease.acquire([schedule.lease_path(old.directory)], lease.new_record("it", old.directory.name, "demo"))
    with pytest.raises(PermanentError, match=r"is at work \(run demo.*`dflash stop demo`; then `dflash run --resume`"):
        leave(old)
    held.release()
    StopMarker(run="demo", by="me", at=now()).write(old.directory / "stop.json")
    with pytest.raises(PermanentError, match="was stopped by me"):
        leave(old)
    assert launch.read_moved(old.directory) is None


def test_no_trainer_can_begin_while_a_training_leaves_or_arrives(
    old: Training, new: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    for name, folder in (("_lay_out", old.directory), ("_take_in", new.directory)):
        real = getattr(moving, name)

        def noted(*arguments: Any, real: Any = real, folder: Path = folder) -> Any:
            held.append(lease.holder(schedule.lease_path(folder)) is not None)
            return real(*arguments)

        monkeypatch.setattr(moving, name, noted)
    carry(old, new)
    assert held == [True, True]
    assert not [one for one in (old, new) if lease.holder(schedule.lease_path(one.directory))]


def test_a_training_leaves_once_unless_it_is_the_same_move_or_the_move_was_taken_back(old: Training) -> None:
    listed = leave(old)
    assert leave(old).root == listed.root
    with pytest.raises(PermanentError, match="was carried over"):
        leave(old, "another")
    moving.stay(old.directory, token="another", run="demo")
    assert launch.read_moved(old.directory) is not None
    moving.stay(old.directory, token="one", run="demo")
    leave(old, "another")


def test_a_damaged_state_is_passed_over_and_a_damaged_drafter_without_a_receipt_is_trained_again(
    old: Training, new: Training, undisturbed: Training
) -> None:
    damage(old.directory / "step_4/state/masters.safetensors")
    damage(old.directory / "step_4/drafter/model.safetensors")
    carry(old, new, receipted=[2])
    assert schedule.existing_steps(new.directory) == [3]
    new.run(6, attempt=2)
    assert same(new, undisturbed, 4)
    assert same(new, undisturbed, 6)


def test_a_damaged_state_of_a_checkpoint_that_has_a_receipt_is_passed_over_for_the_one_before(
    old: Training, new: Training, undisturbed: Training
) -> None:
    damage(old.directory / "step_4/state/masters.safetensors")
    carry(old, new)
    assert schedule.resumable_steps(new.directory) == [3]
    assert (old.directory / "step_4/drafter").is_dir(), "its drafter is whole and stays where its receipt says"
    new.run(6, attempt=2)
    assert same(new, undisturbed, 6)


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_what_was_shipped_is_taken_in_only_when_it_is_what_was_sent(old: Training, new: Training) -> None:
    listed = leave(old)
    with pytest.raises(CorruptError):
        arrive(new, listed.root)
    send(old, new, listed)
    damage(new.directory / ".arriving/step_4/state/masters.safetensors")
    with pytest.raises(CorruptError):
        arrive(new, listed.root)
    assert schedule.existing_steps(new.directory) == []
    send(old, new, listed)
    arrive(new, listed.root)
    assert schedule.existing_steps(new.directory) == [4]


def test_two_trainings_of_one_key_never_become_one(old: Training, new: Training) -> None:
    (new.directory / "trainer.log").write_text("")
    listed = leave(old)
    send(old, new, listed)
    with pytest.raises(PermanentError, match="was begun here too"):
        arrive(new, listed.root)


def test_checkpoints_made_from_other_inputs_do_not_go_along(old: Training, new: Training) -> None:
    dataset = old.store / "dataset" / read_params(old.directory).upstream["dataset"]
    standing = moving.input_digest(Receipt.read(dataset / "receipt.json"))
    listed = leave(old, inputs={"dataset": standing})
    assert any(file.path.startswith("step_4/") for file in listed.files)
    listed = leave(old, inputs={"dataset": "f" * 64}, receipted=[])
    assert not any(file.path.startswith("step_") for file in listed.files)
    assert schedule.existing_steps(old.directory) == []


def test_a_step_that_stayed_on_the_old_host_is_known_as_such(old: Training, new: Training) -> None:
    carry(old, new)
    assert [step for step in range(1, 8) if moving.left_behind(new.directory, step)] == [2, 3]
    assert not moving.left_behind(old.directory, 1)


def test_the_checkpoint_that_a_training_was_continued_from_goes_along(old: Training, tmp_path: Path) -> None:
    from test_train_trainer import child_of

    child = child_of(old, tmp_path, "weights")
    child.run(2)
    elsewhere = again(child, tmp_path / "new")
    parent = elsewhere.store / "train" / old.directory.name
    shutil.rmtree(parent)
    carry(child, elsewhere, receipted=[])
    assert sorted(path.name for path in (parent / "step_4").iterdir()) == ["drafter", "manifest.json"]
    damage(parent / "step_4/drafter/model.safetensors")
    carry(elsewhere, child, token="back", receipted=[])
    carry(child, elsewhere, token="again", receipted=[])
    assert moving._is_whole(parent, 4, state=False)
    assert not list(parent.glob("replaced-*")), "what was replaced of the parent goes too"
    elsewhere.run(4, attempt=2)
    child.directory.joinpath("moved.json").unlink()
    child.run(4, attempt=2)
    assert same(elsewhere, child, 4)


def test_laying_out_what_goes_along_costs_no_space(old: Training) -> None:
    started = time.monotonic()
    leave(old)
    assert time.monotonic() - started < 20
    weights = [old.directory / folder / "step_4/state/masters.safetensors" for folder in ("", moving.LEAVING)]
    assert weights[0].samefile(weights[1])
    assert json.loads((old.directory / moving.LEAVING / moving.NAME).read_text()) == {"token": "one"}
