"""A store as the road would leave it before training: a synthetic dataset, a tiny random target, keys that verify."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash.base.canonical import digest
from dflash.base.files import sha256_file, write_json
from dflash.base.progress import Progress
from dflash.base.records import CodeDigest, OutputFile, ParamsFile, Receipt, last_attempts, now, stage_key
from dflash.base.stage import HostContext
from dflash.base.store import load_inputs, read_params, stage_directory
from dflash.data.buckets_params import BucketsParams
from dflash.data.dataset_params import DatasetParams
from dflash.data.schemas import SAMPLES
from dflash.data.tables import write_table
from dflash.hosts import lease
from dflash.model.target_params import RandomTarget, TargetIdentity
from dflash.train import launch, schedule
from dflash.train.train_params import TrainParams

TINY = RandomTarget(hidden_size=16, intermediate_size=16, num_hidden_layers=5, head_dim=8)
CODE = CodeDigest(digest="c" * 64, modules={})
DRAFTER = {"block_size": 4, "num_draft_layers": 2, "head_dim": 8, "target_layer_ids": [1, 3], "max_anchors": 5}
DRAFTER |= {"lr": 3e-3, "schedule_steps": 40, "warmup": 2, "seed": 3}


def identity(tiny: RandomTarget = TINY) -> TargetIdentity:
    """How the plan names a tiny target."""
    sizes = {"num_layers": tiny.num_hidden_layers, "hidden_size": tiny.hidden_size, "vocab_size": tiny.vocab_size}
    return TargetIdentity(
        digest=None,
        revision=None,
        random=tiny,
        hybrid=tiny.model_type != "qwen3",
        max_position_embeddings=tiny.max_position_embeddings,
        eos_token_ids=[257],
        pad_token_id=256,
        mask_token_id=259,
        **sizes,
    )


def make_samples(count: int = 14, seed: int = 0, *, prompt_only: Iterable[int] = ()) -> list[dict[str, Any]]:
    """Rows of `schemas.SAMPLES`: counting texts of different lengths; those in `prompt_only` have one trained token."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        length = draw.randint(9, 24)
        first = draw.randint(60, 90)
        ids = [first + place % 7 for place in range(length)]
        messages = json.dumps([{"content": f"count {index}", "role": "user"}])
        rows.append(
            {
                "id": digest(messages),
                "source": "synthetic",
                "messages": messages,
                "input_ids": ids,
                "prompt_length": length - 1 if index in set(prompt_only) else 4,
                "finish_reason": "stop",
            }
        )
    return rows


def put_stage(store: Path, stage: str, params: dict[str, Any], upstream: dict[str, str]) -> Path:
    """The folder of a stage with a `params.json` whose key fits."""
    key = stage_key(stage, params, upstream, CODE.digest)
    directory = stage_directory(store, stage, key)
    directory.mkdir(parents=True, exist_ok=True)
    origins = dict.fromkeys(params, "default")
    ParamsFile(stage=stage, key=key, params=params, origins=origins, upstream=upstream, code=CODE).write(
        directory / "params.json"
    )
    return directory


def put_receipt(directory: Path, stage: str, names: list[str]) -> None:
    """The receipt of a stage over the files `names`."""
    files = [OutputFile(path=n, size=(directory / n).stat().st_size, sha256=sha256_file(directory / n)) for n in names]
    Receipt(
        stage=stage,
        key=directory.name,
        outputs=files,
        inputs={},
        host="local",
        started=now(),
        finished=now(),
        attempt=1,
        environment="0" * 12,
    ).write(directory / "receipt.json")


@dataclass(frozen=True)
class Training:
    """A training in a store of its own."""

    store: Path
    directory: Path
    placement: Path

    def params(self, **placed: Any) -> TrainParams:
        """Keyed values from `params.json`, placement from the file, `placed` on top."""
        values = json.loads(self.placement.read_text())["values"]
        return TrainParams.model_validate({**read_params(self.directory).params, **values, **placed})

    def run(self, *steps: int, attempt: int = 1, accept_env: str = "", **placed: Any) -> Any:
        """Trains in this process up to the last of `steps`."""
        from dflash.train import trainer

        schedule.merge_steps(self.directory, steps)
        inputs = load_inputs(read_params(self.directory), self.store)
        context = HostContext(attempt=attempt, placement={"accept_env": accept_env}, progress=Progress(quiet=True))
        return trainer.run(self.params(**placed), inputs, self.directory, context)

    def ensure_alive(self, *steps: int, run: str = "demo", invocation: str = "") -> None:
        """What the rule does first."""
        launch.ensure_alive(self.directory, self.store, self.placement, run, steps, invocation=invocation)

    def wait(self, step: int) -> Any:
        """What the rule does then."""
        return launch.wait_for_step(self.directory, step, progress=Progress(quiet=True), poll=0.02)

    def holder(self) -> Any:
        """Who holds the lease."""
        return lease.holder(schedule.lease_path(self.directory))

    def weights(self, step: int) -> dict[str, Any]:
        """All tensors of a checkpoint, masters and moments included."""
        from safetensors.torch import load_file

        folder = self.directory / f"step_{step}"
        found = {}
        for name in ("drafter/model", "state/masters", "state/moments"):
            found |= {f"{name}:{key}": value for key, value in load_file(folder / f"{name}.safetensors").items()}
        return found

    def batch_ids(self) -> list[list[str]]:
        """Batch ids by step, of the last attempt of each."""
        return [line.batch_ids for line in last_attempts(self.directory / "metrics.jsonl")]


def make_training(
    root: Path,
    *,
    rows: list[dict[str, Any]] | None = None,
    batching: dict[str, Any] | None = None,
    placed: dict[str, Any] | None = None,
    **train: Any,
) -> Training:
    """A store below `root` with everything upstream of a training, and the training's own folder."""
    store = root / "store"
    prompts = put_stage(store, "prompts", {"name": "synthetic", "digest": "d" * 64}, {})
    completions = put_stage(store, "completions", {"max_new_tokens": 8}, {"prompts": prompts.name})
    dataset_params = DatasetParams().keyed_values()
    dataset = put_stage(store, "dataset", dataset_params, {"completions/synthetic": completions.name})
    write_table(dataset / "train.parquet", SAMPLES, make_samples() if rows is None else rows)
    put_receipt(dataset, "dataset", ["train.parquet"])
    values = {"token_budget": 96, "max_seq_len": 32, "quantiles": 2, "batches_per_step": 2, **(batching or {})}
    buckets_params = BucketsParams.model_validate(values).keyed_values()
    buckets = put_stage(store, "buckets", buckets_params, {"dataset": dataset.name})
    write_json(buckets / "buckets.json", {})
    put_receipt(buckets, "buckets", ["buckets.json"])
    params = TrainParams.model_validate({"target": identity(), **DRAFTER, **train})
    upstream = {"dataset": dataset.name, "buckets": buckets.name}
    directory = put_stage(store, "train", params.keyed_values(), upstream)
    placement = root / "placement.json"
    write_json(placement, {"values": placed or {}})
    return Training(store, directory, placement)


def again(training: Training, root: Path) -> Training:
    """The same training in another store."""
    import shutil

    store = root / "store"
    shutil.copytree(
        training.store, store, ignore=shutil.ignore_patterns("step_*", "*.jsonl", "schedule.*", "status.json")
    )
    moved = store / training.directory.relative_to(training.store)
    return replace(training, store=store, directory=moved)


def saved(training: Training, step: int) -> bool:
    """Whether the state is on the disk, which may be some steps after the step: it is written while training goes on."""
    return step in schedule.resumable_steps(training.directory)


def wait_until(holds: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Waits for something to become true and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {seconds} s")


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python process that sees this checkout."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, text=True, **options)
