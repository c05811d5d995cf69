"""From configuration files to validated sections, every value with its origin.

A config has the sections `target, prompts, completions, dataset, batching, train, references, evaluate, report`, a run's
name (`run: NAME`), or several runs that override sections (`runs: [{name: ..., train: {...}}, ...]`), and `results`, `hosts`
(placement). Costs tens of milliseconds; digests of prompt files and weights are remembered.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dflash.base.canonical import short_digest
from dflash.base.environment import masked
from dflash.base.errors import ConfigError, DflashError
from dflash.base.files import DigestCache
from dflash.base.params import DERIVED, Params
from dflash.base.yaml_source import Source, load_yaml, merge, subtree
from dflash.data.buckets_params import BucketsParams
from dflash.data.completions_params import CompletionsParams
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompt_sets import check_labels
from dflash.data.prompts import validate_prompts_file
from dflash.data.prompts_params import PromptsParams
from dflash.evaluate.evaluate_params import EvaluateParams, OtherDrafter
from dflash.evaluate.references_params import PromptSet, ReferencesParams
from dflash.hosts.inventory import Inventory, load_inventory
from dflash.model.facts import identify
from dflash.model.published import read_fields
from dflash.model.taps import check_taps, default_taps
from dflash.model.target_params import TargetIdentity, TargetSection
from dflash.report.report_params import ReportParams
from dflash.train.train_params import TrainParams

SECTIONS = ("target", "prompts", "completions", "dataset", "batching", "train", "references", "evaluate", "report")
TOP_LEVEL = ("run", "runs", "results", "hosts", *SECTIONS)
RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
P = TypeVar("P", bound=Params)


@dataclass(frozen=True)
class RunConfig:
    """One run, validated and resolved. `origins`: section -> dotted name -> origin. `files`: digest -> path on this host."""

    name: str
    target_section: TargetSection
    target: TargetIdentity
    target_path: Path | None
    prompts: tuple[PromptsParams, ...]
    completions: CompletionsParams
    dataset: DatasetParams
    batching: BucketsParams
    train: TrainParams
    references: ReferencesParams
    evaluate: EvaluateParams
    report: ReportParams
    files: Mapping[str, Path]
    origins: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Config:
    """All runs of a configuration, where results go, and the hosts."""

    runs: tuple[RunConfig, ...]
    results: Path
    inventory: Inventory
    files: tuple[str, ...]


def load_config(paths: list[Path], cache: DigestCache | None = None) -> Config:
    """Reads, merges and validates configuration files, later ones over earlier ones.

    Raises:
        ConfigError: anything a user can get wrong, with file, line, key and value.
    """
    source = Source()
    for path in paths:
        source = merge(source, load_yaml(path))
    return build_config(source, [str(path) for path in paths], cache or DigestCache())


def build_config(source: Source, files: list[str], cache: DigestCache) -> Config:
    """Validates a merged source; see `load_config`."""
    for key in source.values:
        if key not in TOP_LEVEL:
            raise ConfigError(
                f"unknown key `{key}: {_short(source.values[key])}`",
                where=source.origin(key),
                remedy=f"{meant(key, TOP_LEVEL)}Known keys: {', '.join(TOP_LEVEL)}.",
            )
    results = Path(str(source.values.get("results", "results")))
    _check_writable(results, source.origin("results") or ", ".join(files))
    inventory = _inventory(source)
    runs = tuple(_run_config(name, part, cache) for name, part in _split_runs(source, files))
    cache.save()
    return Config(runs, results, inventory, tuple(files))


def _inventory(source: Source) -> Inventory:
    hosts = source.values.get("hosts")
    if hosts is None:
        return load_inventory(None)
    where = source.origin("hosts")
    if not isinstance(hosts, str):
        raise ConfigError(f"`hosts: {_short(hosts)}` is not a path", where=where)
    if not Path(hosts).is_file():
        raise ConfigError(
            f"`hosts: {hosts}`: there is no such file",
            where=where,
            remedy=f"Paths are relative to the working directory ({Path.cwd()}).",
        )
    return load_inventory(Path(hosts))


def _check_writable(results: Path, where: str) -> None:
    """Refuses a results folder that cannot be written, without writing (a read-only mount denies even root)."""
    for folder in (results, results / "store", results / "runs"):
        existing = folder
        while not existing.exists():
            existing = existing.parent if existing.parent != existing else Path("/")
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"`results: {results}` cannot be written ({existing} is read-only or not a folder)",
                where=where,
                remedy="Make it writable or name another folder under `results`.",
            )


def _split_runs(source: Source, files: list[str]) -> list[tuple[str, Source]]:
    shared = Source(
        {key: value for key, value in source.values.items() if key in SECTIONS},
        {path: origin for path, origin in source.origins.items() if path.split(".")[0] in SECTIONS},
    )
    where = ", ".join(files) or "config"
    if ("run" in source.values) == ("runs" in source.values):
        raise ConfigError("give exactly one of `run: NAME` and `runs: [...]`", where=source.origin("runs") or where)
    if "run" in source.values:
        return [(_run_name(source.values["run"], source.origin("run")), shared)]
    entries = source.values["runs"]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"`runs: {_short(entries)}` is not a list of runs", where=source.origin("runs"))
    found: dict[str, Source] = {}
    for index, entry in enumerate(entries):
        origin = source.origin(f"runs.{index}")
        if not isinstance(entry, dict) or "name" not in entry:
            raise ConfigError(f"`runs.{index}: {_short(entry)}` is not a mapping with a `name`", where=origin)
        name = _run_name(entry["name"], origin)
        if name in found:
            raise ConfigError(f"`runs`: the name `{name}` is given twice", where=origin, remedy="Rename one of them.")
        unknown = [key for key in entry if key != "name" and key not in SECTIONS]
        if unknown:
            raise ConfigError(
                f"unknown key `runs.{index}.{unknown[0]}: {_short(entry[unknown[0]])}`",
                where=source.origin(f"runs.{index}.{unknown[0]}"),
                remedy=f"{meant(unknown[0], SECTIONS)}A run may override {', '.join(SECTIONS)}.",
            )
        over = subtree(source, f"runs.{index}")
        over.values = {key: value for key, value in over.values.items() if key != "name"}
        over.origins.pop("name", None)
        found[name] = merge(shared, over)
    return list(found.items())


def _run_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not RUN_NAME.match(value):
        raise ConfigError(
            f"`{_short(value)}` is not a run's name", where=where, remedy="Use letters, digits, '-', '_' and '.'."
        )
    return value


def _run_config(name: str, source: Source, cache: DigestCache) -> RunConfig:
    files: dict[str, Path] = {}
    origins: dict[str, dict[str, str]] = {}

    def section(model: type[P], key: str, derived: dict[str, Any] | None = None) -> P:
        made = _validate(model, source.values.get(key, {}), key, source, derived or {})
        origins[key] = _origins(model, key, source)
        return made

    target_section = section(TargetSection, "target")
    target = _explained(source, "target", lambda: identify(target_section, cache))
    sources = source.values.get("prompts")
    if not isinstance(sources, list) or not sources:
        raise ConfigError(
            f"`prompts: {_short(sources)}` is not a list of sources",
            where=source.origin("prompts"),
            remedy="Give at least one entry with `name` and `path`.",
        )
    prompts: list[PromptsParams] = []
    for index, entry in enumerate(sources):
        key = f"prompts.{index}"
        entry = _version_file(entry)
        path = entry.get("path") if isinstance(entry, dict) else None
        digest = _file_digest(path, f"{key}.path", source, cache, files) if path is not None else ""
        made = _validate(PromptsParams, entry, key, source, {"digest": digest})
        if any(made.name == other.name for other in prompts):
            raise ConfigError(f"`{key}.name: {made.name}` is given twice", where=source.origin(f"{key}.name"))
        _validate_prompts(made, cache)
        origins[f"prompts/{made.name}"] = _origins(PromptsParams, key, source)
        prompts.append(made)
    completions = section(CompletionsParams, "completions", {"target": target})
    raw_dataset = source.values.get("dataset", {})
    exclude = raw_dataset.get("exclude", []) if isinstance(raw_dataset, dict) else []
    digests = []
    for index, path in enumerate(exclude if isinstance(exclude, list) else []):
        digests.append(_file_digest(path, f"dataset.exclude.{index}", source, cache, files))
        _validate_prompts(PromptsParams(name="exclude", path=path, digest=digests[-1]), cache)
    parent = raw_dataset.get("parent") if isinstance(raw_dataset, dict) else None
    parent_digest = _file_digest(parent, "dataset.parent", source, cache, files) if parent is not None else None
    dataset = section(DatasetParams, "dataset", {"exclude_digests": sorted(digests), "parent_digest": parent_digest})
    batching = section(BucketsParams, "batching")
    train = _explained(source, "train", lambda: _resolve_train(section(TrainParams, "train", {"target": target})))
    evaluate = section(
        EvaluateParams,
        "evaluate",
        {"target": target, "taps": train.target_layer_ids, "block_size": train.block_size},
    )
    drafters, taps = _drafters(source, evaluate, cache, files)
    evaluate = evaluate.model_copy(update={"drafters": drafters})
    references = _references(source, section, target, taps, cache, files)
    for key, devices in (("references", references.target_devices), ("evaluate", evaluate.target_devices)):
        _check_devices(source, key, devices, target)
    report = section(ReportParams, "report", {"run": name})
    path = Path(target_section.path) if target_section.path is not None else None
    return RunConfig(
        name,
        target_section,
        target,
        path,
        tuple(prompts),
        completions,
        dataset,
        batching,
        train,
        references,
        evaluate,
        report,
        files,
        origins,
    )


def _check_devices(source: Source, key: str, devices: list[str], target: TargetIdentity) -> None:
    if len(devices) > target.num_layers:
        raise ConfigError(
            f"`{key}.target_devices: {devices}` are {len(devices)}, for a target of {target.num_layers} layers",
            where=source.origin(f"{key}.target_devices"),
            remedy=f"Name at most {target.num_layers}: a device holds whole layers.",
        )


def _drafters(
    source: Source, evaluate: EvaluateParams, cache: DigestCache, files: dict[str, Path]
) -> tuple[list[OtherDrafter], list[int]]:
    """The drafters trained elsewhere with the digests of their files, and the taps that all drafters together read: the
    run's own first, so that they stand as they would alone."""
    made, taps = [], list(evaluate.taps)
    for index, item in enumerate(evaluate.drafters):
        key = f"evaluate.drafters.{index}.path"
        where = source.origin(key)
        folder = Path(item.path or "")
        if not (folder / "config.json").is_file() and (folder / "drafter" / "config.json").is_file():
            folder = folder / "drafter"
        weights = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not weights:
            raise ConfigError(
                f"`{key}: {item.path}` holds no drafter",
                where=where,
                remedy="Give a directory with config.json and safetensors.",
            )
        try:
            fields, _ = read_fields(folder, evaluate.target.num_layers)
            check_taps(fields["target_layer_ids"], evaluate.target.num_layers)
        except DflashError as error:
            raise ConfigError(f"`{key}: {item.path}`: {error.what}", where=where, remedy=error.remedy) from error
        for name, wanted in (("vocab_size", evaluate.target.vocab_size), ("hidden_size", evaluate.target.hidden_size)):
            if fields[name] != wanted:
                raise ConfigError(
                    f"`{key}: {item.path}`: its {name} is {fields[name]}, the target's {wanted}",
                    where=where,
                    remedy="Only drafters for the target's own vocabulary and hidden size can be judged.",
                )
        digests = {}
        for file in [folder / "config.json", *weights]:
            digests[file.name] = _file_digest(str(file), key, source, cache, files)
        made.append(item.model_copy(update={"files": digests}))
        taps += [tap for tap in fields["target_layer_ids"] if tap not in taps]
    return made, taps


def resolved_source(run: RunConfig) -> dict[str, Any]:
    """The configuration of one run, every default filled in and paths as they were given: written to a file and planned
    again, it has the same keys under the same code, whatever the defaults of later code are."""
    sections = {name: getattr(run, name) for name in SECTIONS if name not in ("target", "prompts")}
    return {
        "run": run.name,
        "target": _as_given(run.target_section),
        "prompts": [_as_given(item) for item in run.prompts],
        **{name: _as_given(section) for name, section in sections.items()},
    }


def _as_given(params: Params) -> dict[str, Any]:
    """The fields that a user may set, as plain JSON values; nested models likewise, unset (None) ones left out."""
    dumped = params.model_dump(mode="json")
    found: dict[str, Any] = {}
    for name in user_fields(type(params)):
        value = getattr(params, name)
        if isinstance(value, Params):
            found[name] = _as_given(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Params) for item in value):
            found[name] = [_as_given(item) for item in value]
        elif value is not None:
            found[name] = dumped[name]
    return found


def _references(
    source: Source, section: Any, target: TargetIdentity, taps: list[int], cache: DigestCache, files: dict[str, Path]
) -> ReferencesParams:
    made: ReferencesParams = section(ReferencesParams, "references", {"target": target, "taps": taps})
    sets = []
    for index, item in enumerate(made.prompt_sets):
        if item.path is not None:
            digest = _file_digest(item.path, f"references.prompt_sets.{index}.path", source, cache, files)
            _validate_prompts(PromptsParams(name=item.name, path=item.path, digest=digest), cache)
            if not cache.knows(f"labels:{digest}"):
                check_labels(Path(item.path))
                cache.remember(f"labels:{digest}")
            item = PromptSet.model_construct(**{**item.model_dump(), "digest": digest})
        sets.append(item)
    return made.model_copy(update={"prompt_sets": sets})


def _resolve_train(params: TrainParams) -> TrainParams:
    """Fills in what depends on the target, so that the key holds numbers and not `None`."""
    target = params.target
    mask = params.mask_token_id if params.mask_token_id is not None else target.mask_token_id
    if mask is None:
        raise ConfigError(
            "the target's tokenizer has no `<|mask|>` token",
            where="train.mask_token_id",
            remedy="Name a token id that the target never writes.",
        )
    taps = params.target_layer_ids
    heads = params.num_attention_heads or max(1, target.hidden_size // params.head_dim)
    resolved = {
        "mask_token_id": mask,
        "target_layer_ids": taps
        if taps is not None
        else list(default_taps(target.num_layers, params.num_draft_layers)),
        "layer_types": params.layer_types or ["full_attention"] * params.num_draft_layers,
        "intermediate_size": params.intermediate_size or 3 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": params.num_key_value_heads or heads,
    }
    return TrainParams.model_validate(
        {**{name: getattr(params, name) for name in type(params).model_fields}, **resolved}
    )


def _validate(model: type[P], values: Any, path: str, source: Source, derived: dict[str, Any]) -> P:
    where = source.origin(path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"`{path}: {_short(values)}` is not a mapping", where=where)
    for name in values:
        if name in model.model_fields and model.role_of(name) == DERIVED:
            raise ConfigError(
                f"`{path}.{name}: {_short(values[name])}` is computed, not set",
                where=source.origin(f"{path}.{name}"),
                remedy="Remove it.",
            )
    try:
        return model.model_validate({**values, **derived})
    except ValidationError as error:
        raise _config_error(error, path, source, model) from error


def _config_error(error: ValidationError, path: str, source: Source, model: type[Params]) -> ConfigError:
    """All that is wrong with a section, first things first; names file, line, key and value of each."""
    lines = []
    wheres = []
    for item in error.errors():
        name = ".".join([path, *(str(part) for part in item["loc"])])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            text = f"`{name}` is missing"
        elif item["type"] == "secret_in_address":
            text = f"`{name}`: {message}"
        elif item["type"] == "extra_forbidden":
            known = user_fields(model)
            text = f"unknown key `{name}: {_short(item['input'])}`; {_meant_field(item['loc'], known)}known: {', '.join(known)}"
        elif not item["loc"]:
            text = f"`{name}`: {message}"
        else:
            text = f"`{name}: {_short(item['input'])}`: {message[:1].lower()}{message[1:]}"
        lines.append(text)
        wheres.append(source.origin(name))
    text = lines[0] + "".join(f"; also {where}: {line}" for line, where in zip(lines[1:], wheres[1:], strict=True))
    return ConfigError(text, where=wheres[0], remedy="See config/README.md for every option.")


def meant(word: str, known: Iterable[str]) -> str:
    """`Did you mean `lr`? ` for a word that is nearly a known one; empty when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{near[0]}`? " if near else ""


def _meant_field(place: tuple[int | str, ...], known: list[str]) -> str:
    """The same inside a sentence, for an unknown field of a section (not of what is nested in it)."""
    hint = meant(str(place[-1]), known) if len(place) == 1 else ""
    return f"{hint[:1].lower()}{hint[1:].rstrip()} " if hint else ""


def user_fields(model: type[Params]) -> list[str]:
    """The fields of a params model that a user may set."""
    return [name for name in model.model_fields if model.role_of(name) != DERIVED]


def _explained(source: Source, section: str, make: Any) -> Any:
    """Runs `make`; a ConfigError that names only a key gets file and line."""
    try:
        return make()
    except ConfigError as error:
        origin = source.origin(error.where)
        if error.where.startswith(section) and origin:
            raise ConfigError(f"`{error.where}`: {error.what}", where=origin, remedy=error.remedy) from error
        raise
    except ValidationError as error:
        raise _config_error(error, section, source, TrainParams) from error


def _file_digest(path: Any, key: str, source: Source, cache: DigestCache, files: dict[str, Path]) -> str:
    where = source.origin(key)
    if not isinstance(path, str):
        raise ConfigError(f"`{key}: {_short(path)}` is not a path", where=where)
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"`{key}: {path}`: there is no such file",
            where=where,
            remedy=f"Paths are relative to the working directory ({Path.cwd()}).",
        )
    try:
        digest = cache.sha256(file)
    except OSError as error:
        raise ConfigError(f"`{key}: {path}` cannot be read ({error.strerror})", where=where) from error
    files[digest] = file
    return digest


def _version_file(entry: Any) -> Any:
    """An earlier dataset version may be given as its folder; its `dataset.json` is what names it."""
    if isinstance(entry, dict) and entry.get("kind") == "dataset" and isinstance(entry.get("path"), str):
        path = Path(entry["path"])
        return {**entry, "path": str(path / "dataset.json")} if path.is_dir() else entry
    return entry


def _validate_prompts(params: PromptsParams, cache: DigestCache) -> None:
    """Reads a file of prompts as its stage will; ready samples and the hub's rows are left to the stage."""
    if params.path is None or params.kind != "prompts":
        return
    fact = f"prompts:{short_digest(params.keyed_values())}"
    if not cache.knows(fact):
        validate_prompts_file(Path(params.path), params)
        cache.remember(fact)


def _origins(model: type[Params], path: str, source: Source) -> dict[str, str]:
    found = {}
    for name in model.model_fields:
        dotted = f"{path}.{name}"
        if model.role_of(name) == DERIVED:
            found[name] = "derived"
        elif dotted in source.origins:
            found[name] = source.origins[dotted]
        else:
            found[name] = "default"
    return found


def _short(value: Any) -> str:
    text = masked(repr(value) if isinstance(value, str) and not value.isprintable() else str(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
