"""`dflash reproduce MANIFEST`: the recorded code, on the recorded config, compared with the recorded results.

    the code of the manifest, kept by digest under `results/code/`, else its commit from git (uncommitted changes that the
       manifest holds are put on top), in a folder of its own
    -> the configuration of the manifest, every default written out, so that later defaults cannot creep in
    -> `dflash run` of that code, or one segment of the training from a checkpoint whose state is kept
    -> every output by digest, every tensor by name

In the class *bitwise* (CPUs, one thread) digests must be equal. A package, interpreter or processor other than the recorded one
cannot promise that: it is named and refused, unless values are to be compared within a tolerance (1e-4 relative in float32). Costs
what the run cost; a segment costs its steps. Nothing is written into the present results.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dflash.base.environment import NUMERIC_DISTRIBUTIONS, collect
from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import sha256_file
from dflash.base.records import CheckpointManifest, Environment, OutputFile, RunManifest, StageEntry
from dflash.base.store import STEPWISE_RECEIPTS, stage_directory
from dflash.base.words import number_of
from dflash.hosts.code import DIGITS
from dflash.hosts.lease import holder
from dflash.plan.code import source_root
from dflash.plan.kept_code import PARTS, kept_code, kept_path
from dflash.report.subject import check_keys, read_header

BYTE_DISTRIBUTIONS = ("numpy", "safetensors", "tokenizers", "pyarrow", "pandas")
"""Distributions that decide bytes of files or tokens of texts, beside those that numbers depend on."""
WEIGHTS = "model.safetensors"
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest relative error of a tensor by type, where bits cannot be equal."""
NOT_COMPARED = "not compared"
"""Of a file with other bytes, of a type whose values nobody compares, where bits cannot be equal."""
NUMPY_TYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}


@dataclass(frozen=True)
class Changed:
    """A part of the environment that is not the recorded one."""

    name: str
    recorded: str
    here: str

    def words(self) -> str:
        """`torch 2.13.0 -> 2.12.1`."""
        return f"{self.name} {self.recorded} -> {self.here}"


@dataclass
class Verdict:
    """What a reproduction found. lines: one a result, for people. problems: what is not as recorded."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    compared: int = 0

    def add(self, name: str, words: str, equal: bool) -> None:
        """Notes one result."""
        self.lines.append(f"  {name:<28} {words}")
        if not equal:
            self.problems.append(f"{name}: {words}")


def read_manifest(path: Path) -> RunManifest:
    """A run's manifest, which must hold what a repetition needs.

    Raises:
        ConfigError: there is none. CorruptError: damaged or edited. PermanentError: it holds no configuration, or an adopted
            result.
    """
    file = path / "manifest.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(
            "there is no such file",
            where=str(file),
            remedy="Give a run's manifest.json, or the folder that holds it (results/runs/RUN/latest).",
        )
    manifest = RunManifest.read(file)
    check_keys(manifest, file)
    _check_environments(manifest, file)
    if manifest.adoptions:
        kept = ", ".join(f"{item.get('stage')} {item.get('old_key')}" for item in manifest.adoptions)
        raise PermanentError(
            f"the run keeps results that other code made ({kept}, adopted)",
            where=str(file),
            remedy="No single commit makes all of it: reproduce the run that made the adopted result first.",
        )
    if not manifest.source:
        raise PermanentError("the manifest does not hold the configuration as it was given", where=str(file))
    return manifest


def _check_environments(manifest: RunManifest, file: Path) -> None:
    """Without where results were made nobody could tell whether this environment can make them again.

    Raises:
        CorruptError: no environment, or not that of some result.
    """
    named = {label: entry.name for entry in manifest.stages for label in entry.environments.values()}
    missing = sorted(set(named) - set(manifest.environments))
    if manifest.environments and not missing:
        return
    what = f"does not hold {missing[0]}, where {named[missing[0]]} was made" if missing else "is empty"
    raise CorruptError(
        f"`environments` {what}",
        where=str(file),
        remedy="It was edited after it was written: nothing in the file is trusted.",
    )


# ---------------------------------------------------------------- the environment


def _distributions(environment: Environment) -> dict[str, str]:
    wanted = {*NUMERIC_DISTRIBUTIONS, *BYTE_DISTRIBUTIONS}
    return {
        name: version
        for name, version in environment.distributions.items()
        if name in wanted or name.startswith("nvidia-")
    }


def changed_environment(manifest: RunManifest, here: Environment | None = None) -> list[Changed]:
    """What of this machine is not as recorded, as far as bits depend on it; each named once.

    Args:
        here: this environment; looked up when left out.
    """
    present = here or collect()
    found: dict[str, Changed] = {}

    def note(name: str, recorded: str, now: str) -> None:
        if recorded != now:
            found.setdefault(name, Changed(name, recorded, now))

    for environment in manifest.environments.values():
        ours, theirs = _distributions(environment), _distributions(present)
        for name in sorted({*ours, *theirs}):
            note(name, ours.get(name, "absent"), theirs.get(name, "absent"))
        note("python", environment.python.rpartition(".")[0], present.python.rpartition(".")[0])
        note("processor", environment.cpu, present.cpu)
    return list(found.values())


def lock_lines(manifest: RunManifest) -> str:
    """Everything that was installed where the run was made, as a requirements file."""
    versions: dict[str, str] = {}
    for environment in manifest.environments.values():
        versions |= environment.distributions
    lines = [f"{name}=={version}" for name, version in sorted(versions.items()) if name != "dflash-workflow"]
    return "\n".join([f"# what run {manifest.run} ({manifest.runkey}) was made with", *lines]) + "\n"


def require_environment(manifest: RunManifest, path: Path, tolerance: bool) -> str:
    """The class that this environment can promise.

    Raises:
        PermanentError: other packages than recorded, and nobody asked for a tolerance; names them.
    """
    changed = changed_environment(manifest)
    if not changed:
        return manifest.determinism
    told = ", ".join(item.words() for item in changed)
    if not tolerance:
        raise PermanentError(
            f"the environment cannot give the same bits: {told}; the class here is tolerance, not {manifest.determinism}",
            where=str(path),
            remedy=f"`dflash reproduce {path} --lock FILE` writes the recorded packages to install; `--tolerance` compares "
            "values instead of bits.",
        )
    return "tolerance" if manifest.determinism == "bitwise" else manifest.determinism


# ---------------------------------------------------------------- the code


def _git(repository: Path, *arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(repository), *arguments], input=given, capture_output=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PermanentError(f"git cannot be run ({error})", where=str(repository)) from error


def find_repository(commit: str, candidates: Sequence[Path]) -> Path | None:
    """The clone that has a commit; None when none has it."""
    for candidate in candidates if commit else ():
        if _git(candidate, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0:
            return candidate
    return None


def place_code(manifest: RunManifest, results: Path | None, candidates: Sequence[Path], folder: Path) -> str:
    """Puts the recorded code into `folder`: the kept one, else that of the commit, uncommitted changes included. Other files of
    the commit (prompts of a demo) come along where a clone has it.

    Args:
        results: the folder of results that the manifest belongs to, when it is at hand. candidates: clones that may have the
            commit.

    Returns:
        Where it was taken from, for people.

    Raises:
        PermanentError: neither is to be had, or the uncommitted changes were not kept or do not apply.
    """
    commit = str(manifest.git.get("commit") or "")
    kept, why = _kept(manifest, results)
    usable = candidates if kept is None or shutil.which("git") else ()  # kept code needs no git
    repository = find_repository(commit, usable)
    if kept is None and repository is None:
        raise _no_code(commit, candidates, why)
    if kept is None and repository is not None:
        take_code(manifest, repository, folder)
        return f"code {commit[:12]} from {repository}{f' ({why})' if manifest.code else ''}"
    if repository is not None:
        _take_commit(repository, commit, folder)
    for part in PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)
    for name, content in (kept or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    name = commit[:12] or "of no commit"
    changes = " with its uncommitted changes" if manifest.git.get("dirty") else ""
    rest = f"other files from {repository}" if repository is not None else f"commit {name} is in no clone here"
    return f"code {name}{changes}, kept as {manifest.code[:DIGITS]}; {rest}"


def _kept(manifest: RunManifest, results: Path | None) -> tuple[dict[str, bytes] | None, str]:
    """The kept code, or why there is none."""
    if not manifest.code:
        return None, "its code was not kept"
    if results is None:
        return None, "no results lie beside the manifest, so no kept code"
    try:
        kept = kept_code(results, manifest.code)
    except CorruptError as error:
        return None, error.message()
    return kept, f"its code is not in {kept_path(results, manifest.code)}"


def _no_code(commit: str, candidates: Sequence[Path], why: str) -> PermanentError:
    if not commit:
        return PermanentError(
            f"the manifest names no commit: the run was not made from a git checkout; and {why}",
            remedy="Nobody can tell which code to take.",
        )
    return PermanentError(
        f"the recorded commit {commit} is not in {' or '.join(dict.fromkeys(map(str, candidates)))}; and {why}",
        remedy="Fetch it (`git fetch --all`; a shallow clone needs `--unshallow`), or run this in a clone that has it.",
    )


def _take_commit(repository: Path, commit: str, folder: Path) -> None:
    archive = _git(repository, "archive", "--format=tar", commit)
    if archive.returncode != 0:
        raise PermanentError(
            f"git cannot give commit {commit}: {archive.stderr.decode().strip()}", where=str(repository)
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def take_code(manifest: RunManifest, repository: Path, folder: Path) -> None:
    """Puts the recorded commit into `folder`, uncommitted changes included.

    Raises:
        PermanentError: the changes were not kept, or do not apply.
    """
    _take_commit(repository, str(manifest.git["commit"]), folder)
    code = [
        name
        for name in manifest.git.get("changed") or []
        if name.partition("/")[0] in ("dflash", "workflow", "Snakefile")
    ]
    if not manifest.git.get("dirty"):
        return
    diff = manifest.git.get("diff")
    if not diff and code:
        raise PermanentError(
            f"the run was made with uncommitted changes of {', '.join(code[:5])}, which its manifest does not hold",
            remedy="Nobody can tell which code to take.",
        )
    if diff and _git(folder, "apply", "--whitespace=nowarn", "-", given=str(diff).encode()).returncode != 0:
        raise PermanentError("the uncommitted changes that the manifest holds do not apply to its commit")


# ---------------------------------------------------------------- the config


def placed_config(source: Mapping[str, Any], code: Path, here: Path, results: Path) -> dict[str, Any]:
    """The recorded configuration with paths that can be found: in the recorded code first, then where the command was given.

    Raises:
        ConfigError: a file of prompts, the target, a drafter or the parent dataset is in neither.
    """
    config: dict[str, Any] = json.loads(json.dumps(source))

    def find(path: str, key: str) -> str:
        for base in (code, here):
            if (base / path).exists():
                return str((base / path).resolve())
        raise ConfigError(f"`{key}: {path}`: there is no such file in the recorded code or in {here}")

    def place(section: Any, key: str) -> None:
        if isinstance(section, dict) and isinstance(section.get("path"), str):
            section["path"] = find(section["path"], f"{key}.path")

    place(config.get("target"), "target")
    for index, entry in enumerate(config.get("prompts", [])):
        place(entry, f"prompts.{index}")
    dataset = config.get("dataset", {})
    dataset["exclude"] = [find(path, "dataset.exclude") for path in dataset.get("exclude", [])]
    if isinstance(dataset.get("parent"), str):
        dataset["parent"] = find(dataset["parent"], "dataset.parent")
    for index, entry in enumerate(config.get("references", {}).get("prompt_sets", [])):
        place(entry, f"references.prompt_sets.{index}")
    for index, entry in enumerate(config.get("evaluate", {}).get("drafters") or []):
        place(entry, f"evaluate.drafters.{index}")
    return {**config, "results": str(results)}


# ---------------------------------------------------------------- running it


def _environment(code: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("DFLASH_") or name == "DFLASH_LEASES"
    }
    return {**kept, "PYTHONPATH": str(code)}


def end_trainers(results: Path, patience: float = 20.0) -> None:
    """Ends trainers that a repetition has left at work, and waits until they and their launchers have written their last word:
    they are detached, would go on, and would write into a folder that is being deleted.

    Args:
        patience: seconds to wait at most.
    """
    for lease in results.glob("store/train/*/lease.json"):
        record = holder(lease)
        if record is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(
        _unfinished(path) for path in results.glob("store/train/*/attempts/*.json")
    ):
        time.sleep(0.1)


def _unfinished(attempt: Path) -> bool:
    """Whether the launcher of an attempt has yet to write how it ended."""
    try:
        return json.loads(attempt.read_text()).get("end") is None
    except (OSError, ValueError):
        return False


def _call(code: Path, words: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash", *words], cwd=code, env=_environment(code), stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise PermanentError(
            f"the recorded code ended with exit code {done.returncode}",
            where=f"dflash {words[0]}",
            remedy="Its last lines say why.",
        )


def run_whole(manifest: RunManifest, code: Path, here: Path, results: Path) -> RunManifest:
    """Runs the recorded configuration with the recorded code and returns the new manifest."""
    config = code / "reproduce.yaml"
    config.write_text(yaml.safe_dump(placed_config(manifest.source, code, here, results), sort_keys=False))
    _call(code, ["run", "--configfile", str(config)])
    return RunManifest.read(results / "runs" / manifest.run / "latest" / "manifest.json")


def run_segment(
    manifest: RunManifest, store: Path, code: Path, here: Path, results: Path, first: int, last: int
) -> None:
    """Trains steps `first` + 1 to `last` with the recorded code, from the recorded state of `first`.

    Raises:
        ConfigError: a step that is no checkpoint of the run, or whose state is not kept; says which are.
    """
    entry = _stage(manifest, "train")
    origin = stage_directory(store, "train", entry.key)
    kept = sorted(int(path.parent.name[5:]) for path in origin.glob("step_*/state") if path.parent.name[5:].isdigit())
    if last not in manifest.steps or not first < last:
        raise ConfigError(f"`--steps {first}:{last}`: checkpoints of the run are {', '.join(map(str, manifest.steps))}")
    if first and first not in kept:
        _refuse_far_state(entry, first, last)
        raise ConfigError(
            f"`--steps {first}:{last}`: the state of step {first} is not kept",
            where=str(origin),
            remedy=f"States are kept of {', '.join(map(str, kept)) or 'no step'}; 0 begins from scratch.",
        )
    fresh = results / "store"
    for item in manifest.stages:
        if item.stage in STEPWISE_RECEIPTS or item.stage == "references":
            continue
        place = stage_directory(fresh, item.stage, item.key)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(stage_directory(store, item.stage, item.key).resolve())
    folder = stage_directory(fresh, "train", entry.key)
    folder.mkdir(parents=True)
    shutil.copyfile(origin / "params.json", folder / "params.json")
    if first:
        shutil.copytree(origin / f"step_{first}", folder / f"step_{first}")
        if (origin / "probe.safetensors").exists():
            shutil.copyfile(origin / "probe.safetensors", folder / "probe.safetensors")
    config = placed_config(manifest.source, code, here, results)
    placement = {
        **config["train"],
        "host": "local",
        "device": "cpu" if manifest.determinism == "bitwise" else "cuda",
        "target_path": config["target"].get("path"),
        "steps": [step for step in manifest.steps if first < step <= last],
        "node": "train",
    }
    words = ["stage", "train", "--params", str(folder / "params.json"), "--store", str(fresh), "--step", str(last)]
    _call(code, [*words, "--run", manifest.run, "--placement", json.dumps(placement)])


def _refuse_far_state(entry: StageEntry, first: int, last: int) -> None:
    host = entry.environments.get(str(first), "").partition("/")[0]
    if host not in ("", "local"):
        raise PermanentError(
            f"`--steps {first}:{last}`: the state of step {first} lies on {host}, where it was trained",
            remedy=f"`--steps :{last}` begins from scratch here.",
        )


def _stage(manifest: RunManifest, stage: str) -> StageEntry:
    for entry in manifest.stages:
        if entry.stage == stage:
            return entry
    raise PermanentError(f"the run has no {stage} stage")


# ---------------------------------------------------------------- comparing


def tensor_digests(path: Path) -> dict[str, str]:
    """sha256 of the bytes of each tensor of a safetensors file, by name.

    Raises:
        CorruptError: not a whole safetensors file.
    """
    tensors, _, start = read_header(path)
    found = {}
    with path.open("rb") as stream:
        for tensor in tensors:
            stream.seek(start + tensor["offset"])
            found[tensor["name"]] = hashlib.sha256(stream.read(tensor["bytes"])).hexdigest()
    return found


def compare_stage(
    verdict: Verdict,
    entry: StageEntry,
    made: Path,
    recorded: Path | None,
    steps: Sequence[int],
    kind: str,
    tensors: Mapping[str, str],
) -> None:
    """Compares the outputs of one result with what the manifest records of them.

    Args:
        made: folder of the reproduced result. recorded: of the recorded one, when its store is at hand.
        steps: checkpoints to compare. kind: the class. tensors: recorded digests of the last checkpoint's tensors.
    """
    places = [str(step) for step in steps] if entry.stage in STEPWISE_RECEIPTS else [""]
    equal, unequal, left_out = 0, [], []
    for place in places:
        for output in entry.outputs.get(place, []):
            host = entry.environments.get(place, "").partition("/")[0]
            fault = _output_fault(output, made, recorded, kind, "" if host == "local" else host)
            if fault == NOT_COMPARED:
                left_out.append(output.path)
                continue
            verdict.compared += 1
            if fault is None:
                equal += 1
            else:
                unequal.append(f"{output.path}: {fault}")
    words = (
        f"{equal} of {number_of(equal + len(unequal), 'output')} {'equal' if kind == 'bitwise' else 'within tolerance'}"
    )
    if entry.stage == "train" and places:
        words += _tensor_words(made, places, tensors, verdict, kind)
    if left_out:
        words += f"; {len(left_out)} of other bytes {NOT_COMPARED} ({', '.join(left_out[:3])})"
    verdict.add(entry.name, f"{words}{'; ' + '; '.join(unequal[:3]) if unequal else ''}", not unequal)


def _tensor_words(made: Path, places: Sequence[str], tensors: Mapping[str, str], verdict: Verdict, kind: str) -> str:
    """How many tensors of the last checkpoint have the recorded digests."""
    path = made / f"step_{places[-1]}" / "drafter" / WEIGHTS
    if not tensors or not path.exists() or kind != "bitwise":
        return ""
    here = tensor_digests(path)
    other = sorted(name for name in {*here, *tensors} if here.get(name) != tensors.get(name))
    if other:
        verdict.problems.append(f"train step {places[-1]}: tensors {', '.join(other[:3])} differ ({len(other)} in all)")
    return f"; step {places[-1]}: {len(tensors) - len(other)} of {number_of(len(tensors), 'tensor')} equal"


def _output_fault(output: OutputFile, made: Path, recorded: Path | None, kind: str, host: str = "") -> str | None:
    """What is wrong with a file; None when it is as recorded, `NOT_COMPARED` when nobody can tell. host: another one, on which
    the recorded file was made."""
    path = made / output.path
    if not path.exists():
        return "not made"
    if sha256_file(path) == output.sha256:
        return None
    before = recorded / output.path if recorded is not None and (recorded / output.path).exists() else None
    weights = path.name.endswith(".safetensors")
    if weights and before is not None:
        return _weights_fault(before, path, kind)
    if kind == "bitwise":
        return _far_weights_fault(recorded, output, path) if weights and recorded is not None else "other bytes"
    if not weights and path.name != "rows.json":
        return NOT_COMPARED
    if before is None:
        lies = f" (it was made on {host})" if host else ""
        return f"other bytes, and the recorded file is not here to compare values with{lies}"
    return _rows_fault(before, path)


def _far_weights_fault(recorded: Path, output: OutputFile, path: Path) -> str | None:
    """Tensors that differ from those of a checkpoint whose weights stayed on another host: its manifest came back."""
    file = recorded / Path(output.path).parts[0] / "manifest.json"
    if path.name != WEIGHTS or not file.exists():
        return "other bytes"
    ours = {tensor.name: tensor.sha256 for tensor in CheckpointManifest.read(file).tensors}
    if not ours or not all(ours.values()):
        return "other bytes"
    return _other_tensors(ours, tensor_digests(path))


def _other_tensors(ours: Mapping[str, str | None], theirs: Mapping[str, str | None]) -> str | None:
    other = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return f"tensors {', '.join(other[:3])} differ ({len(other)} of {len(ours)})" if other else None


def _weights_fault(before: Path, path: Path, kind: str) -> str | None:
    """Tensors that differ, by bits or beyond the tolerance of their type."""
    if kind == "bitwise":
        return _other_tensors(tensor_digests(before), tensor_digests(path))
    ours_values, theirs_values = _values(before), _values(path)
    if ours_values.keys() != theirs_values.keys():
        return "other tensors"
    for name, (kind_of, value) in ours_values.items():
        other_value = theirs_values[name][1]
        size = float(np.linalg.norm(value)) or 1.0
        error = float(np.linalg.norm(other_value - value)) / size if value.shape == other_value.shape else np.inf
        if not error <= TOLERANCE.get(kind_of, 0.0):
            return f"{name} is off by {error:.1e} (at most {TOLERANCE.get(kind_of, 0.0):.0e})"
    return None


def _values(path: Path) -> dict[str, tuple[str, np.ndarray[Any, np.dtype[np.float64]]]]:
    """Tensors of floats by name, with their type, as float64."""
    tensors, _, start = read_header(path)
    found = {}
    with path.open("rb") as stream:
        for tensor in tensors:
            stream.seek(start + tensor["offset"])
            content = stream.read(tensor["bytes"])
            if tensor["dtype"] == "bfloat16":
                raw = (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
            elif tensor["dtype"] in NUMPY_TYPES:
                raw = np.frombuffer(content, NUMPY_TYPES[tensor["dtype"]])
            else:
                continue
            found[tensor["name"]] = (tensor["dtype"], raw.astype(np.float64))
    return found


def _rows_fault(before: Path, path: Path) -> str | None:
    """Pooled tau outside the recorded intervals."""
    try:
        ours, theirs = (json.loads(file.read_text()) for file in (before, path))
    except ValueError as error:
        raise CorruptError(f"not JSON ({error})", where=str(path)) from error
    if len(ours) != len(theirs):
        return f"{number_of(len(theirs), 'row')}, recorded are {len(ours)}"
    for one, other in zip(ours, theirs, strict=True):
        low, high = one.get("ci_low"), one.get("ci_high")
        if one.get("metric") == "tau_pooled" and low is not None and not low <= other["value"] <= high:
            return f"tau of {one['method']} is {other['value']:.3f}, outside [{low:.3f}, {high:.3f}]"
    return None


# ---------------------------------------------------------------- the command


def parse_steps(text: str) -> tuple[int, int]:
    """`A:B`: the checkpoint to start from (0: none) and the one to end at.

    Raises:
        ConfigError: it is not two numbers.
    """
    first, colon, last = text.partition(":")
    if not colon or not last.isdecimal() or (first and not first.isdecimal()):
        raise ConfigError(f"`--steps {text}` is not A:B", remedy="Say --steps 100:150, or :50 from scratch.")
    return int(first or 0), int(last)


def reproduce(path: Path, folder: Path, *, steps: str = "", tolerance: bool = False) -> Verdict:
    """Repeats a run, or a segment of its training, in `folder` and compares.

    Raises:
        PermanentError: the code or the environment cannot be had; names what is missing.
        ConfigError: a file or step that is not there.
    """
    manifest = read_manifest(path)
    segment = parse_steps(steps) if steps else None
    kind = require_environment(manifest, path, tolerance)
    here = Path.cwd()
    file = path / "manifest.json" if path.is_dir() else path
    store = _store_beside(file)
    code, results = folder / "code", folder / "results"
    origin = place_code(manifest, store.parent if store is not None else None, [here, source_root()], code)
    verdict = Verdict([f"{origin}; class {kind}"])
    tensors = {tensor.name: tensor.sha256 for tensor in manifest.tensors if tensor.sha256}
    if segment is not None:
        if store is None:
            raise ConfigError(
                "a segment starts from a recorded state, but no store lies beside the manifest", where=str(file)
            )
        first, last = segment
        run_segment(manifest, store, code, here, results, first, last)
        entry = _stage(manifest, "train")
        made = stage_directory(results / "store", "train", entry.key)
        wanted = [step for step in manifest.steps if first < step <= last]
        last_tensors = tensors if last == max(manifest.steps) else {}
        compare_stage(verdict, entry, made, stage_directory(store, "train", entry.key), wanted, kind, last_tensors)
        return require_compared(verdict, file)
    again = run_whole(manifest, code, here, results)
    keys = {entry.name: entry.key for entry in again.stages}
    for entry in manifest.stages:
        if keys.get(entry.name) != entry.key:
            verdict.add(
                entry.name, f"key {keys.get(entry.name, 'absent')}, recorded is {entry.key}: other inputs", False
            )
            continue
        made = stage_directory(results / "store", entry.stage, entry.key)
        recorded = stage_directory(store, entry.stage, entry.key) if store is not None else None
        compare_stage(verdict, entry, made, recorded, manifest.steps, kind, tensors)
    return require_compared(verdict, file)


def require_compared(verdict: Verdict, where: Path) -> Verdict:
    """The verdict, which must rest on something.

    Raises:
        PermanentError: no output was compared, and none was found to be other.
    """
    if not verdict.compared and not verdict.problems:
        raise PermanentError(
            "nothing could be compared", where=str(where), remedy="Give the manifest beside its store."
        )
    return verdict


def _store_beside(path: Path) -> Path | None:
    for parent in list(path.absolute().resolve().parents)[:4]:
        if (parent / "store").is_dir():
            return parent / "store"
    return None
