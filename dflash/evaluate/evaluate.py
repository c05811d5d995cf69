"""The `evaluate` stage: how many tokens a verification a checkpoint commits, beside what needs no training at all.

One checkpoint is judged against every references result (one a kernel), with chains, with trees of each budget, and with the
baselines; other drafters stand beside it (`candidates.py`), and some prompts are decoded for real when that is asked for
(`online.py`). While the features are cached the target does not run otherwise: only its embedding and head are loaded.

The probe of the training is compared with that of each references result: what the target gives for fixed sequences under the
kernels of the one and of the other. The gap stands in the receipt; a wrong kernel stops the evaluation.

Cost: one drafter forward of `anchor_chunk` anchors at a time over one request; memory is the drafters, the two ends of the
target, one request's features, the logits of one chunk (see `acceptance.py`), and per request what the intervals are made of:
about 1 kB a drafter and kernel, however long its text (`metrics.Counted`).

Files, relative to the stage's folder:
    step_<n>/rows.json         tidy rows, see `metrics.py`
    step_<n>/requests.parquet  one row a request, kernel, drafter and method, with its acceptance lengths
    step_<n>/tags.json         tidy rows of each tag of a prompt set, where prompts have tags (`tags.py`)
    step_<n>/samples.json      some requests with their text, and which tokens were drafted and accepted
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from dflash.base.errors import PermanentError
from dflash.base.files import write_json
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data.chat import length_limit
from dflash.data.schemas import REFERENCES, SAMPLES
from dflash.data.tables import ROW_GROUP, TableWriter, read_pieces, rows_of
from dflash.evaluate import metrics
from dflash.evaluate.acceptance import Continuation, Drafts, Walk, draft_continuation
from dflash.evaluate.baselines import NGRAM_TOKENS, NGram, walk_ngram, walk_prompt_lookup
from dflash.evaluate.candidates import OWN_DRAFTER, Candidate, other_drafter
from dflash.evaluate.decode import Decoder
from dflash.evaluate.ends import Ends, load_ends
from dflash.evaluate.evaluate_params import EvaluateParams, Online
from dflash.evaluate.features import FeatureReader
from dflash.evaluate.online import ONLINE_CHAIN, ONLINE_TREE, Prompt, decode_all, sampling_name
from dflash.evaluate.online import rows as online_rows
from dflash.evaluate.overlap import refuse_overlap
from dflash.evaluate.samples import sample
from dflash.evaluate.tags import COLUMN, Places, read_places
from dflash.evaluate.tags import FILE as TAGS
from dflash.model.drafter import Drafter
from dflash.model.export import load_drafter
from dflash.model.identity import target_source
from dflash.model.probe import check_target, kernel_gap
from dflash.model.target import DTYPES, Target, load_target, load_tokenizer, select_taps

BASELINES = ("prompt_lookup", "ngram")
ROWS_AT_ONCE = 64
"""Rows of the references that are Python objects at a time: 64 of 2,200 tokens take 5 MB."""
SAMPLES_A_SET = 4
"""Requests of each prompt set whose text is kept in `samples.json`."""

REQUESTS = pa.schema(
    [
        pa.field("prompt_set", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("kernel", pa.string(), nullable=False),
        pa.field("drafter", pa.string(), nullable=False),
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
    """What all requests share. stored: the taps whose features the references hold."""

    params: EvaluateParams
    candidates: Sequence[Candidate]
    stored: Sequence[int]
    ends: Ends
    ngram: NGram
    device: str
    anchor_chunk: int

    def methods(self, candidate: Candidate) -> list[tuple[str, int]]:
        """(method, budget) of everything that is measured of a drafter, in the order of the tables; the baselines go with the
        run's own."""
        slots = candidate.block_size - 1
        trees = [("tree", budget) for budget in self.params.budgets]
        baselines = [(name, slots) for name in BASELINES] if candidate.own else []
        return [("chain", slots), *trees, *baselines]

    def draft(self, candidate: Candidate, continuation: Continuation, features: torch.Tensor) -> Drafts:
        """A drafter's proposals all along one continuation; `features` of the stored taps."""
        online = self.params.online.budget if self.params.online is not None else None
        return draft_continuation(
            candidate.drafter,
            continuation,
            select_taps(features, self.stored, candidate.taps).to(self.device),
            self.ends.embed,
            self.ends.head,
            top=max([*self.params.budgets, online or 1]),
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
            on prompts that it is judged on; another drafter is for another vocabulary or hidden size; or the target's features
            under one of the kernels are further from those of the training than right kernels can be.
        CorruptError: references or features do not fit together.
    """
    train = inputs.one("train")
    if inputs.step is None:
        raise PermanentError("evaluate runs once a checkpoint; no step was given")
    checkpoint = train.directory / f"step_{inputs.step}" / "drafter"
    candidates = load_candidates(params, inputs, checkpoint, host_context.device)
    training = inputs.one("dataset").directory / "train.parquet"
    references = {kernel: inputs.one(f"references/{kernel}") for kernel in params.kernels}
    first = references[params.kernels[0]]
    refuse_overlap(judged_messages(first.directory / "references.parquet"), training)
    source = target_source(params.target, inputs.target_path)
    judge = Judge(
        params,
        candidates,
        first.params.params["taps"],
        load_ends(source, params.dtype, host_context.device),
        NGram.count(training_samples(training), params.ngram),
        host_context.device,
        host_context.placement.get("anchor_chunk", params.anchor_chunk),
    )
    gaps = {kernel: kernel_gap(train.directory, item.directory, kernel) for kernel, item in references.items()}
    folder = workdir / f"step_{inputs.step}"
    folder.mkdir(parents=True, exist_ok=True)
    with TableWriter(folder / "requests.parquet", REQUESTS) as writer:
        tally = Tally(judge, load_tokenizer(source), writer, wants_online(params, train, inputs.step))
        for kernel, upstream in references.items():
            judge_all(tally, kernel, upstream, inputs, host_context)
        tally.flush()
    beaten = say(tally, host_context)
    write_json(folder / "rows.json", tally.rows(train.params.key, inputs.step))
    write_json(folder / "samples.json", tally.samples)
    by_tag = tally.rows_by_tag(read_places(first.directory), train.params.key, inputs.step)
    if by_tag:
        write_json(folder / TAGS, by_tag)
    results = {
        "tau": tally.tau(),
        "beaten_by": beaten,
        "ngram_tokens": judge.ngram.tokens,
        "kernel_gap": gaps,
        "drafters": {item.label: drafter_facts(item) for item in judge.candidates},
    }
    names = ["rows.json", "requests.parquet", "samples.json", *([TAGS] if by_tag else [])]
    files = [f"step_{inputs.step}/{name}" for name in names]
    return Outputs(files, Counts(total=tally.judged, ok=tally.judged), results)


def judge_all(tally: Tally, kernel: str, upstream: Upstream, inputs: Inputs, host_context: HostContext) -> None:
    """Judges every request of one references result, one after another, then decodes some for real if that is asked for."""
    params = tally.judge.params
    devices = host_context.placement.get("target_devices", params.target_devices) or host_context.device

    @cache
    def target() -> Target:
        source = target_source(params.target, inputs.target_path)
        loaded = load_target(source, upstream.params.params["dtype"], devices, kernels=kernel)
        check_target(loaded, upstream.directory)
        return loaded

    reader = FeatureReader(upstream.directory, tally.judge.stored, kernel, target)
    path = upstream.directory / "references.parquet"
    total = rows_of(path)
    for number, row in enumerate(stream_rows(path)):
        continuation = continuation_of(row, upstream, params)
        name = f"{row['prompt_set']}/{row['id'][:12]}"
        tally.add(kernel, row, continuation, reader.read(number, continuation.prompt + continuation.output, name))
        host_context.progress.update(number + 1, total, f"requests under {kernel}")
    tally.decode(kernel, target, lambda done: host_context.progress.update(done, done, f"decodes under {kernel}"))


def wants_online(params: EvaluateParams, train: Upstream, step: int) -> Online | None:
    """What to decode for real at this checkpoint: nothing unless it is asked for at each, or is the last of the schedule."""
    if params.online is None or params.online.every_checkpoint:
        return params.online
    return params.online if step == train.params.params.get("schedule_steps") else None


def load_candidates(params: EvaluateParams, inputs: Inputs, checkpoint: Path, device: str) -> list[Candidate]:
    """The checkpoint, then the drafters that were trained elsewhere."""
    dtype = DTYPES[params.dtype]
    drafter = load_drafter(checkpoint, dtype=dtype).to(device).eval()
    check_drafter(drafter, params, str(checkpoint))
    others = [other_drafter(item, params, inputs.files, dtype, device) for item in params.drafters]
    return [Candidate(OWN_DRAFTER, drafter), *others]


def drafter_facts(candidate: Candidate) -> dict[str, Any]:
    """What the receipt says of a drafter."""
    return {
        "name": candidate.name,
        "differs": list(candidate.differs),
        "taps": list(candidate.taps),
        "block_size": candidate.block_size,
    }


class Tally:
    """Judges requests one by one and keeps what the files are made of: a few kilobytes a request and drafter."""

    def __init__(self, judge: Judge, tokenizer: Any, writer: TableWriter, online: Online | None) -> None:
        self.judge = judge
        self.samples: list[dict[str, Any]] = []
        self.judged = 0
        self._tokenizer = tokenizer
        self._writer = writer
        self._rows: list[dict[str, Any]] = []
        self._online = online
        self._settings = settings(judge.params)
        self._results: dict[tuple[str, str, str, str, int], metrics.Counted] = {}
        self._texts: dict[tuple[str, str], array[int]] = {}
        self._shown: Counter[tuple[str, str]] = Counter()
        self._prompts: dict[tuple[str, str], list[Prompt]] = {}
        self._decoded: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}

    def add(self, kernel: str, row: dict[str, Any], continuation: Continuation, features: torch.Tensor) -> None:
        """Judges one request (a row of the references) with every drafter and method."""
        prompt_set = row["prompt_set"]
        # Only equality is asked of it, within this process: the hash of a text, not the text.
        self._texts.setdefault((kernel, prompt_set), array("q")).append(hash(tuple(continuation.output)))
        for candidate in self.judge.candidates:
            drafts = self.judge.draft(candidate, continuation, features)
            for method, budget in self.judge.methods(candidate):
                walk = self.judge.walk(method, budget, drafts)
                key = (kernel, prompt_set, candidate.label, method, budget)
                slots = candidate.block_size - 1 if method == "chain" else 0
                if key not in self._results:
                    self._results[key] = metrics.Counted(self._settings.buckets(), slots)
                self._results[key].add(request_result(walk, drafts, with_slots=slots > 0))
                self._rows.append(request_row(row, kernel, candidate.label, method, budget, walk))
                if candidate.own and method == "chain":
                    self._show(kernel, row, walk, drafts)
            if candidate.own:
                self._keep_for_decoding(kernel, prompt_set, drafts)
        self.judged += 1
        if len(self._rows) >= ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Hands the rows of `requests.parquet` that are waiting to the writer."""
        self._writer.append(self._rows)
        self._rows = []

    def _show(self, kernel: str, row: dict[str, Any], walk: Walk, drafts: Drafts) -> None:
        place = kernel, row["prompt_set"]
        if self._shown[place] < SAMPLES_A_SET:
            self._shown[place] += 1
            self.samples.append({"kernel": kernel, **sample(row, walk, drafts, self._tokenizer)})

    def _keep_for_decoding(self, kernel: str, prompt_set: str, drafts: Drafts) -> None:
        kept = self._prompts.setdefault((kernel, prompt_set), [])
        if self._online is None or len(kept) == self._online.prompts:
            return
        offline = {ONLINE_CHAIN: drafts.walk_chain().lengths}
        if self._online.budget is not None:
            offline[ONLINE_TREE] = drafts.walk_tree(self._online.budget).lengths
        kept.append(Prompt(drafts.continuation, offline))

    def decode(self, kernel: str, target: Callable[[], Target], progress: Callable[[int], None]) -> None:
        """Decodes for real the prompts that were kept for it."""
        if self._online is None:
            return
        own = self.judge.candidates[0]
        stops = frozenset(target().facts.eos_ids)
        decoder = Decoder(target(), own.drafter, self.judge.ends.embed, self.judge.ends.head, stops)
        for (form, prompt_set), prompts in self._prompts.items():
            if form == kernel:
                found = decode_all(decoder, prompts, self._online, self.judge.params.seed, progress)
                for method, decoded in found.items():
                    budget = self._online.budget if method == ONLINE_TREE else own.block_size - 1
                    self._decoded[kernel, prompt_set, method, budget or 0] = decoded

    def tau(self) -> dict[str, dict[str, dict[str, float]]]:
        """The pooled tau by kernel, prompt set and method: `chain`, `tree_<budget>`, `prompt_lookup`, `ngram`, `online`, and
        `chain of <drafter>` for drafters that were trained elsewhere."""
        tau: dict[str, dict[str, dict[str, float]]] = {}
        for (kernel, prompt_set, label, method, budget), counted in self._results.items():
            name = f"tree_{budget}" if method == "tree" else method
            name = name if label == OWN_DRAFTER else f"{name} of {label}"
            tau.setdefault(kernel, {}).setdefault(prompt_set, {})[name] = metrics.tau(counted.committed())
        return tau

    def lossy(self) -> list[str]:
        """Real decodes whose text is not that of the target alone, or whose lengths are not those worked out offline."""
        found = []
        for (kernel, prompt_set, method, _), decoded in self._decoded.items():
            for name, words in (("lossless", "is not the target's own text"), ("same_lengths", "differs from offline")):
                wrong = sum(item[name] is False for item in decoded)
                if wrong:
                    found.append(f"{method} on {prompt_set} under {kernel}: {wrong} of {len(decoded)} prompts, {words}")
        return found

    def rows(self, train_key: str, step: int) -> list[dict[str, Any]]:
        """The tidy rows."""
        params = self.judge.params
        how = self._settings
        blocks = {item.label: item.block_size for item in self.judge.candidates}
        whose = {"train_key": train_key, "step": step}
        made = []
        for (kernel, prompt_set, label, method, budget), counted in self._results.items():
            labels = {**whose, "drafter": label, "prompt_set": prompt_set, "kernel": kernel, "method": method}
            made += metrics.rows({**labels, "budget": budget}, counted, blocks[label], how)
        for (kernel, prompt_set, method, budget), decoded in self._decoded.items():
            labels = {**whose, "drafter": OWN_DRAFTER, "prompt_set": prompt_set, "kernel": kernel, "method": method}
            sampling = sampling_name(self._online.temperature if self._online else 0.0)
            made += online_rows({**labels, "budget": budget}, decoded, params.block_size, sampling, how)
        for kernel in params.kernels[1:]:
            made += self._differences(kernel, params.kernels[0], whose, blocks, how)
        return made

    def rows_by_tag(self, places: Places, train_key: str, step: int) -> list[dict[str, Any]]:
        """Tidy rows of tau for each tag of each prompt set, with the tag as a last column."""
        blocks = {item.label: item.block_size for item in self.judge.candidates}
        made = []
        for (kernel, prompt_set, label, method, budget), counted in self._results.items():
            labels = {
                "train_key": train_key,
                "step": step,
                "drafter": label,
                "prompt_set": prompt_set,
                "kernel": kernel,
                "method": method,
                "budget": budget,
            }
            for tag, own in places.get(prompt_set, {}).items():
                rows = metrics.rows(labels, counted.of_requests(own), blocks[label], self._settings)
                made += [{**row, COLUMN: tag} for row in rows]
        return made

    def _differences(
        self, first: str, second: str, whose: dict[str, Any], blocks: dict[str, int], how: metrics.Settings
    ) -> list[dict[str, Any]]:
        """Rows that compare two kernels on the same requests."""
        made = []
        for (kernel, prompt_set, label, method, budget), counted in self._results.items():
            if kernel != first:
                continue
            others = self._results[second, prompt_set, label, method, budget]
            labels = {
                **whose,
                "drafter": label,
                "prompt_set": prompt_set,
                "kernel": f"{first}-{second}",
                "method": method,
                "budget": budget,
            }
            chance: dict[str, Any] = {"resamples": how.resamples, "confidence": how.confidence, "seed": how.seed}
            gap = metrics.difference(counted.committed(), others.committed(), **chance)
            made.append(metrics.row(labels, "tau_difference", gap, len(counted), block_size=blocks[label]))
            if method == "chain" and label == OWN_DRAFTER:
                pairs = zip(self._texts[first, prompt_set], self._texts[second, prompt_set], strict=True)
                same = np.array([[float(one == other)] for one, other in pairs])
                value, low, high = (
                    float(part[0]) for part in metrics.ratio_intervals(same, np.ones_like(same), **chance)
                )
                made.append(
                    metrics.row(labels, "same_continuation", (value, low, high), len(same), block_size=blocks[label])
                )
        return made


def say(tally: Tally, host_context: HostContext) -> list[dict[str, Any]]:
    """Tells what came of it, warnings last; returns the baselines that beat the drafter."""
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
    for words in tally.lossy():
        host_context.progress.say(f"WARNING: {words}")
    return beaten


def stream_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a references file, a row group in memory at a time, and few of its rows as objects."""
    for piece in read_pieces(path, REFERENCES):
        for start in range(0, piece.num_rows, ROWS_AT_ONCE):
            yield from piece.slice(start, ROWS_AT_ONCE).to_pylist()


def judged_messages(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(prompt set, messages) of every prompt."""
    for piece in read_pieces(path, REFERENCES, ["prompt_set", "messages"]):
        for row in piece.to_pylist():
            yield row["prompt_set"], json.loads(row["messages"])


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


def training_samples(path: Path, most: int = NGRAM_TOKENS) -> Iterator[tuple[Sequence[int], int]]:
    """(input ids, prompt length) of training samples of `most` tokens at most: all, or those whose ids, which are digests, are
    below a limit, so that the choice depends on the samples and not on their order."""
    limit = _limit(path, most)
    for piece in read_pieces(path, SAMPLES, ["id", "input_ids", "prompt_length"]):
        ids = piece.column("input_ids").combine_chunks()
        names, lengths = piece.column("id").to_pylist(), piece.column("prompt_length").to_pylist()
        for name, row, length in zip(names, ids, lengths, strict=True):
            if _place(name) < limit:
                yield row.values.to_numpy(), length


def _place(name: str) -> int:
    """Where a sample stands among all that there could be: the first 12 hex digits of its id."""
    return int(name[:12], 16)


def _limit(path: Path, most: int) -> int:
    """The place below which samples hold `most` tokens at most; 16 bytes a sample, and no tokens are read where lengths are."""
    places: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for piece in read_pieces(path, SAMPLES, ["id", "input_ids"] if _without_lengths(path) else ["id", "length"]):
        places.append(np.array([_place(name) for name in piece.column("id").to_pylist()], dtype=np.int64))
        column = piece.column(1)
        counts = column if pa.types.is_integer(column.type) else pc.list_value_length(column)
        lengths.append(counts.to_numpy().astype(np.int64))
    if not places:
        return 16**12
    order = np.argsort(np.concatenate(places))
    sums = np.cumsum(np.concatenate(lengths)[order])
    beyond = int(np.searchsorted(sums, most, side="right"))
    return 16**12 if beyond == len(order) else int(np.concatenate(places)[order[beyond]])


def _without_lengths(path: Path) -> bool:
    """Whether any sample lacks its length, as in older files."""
    return any(piece.column("length").null_count for piece in read_pieces(path, SAMPLES, ["length"]))


def continuation_of(row: dict[str, Any], references: Upstream, params: EvaluateParams) -> Continuation:
    """A row of the references as a continuation, with the length limit it was made under."""
    most, longest = references.params.params["max_new_tokens"], params.target.max_position_embeddings
    return Continuation(row["prompt_ids"], row["output_ids"], length_limit(most, longest, len(row["prompt_ids"])))


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
        [first + index for index in walk.anchors],
        walk.lengths,
        [first + index for index in whole],
        walk.unclipped,
    )
    if with_slots:
        result.hits, result.in_bounds = drafts.hits(), drafts.in_bounds()
        result.anchor_contexts = first + np.arange(len(result.hits))
    return result


def request_row(row: dict[str, Any], kernel: str, drafter: str, method: str, budget: int, walk: Walk) -> dict[str, Any]:
    """A row of `requests.parquet`."""
    return {
        "prompt_set": row["prompt_set"],
        "id": row["id"],
        "kernel": kernel,
        "drafter": drafter,
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
