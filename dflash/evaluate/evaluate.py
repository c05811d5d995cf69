"""The `evaluate` stage: how many tokens a verification a checkpoint commits, beside what needs no training at all.

One checkpoint is judged against every references result (one a kernel), with chains, with trees of each budget, and with the
baselines. While the features are cached the target does not run: only its embedding and head are loaded.

The probe of the training is compared with that of each references result: what the target gives for fixed sequences under the
kernels of the one and of the other. The gap stands in the receipt; a wrong kernel stops the evaluation.

Cost: one drafter forward of `anchor_chunk` anchors at a time over one request; memory is the drafter, the two ends of the
target, one request's features and the logits of one chunk (see `acceptance.py`).

Files, relative to the stage's folder:
    step_<n>/rows.json         tidy rows, see `metrics.py`
    step_<n>/requests.parquet  one row a request, kernel and method, with its acceptance lengths
    step_<n>/samples.json      some requests with their text, and which tokens were drafted and accepted
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dflash.base.errors import PermanentError
from dflash.base.files import write_json
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data.chat import length_limit
from dflash.data.schemas import REFERENCES, SAMPLES
from dflash.data.tables import read_pieces, read_rows, write_table
from dflash.evaluate import metrics
from dflash.evaluate.acceptance import Continuation, Drafts, Walk, draft_continuation
from dflash.evaluate.baselines import NGram, walk_ngram, walk_prompt_lookup
from dflash.evaluate.ends import Ends, load_ends
from dflash.evaluate.evaluate_params import EvaluateParams
from dflash.evaluate.features import FeatureReader
from dflash.evaluate.overlap import refuse_overlap
from dflash.evaluate.samples import sample
from dflash.model.drafter import Drafter
from dflash.model.export import load_drafter
from dflash.model.identity import target_source
from dflash.model.probe import check_target, kernel_gap
from dflash.model.target import DTYPES, Target, load_target, load_tokenizer

OWN_DRAFTER = "trained"
"""In the `drafter` column: a checkpoint of the run's own training."""

BASELINES = ("prompt_lookup", "ngram")
SAMPLES_A_SET = 4
"""Requests of each prompt set whose text is kept in `samples.json`."""

REQUESTS = pa.schema(
    [
        pa.field("prompt_set", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("kernel", pa.string(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("budget", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("anchors", pa.list_(pa.int32()), nullable=False),  # output index of each verification's anchor
        pa.field("acceptance_lengths", pa.list_(pa.int32()), nullable=False),  # tokens committed by each, clipped
        pa.field("acceptance_lengths_unclipped", pa.list_(pa.int32()), nullable=False),
    ]
)


@dataclass(frozen=True)
class Judge:
    """What all requests share."""

    params: EvaluateParams
    drafter: Drafter
    ends: Ends
    ngram: NGram
    device: str
    anchor_chunk: int

    def methods(self) -> list[tuple[str, int]]:
        """(method, budget) of everything that is measured, in the order of the tables."""
        slots = self.params.block_size - 1
        trees = [("tree", budget) for budget in self.params.budgets]
        return [("chain", slots), *trees, *((name, slots) for name in BASELINES)]

    def draft(self, continuation: Continuation, features: torch.Tensor) -> Drafts:
        """The drafter's proposals all along one continuation."""
        return draft_continuation(
            self.drafter,
            continuation,
            features.to(self.device),
            self.ends.embed,
            self.ends.head,
            top=max(self.params.budgets, default=1),
            chunk=self.anchor_chunk,
        )

    def walk(self, method: str, budget: int, drafts: Drafts) -> Walk:
        """The verifications of one method along the continuation of `drafts`."""
        continuation, block_size = drafts.continuation, self.params.block_size
        if method == "chain":
            return drafts.walk_chain()
        if method == "tree":
            return drafts.walk_tree(budget)
        if method == "prompt_lookup":
            return walk_prompt_lookup(continuation, block_size, self.params.ngram)
        return walk_ngram(continuation, block_size, self.ngram)


@torch.no_grad()
def run(params: EvaluateParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The stage.

    Raises:
        PermanentError: the checkpoint is not of the shape that the evaluation is for, drafts nonsense (NaN), or was trained
            on prompts that it is judged on; or the target's features under one of the kernels are further from those of the
            training than right kernels can be.
        CorruptError: references or features do not fit together.
    """
    train = inputs.one("train")
    if inputs.step is None:
        raise PermanentError("evaluate runs once a checkpoint; no step was given")
    checkpoint = train.directory / f"step_{inputs.step}" / "drafter"
    drafter = load_drafter(checkpoint, dtype=DTYPES[params.dtype]).to(host_context.device).eval()
    check_drafter(drafter, params, str(checkpoint))
    training = inputs.one("dataset").directory / "train.parquet"
    references = {kernel: inputs.one(f"references/{kernel}") for kernel in params.kernels}
    stored = {
        kernel: read_rows(item.directory / "references.parquet", REFERENCES) for kernel, item in references.items()
    }
    judged = [(row["prompt_set"], json.loads(row["messages"])) for row in stored[params.kernels[0]]]
    refuse_overlap(judged, training)
    source = target_source(params.target, inputs.target_path)
    judge = Judge(
        params,
        drafter,
        load_ends(source, params.dtype, host_context.device),
        NGram.count(training_samples(training), params.ngram),
        host_context.device,
        host_context.placement.get("anchor_chunk", params.anchor_chunk),
    )
    tally = Tally(judge, load_tokenizer(source))
    gaps = {kernel: kernel_gap(train.directory, item.directory, kernel) for kernel, item in references.items()}
    for kernel, upstream in references.items():
        reader = feature_reader(upstream, params, kernel, inputs, host_context)
        rows = stored[kernel]
        for number, row in enumerate(rows):
            continuation = continuation_of(row, upstream, params)
            name = f"{row['prompt_set']}/{row['id'][:12]}"
            tally.add(kernel, row, continuation, reader.read(number, continuation.prompt + continuation.output, name))
            host_context.progress.update(number + 1, len(rows), f"requests under {kernel}")
    for form, sets in tally.tau().items():
        for name, values in sets.items():
            said = ", ".join(f"{method} {value:.2f}" for method, value in values.items())
            host_context.progress.say(f"tau on {name} under {form}: {said}")
    beaten = beaten_by(tally.tau())
    for entry in beaten:
        host_context.progress.say(
            f"WARNING: {entry['method']} commits {entry['tau']:.3f} tokens a verification on {entry['prompt_set']}, "
            f"the drafter {entry['drafter_tau']:.3f}"
        )
    files = tally.write(workdir, train.params.key, inputs.step)
    results = {"tau": tally.tau(), "beaten_by": beaten, "kernel_gap": gaps}
    return Outputs(files, Counts(total=tally.judged, ok=tally.judged), results)


class Tally:
    """Judges requests one by one and keeps what the files are made of: a few hundred bytes a request and method."""

    def __init__(self, judge: Judge, tokenizer: Any) -> None:
        self._judge = judge
        self._tokenizer = tokenizer
        self._results: dict[tuple[str, str, str, int], list[metrics.RequestResult]] = {}
        self._requests: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._shown: Counter[tuple[str, str]] = Counter()
        self.judged = 0

    def add(self, kernel: str, row: dict[str, Any], continuation: Continuation, features: torch.Tensor) -> None:
        """Judges one request (a row of the references) with every method."""
        drafts = self._judge.draft(continuation, features)
        prompt_set = row["prompt_set"]
        for method, budget in self._judge.methods():
            walk = self._judge.walk(method, budget, drafts)
            result = request_result(walk, drafts, with_slots=method == "chain")
            self._results.setdefault((kernel, prompt_set, method, budget), []).append(result)
            self._requests.append(request_row(row, kernel, method, budget, walk))
            if method == "chain" and self._shown[kernel, prompt_set] < SAMPLES_A_SET:
                self._shown[kernel, prompt_set] += 1
                self._samples.append({"kernel": kernel, **sample(row, walk, drafts, self._tokenizer)})
        self.judged += 1

    def tau(self) -> dict[str, dict[str, dict[str, float]]]:
        """The pooled tau by kernel, prompt set and method (`chain`, `tree_<budget>`, `prompt_lookup`, `ngram`)."""
        tau: dict[str, dict[str, dict[str, float]]] = {}
        for (kernel, prompt_set, method, budget), results in self._results.items():
            name = f"tree_{budget}" if method == "tree" else method
            tau.setdefault(kernel, {}).setdefault(prompt_set, {})[name] = metrics.tau(results)
        return tau

    def rows(self, train_key: str, step: int) -> list[dict[str, Any]]:
        """The tidy rows."""
        params = self._judge.params
        made = []
        for (kernel, prompt_set, method, budget), results in self._results.items():
            labels = {
                "train_key": train_key,
                "step": step,
                "drafter": OWN_DRAFTER,
                "prompt_set": prompt_set,
                "kernel": kernel,
                "method": method,
                "budget": budget,
            }
            made += metrics.rows(labels, results, params.block_size, settings(params))
        return made

    def write(self, workdir: Path, train_key: str, step: int) -> list[str]:
        """Writes the three files; returns their names."""
        folder = f"step_{step}"
        (workdir / folder).mkdir(parents=True, exist_ok=True)
        write_json(workdir / folder / "rows.json", self.rows(train_key, step))
        write_table(workdir / folder / "requests.parquet", REQUESTS, self._requests)
        write_json(workdir / folder / "samples.json", self._samples)
        return [f"{folder}/rows.json", f"{folder}/requests.parquet", f"{folder}/samples.json"]


def check_drafter(drafter: Drafter, params: EvaluateParams, where: str) -> None:
    """Refuses a checkpoint of another shape than the evaluation is for.

    Raises:
        PermanentError: names what differs, and both values.
    """
    config = drafter.config
    for name, held, wanted in (
        ("taps", list(config.target_layer_ids), params.taps),
        ("block size", config.block_size, params.block_size),
        ("vocabulary size", config.vocab_size, params.target.vocab_size),
        ("hidden size", config.hidden_size, params.target.hidden_size),
    ):
        if held != wanted:
            raise PermanentError(
                f"the checkpoint has {name} {held}, the evaluation is for {wanted}",
                where=where,
                remedy="Run `dflash run`, which plans evaluation and training together.",
            )


def training_samples(path: Path) -> Iterator[tuple[Sequence[int], int]]:
    """(input ids, prompt length) of the training samples."""
    for piece in read_pieces(path, SAMPLES, ["input_ids", "prompt_length"]):
        ids = piece.column("input_ids").combine_chunks()
        for row, length in zip(ids, piece.column("prompt_length").to_pylist(), strict=True):
            yield row.values.to_numpy(), length


def continuation_of(row: dict[str, Any], references: Upstream, params: EvaluateParams) -> Continuation:
    """A row of the references as a continuation, with the length limit it was made under."""
    most, longest = references.params.params["max_new_tokens"], params.target.max_position_embeddings
    return Continuation(row["prompt_ids"], row["output_ids"], length_limit(most, longest, len(row["prompt_ids"])))


def feature_reader(
    upstream: Upstream, params: EvaluateParams, kernel: str, inputs: Inputs, host_context: HostContext
) -> FeatureReader:
    """Features of a references result; the target is loaded only for requests that are not cached."""

    def load() -> Target:
        dtype = upstream.params.params["dtype"]
        source = target_source(params.target, inputs.target_path)
        target = load_target(source, dtype, host_context.device, kernels=kernel)
        check_target(target, upstream.directory)
        return target

    return FeatureReader(upstream.directory, params.taps, kernel, load)


def settings(params: EvaluateParams) -> metrics.Settings:
    """How intervals and buckets are made."""
    return metrics.Settings(
        params.length_edges,
        params.target.max_position_embeddings,
        params.bootstrap,
        params.confidence,
        params.seed,
    )


def request_result(walk: Walk, drafts: Drafts, *, with_slots: bool) -> metrics.RequestResult:
    """What the metrics need of one request under one method."""
    first = len(drafts.continuation.prompt)
    block_size = drafts.tokens.shape[1] + 1
    whole = [index for index in walk.anchors if index + block_size < len(drafts.continuation.output)]
    result = metrics.RequestResult(
        [first + index for index in walk.anchors], walk.lengths, [first + index for index in whole], walk.unclipped
    )
    if with_slots:
        result.hits, result.in_bounds = drafts.hits(), drafts.in_bounds()
        result.anchor_contexts = first + np.arange(len(result.hits))
    return result


def request_row(row: dict[str, Any], kernel: str, method: str, budget: int, walk: Walk) -> dict[str, Any]:
    """A row of `requests.parquet`."""
    return {
        "prompt_set": row["prompt_set"],
        "id": row["id"],
        "kernel": kernel,
        "method": method,
        "budget": budget,
        "prompt_tokens": len(row["prompt_ids"]),
        "output_tokens": len(row["output_ids"]),
        "finish_reason": row["finish_reason"],
        "anchors": walk.anchors,
        "acceptance_lengths": walk.lengths,
        "acceptance_lengths_unclipped": walk.unclipped,
    }


def beaten_by(tau: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """The baselines that commit more tokens a verification than the drafter's chain, by kernel and set."""
    return [
        {
            "kernel": kernel,
            "prompt_set": prompt_set,
            "method": method,
            "tau": values[method],
            "drafter_tau": values["chain"],
        }
        for kernel, sets in tau.items()
        for prompt_set, values in sets.items()
        for method in BASELINES
        if values[method] > values["chain"]
    ]
