"""`config/README.md`: every option with type, default, unit and effect on keys, from the params models.

    python -m dflash.plan.options > config/README.md

A test compares the file with the models, so it cannot drift. Costs nothing that planning does not.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dflash.base.params import DERIVED, PLACEMENT, Params
from dflash.evaluate.evaluate_params import Online, OtherDrafter
from dflash.evaluate.references_params import PromptSet
from dflash.model.target_params import DeclaredFacts, RandomTarget, TargetSection
from dflash.stages import STAGES
from dflash.train.train_params import ContinueFrom, Topology

HEAD = """\
# Options

Generated from the models by `python -m dflash.plan.options`; `make fmt` writes it again.

A configuration is a YAML file of sections, one a stage of the road. Give a run's name (`run: NAME`), or several runs that
override sections (`runs: [{name: one}, {name: two, train: {lr: 1e-3}}]`). Several files merge (`--configfile A
--configfile B`): mappings merge, everything else is replaced by the later file. `results: FOLDER` (default `results`) says
where results go, `hosts: FILE` which machine plays which role (default: this one plays all). Paths are relative to the
working directory.

*In the key* says what a change does. `yes`: the stage and everything after it is made again, and changing the value back
makes nothing again. `no`: placement; it changes where, how fast or how often, never a result. Options of `target` enter the
keys of completions, train, references and evaluate; a path never does, the digest of what lies there does.

A dataset grows by its sources. Each is answered on its own, so one more costs its own answers and what follows:

    prompts:
      - {name: base, kind: dataset, path: results/store/dataset/0123456789ab}      # an earlier version, taken whole
      - {name: old, kind: imported, path: old.parquet}                             # rows of input_ids and loss_mask, as they are
      - {name: chats, path: chats.jsonl, mapping: sharegpt, answers: drop, shards: 8}
      - {name: hub, huggingface: owner/name, revision: <commit>, licence: Apache-2.0, malformed: skip}
    completions: {engine: openai, endpoints: [http://one:8000/v1, http://two:8000/v1], max_new_tokens: 4096}

The report then shows how the lengths shifted since the earlier version, and what that does to batches, steps and memory.
"""


def options_markdown() -> str:
    """The whole document."""
    parts = [
        HEAD,
        _section("target", TargetSection),
        _nested("target.facts", DeclaredFacts),
        _nested("target.random", RandomTarget),
    ]
    seen = set()
    for stage in STAGES:
        if stage.section in seen:
            continue
        seen.add(stage.section)
        parts.append(_section(stage.section, stage.params_model()))
        if stage.section == "train":
            parts += [_nested("train.topology", Topology), _nested("train.continue_from", ContinueFrom)]
        if stage.section == "references":
            parts.append(_nested("references.prompt_sets[]", PromptSet))
        if stage.section == "evaluate":
            parts += [_nested("evaluate.online", Online), _nested("evaluate.drafters[]", OtherDrafter)]
    return "\n".join(parts)


def _section(name: str, model: type[Params]) -> str:
    title = f"{name}[]" if name == "prompts" else name
    return f"## {title}\n\n{_table(model)}"


def _nested(name: str, model: type[Params]) -> str:
    return f"### {name}\n\n{_table(model)}"


def _table(model: type[Params]) -> str:
    rows = ["| option | type | default | unit | in the key | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        role = model.role_of(name)
        if role == DERIVED:
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        cells = [
            f"`{name}`",
            type_name(field.annotation) + _bounds(field),
            _default(field),
            str(extra.get("unit", "")),
            "no" if role == PLACEMENT else "yes",
            field.description or "",
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def type_name(annotation: Any) -> str:
    """A type as a reader of YAML would call it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_name(part) for part in arguments)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    names = {int: "whole number", float: "number", str: "text", bool: "yes/no"}
    if annotation in names:
        return names[annotation]
    return "mapping" if isinstance(annotation, type) and issubclass(annotation, Params) else str(annotation)


def _bounds(field: FieldInfo) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    found = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs
        if getattr(item, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    if isinstance(value, Params):
        return "see below"
    if isinstance(value, list) and value and isinstance(value[0], Params):
        return "`" + ", ".join(str(item.model_dump(exclude_defaults=True)) for item in value) + "`"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`"


if __name__ == "__main__":
    print(options_markdown(), end="")
