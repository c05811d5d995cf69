"""What planning must know of a target without loading it: its digest and the numbers in its config.

No torch: two small JSON files are read (milliseconds); the digest of the weights costs one read of the directory, once,
remembered by inode, size and modification time. A controller without a copy of the target takes both from the config, where
they are declared; every stage checks the digest of what it loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError
from dflash.base.files import DigestCache
from dflash.model.identity import target_digest
from dflash.model.target_params import DeclaredFacts, RandomTarget, TargetIdentity, TargetSection

MASK_TOKEN = "<|mask|>"
BYTE_SPECIALS = {"pad": 256, "im_end": 257, "im_start": 258, "mask": 259}
"""Ids of the special tokens of the byte-level tokenizer that random targets use, after the 256 bytes."""


def identify(section: TargetSection, cache: DigestCache) -> TargetIdentity:
    """The identity of the target that a config names.

    Raises:
        ConfigError: the directory is missing and its facts are not declared, a file in it is missing, its config lacks a field
            or is not what was declared.
    """
    if section.random is not None:
        return _random_identity(section.random, section.revision)
    assert section.path is not None
    directory = Path(section.path)
    if section.facts is not None and not directory.exists():
        return _declared_identity(section, section.facts)
    found = _identity_there(section, directory, cache)
    if section.facts is not None:
        _compare(section.facts, found, directory)
    return found


def _declared_identity(section: TargetSection, facts: DeclaredFacts) -> TargetIdentity:
    """The same identity as a look at the directory gives, so that keys do not depend on which machine plans."""
    return TargetIdentity(digest=section.digest, revision=section.revision, random=None, **facts.model_dump())


def _compare(facts: DeclaredFacts, found: TargetIdentity, directory: Path) -> None:
    for name in type(facts).model_fields:
        declared, real = getattr(facts, name), getattr(found, name)
        if declared != real:
            raise ConfigError(
                f"`target.facts.{name}: {declared}`: the target in {directory} has {real}",
                where=f"target.facts.{name}",
                remedy="Correct it, or leave `facts` out.",
            )


def _identity_there(section: TargetSection, directory: Path, cache: DigestCache) -> TargetIdentity:
    config = _read(directory / "config.json")
    text = config.get("text_config", config)
    digest = section.digest
    if digest is None:
        digest = target_digest(directory, cache)
    generation = directory / "generation_config.json"
    eos = _read(generation).get("eos_token_id") if generation.exists() else None
    eos = eos if eos is not None else text.get("eos_token_id", config.get("eos_token_id"))
    try:
        return TargetIdentity(
            digest=digest,
            revision=section.revision,
            random=None,
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            hybrid="linear_attention" in (text.get("layer_types") or []),
            max_position_embeddings=text["max_position_embeddings"],
            eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
            pad_token_id=text.get("pad_token_id", config.get("pad_token_id")),
            mask_token_id=_special_token(directory / "tokenizer.json", MASK_TOKEN),
        )
    except KeyError as error:
        raise ConfigError(f"the target's config.json has no {error}", where=str(directory / "config.json")) from error


def _random_identity(spec: RandomTarget, revision: str | None) -> TargetIdentity:
    return TargetIdentity(
        digest=None,
        revision=revision,
        random=spec,
        num_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        hybrid=spec.model_type == "qwen3_5_text",
        max_position_embeddings=spec.max_position_embeddings,
        eos_token_ids=[BYTE_SPECIALS["im_end"]],
        pad_token_id=BYTE_SPECIALS["pad"],
        mask_token_id=BYTE_SPECIALS["mask"],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"`target.path` has no {path.name}",
            where=str(path),
            remedy="Give the directory of a transformers model, or `digest` and `facts` where it lies on other hosts only.",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"not readable JSON ({error})", where=str(path)) from error
    if not isinstance(found, dict):
        raise ConfigError("not a JSON object", where=str(path))
    return found


def _special_token(path: Path, content: str) -> int | None:
    for token in _read(path).get("added_tokens", []):
        if token.get("content") == content:
            return int(token["id"])
    return None
