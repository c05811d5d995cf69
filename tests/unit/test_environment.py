"""`environment.json`: what numbers depend on is there, GPUs included, and no secret can be."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.base import environment

SMI = """#!/bin/sh
if [ "$1" = topo ]; then
printf '\\t\\033[4mGPU0\\tGPU1\\tCPU Affinity\\tNUMA Affinity\\tGPU NUMA ID\\033[0m\\n'
printf 'GPU0\\t X \\tNV18\\t0-31\\t0\\t\\tN/A\\nGPU1\\tNV18\\t X \\t0-31\\t0\\t\\tN/A\\n\\nLegend:\\n\\n  X    = Self\\n'
else
printf 'GPU-aaaa, 700.00\\nGPU-bbbb, [N/A]\\n'
fi
"""
"""What nvidia-smi 580 prints on a machine with two H200, the identities shortened."""


DRIVER = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (someone@)
GCC version:  gcc version 15.3.0 (GCC)
"""


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as torch and nvidia-smi would show it."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cards = [
        SimpleNamespace(name="NVIDIA H200", uuid=uuid, total_memory=150_000_000_000, major=9, minor=0)
        for uuid in ("aaaa", "bbbb")
    ]
    torch = SimpleNamespace(
        __version__="2.13.0+cu130",
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(is_available=lambda: True, version=lambda: 91300)),
        get_num_threads=lambda: 1,
        are_deterministic_algorithms_enabled=lambda: False,
        cuda=SimpleNamespace(
            is_available=lambda: True,
            nccl=SimpleNamespace(version=lambda: (2, 28, 3)),
            device_count=lambda: 2,
            get_device_properties=lambda index: cards[index],
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    version = tmp_path / "version"
    version.write_text(DRIVER)
    monkeypatch.setattr(environment, "DRIVER_FILE", version)
    environment._nvidia_smi.cache_clear()


@pytest.mark.usefixtures("gpu_machine")
def test_a_gpu_machine_is_described_with_build_driver_cards_caps_and_links() -> None:
    facts, gpus = environment.torch_facts()
    assert facts["version"] == "2.13.0+cu130"
    assert (facts["cuda"], facts["cudnn"], facts["nccl"], facts["driver"]) == ("13.0", 91300, "2.28.3", "580.159.04")
    assert facts["topology"] == {"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "NV18"}}
    assert [gpu["power_cap_watts"] for gpu in gpus] == [700.0, None]
    assert [(gpu["name"], gpu["uuid"], gpu["memory_bytes"], gpu["capability"]) for gpu in gpus] == [
        ("NVIDIA H200", uuid, 150_000_000_000, "9.0") for uuid in ("aaaa", "bbbb")
    ]


def test_a_machine_without_nvidia_smi_is_described_without_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    environment._nvidia_smi.cache_clear()
    assert environment._power_caps() == {}
    assert environment._topology() == {}


def test_the_drivers_version_is_read_from_the_closed_module_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(environment, "DRIVER_FILE", file)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n")
    assert environment._driver_version() == "570.86.15"
    file.write_text("")
    assert environment._driver_version() is None


def test_what_is_bound_is_recorded_and_not_only_what_is_installed() -> None:
    bound = {"linear": "torch", "functions": {"chunk_gated_delta_rule": "transformers.x.torch_chunk_gated_delta_rule"}}
    made = environment.collect(bound)
    assert made.kernels == bound
    assert made.distributions["torch"]
    assert made.python
    assert made.cpu
    assert made.platform


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
        "ghp_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
        "sk-proj-AbCdEfGhIjKlMnOpQrStUvWx",
        "AKIAIOSFODNN7EXAMPLE",
        "api_key = 'AbCdEfGhIjKlMnOpQrStUvWx'",
        "https://user:passw0rd@example.org/x",
        'WANDB_API_KEY="0123456789abcdef0123456789abcdef01234567"',
    ],
)
def test_what_looks_like_a_secret_is_masked_in_a_diff(secret: str) -> None:
    text = environment.masked(f"+    call({secret})\n")
    assert "[masked]" in text
    for part in ("AbCdEf", "passw0rd", "IOSFODNN", "0123456789abcdef"):
        assert part not in text


def test_code_about_tokens_is_no_secret() -> None:
    code = "+    token = self.tokens[index]\n+    token_budget: int = 2560\n+    mask_token_id=mask, tokens=[1, 2]\n"
    assert environment.masked(code) == code


def test_only_allowed_variables_are_kept_and_masked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345")
    monkeypatch.setenv("TRITON_CACHE_DIR", "https://user:passw0rd@example.org/cache")
    text = json.dumps(environment.collect().model_dump(mode="json"))
    assert "hf_AbC" not in text
    assert "passw0rd" not in text
    assert "TRITON_CACHE_DIR" in text


def test_uncommitted_changes_of_the_code_are_kept_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "rev-parse --show-toplevel": str(Path(environment.__file__).resolve().parents[2]),
        "rev-parse HEAD": "c" * 40,
        "status --porcelain --untracked-files=no": " M dflash/train/objective.py",
        "diff HEAD --": "+x = 1",
    }

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        said = " ".join(words[3:])
        found = next((text for start, text in answers.items() if said.startswith(start)), None)
        return SimpleNamespace(returncode=0 if found is not None else 1, stdout=f"{found}\n")

    monkeypatch.setattr(environment.subprocess, "run", run)
    facts = environment.git_facts.__wrapped__()
    assert facts["commit"] == "c" * 40
    assert facts["dirty"] is True
    assert facts["changed"] == ["dflash/train/objective.py"]
    assert facts["diff"] == "+x = 1\n"


def test_a_version_is_told_whole_however_long_the_lines_before_it(tmp_path: Path) -> None:
    for length in range(440, 500):
        folder = tmp_path / f"n{length}-1.dist-info"
        folder.mkdir()
        start = f"Metadata-Version: 2.1\nName: n{length}\nLicense: "
        start += "x" * (length - len(f"{start}\nVersion: "))
        (folder / "METADATA").write_text(f"{start}\nVersion: 12.34.56\n\nVersion: no\n")
        assert environment._name_and_version(PathDistribution(folder)) == (f"n{length}", "12.34.56")
