"""A real OpenAI-compatible server answers a source exactly as the target does in process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash.base.files import DigestCache
from dflash.base.progress import Progress
from dflash.base.records import CodeDigest, ParamsFile
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data import completions, prompts
from dflash.data.completions_params import CompletionsParams
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import COMPLETIONS
from dflash.data.tables import read_rows
from dflash.model.facts import identify
from dflash.model.target_params import TargetSection
from dflash.plan.code import source_root

TARGET = source_root() / "config/demo/target"
SOURCES = [source_root() / f"config/demo/prompts/{name}.jsonl" for name in ("arithmetic", "code")]
EACH = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve` on the demo target; the address of its API."""
    pytest.importorskip(
        "fastapi", reason="transformers serve needs fastapi, uvicorn and openai (requirements-dev.lock)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(TARGET), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 200
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"transformers serve did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def upstream(directory: Path) -> Upstream:
    code = CodeDigest(digest="0" * 64, modules={})
    return Upstream(
        directory, ParamsFile(stage="prompts", key="0", params={}, origins={}, upstream={}, code=code), None
    )


def answers(folder: Path, params: CompletionsParams, **placement: Any) -> tuple[Outputs, list[dict[str, Any]]]:
    """The completions stage, and its rows."""
    folder.mkdir()
    context = HostContext(placement=placement, progress=Progress(quiet=True))
    outputs = completions.run(params, Inputs({"prompts": upstream(folder.parent)}, {}, TARGET), folder, context)
    return outputs, read_rows(folder / "completions.parquet", COMPLETIONS)


def test_greedy_completions_of_a_real_server_equal_those_in_process_sample_by_sample(
    server: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(line for file in SOURCES for line in file.read_text().splitlines(keepends=True)[:EACH]))
    source = PromptsParams(name="some", path=str(path))
    prompts.run(source, Inputs({}, {"": path}), tmp_path, HostContext(progress=Progress(quiet=True)))
    params = CompletionsParams(
        target=identify(TargetSection(path=str(TARGET)), DigestCache()), max_new_tokens=96, max_truncated_share=1.0
    )
    served = params.model_copy(update={"engine": "openai"})
    _, expected = answers(tmp_path / "local", params)
    outputs, found = answers(tmp_path / "served", served, endpoints=[server], send_prompts="text", concurrency=2)
    assert outputs.counts.ok == outputs.counts.total == 2 * EACH
    for one, other in zip(found, expected, strict=True):
        assert one == other
    assert outputs.results["engine"]["models"]
