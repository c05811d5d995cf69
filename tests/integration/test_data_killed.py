"""Generation and merging killed with -9 at random moments: a plain rerun accounts for every input exactly once.

The seed of the moments is drawn when the test runs and printed. `DFLASH_KILLS` says how many kills (6 when left out).
Attempts are forks of one process that has everything imported, so that an attempt takes a second and not ten.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from data_road import completions_params, target, write_lines

from dflash import runner
from dflash.base.errors import PermanentError
from dflash.base.files import sha256_file
from dflash.base.records import CodeDigest, ParamsFile, stage_key
from dflash.base.stage import HostContext
from dflash.data import completions, dataset
from dflash.data.completions import Answered, answer, generation_batches
from dflash.data.completions_params import CompletionsParams
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompts_params import PromptsParams
from dflash.data.requests import Request
from dflash.data.schemas import COMPLETIONS
from dflash.data.tables import read_rows
from dflash.runner import Job, run_job
from dflash.stages import BY_NAME

KILLS = int(os.environ.get("DFLASH_KILLS", "6"))
PROMPTS = {"a": 70, "b": 50}


@pytest.fixture(autouse=True)
def slow_road(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small batches and small pieces, each taking a moment, so that a kill finds the work at many places."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(runner.CONTROLLER, raising=False)
    monkeypatch.delenv(runner.INVOCATION, raising=False)
    real = target()
    monkeypatch.setattr(completions, "load_target", lambda *_arguments, **_named: real)
    monkeypatch.setattr(completions, "GENERATION_BATCH", 8)
    whole = dataset.completed_samples

    def in_pieces(path: Path) -> Iterator[pa.Table]:
        for piece in whole(path):
            for start in range(0, piece.num_rows, 8):
                time.sleep(0.01)
                yield piece.slice(start, 8).combine_chunks()

    monkeypatch.setattr(dataset, "completed_samples", in_pieces)


def jobs(folder: Path, root: Path) -> list[Job]:
    """prompts, completions of each source, and the dataset, in a store of their own."""
    code = CodeDigest(digest="c" * 16, modules={})
    found, keys = [], {}

    def job(stage: str, name: str, params: dict[str, Any], upstream: dict[str, str], **placement: Any) -> None:
        key = stage_key(stage, params, upstream, code.digest)
        directory = root / stage / key
        if not (directory / "params.json").exists():
            document = ParamsFile(stage=stage, key=key, params=params, origins={}, upstream=upstream, code=code)
            document.write(directory / "params.json")
        keys[name] = key
        found.append(Job(BY_NAME[stage], directory / "params.json", root, placement=placement))

    for source, count in PROMPTS.items():
        path = folder / f"{source}.jsonl"
        if not path.exists():
            write_lines(path, [{"prompt": f"{source if n % 10 else ''}{'x' * (n * 7 % 31)}{n}"} for n in range(count)])
        params = PromptsParams(name=source, path=str(path), digest=sha256_file(path))
        job("prompts", f"prompts/{source}", params.keyed_values(), {}, files={params.digest: str(path)}, path=str(path))
    for source in PROMPTS:
        values = completions_params(max_new_tokens=4).keyed_values()
        job("completions", f"completions/{source}", values, {"prompts": keys[f"prompts/{source}"]})
    upstream = {f"completions/{source}": keys[f"completions/{source}"] for source in PROMPTS}
    job("dataset", "dataset", DatasetParams().keyed_values(), upstream)
    return found


def run_road(folder: Path, root: Path) -> None:
    for job in jobs(folder, root):
        run_job(job)


def in_a_fork(work: Callable[[], None]) -> int:
    """Starts `work` in a process of its own, silent; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        work()
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """Exit status of a fork (negative for a signal), None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_after(pid: int, seconds: float) -> bool:
    """Kills a fork with -9 at a moment; False when it had ended well before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = ended(pid)
        if status is not None:
            assert status == 0, f"an attempt failed with {status}"
            return False
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def check_store(folder: Path, root: Path) -> str:
    """Every input exactly once in every ledger, and each answer to its prompt; returns the digest of the dataset."""
    made = {job.stage.name + job.params_path.parent.name: job.directory for job in jobs(folder, root)}
    *_, merged = made.values()
    total: Counter[str] = Counter()
    for name, directory in made.items():
        if name.startswith("completions"):
            rows = read_rows(directory / "completions.parquet", COMPLETIONS)
            ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
            assert [line["id"] for line in ledger] == [row["id"] for row in rows]
            assert len({row["id"] for row in rows}) == len(rows)
            total.update(row["id"] for row in rows)
    assert sum(total.values()) == sum(PROMPTS.values())
    lines = [json.loads(line) for line in (merged / "ledger.jsonl").read_text().splitlines()]
    assert Counter(line["id"] for line in lines) == total
    record: dict[str, Any] = json.loads((merged / "dataset.json").read_text())
    kept = [line for line in lines if line["status"] == "ok"]
    assert record["samples"] == len(kept) == len({line["id"] for line in kept}) == len(total)
    digest: str = record["digest"]
    return digest


def test_killed_at_random_moments_a_rerun_makes_the_dataset_of_an_undisturbed_run(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    run_road(tmp_path, tmp_path / "first, which pays for what is done once")
    start = time.monotonic()
    run_road(tmp_path, tmp_path / "undisturbed")
    span = time.monotonic() - start
    undisturbed = check_store(tmp_path, tmp_path / "undisturbed")
    kills, stores = 0, 0
    while kills < KILLS:
        root = tmp_path / f"store-{stores}"
        stores += 1
        while kills < KILLS:
            if not kill_after(in_a_fork(lambda root=root: run_road(tmp_path, root)), moments.uniform(0, span)):
                break
            kills += 1
        run_road(tmp_path, root)
        assert check_store(tmp_path, root) == undisturbed
    print(f"{kills} kills over {stores} datasets; an undisturbed one takes {span:.1f} s")


def resume_by_counting(
    real: Any, requests: Sequence[Request], params: CompletionsParams, host_context: HostContext
) -> Answered:
    """The mutant: rows are appended as they come, longest prompts first, and a resume skips as many prompts as there are
    lines."""
    path = Path(host_context.placement["scratch"]) / "lines.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = Answered(params, len(requests), done={row["id"]: row for row in lines})
    for batch in generation_batches(requests[len(lines) :]):
        rows = answer(real, batch, params, 8)
        with path.open("a") as stream:
            stream.writelines(
                json.dumps(
                    {**row, "prompt_ids": list(row["prompt_ids"]), "completion_ids": list(row["completion_ids"])}
                )
                + "\n"
                for row in rows
            )
        found.done.update((row["id"], row) for row in rows)
        time.sleep(0.2)
    return found


def test_a_resume_that_counts_lines_loses_prompts_and_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "answer_in_process", resume_by_counting)
    root = tmp_path / "store"
    pid = in_a_fork(lambda: run_road(tmp_path, root))
    while not any(path.read_text().count("\n") >= 16 for path in root.glob("completions/*/partial/lines.jsonl")):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(PermanentError, match="neither an answer nor a reason"):
        run_road(tmp_path, root)
