"""Configuration files read so that every value remembers where it was written.

YAML traps are closed here: a key given twice is refused (YAML would keep the last in silence), and so is `010` (YAML 1.1
reads it as the octal 8). Costs a few milliseconds a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash.base.errors import ConfigError

OCTAL = re.compile(r"^[-+]?0[0-9]+$")


@dataclass
class Source:
    """A merged configuration: plain values, and for each dotted path the `file:line` that set it."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """`file:line` of a dotted path or of the nearest enclosing one; empty when nothing set it."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return ""


def load_yaml(path: Path) -> Source:
    """Reads one configuration file.

    Raises:
        ConfigError: missing, not YAML, not a mapping, a key twice, or a number with a leading zero; names file and line.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError("the config file does not exist", where=str(path), remedy="Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read ({error})", where=str(path)) from error
    source = Source()
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return source
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("the file is not a mapping of sections", where=str(path))
        source.values = _plain(loader, node, "", str(path), source.origins)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"not YAML: {getattr(error, 'problem', error)}", where=f"{path}{line}") from error
    finally:
        loader.dispose()
    return source


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: str, file: str, origins: dict[str, str]) -> Any:
    where = f"{file}:{node.start_mark.line + 1}"
    if path:
        origins[path] = where
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            if key in found:
                raise ConfigError(
                    f"key `{f'{path}.{key}' if path else key}` is given twice",
                    where=f"{file}:{key_node.start_mark.line + 1}",
                    remedy="Keep one.",
                )
            found[key] = _plain(loader, value_node, f"{path}.{key}" if path else key, file, origins)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, f"{path}.{index}", file, origins) for index, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:int" and OCTAL.match(node.value):
        raise ConfigError(
            f"`{path}: {node.value}` starts with a zero: YAML would read it as an octal number",
            where=where,
            remedy="Write the number without the leading zero, or in quotes if it is text.",
        )
    return loader.construct_object(node, deep=True)


def merge(base: Source, over: Source) -> Source:
    """Deep-merges `over` into `base`: mappings merge, everything else is replaced, as Snakemake merges config files."""
    values = _merge_values(base.values, over.values)
    replaced = _replaced_paths(base.values, over.values, "")
    kept = {
        path: origin
        for path, origin in base.origins.items()
        if not any(path == gone or path.startswith(f"{gone}.") for gone in replaced)
    }
    return Source(values, {**kept, **over.origins})


def _merge_values(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge_values(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _replaced_paths(base: dict[str, Any], over: dict[str, Any], path: str) -> list[str]:
    found = []
    for key, value in over.items():
        name = f"{path}.{key}" if path else key
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            found += _replaced_paths(old, value, name)
        elif key in base:
            found.append(name)
    return found


def subtree(source: Source, path: str) -> Source:
    """The part of a source below a dotted path, with origins relative to it."""
    value: Any = source.values
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    prefix = f"{path}."
    origins = {name[len(prefix) :]: origin for name, origin in source.origins.items() if name.startswith(prefix)}
    return Source(value if isinstance(value, dict) else {}, origins)
