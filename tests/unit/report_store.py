"""A store as a finished run leaves it, small and invented, but true to every schema: keys verify, receipts hold.

`make_run` writes it and returns its places; tests then damage one thing. 6 checkpoints take 0.3 s.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.base.files import write_json
from dflash.base.records import (
    Artifact,
    ArtifactFile,
    CheckpointManifest,
    CodeDigest,
    Counts,
    Environment,
    Lineage,
    MetricsLine,
    OutputFile,
    ParamsFile,
    Receipt,
    RunManifest,
    StageEntry,
    TensorFact,
    stage_key,
)
from dflash.base.stage import HostContext, Inputs
from dflash.data.buckets_params import BucketsParams
from dflash.data.completions_params import CompletionsParams
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import REFERENCES, SAMPLES
from dflash.evaluate.evaluate_params import EvaluateParams, Online
from dflash.evaluate.references_params import ReferencesParams
from dflash.model.target_params import TargetIdentity
from dflash.report.report import run
from dflash.report.report_params import ReportParams
from dflash.train.train_params import TrainParams

TIME = "2026-01-02T03:04:05.678+00:00"
TORCH_KERNELS = {
    "linear": "torch",
    "functions": {
        "chunk_gated_delta_rule": "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule"
    },
    "form": "chunked",
    "attention": "sdpa",
}
FLA_KERNELS = {
    "linear": "fla",
    "functions": {"chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"},
    "form": "chunked",
    "attention": "sdpa",
}
TARGET = TargetIdentity(
    digest="ab" * 32,
    revision="demo-1",
    random=None,
    num_layers=8,
    hidden_size=160,
    vocab_size=2048,
    hybrid=True,
    max_position_embeddings=2048,
    eos_token_ids=[1],
    pad_token_id=0,
    mask_token_id=3,
)
BLOCK = 8


@dataclass
class Story:
    """What the invented run looks like; tests change one field."""

    run: str = "demo"
    steps: list[int] = field(default_factory=lambda: [50, 100, 150, 200, 250, 300])
    chain: Callable[[int], float] = lambda step: 1.2 + 1.3 * (1 - math.exp(-step / 110))
    prompt_lookup: float = 1.14
    ngram: float = 1.52
    spread: float = 0.09
    train_kernels: dict[str, Any] = field(default_factory=lambda: TORCH_KERNELS)
    judge_kernels: dict[str, dict[str, Any]] = field(default_factory=lambda: {"torch": TORCH_KERNELS})
    git: dict[str, Any] = field(
        default_factory=lambda: {"commit": "c0ffee" * 6 + "beef", "dirty": False, "changed": []}
    )
    adoptions: list[dict[str, Any]] = field(default_factory=list)
    determinism: str = "bitwise"
    truncated: int = 61
    shared: int = 0
    unchecked: int = 0
    prompt_sets: tuple[str, ...] = ("held_out",)
    source: str = "arithmetic"
    text: tuple[str, ...] = ("12", " +", " 30", " =", " 42", "\n", "42", " *", " 2", " =", " 84", "<|im_end|>")
    title: str | None = None
    lossless: float | None = None  # share of texts that real decodes got right; None: nothing was decoded for real
    extra: list[dict[str, Any]] = field(
        default_factory=list
    )  # changes to a chain row: one more row each, at the last step
    tags: dict[str, int] = field(default_factory=dict)
    """Requests by tag of every prompt set."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Fields of every environment that are other than the usual; mappings are merged."""
    batching: dict[str, Any] = field(default_factory=dict)
    mean_length: float = 91.4
    rate: float = 1.0
    """Factor on the throughput of training."""
    tensors: list[TensorFact] = field(
        default_factory=lambda: [TensorFact(name="fc.weight", shape=[160, 800], dtype="bfloat16", bytes=256_000)]
    )


@dataclass
class Made:
    """Where things lie: `directory(name)` is the folder of a result."""

    store: Path
    manifest_path: Path
    manifest: RunManifest
    workdir: Path

    def directory(self, name: str) -> Path:
        entry = next(entry for entry in self.manifest.stages if entry.name == name)
        return self.store / entry.stage / entry.key

    def report(self, **params: Any) -> str:
        """Runs the stage and returns the page."""
        placement = {"manifest": str(self.manifest_path), "store": str(self.store)}
        self.workdir.mkdir(exist_ok=True)
        run(ReportParams(run=self.manifest.run, **params), Inputs({}), self.workdir, HostContext(placement=placement))
        return (self.workdir / "report.html").read_text()


class Writer:
    """Writes results in the order of the road and remembers their keys."""

    def __init__(self, store: Path, story: Story) -> None:
        self.store = store
        self.story = story
        self.entries: list[StageEntry] = []
        self.params: dict[str, ParamsFile] = {}
        self.environments: dict[str, Environment] = {}

    def stage(self, name: str, params: dict[str, Any], upstream: list[str]) -> Path:
        """Writes `params.json` and returns the folder."""
        stage = name.split("/")[0]
        keys = {item: self.params[item].key for item in upstream}
        code = CodeDigest(digest=hashlib.sha256(stage.encode()).hexdigest(), modules={f"dflash.{stage}": "0" * 64})
        key = stage_key(stage, params, keys, code.digest)
        origins = dict.fromkeys(params, "default") | {"target": "derived"}
        if "lr" in params:
            origins["lr"] = "config/config.yaml:12"
        record = ParamsFile(stage=stage, key=key, params=params, origins=origins, upstream=keys, code=code)
        self.params[name] = record
        directory = self.store / stage / key
        record.write(directory / "params.json")
        self.entries.append(StageEntry(name=name, stage=stage, key=key, receipts={}))
        return directory

    def environment(self, kernels: dict[str, Any]) -> str:
        fields: dict[str, Any] = {
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "cpu": "Some CPU @ 2.4 GHz",
            "cores": 2,
            "memory_bytes": 8 << 30,
            "distributions": {f"package-{index}": f"1.{index}" for index in range(120)} | {"torch": "2.13.0"},
            "torch": {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "deterministic": False},
            "kernels": kernels,
            "git": self.story.git,
        }
        for name, value in self.story.environment.items():
            fields[name] = {**fields[name], **value} if isinstance(fields.get(name), dict) else value
        item = Environment(**fields)
        name = item.digest()[:12]
        item.write(self.store / "environments" / f"{name}.json")
        self.environments[name] = item
        return name

    def receipt(
        self,
        name: str,
        files: list[str],
        *,
        step: int | None = None,
        counts: Counts | None = None,
        results: dict[str, Any] | None = None,
        kernels: dict[str, Any] | None = None,
    ) -> None:
        params = self.params[name]
        directory = self.store / params.stage / params.key
        outputs = [
            OutputFile(
                path=file,
                size=(directory / file).stat().st_size,
                sha256=hashlib.sha256((directory / file).read_bytes()).hexdigest(),
            )
            for file in files
        ]
        receipt = Receipt(
            stage=params.stage,
            key=params.key,
            step=step,
            outputs=outputs,
            inputs={},
            host="local",
            started=TIME,
            finished=TIME,
            attempt=1,
            environment=self.environment(kernels or {}),
            counts=counts or Counts(),
            results=results or {},
        )
        where = {"train": f"receipts/step_{step}.json", "evaluate": f"step_{step}.json"}.get(
            params.stage, "receipt.json"
        )
        receipt.write(directory / where)
        entry = next(entry for entry in self.entries if entry.name == name)
        entry.receipts[where] = receipt.digest()


def make_run(root: Path, story: Story | None = None) -> Made:
    """Writes a whole run below `root`, without waiting for the disk."""
    with patch("os.fsync"):
        return _make_run(root, story or Story())


def _make_run(root: Path, story: Story) -> Made:
    store = root / "store"
    writer = Writer(store, story)
    _write_data(writer)
    _write_training(writer)
    _write_references(writer)
    _write_evaluations(writer)
    manifest = RunManifest(
        run=story.run,
        runkey="0123456789ab",
        created=TIME,
        config={name: item.params for name, item in writer.params.items()},
        params_files={name: item.model_dump(mode="json") for name, item in writer.params.items()},
        stages=writer.entries,
        steps=story.steps,
        git=story.git,
        environments={},
        adoptions=story.adoptions,
        determinism=story.determinism,  # type: ignore[arg-type]
    )
    path = root / "manifest.json"
    manifest.write(path)
    return Made(store, path, manifest, root / "out")


def _identity(index: int, kind: str) -> str:
    return hashlib.sha256(f"{kind} {index}".encode()).hexdigest()


def _write_data(writer: Writer) -> None:
    source = writer.story.source
    prompts = PromptsParams(name=source, path="p.jsonl", digest="cd" * 32)
    directory = writer.stage(f"prompts/{source}", prompts.keyed_values(), [])
    (directory / "prompts.parquet").write_bytes(b"prompts")
    writer.receipt(f"prompts/{source}", ["prompts.parquet"])
    completions = CompletionsParams(target=TARGET)
    directory = writer.stage(f"completions/{source}", completions.keyed_values(), [f"prompts/{source}"])
    (directory / "completions.parquet").write_bytes(b"completions")
    results = {"completions": 1900, "truncated": writer.story.truncated}
    counts = Counts(total=1900, ok=1900)
    writer.receipt(
        f"completions/{source}", ["completions.parquet"], counts=counts, results=results, kernels=TORCH_KERNELS
    )
    directory = writer.stage("dataset", DatasetParams().keyed_values(), [f"completions/{source}"])
    _write_dataset(directory, source, writer.story.mean_length, writer.story.unchecked)
    counts = Counts(total=1900, ok=1824, skipped=76, reasons={"duplicate": 70, "short": 6})
    writer.receipt("dataset", ["train.parquet", "dataset.json"], counts=counts)
    directory = writer.stage("buckets", BucketsParams(**writer.story.batching).keyed_values(), ["dataset"])
    write_json(directory / "buckets.json", BUCKETS)
    writer.receipt("buckets", ["buckets.json"])


def _write_dataset(directory: Path, source: str, mean: float, unchecked: int) -> None:
    rows = [
        {
            "id": _identity(index, "train"),
            "source": source,
            "messages": "[]",
            "input_ids": [1, 2, 3],
            "prompt_length": 1,
            "finish_reason": "stop",
        }
        for index in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), directory / "train.parquet")
    length = {"mean": mean, "min": 12, "max": 256, "quantiles": {"0.05": 21, "0.5": int(mean) - 7, "0.95": 210}}
    side = {"tokens": 150_000, "trainable_tokens": 101_000, "truncated": 55, "truncated_share": 0.03, "length": length}
    dataset = {
        "digest": hashlib.sha256(f"{source} {mean}".encode()).hexdigest(),
        "samples": 1824,
        "sources": {
            source: {"total": 1900, "train": 1640, "validation": 184, "skipped": {"duplicate": 70, "short": 6}}
        },
        "truncated_share": 0.03,
        "train": {"samples": 1640, **side},
        "validation": {"samples": 184, **side, "truncated": 6},
        "unchecked_against_exclude": unchecked,
    }
    write_json(directory / "dataset.json", dataset)


def _bucket(above: int, up_to: int, samples: int, tokens: float, batches: float, padding: float) -> dict[str, Any]:
    return {
        "above": above,
        "up_to": up_to,
        "samples": samples,
        "sample_share": samples / 1640,
        "tokens": int(tokens * 150_000),
        "token_share": tokens,
        "batches": int(batches * 60),
        "batch_share": batches,
        "batch_size": 4096 // up_to,
        "longest": up_to,
        "padding_share": padding,
    }


BUCKETS = {
    "samples": 1640,
    "tokens": 150_000,
    "trainable_tokens": 101_000,
    "cut_samples": 3,
    "cut_tokens": 120,
    "samples_without_anchor": 0,
    "length": {"mean": 91.4, "min": 12, "max": 256, "quantiles": {"0.5": 84}},
    "histogram": {
        "edges": [8 * index for index in range(33)],
        "counts": [int(150 * math.exp(-(((index - 9) / 7) ** 2))) for index in range(32)],
    },
    "edges": [40, 84, 130, 256],
    "buckets": [
        _bucket(0, 40, 410, 0.08, 0.1, 0.12),
        _bucket(40, 84, 410, 0.17, 0.2, 0.1),
        _bucket(84, 130, 410, 0.29, 0.3, 0.07),
        _bucket(130, 256, 410, 0.46, 0.4, 0.16),
    ],
    "padded_tokens": 168_000,
    "padding_share": 0.107,
    "budget_share": 0.91,
    "batches_per_epoch": 60,
    "steps_per_epoch": 15.0,
}


def _write_training(writer: Writer) -> None:
    story = writer.story
    params = TrainParams(
        target=TARGET, block_size=BLOCK, num_draft_layers=2, head_dim=32, schedule_steps=max(story.steps), lr="1e-3"
    )  # type: ignore[arg-type]
    directory = writer.stage("train", params.keyed_values(), ["dataset", "buckets"])
    environment = writer.environments[writer.environment(story.train_kernels)]
    for step in story.steps:
        CheckpointManifest(
            key=directory.name,
            step=step,
            created=TIME,
            config={},
            params_files={},
            placement={},
            dataset={},
            buckets={},
            topology={"targets": 1, "drafters": 1, "colocate": True},
            kernels=story.train_kernels,
            environment=environment,
            lineage=Lineage(attempts=[{"attempt": 1}]),
            tensors=story.tensors,
            drafter=Artifact(
                root="00" * 32, files=[ArtifactFile(path="model.safetensors", size=1_700_000, chunks=["0"])]
            ),
            state=None,
        ).write(directory / f"step_{step}" / "manifest.json")
        writer.receipt("train", [f"step_{step}/manifest.json"], step=step, kernels=story.train_kernels)
    noise = random.Random(0)
    lines = [_metrics_line(step, max(story.steps), noise, story.rate) for step in range(1, max(story.steps) + 1)]
    (directory / "metrics.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in lines))


def _metrics_line(step: int, steps: int, noise: random.Random, rate: float) -> MetricsLine:
    learned = 1 - math.exp(-3 * step / steps)
    accuracy = [learned * 0.8 * math.exp(-slot / 5) + noise.uniform(-0.03, 0.03) for slot in range(BLOCK - 1)]
    return MetricsLine(
        attempt=1,
        step=step,
        time=TIME,
        loss=7.6 - 5 * learned + noise.uniform(-0.2, 0.2),
        accuracy_by_slot=[max(0.0, value) for value in accuracy],
        learning_rate=1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps)),
        gradient_norm=1.0,
        anchors=512,
        tokens=9000,
        seconds=0.21,
        tokens_per_second={
            "target": rate * (21_000 + noise.uniform(-800, 800)),
            "drafter": rate * (14_000 + noise.uniform(-800, 800)),
        },
        padding_share=0.1,
        batch_ids=["a", "b"],
        buckets=[step % 4],
    )


def _write_references(writer: Writer) -> None:
    story = writer.story
    for kernel, bound in story.judge_kernels.items():
        params = ReferencesParams(target=TARGET, kernels=kernel)  # type: ignore[arg-type]
        directory = writer.stage(f"references/{kernel}", params.keyed_values(), ["dataset"])
        rows = [
            {
                "prompt_set": prompt_set,
                "id": _identity(index, "train" if index < story.shared else "held out"),
                "messages": "[]",
                "prompt_ids": [1, 2],
                "output_ids": [3, 4, 1],
                "finish_reason": "stop",
            }
            for prompt_set in story.prompt_sets
            for index in range(20)
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=REFERENCES), directory / "references.parquet")
        writer.receipt(f"references/{kernel}", ["references.parquet"], kernels={"target": bound})


def _write_evaluations(writer: Writer) -> None:
    story = writer.story
    params = EvaluateParams(
        target=TARGET,
        block_size=BLOCK,
        kernels=list(story.judge_kernels),  # type: ignore[arg-type]
        budgets=[8, 16],
        online=None if story.lossless is None else Online(prompts=4),
    )
    upstream = ["train", "dataset", *(f"references/{kernel}" for kernel in story.judge_kernels)]
    directory = writer.stage("evaluate", params.keyed_values(), upstream)
    for step in story.steps:
        rows = [
            row
            for kernel in story.judge_kernels
            for prompt_set in story.prompt_sets
            for row in _rows(story, writer.params["train"].key, step, prompt_set, kernel)
        ]
        if step == max(story.steps):
            rows += [rows[0] | other for other in [*_online(story), *story.extra]]
        write_json(directory / f"step_{step}" / "rows.json", rows)
        write_json(directory / f"step_{step}" / "samples.json", _samples(story))
        files = [f"step_{step}/rows.json", f"step_{step}/samples.json"]
        if story.tags:
            write_json(directory / f"step_{step}" / "tags.json", _tag_rows(story, rows))
            files.append(f"step_{step}/tags.json")
        writer.receipt("evaluate", files, step=step)


def _tag_rows(story: Story, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of tau for each tag, whose requests are fewer."""
    taus = [row for row in rows if row["metric"] == "tau_pooled" and row["length_bucket"] == "all"]
    return [row | {"n": n, "value": row["value"] + 0.5, "tag": tag} for tag, n in story.tags.items() for row in taus]


def _rows(story: Story, train_key: str, step: int, prompt_set: str, kernel: str) -> list[dict[str, Any]]:
    chain = story.chain(step)
    methods = {
        ("chain", BLOCK - 1): chain,
        ("tree", 8): 1 + (chain - 1) * 1.25,
        ("tree", 16): 1 + (chain - 1) * 1.4,
        ("prompt_lookup", BLOCK - 1): story.prompt_lookup,
        ("ngram", BLOCK - 1): story.ngram,
    }
    rows = []

    def add(method: str, budget: int, bucket: str, metric: str, value: float, **other: Any) -> None:
        spread = story.spread if metric.startswith("tau") else 0.02
        row = {
            "run": "",
            "train_key": train_key,
            "step": step,
            "drafter": "trained",
            "prompt_set": prompt_set,
            "length_bucket": bucket,
            "kernel": kernel,
            "method": method,
            "budget": budget,
            "block_size": BLOCK,
            "horizon": BLOCK - 1,
            "sampling": "greedy",
            "convention": "committed_with_bonus",
            "metric": metric,
            "value": value,
            "ci_low": value - spread,
            "ci_high": value + spread,
            "n": 184,
        }
        rows.append(row | other)

    for (method, budget), value in methods.items():
        add(method, budget, "all", "tau_pooled", value)
        add(method, budget, "all", "tau_request_mean", value + 0.05)
        add(method, budget, "all", "tau_pooled", value + 0.1, convention="committed_with_bonus_unclipped")
        add(method, budget, "0-128", "tau_pooled", value + 0.1, n=150)
        add(method, budget, "128-512", "tau_pooled", value - 0.1, n=70)
    for slot in range(1, BLOCK):
        given = 0.75 * math.exp(-slot / 30) * (0.5 + step / 600)
        add("chain", BLOCK - 1, "all", f"slot_accuracy_{slot}", given * math.exp(-slot / 4))
        add("chain", BLOCK - 1, "all", f"slot_accuracy_given_prefix_{slot}", given)
    return rows


def _online(story: Story) -> list[dict[str, Any]]:
    """How rows of real decodes differ from a row of the chain."""
    if story.lossless is None:
        return []
    values = {"tau_pooled": 2.2, "speedup": 1.6, "lossless": story.lossless, "same_lengths_as_offline": 1.0}
    bounds = {"ci_low": 1.0, "ci_high": 2.4}
    return [{"method": "online", "metric": name, "value": value, "n": 4, **bounds} for name, value in values.items()]


def _samples(story: Story) -> list[dict[str, Any]]:
    output = list(story.text) * 4
    origin, verifications, place = ["prefill"], [], 1
    noise = random.Random(1)
    while place < len(output):
        accepted = min(noise.choice([0, 1, 2, 3, 5, 7]), len(output) - place)
        origin += ["draft"] * accepted
        place += accepted
        committed = accepted
        if place < len(output):
            origin.append("bonus")
            place += 1
            committed += 1
        drafted = [" x"] * (BLOCK - 1)
        verifications.append({"anchor": place, "drafted": drafted, "accepted": accepted, "committed": committed})
    return [
        {
            "kernel": kernel,
            "prompt_set": prompt_set,
            "id": _identity(index, "held out"),
            "prompt": "<|im_start|>user\nCompute 12 + 30, then double it.<|im_end|>\n<|im_start|>assistant\n",
            "output": output,
            "origin": origin,
            "verifications": verifications,
        }
        for kernel in story.judge_kernels
        for prompt_set in story.prompt_sets
        for index in range(3)
    ]


def rewrite_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Edits a JSON file in place, as a careless hand would."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
