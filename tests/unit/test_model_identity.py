"""A target is its content: the path does not matter, every byte does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.base.errors import ConfigError, PermanentError
from dflash.model.identity import target_digest, target_source
from dflash.model.target_params import TargetIdentity


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash" / "digests.json"


def make(root: Path) -> Path:
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"weights")
    (root / "tokenizer.json").write_text('{"a": 1}')
    return root


def test_the_same_content_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    (two / "README.md").write_text("not part of the target")
    (two / "config.json").touch()
    assert target_digest(one) == target_digest(two)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_every_part_counts(name: str, tmp_path: Path) -> None:
    root = make(tmp_path / "one")
    before = target_digest(root)
    (root / name).write_bytes(b"something else")
    assert target_digest(root) != before


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, own_cache: Path) -> None:
    root = make(tmp_path / "one")
    before = target_digest(root)
    known = json.loads(own_cache.read_text())
    own_cache.write_text(json.dumps(dict.fromkeys(known, "f" * 64)))
    planted = target_digest(root)
    assert planted != before
    (root / "model.safetensors").write_bytes(b"other weights")
    assert target_digest(root) not in (planted, before)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_cache_costs_time_only(content: str, tmp_path: Path, own_cache: Path) -> None:
    root = make(tmp_path / "one")
    before = target_digest(root)
    own_cache.write_text(content)
    assert target_digest(root) == before


def test_a_target_with_other_bytes_than_the_key_names_is_refused(tmp_path: Path) -> None:
    root = make(tmp_path / "one")
    facts = {"num_layers": 1, "hidden_size": 8, "vocab_size": 9, "hybrid": False, "max_position_embeddings": 16}
    unset = dict.fromkeys(("revision", "random", "pad_token_id", "mask_token_id"))
    identity = TargetIdentity(digest=target_digest(root), eos_token_ids=[], **facts, **unset)  # type: ignore[arg-type]
    assert target_source(identity, root) == root
    (root / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(PermanentError, match="the recorded one is"):
        target_source(identity, root)


def test_an_incomplete_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such target"):
        target_digest(tmp_path / "nowhere")
    root = make(tmp_path / "one")
    (root / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        target_digest(root)


def test_planning_can_name_a_target_without_torch() -> None:
    code = "import sys, dflash.model.identity; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
