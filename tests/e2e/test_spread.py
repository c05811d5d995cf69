"""The road over several machines: equal results, the right things shipped, and damage found where it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace  # type: ignore[import-not-found]
from spread import Spread, copy_spread, make_spread
from sshd import Sshd

from dflash.base.records import Receipt

pytestmark = pytest.mark.timeout(900 * PATIENCE)


@pytest.fixture(scope="session")
def spread_run(tmp_path_factory: pytest.TempPathFactory, cache: Path, servers: dict[str, Sshd]) -> Spread:
    """The micro run over two sshd, finished once."""
    space = make_spread(tmp_path_factory.mktemp("spread") / "work", cache, servers)
    space.call("run")
    return space


@pytest.fixture
def spread(tmp_path: Path, spread_run: Spread) -> Iterator[Spread]:
    """A copy of the finished run with the workdirs of its hosts."""
    space = copy_spread(spread_run, tmp_path / "all")
    yield space
    space.kill_trainers()


def contents(space: Workspace) -> dict[str, str]:
    """Content digest of every result by its path."""
    found = {}
    for name in space.receipts():
        if name.startswith("store/"):
            found[name] = Receipt.read(space.results / name).content_digest()
    return found


def hosts_of(space: Workspace) -> dict[str, str]:
    found = {}
    for name in space.receipts():
        found["report" if name.startswith("runs/") else name.split("/")[1]] = Receipt.read(space.results / name).host
    return found


def test_results_over_two_sshd_equal_the_local_run_digest_by_digest(spread: Spread, finished: Workspace) -> None:
    assert contents(spread) == contents(finished)
    table = "runs/micro/latest/evaluations.csv"
    assert (spread.results / table).read_bytes() == (finished.results / table).read_bytes()
    assert hosts_of(spread) == {
        **dict.fromkeys(("prompts", "completions", "dataset", "buckets", "report"), "local"),
        "train": "trainbox",
        **dict.fromkeys(("references", "evaluate"), "judge"),
    }


def test_weights_and_features_stay_where_they_were_made_and_what_explains_them_comes_back(spread: Spread) -> None:
    here = {path.name for path in spread.results.glob("store/train/*/step_6/drafter/*")}
    assert here == {"config.json"}
    assert not list(spread.results.glob("store/references/*/features-*.safetensors"))
    assert list(spread.store("trainbox").glob("train/*/step_6/drafter/model.safetensors"))
    assert list(spread.store("judge").glob("shipped/train/*/step_6/drafter/model.safetensors"))
    (manifest,) = spread.results.glob("store/train/*/step_6/manifest.json")
    assert json.loads(spread.call("inspect", str(manifest.parent), "--json").stdout)
    report = (spread.results / "runs/micro/latest/report.html").read_text()
    assert "is missing" not in report


def test_each_artifact_was_shipped_once_to_the_host_that_needs_it(spread: Spread) -> None:
    stages = sorted(
        f"{record['stage']}:{record['step']} to {record['destination']}"
        for path in spread.results.glob("store/ship/*/*/*.json")
        for record in [json.loads(path.read_text())]
    )
    assert stages == [
        "buckets:None to trainbox",
        "dataset:None to judge",
        "dataset:None to trainbox",
        *(f"train:{step} to judge" for step in (4, 6)),
    ]


def test_nothing_changed_reruns_nothing_and_asks_no_host(spread: Spread) -> None:
    logs = {host: server.log.stat().st_size for host, server in spread.servers.items()}
    assert spread.reruns() == []
    assert logs == {host: server.log.stat().st_size for host, server in spread.servers.items()}


def test_moving_every_role_reruns_nothing(spread: Spread) -> None:
    spread.write_hosts(gpu="spare", eval="local")
    assert spread.reruns() == []
    spread.write_config(hosts="nohosts.yaml")
    (spread.folder / "nohosts.yaml").write_text("roles: {}\n")
    assert spread.reruns() == []


def test_the_eval_host_moved_ships_only_what_a_missing_evaluation_needs(spread: Spread) -> None:
    before = spread.shipments()
    (receipt,) = spread.results.glob("store/evaluate/*/step_4.json")
    old = Receipt.read(receipt)
    receipt.unlink()
    spread.write_hosts(eval="spare")
    assert spread.reruns() == ["evaluate:4"]
    made = {name for name, inode in spread.shipments().items() if before.get(name) != inode}
    stages = sorted(json.loads((spread.results / path).read_text())["stage"] for path in map(record_path, made))
    assert stages == ["dataset", "references", "train"]
    assert all(name.startswith("spare/") for name in made)
    assert Receipt.read(receipt).content_digest() == old.content_digest()
    assert Receipt.read(receipt).host == "spare"


def record_path(name: str) -> str:
    host, key, record = name.split("/")
    return f"store/ship/{key}/{host}/{record}.json"


def test_the_eval_host_wiped_redoes_the_shipments_that_missing_evaluations_need_and_nothing_else(
    spread: Spread,
) -> None:
    shutil.rmtree(spread.workdir("judge"))
    assert spread.reruns() == []
    before = spread.shipments()
    (receipt,) = spread.results.glob("store/evaluate/*/step_4.json")
    receipt.unlink()
    # The features of the references were on that host only, so they are made again; their digest is the same.
    assert spread.reruns() == ["evaluate:4", "references"]
    made = {name for name, inode in spread.shipments().items() if before.get(name) != inode}
    records = [json.loads((spread.results / record_path(name)).read_text()) for name in made]
    assert sorted((record["stage"], record["step"] or 0) for record in records) == [("dataset", 0), ("train", 4)]


def test_damage_on_another_host_is_found_there_and_named(spread: Spread) -> None:
    (weights,) = spread.store("trainbox").glob("train/*/step_4/drafter/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = spread.call("plan", "--verify", expect=1)
    assert "on trainbox" in done.stderr
    assert "step_4/drafter/model.safetensors" in done.stderr
    assert spread.reruns() == []  # nothing that is missing needs it
    (receipt,) = spread.results.glob("store/evaluate/*/step_4.json")
    receipt.unlink()
    assert spread.reruns() == ["evaluate:4"]  # its copy on the eval host is whole
    for path in spread.results.glob("store/ship/*/judge/step_4.json"):
        path.unlink()
    receipt.unlink()
    done = spread.call("run", expect=1)
    assert "--recompute train" in done.stderr
    spread.call("run", "--recompute", "train")
    assert weights.read_bytes() == whole


def test_a_copy_damaged_on_the_eval_host_is_shipped_again(spread: Spread) -> None:
    (copy,) = spread.store("judge").glob("shipped/train/*/step_4/drafter/model.safetensors")
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (receipt,) = spread.results.glob("store/evaluate/*/step_4.json")
    receipt.unlink()
    assert spread.reruns() == ["evaluate:4"]
    assert copy.read_bytes() == whole


def test_a_lost_receipt_of_a_remote_stage_is_fetched_not_computed(spread: Spread) -> None:
    (receipt,) = spread.results.glob("store/references/*/receipt.json")
    finished = Receipt.read(receipt).finished
    receipt.unlink()
    assert spread.reruns() == ["references"]
    assert Receipt.read(receipt).finished == finished


def test_hosts_that_share_the_completions_answer_a_shard_each_and_no_prompt_is_lost(spread: Spread) -> None:
    before = {name.split("/")[2] for name in spread.receipts() if name.startswith("store/completions/")}
    spread.write_config(prompts=[{"name": "short", "path": "config/micro/short.jsonl", "shards": 2}])
    spread.write_hosts(generate=["judge", "trainbox"])
    spread.call("run")
    made = [
        Receipt.read(spread.results / name)
        for name in spread.receipts()
        if name.startswith("store/completions/") and name.split("/")[2] not in before
    ]
    assert {receipt.host for receipt in made} == {"judge", "trainbox"}
    prompts = len((spread.folder / "config/micro/short.jsonl").read_text().splitlines())
    assert sum(receipt.counts.total for receipt in made) == prompts
    assert all(receipt.counts.ok for receipt in made)
