"""N targets and M drafters for real: one process a GPU, NCCL between them, random weights at Qwen3.6-27B's shapes.

    python tests/bench/gpu/topology.py --topologies 3:1 2:2 1:1          (4 GPUs, under 9 minutes)
    python tests/bench/gpu/topology.py --tiny --device cpu                (the same road with gloo, seconds)

First the rate of one target and of one drafter alone, each on a GPU of its own, on the batches that the topologies get. Then
each topology through the project's own launcher: tokens per second end to end, by role, stalls by reason, features waiting,
all without the first steps, against min(N * target, M * drafter). Batch ids and losses of all topologies are compared. One
topology saves a checkpoint in mid-run; every one is ended by killing one of its ranks, which tells how long the job takes to
end and whom it blames; the one that saved resumes, at another topology if asked, and must repeat the losses.

A topology named twice runs twice, the first time with a checkpoint: side by side (`--together`), step against equal step, they
tell what saving costs.

Seen on four H200 of one host (torch 2.11, fla 0.6 without causal-conv1d; 64 layers, five-layer drafter, 512 anchors of 16, lengths
of mean 2,191; steps of six batches of at most 8,192 tokens, 6 to 11 steps, n = 1 unless said): 3:1 5,635 tokens/s, 2:2 7,946, 1:1
4,742 (5,103 and 4,754 in two later runs): 0.99, 0.81 and 0.99 of what the slower side did while it worked. 2:2 lost 17% at the
end of its steps to unequal shares; batches are dealt out evenly since (`dflash/data/batches.py`), which has not been measured
there. A target did 7,450 tokens/s a GPU, a drafter 4,300 to 5,700. Losses of all three differed by at most 1.6e-4 in ten steps (a
four-layer cut: 5e-4 in 14). A killed rank ended the job in 2.7 to 4.1 s; the resumed one repeated three losses to 8.5e-6. A
checkpoint of 24 GB stopped the loop for 6 to 10 ms, and the four steps beside its writing took 1.019 of the same steps without.

As a rates file, with the drafter's rate alone, for `dflash plan --topology --rates FILE --gpus 8`:

    {"target": 7450, "drafter": 4500, "gpus": 4, "measured": [
      {"targets": 3, "drafters": 1, "tokens_per_second": 5635},
      {"targets": 2, "drafters": 2, "tokens_per_second": 7946},
      {"targets": 1, "drafters": 1, "tokens_per_second": 4742}]}

It predicts 4,500, 9,000 and 4,500 for these (1.25, 0.88 and 1.05 of that were reached: drafters inside the runs were faster than
the one alone), and for eight GPUs 3:5 (22,350) rather than 5:3 (13,500).

Prints a JSON line a finding, as it comes; a part that fails says so and stops no other. The lines, and `rates.json` for
`dflash plan --topology`, also go to $OUT. Nothing is downloaded; the data are counting texts with lengths as real completions
have them (log-normal, mean about 2,200, cut to 8,192).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# A program that uses NVLink multicast can put shared GPUs out of service.
for name, off in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
    os.environ[name] = off

import numpy as np  # noqa: E402
from shapes import LENGTHS_27B, SHAPES_27B, drafter_27b, fla_is_there, lengths  # noqa: E402
from train_store import TINY, Training, identity, make_training  # noqa: E402

from dflash.base.canonical import digest  # noqa: E402
from dflash.base.files import write_json  # noqa: E402
from dflash.base.records import MetricsLine  # noqa: E402
from dflash.model.target_params import RandomTarget  # noqa: E402
from dflash.train import schedule  # noqa: E402
from dflash.train.attempts import Attempt, attempt_path  # noqa: E402

STARTED = time.monotonic()
LINES: list[str] = []
SAYING = threading.Lock()


def say(part: str, **found: Any) -> None:
    """One line of JSON, at once, here and in $OUT."""
    line = json.dumps({"part": part, "at": round(time.monotonic() - STARTED, 1), **found})
    with SAYING:
        print(line, flush=True)
        LINES.append(line)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "topology.jsonl").write_text("\n".join(LINES) + "\n")


@dataclass(frozen=True)
class Split:
    """N targets and M drafters."""

    targets: int
    drafters: int

    @classmethod
    def parse(cls, text: str) -> Split:
        """From `3:1`."""
        targets, _, drafters = text.partition(":")
        return cls(int(targets), int(drafters))

    @property
    def gpus(self) -> int:
        return self.targets + self.drafters

    def __str__(self) -> str:
        return f"{self.targets}:{self.drafters}"


# ---------------------------------------------------------------- the job


def counting_texts(count: int, mean: float, longest: int) -> list[dict[str, Any]]:
    """Samples that a drafter can learn: each counts through a range of its own."""
    draw = np.random.default_rng(9)
    rows = []
    for index, length in enumerate(lengths(count, mean, longest).tolist()):
        first, period = int(draw.integers(0, 150)), int(draw.integers(5, 100))
        ids = (first + np.arange(length) % period).tolist()
        messages = json.dumps([{"content": f"count {index}", "role": "user"}])
        prompt = max(1, min(length // 6, 400))
        rows.append(
            {
                "id": digest(messages),
                "source": "synthetic",
                "messages": messages,
                "input_ids": ids,
                "prompt_length": prompt,
                "finish_reason": "stop",
            }
        )
    return rows


def job_values(given: argparse.Namespace) -> dict[str, Any]:
    """The keyed and placed values of the training."""
    if given.tiny:
        target = TINY
        train: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "max_anchors": given.anchors or 5}
        sizes = {"mean": 30.0, "longest": 96}
    else:
        target = RandomTarget(**{**SHAPES_27B, "num_hidden_layers": given.layers})
        train = {
            **drafter_27b(given.layers, given.draft_layers),
            "max_anchors": given.anchors or 512,
            "lr": 1e-4,
            "dtype": "bfloat16",
            "kernels": given.kernels,
        }
        sizes = LENGTHS_27B
    train |= {"schedule_steps": 10_000, "warmup": 10, "seed": 3, "target": identity(target)}
    batching = {
        "token_budget": given.token_budget or sizes["longest"],
        "max_seq_len": sizes["longest"],
        "quantiles": 8,
        "batches_per_step": given.batches_per_step,
    }
    placed = {"anchor_chunk": given.anchor_chunk, "rank_timeout": 300, "keep_states": 1, "checkpoint_every": 10_000}
    return {"train": train, "batching": batching, "placed": placed, "sizes": sizes}


def make_job(root: Path, given: argparse.Namespace, split: Split, device: str) -> Training:
    """A training of its own for one topology: the same key as every other's, in a store of its own."""
    values = job_values(given)
    rows = counting_texts(given.samples, **values["sizes"])
    training = make_training(root, rows=rows, batching=values["batching"], **values["train"])
    place(training, given, split, device)
    return training


def place(training: Training, given: argparse.Namespace, split: Split, device: str) -> None:
    """Writes where and how it runs."""
    topology = {"targets": split.targets, "drafters": split.drafters, "colocate": False}
    values = {**job_values(given)["placed"], "topology": topology}
    write_json(training.placement, {"device": device, "threads": given.threads, "values": values})


# ---------------------------------------------------------------- one role alone


def rate(given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one role on one device, on the batches of the plan, padding not counted."""
    import torch
    from roles import DrafterWork, Job, TargetWork

    job = Job.read(make_job(Path(given.folder), given, Split(1, 1), given.device), given.device, given.threads)
    plan = job.plan
    begun = time.perf_counter()
    work = (TargetWork if given.role == "target" else DrafterWork)(job)
    loading = time.perf_counter() - begun
    per_step = plan.params.batches_per_step
    work(0)  # compiles and tunes what is compiled and tuned
    kept: list[tuple[int, float]] = []
    begun = time.perf_counter()
    while len(kept) < 2 or time.perf_counter() - begun < given.rate_seconds:
        before = time.perf_counter()
        tokens = work(len(kept) + 1)
        kept.append((tokens, time.perf_counter() - before))
    beside = packing_beside(given, work) if given.packing and given.role == "target" else {}
    rates = sorted(tokens / seconds for tokens, seconds in kept)
    peak = torch.cuda.max_memory_allocated(given.device) if given.device.startswith("cuda") else 0
    return {
        "role": given.role,
        "tokens_per_second": round(sum(tokens for tokens, _ in kept) / sum(seconds for _, seconds in kept), 1),
        "by_step": [round(rates[0], 1), round(statistics.median(rates), 1), round(rates[-1], 1)],
        "steps": len(kept),
        "batches_per_step": per_step,
        "step_seconds": round(statistics.median(seconds for _, seconds in kept), 3),
        "loading_seconds": round(loading, 1),
        "peak_gb": round(peak / 1e9, 1),
        "kernels": getattr(work, "kernels", {}),
        "lengths": {"mean": round(float(plan.lengths.mean())), "longest": int(plan.lengths.max())},
        "padding_share": round(padding(plan), 3),
        **beside,
    }


def packing_beside(given: argparse.Namespace, work: Any) -> dict[str, Any]:
    """Where batches are packed: what padding them would give, and how far both are from rows computed one by one, by tap.

    The first is the gain of packing; the others are noise of the type, and must be of one size.
    """
    import torch

    target = work.target
    if not target.kernels.packed:
        return {}
    padded = replace(target.kernels, packed=False)
    batch = next(found for number in itertools.count() if len((found := work.job.plan.batch(number)).rows) > 1)
    ids, mask = work.job.tensors(batch)
    taps = list(work.job.config.target_layer_ids)
    packed_features = target.features(ids, mask, taps)
    packed_kernels, target.kernels = target.kernels, padded
    padded_features = target.features(ids, mask, taps)
    errors: dict[str, list[float]] = {"packed": [0.0] * len(taps), "padded": [0.0] * len(taps)}
    for row, length in enumerate(batch.lengths.tolist()):
        alone = target.features(ids[row : row + 1, :length], None, taps)[0].float().unflatten(-1, (len(taps), -1))
        for name, found in (("packed", packed_features), ("padded", padded_features)):
            other = found[row, :length].float().unflatten(-1, (len(taps), -1))
            for tap in range(len(taps)):
                error = float((other[:, tap] - alone[:, tap]).norm() / alone[:, tap].norm())
                errors[name][tap] = max(errors[name][tap], round(error, 5))
    work(1)
    begun = time.perf_counter()
    tokens = sum(work(step) for step in (1, 2))
    rate = tokens / (time.perf_counter() - begun)
    target.kernels = packed_kernels
    if given.device.startswith("cuda"):
        torch.cuda.synchronize(given.device)
    return {"padded_tokens_per_second": round(rate, 1), "error_against_one_by_one": errors}


def padding(plan: Any) -> float:
    """Share of an epoch's tokens that are padding."""
    batches = [plan.batch(number) for number in range(plan.batches_per_epoch)]
    return 1.0 - sum(int(batch.lengths.sum()) for batch in batches) / sum(batch.padded_tokens for batch in batches)


def rate_command(given: argparse.Namespace, role: str, device: str, folder: Path) -> list[str]:
    """This script, as the process that measures one role."""
    command = [sys.executable, __file__, "--role", role, "--device", device, "--folder", str(folder)]
    for option in (
        "layers",
        "draft_layers",
        "batches_per_step",
        "samples",
        "threads",
        "rate_seconds",
        "kernels",
        "warmup",
    ):
        command += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
    for option in ("anchors", "anchor_chunk", "token_budget"):
        if getattr(given, option) is not None:
            command += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
    return [*command, *(["--tiny"] if given.tiny else []), *(["--packing"] if given.packing else [])]


def measure_rates(given: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Both roles at once, each on a GPU of its own; on a single device one after the other."""
    found: dict[str, float] = {}
    together = given.device.startswith("cuda") and given.gpus > 1

    def one(role: str, index: int) -> None:
        device = f"cuda:{index if together else 0}" if given.device.startswith("cuda") else given.device
        command = rate_command(given, role, device, scratch / f"rate_{role}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=given.rate_seconds + given.start_limit, check=False
            )
        except subprocess.TimeoutExpired as late:
            say("rate", role=role, error="out of time", log=str(late.stderr)[-1500:])
            return
        if done.returncode:
            say("rate", role=role, error=f"exit status {done.returncode}", log=(done.stderr or done.stdout)[-3000:])
            return
        values = json.loads(done.stdout.strip().splitlines()[-1])
        found[role] = values["tokens_per_second"]
        say("rate", **values)

    run_together([lambda: one("target", 0), lambda: one("drafter", 1)], together)
    return found


def run_together(parts: Sequence[Callable[[], None]], together: bool = True) -> None:
    """Runs parts in threads, or one after the other."""
    if not together:
        for part in parts:
            part()
        return
    threads = [threading.Thread(target=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------- a topology


@dataclass
class Running:
    """A launcher at work, in the foreground of this bench."""

    training: Training
    attempt: int
    process: subprocess.Popen[bytes]
    log: Path
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, training: Training, attempt: int) -> Running:
        """Starts the project's launcher on the placement that lies beside the store."""
        log = training.store.parent / f"launcher_{attempt}.log"
        argv = [sys.executable, "-m", "dflash.train.launch", "--foreground", "--run", "bench"]
        argv += ["--directory", str(training.directory), "--store", str(training.store)]
        argv += ["--placement", str(training.placement)]
        with log.open("wb") as stream:
            process = subprocess.Popen(argv, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, cwd=ROOT)
        return cls(training, attempt, process, log)

    def lines(self) -> list[MetricsLine]:
        """The whole lines that this attempt has written."""
        try:
            text = (self.training.directory / "metrics.jsonl").read_text()
        except OSError:
            return []
        found = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                found.append(MetricsLine.model_validate(json.loads(line)))
        return [line for line in found if line.attempt == self.attempt]

    def tail(self, size: int = 3000) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-size:]

    def wait_for(self, enough: Callable[[list[MetricsLine]], bool], start_limit: float, seconds: float) -> str:
        """Waits until there is enough; what was wrong, or an empty string. `seconds` count from the first line on."""
        first = None
        while True:
            lines = self.lines()
            if enough(lines):
                return ""
            if self.process.poll() is not None:
                return f"the launcher ended with status {self.process.returncode}"
            if lines and first is None:
                first = time.monotonic()
            if first is None and time.monotonic() - self.begun > start_limit:
                return f"no step within {start_limit:.0f} s"
            if first is not None and time.monotonic() - first > seconds:
                return "" if len(lines) >= 3 else f"{len(lines)} steps in {seconds:.0f} s"
            time.sleep(0.1)

    def pids(self) -> list[int]:
        """Of its ranks, in their order."""
        return Attempt.read(attempt_path(self.training.directory, self.attempt)).rank_pids

    def stop(self) -> None:
        """Ends it without a word; its ranks see that their parent is gone."""
        pids: list[int] = []
        with contextlib.suppress(Exception):
            pids = self.pids()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.1)


def seconds_between(lines: Sequence[MetricsLine]) -> list[float]:
    """Wall time of each step but the first: from the line before to its own."""
    times = [datetime.datetime.fromisoformat(line.time).timestamp() for line in lines]
    return [after - before for before, after in itertools.pairwise(times)]


def summary(lines: Sequence[MetricsLine], warmup: int, saved_after: int | None) -> dict[str, Any]:
    """What the lines of one topology say, without the first `warmup` steps and without the pause of a checkpoint."""
    wall = dict(zip((line.step for line in lines[1:]), seconds_between(lines), strict=True))
    kept = [line for line in lines[warmup:] if line.step in wall and line.step - 1 != saved_after]
    seconds = sum(wall[line.step] for line in kept)
    reasons = sorted({reason for line in kept for reason in line.stalled_seconds})
    roles = sorted({role for line in kept for role in line.tokens_per_second})
    return {
        "steps": len(lines),
        "kept": len(kept),
        "tokens_per_second": round(sum(line.tokens for line in kept) / seconds, 1),
        "by_role": {
            role: round(statistics.harmonic_mean([line.tokens_per_second[role] for line in kept]), 1) for role in roles
        },
        "stalled_share": {
            reason: round(sum(line.stalled_seconds.get(reason, 0.0) for line in kept) / seconds, 4)
            for reason in reasons
        },
        "features_waiting": [
            round(statistics.mean(column), 2) for column in zip(*(line.features_waiting for line in kept), strict=True)
        ],
        "padding_share": round(statistics.mean(line.padding_share for line in kept), 3),
        "anchors": sum(line.anchors for line in kept),
        "step_seconds": [round(wall[line.step], 3) for line in lines if line.step in wall],
        "tokens": [line.tokens for line in lines],
        "memory_gb": {name: round(size / 1e9, 1) for name, size in kept[-1].memory_bytes.items()},
        "losses": [round(line.loss, 5) for line in lines],
    }


def pause(lines: Sequence[MetricsLine], saved_after: int) -> dict[str, Any]:
    """How long the loop waited for a checkpoint after step `saved_after`: the wall time behind it that was no step."""
    wall = dict(zip((line.step for line in lines[1:]), seconds_between(lines), strict=True))
    behind = {line.step: line for line in lines}.get(saved_after + 1)
    if behind is None:
        return {"error": "no step behind the checkpoint"}
    return {"saved_after_step": saved_after, "pause_seconds": round(wall[behind.step] - behind.seconds, 3)}


def disturbance(saving: Sequence[MetricsLine], calm: Sequence[MetricsLine], saved_after: int) -> dict[str, Any]:
    """How much slower the steps behind a checkpoint are than the same steps of a run that did not save.

    Steps differ in their batches, so only equal steps can be compared; those before the checkpoint show how equal the runs are.
    """
    ours, theirs = (
        dict(zip((line.step for line in lines[1:]), seconds_between(lines), strict=True)) for lines in (saving, calm)
    )
    ratios = {step: round(ours[step] / theirs[step], 4) for step in sorted(ours.keys() & theirs.keys()) if step > 2}
    after = [step for step in ratios if saved_after < step <= saved_after + 4]
    before = [step for step in ratios if step <= saved_after]
    if not after or not before:
        return {"error": "too few equal steps around the checkpoint"}
    total = {name: sum(lines[step] for step in after) for name, lines in (("saving", ours), ("calm", theirs))}
    return {
        "saved_after_step": saved_after,
        "ratio_by_step": ratios,
        "before": round(sum(ours[step] for step in before) / sum(theirs[step] for step in before), 4),
        "while_writing": round(total["saving"] / total["calm"], 4),
    }


def run_topology(given: argparse.Namespace, split: Split, first_gpu: int, scratch: Path, saves: bool, rank: int) -> Any:
    """One topology from its start to the death of one of its ranks. Returns (training, lines), or None when it failed."""
    device = f"cuda:{first_gpu}" if given.device.startswith("cuda") else given.device
    training = make_job(Path(tempfile.mkdtemp(dir=scratch)), given, split, device)
    saved_after = given.checkpoint_step if saves else None
    schedule.merge_steps(training.directory, [9_999, *([saved_after] if saved_after else [])])
    running = Running.start(training, 1)
    try:
        lines = watch_topology(given, split, first_gpu, running, saved_after, rank)
    finally:
        running.stop()
    return (training, lines) if lines else None


def watch_topology(
    given: argparse.Namespace, split: Split, first_gpu: int, running: Running, saved_after: int | None, rank: int
) -> list[MetricsLine]:
    """Waits for its steps, says what they show, and kills a rank. Returns its lines."""

    def enough(lines: list[MetricsLine]) -> bool:
        if len(lines) < given.steps and sum(line.seconds for line in lines) < given.seconds:
            return False
        if saved_after is None:
            return True
        return lines[-1].step >= saved_after + 3 and schedule.exists(running.training.directory, saved_after)

    saving = given.save_limit if saved_after else 0.0
    wrong = running.wait_for(enough, given.start_limit, given.seconds + saving)
    lines = running.lines()
    if wrong:
        say("topology", split=str(split), error=wrong, steps=len(lines), log=running.tail())
    if len(lines) > given.warmup + 1:
        say(
            "topology",
            split=str(split),
            gpus=list(range(first_gpu, first_gpu + split.gpus)),
            seconds_to_first_step=round(first_line(running, lines), 1),
            **summary(lines, given.warmup, saved_after),
        )
    if saved_after is not None:
        say("checkpoint", split=str(split), **pause(lines, saved_after))
    if not wrong:
        kill(running, split, rank)
    return running.lines()


def first_line(running: Running, lines: Sequence[MetricsLine]) -> float:
    """Seconds from the launch to the first line."""
    ago = time.time() - datetime.datetime.fromisoformat(lines[0].time).timestamp()
    return time.monotonic() - ago - running.begun


def kill(running: Running, split: Split, rank: int) -> None:
    """Kills a rank, and says how long the job takes to end and what it says."""
    pid = running.pids()[rank]
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        running.process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        say("kill", split=str(split), rank=rank, error="the job had not ended after 60 s", log=running.tail())
        return
    attempt = Attempt.read(attempt_path(running.training.directory, running.attempt))
    left = [other for other in running.pids() if Path(f"/proc/{other}").exists()]
    say(
        "kill",
        split=str(split),
        rank=rank,
        seconds_to_end=round(time.monotonic() - begun, 2),
        names_the_rank=f"rank {rank} " in attempt.cause,
        processes_left=left,
        cause=attempt.cause[-400:],
    )


def resume(
    given: argparse.Namespace, training: Training, before: Sequence[MetricsLine], split: Split, gpu: int
) -> None:
    """Starts a killed training again and compares the losses of the steps that it repeats."""
    place(training, given, split, f"cuda:{gpu}" if given.device.startswith("cuda") else given.device)
    running = Running.start(training, 2)
    try:
        wrong = running.wait_for(lambda lines: len(lines) >= 3, given.start_limit, given.seconds)
        lines = running.lines()
    finally:
        running.stop()
    if wrong or not lines:
        say("resume", split=str(split), error=wrong or "no line", log=running.tail())
        return
    known = {line.step: line for line in before}
    repeated = [(line, known[line.step]) for line in lines if line.step in known]
    say(
        "resume",
        split=str(split),
        from_step=lines[0].step,
        seconds_to_first_step=round(first_line(running, lines), 1),
        same_batches=all(ours.batch_ids == theirs.batch_ids for ours, theirs in repeated),
        steps_repeated=len(repeated),
        largest_loss_difference=max((abs(ours.loss - theirs.loss) for ours, theirs in repeated), default=None),
    )


# ---------------------------------------------------------------- all of it


def compare(results: dict[str, Sequence[MetricsLine]], rates: dict[str, float], given: argparse.Namespace) -> None:
    """Batch ids, losses and rates of all topologies side by side."""
    if not results:
        return
    common = min(len(lines) for lines in results.values())
    ids = {name: [line.batch_ids for line in lines[:common]] for name, lines in results.items()}
    first = next(iter(results))
    losses = {name: np.array([line.loss for line in lines[:common]]) for name, lines in results.items()}
    apart = {name: float(np.abs(values - losses[first]).max()) for name, values in losses.items() if name != first}
    say(
        "agreement",
        splits=list(results),
        steps=common,
        same_batches=all(found == ids[first] for found in ids.values()),
        largest_loss_difference=apart,
        first_and_last_loss=[round(float(losses[first][0]), 4), round(float(losses[first][-1]), 4)],
    )
    measured = []
    for name, lines in results.items():
        split = Split.parse(name.split()[0])
        saved = given.checkpoint_step if name == given.checkpoint else None
        if name.endswith(" again") and given.checkpoint in results:
            say("disturbance", split=str(split), **disturbance(results[given.checkpoint], lines, given.checkpoint_step))
        if len(lines) <= given.warmup + 1:
            continue
        reached = summary(lines, given.warmup, saved)["tokens_per_second"]
        measured.append({"targets": split.targets, "drafters": split.drafters, "tokens_per_second": reached})
        if {"target", "drafter"} <= rates.keys():
            sides = split.targets * rates["target"], split.drafters * rates["drafter"]
            say(
                "ratio",
                split=name,
                reached=reached,
                possible=round(min(sides), 1),
                ratio=round(reached / min(sides), 4),
            )
    if {"target", "drafter"} <= rates.keys():
        document = {"target": rates["target"], "drafter": rates["drafter"], "gpus": given.gpus, "measured": measured}
        say("rates", **document)
        if os.environ.get("OUT"):
            write_json(Path(os.environ["OUT"]) / "rates.json", document)


def waves(given: argparse.Namespace, splits: Sequence[Split]) -> list[list[Split]]:
    """Topologies in the order given; those that fit side by side run at once with `--together`."""
    found: list[list[Split]] = []
    for split in splits:
        if found and given.together and sum(one.gpus for one in found[-1]) + split.gpus <= given.gpus:
            found[-1].append(split)
        else:
            found.append([split])
    return found


def grow_host_memory(gigabytes: int) -> None:
    """Fills and frees memory, in four processes: some machines show little of it until it has been used once."""
    code = f"b = b'1' * ({gigabytes} << 28)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    for process in processes:
        process.wait()
    say("memory", grown_gb=gigabytes, **{line.split(":")[0]: line.split()[1] for line in meminfo()})


def meminfo() -> list[str]:
    """Total and available memory of the host, kB."""
    return [
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(("MemTotal", "MemAvail"))
    ]


def count_gpus(device: str) -> int:
    """How many GPUs there are; on a CPU as many ranks as are sensible."""
    if not device.startswith("cuda"):
        return 4
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return len(done.stdout.strip().splitlines())


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=["3:1", "2:2", "1:1"], metavar="N:M")
    parser.add_argument("--steps", type=int, default=40, help="steps of a topology, unless --seconds end first")
    parser.add_argument("--seconds", type=float, default=50.0, help="most seconds of steps of a topology")
    parser.add_argument("--deadline", type=float, default=520.0, help="start no part that would pass this second")
    parser.add_argument("--start-limit", type=float, default=150.0, help="most seconds until a first step")
    parser.add_argument("--save-limit", type=float, default=120.0, help="more seconds for the topology that saves")
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--checkpoint", default=None, metavar="N:M", help="which topology saves (the first); `none`")
    parser.add_argument("--checkpoint-step", type=int, default=4)
    parser.add_argument("--resume-at", default="1:1", metavar="N:M", help="where the killed one goes on; `none`")
    parser.add_argument("--together", action="store_true", help="run topologies side by side where they fit")
    parser.add_argument("--no-rates", action="store_true", help="leave out the roles alone")
    parser.add_argument("--rate-seconds", type=float, default=20.0)
    parser.add_argument("--packing", action="store_true", help="also what padding instead of packing would give (slow)")
    parser.add_argument("--layers", type=int, default=64, help="of the target")
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--anchors", type=int, default=None, help="max_anchors (512)")
    parser.add_argument("--anchor-chunk", type=int, default=None, help="anchors at a time (128 on a GPU)")
    parser.add_argument("--token-budget", type=int, default=None)
    parser.add_argument("--batches-per-step", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kernels", default=None, choices=["fla", "torch"], help="fla where it can be imported")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default=None, help="for stores and checkpoints (25 GB a checkpoint)")
    parser.add_argument("--grow", type=int, default=96, help="GB of host memory to fill once at the start; 0 for none")
    parser.add_argument("--tiny", action="store_true", help="a tiny target and drafter")
    parser.add_argument("--role", choices=["target", "drafter"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    on_gpu = given.device.startswith("cuda")
    given.threads = given.threads or (4 if on_gpu else 1)
    given.kernels = given.kernels or ("fla" if on_gpu and fla_is_there() else "torch")
    if given.anchor_chunk is None and on_gpu and not given.tiny:
        given.anchor_chunk = 128
    given.checkpoint = given.checkpoint or given.topologies[0]
    given.gpus = count_gpus(given.device)
    return given


def main() -> int:
    """All parts; 1 when one of them failed."""
    given = parse()
    if given.role:
        print(json.dumps(rate(given)), flush=True)
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        return measure(given, Path(folder))


def measure(given: argparse.Namespace, scratch: Path) -> int:
    """Roles alone, then the topologies, then what they have in common."""
    say("begin", gpus=given.gpus, kernels=given.kernels, argv=sys.argv[1:], cores=os.cpu_count())
    growing = None
    if given.grow and given.device.startswith("cuda"):
        growing = threading.Thread(target=grow_host_memory, args=(given.grow,))
        growing.start()
    rates = {} if given.no_rates else guarded("rates", lambda: measure_rates(given, scratch)) or {}
    if growing is not None:
        growing.join()
    splits = [Split.parse(text) for text in given.topologies]
    results: dict[str, Sequence[MetricsLine]] = {}
    saved: list[tuple[Training, Sequence[MetricsLine]]] = []

    def one(number: int, split: Split, gpu: int) -> None:
        name = str(split) if split not in splits[:number] else f"{split} again"
        saves = name == given.checkpoint
        # A target, then the last drafter, then the one that leads.
        rank = (0, split.gpus - 1, split.targets)[number % 3]
        found = guarded(f"topology {split}", lambda: run_topology(given, split, gpu, scratch, saves, rank))
        if found:
            results[name] = found[1]
            if saves and schedule.exists(found[0].directory, given.checkpoint_step):
                saved.append(found)

    number = 0
    planned = waves(given, splits)
    again = Split.parse(given.resume_at) if given.resume_at != "none" else None
    for wave in planned:
        used = 0
        parts: list[Callable[[], None]] = []
        if time.monotonic() - STARTED > given.deadline - 100:
            say("skipped", splits=[str(split) for split in wave], reason="the deadline is near")
            continue
        for split in wave:
            if split.gpus > given.gpus:
                say("skipped", split=str(split), reason=f"{given.gpus} GPUs")
                continue
            parts.append(lambda number=number, split=split, gpu=used: one(number, split, gpu))
            number, used = number + 1, used + split.gpus
        if again and saved and used + again.gpus <= given.gpus:
            training, lines = saved.pop()
            parts.append(
                lambda t=training, b=lines, s=again, g=used: guarded("resume", lambda: resume(given, t, b, s, g))
            )
            again = None
        run_together(parts)
        compare(results, rates, given)
    if again and saved and time.monotonic() - STARTED < given.deadline - 60:
        training, lines = saved.pop()
        guarded("resume", lambda: resume(given, training, lines, again, 0))
    failed = [line for line in LINES if '"error"' in line]
    say("end", failed=len(failed))
    return int(bool(failed))


def guarded(part: str, work: Callable[[], Any]) -> Any:
    """A part that may fail without stopping the others."""
    try:
        return work()
    except Exception as error:  # a bench goes on with what is left
        import traceback

        say(part, error=repr(error), log=traceback.format_exc()[-2000:])
        return None


if __name__ == "__main__":
    raise SystemExit(main())
