"""A receipt is written last, over outputs that are whole, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash import runner
from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import sha256_file
from dflash.base.records import CodeDigest, Counts, ParamsFile, Receipt, stage_key
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.base.store import read_params
from dflash.data.prompts_params import PromptsParams
from dflash.runner import Job, run_job, verify_inputs
from dflash.stages import BY_NAME, Stage


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(runner.CONTROLLER, raising=False)
    monkeypatch.delenv(runner.INVOCATION, raising=False)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The real `prompts` stage on a file of two prompts."""
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    digest = sha256_file(source)
    params = PromptsParams(name="s", path=str(source), digest=digest).keyed_values()
    key = stage_key("prompts", params, {}, "c" * 16)
    directory = tmp_path / "store/prompts" / key
    document = ParamsFile(
        stage="prompts", key=key, params=params, origins={}, upstream={}, code=CodeDigest(digest="c" * 16, modules={})
    )
    document.write(directory / "params.json")
    placement = {"path": str(source), "files": {digest: str(source)}}
    return Job(BY_NAME["prompts"], directory / "params.json", tmp_path / "store", placement=placement)


def patched(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    monkeypatch.setattr(Stage, "run", lambda self: function)


def test_the_receipt_lists_what_was_made(job: Job) -> None:
    receipt = run_job(job)
    assert receipt == Receipt.read(job.receipt)
    (output,) = receipt.outputs
    made = job.directory / output.path
    assert (output.path, output.size, output.sha256) == ("prompts.parquet", made.stat().st_size, sha256_file(made))
    assert (receipt.counts.total, receipt.counts.ok) == (2, 2)
    assert (job.store / "environments" / f"{receipt.environment}.json").exists()


def test_the_receipt_is_written_after_every_output_is_in_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write = Receipt.write

    def watching(self: Receipt, path: Path) -> None:
        seen.append([(job.directory / output.path).stat().st_size == output.size for output in self.outputs])
        write(self, path)

    publish = runner._publish
    states = []

    def watching_publish(work: Path, directory: Path, outputs: Outputs) -> list[object]:
        states.append(job.receipt.exists())
        made = publish(work, directory, outputs)
        states.append(job.receipt.exists())
        return list(made)

    monkeypatch.setattr(Receipt, "write", watching)
    monkeypatch.setattr(runner, "_publish", watching_publish)
    run_job(job)
    assert seen == [[True]]
    assert states == [False, False]


def test_a_stage_that_fails_leaves_no_receipt_and_no_output(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(params: object, inputs: Inputs, workdir: Path, context: HostContext) -> Outputs:
        (workdir / "prompts.parquet").write_text("half")
        raise PermanentError("no")

    patched(monkeypatch, failing)
    with pytest.raises(PermanentError):
        run_job(job)
    assert not job.receipt.exists()
    assert not (job.directory / "prompts.parquet").exists()


def test_a_stage_killed_in_the_middle_leaves_no_receipt_and_the_next_attempt_starts_clean(job: Job) -> None:
    script = (
        "import os, signal, sys, json\n"
        "from pathlib import Path\n"
        "from dflash import runner\n"
        "from dflash.stages import BY_NAME\n"
        "publish = runner._publish\n"
        "def dying(work, directory, outputs):\n"
        "    publish(work, directory, outputs)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "runner._publish = dying\n"
        "runner.run_job(runner.Job(BY_NAME['prompts'], Path(sys.argv[1]), Path(sys.argv[2]), placement=json.loads(sys.argv[3])))\n"
    )
    arguments = [str(job.params_path), str(job.store), json.dumps(job.placement)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=False)
    assert done.returncode == -9
    assert not job.receipt.exists()
    receipt = run_job(job)
    assert receipt.outputs
    assert receipt.attempt == 2
    assert not list(job.directory.glob(".work*"))


def test_a_result_that_stands_is_not_made_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_job(job)

    def never(*_: object) -> Outputs:
        raise AssertionError("ran again")

    patched(monkeypatch, never)
    assert run_job(job) == first


def test_inputs_that_are_not_accounted_for_stop_the_stage(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(params: object, inputs: Inputs, workdir: Path, context: HostContext) -> Outputs:
        return Outputs([], Counts(total=3, ok=1, skipped=1))

    patched(monkeypatch, losing)
    with pytest.raises(PermanentError, match="do not add up"):
        run_job(job)
    assert not job.receipt.exists()


def test_an_edited_params_file_is_refused(job: Job) -> None:
    document = json.loads(job.params_path.read_text())
    document["params"]["limit"] = 1
    job.params_path.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match="content has key"):
        run_job(job)
    assert not job.receipt.exists()


def test_a_source_that_changed_since_the_plan_is_refused(job: Job) -> None:
    path = Path(job.placement["path"])
    path.write_text(path.read_text() + '{"prompt": "three"}\n')
    with pytest.raises(CorruptError, match="changed since the plan"):
        run_job(job)


def test_an_input_with_one_bit_flipped_is_refused_by_name(job: Job) -> None:
    inputs = Inputs({"prompts": Upstream(job.directory, read_params(job.directory), run_job(job))})
    verify_inputs(inputs)
    path = job.directory / "prompts.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"prompts\.parquet: an input is missing or its bytes are not"):
        verify_inputs(inputs)


def test_a_permanent_failure_is_not_tried_again_in_the_same_invocation(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refusing(*_: object) -> Outputs:
        calls.append(1)
        raise ConfigError("block size 1", where="train.block_size")

    patched(monkeypatch, refusing)
    monkeypatch.setenv(runner.INVOCATION, "first")
    for _ in range(2):
        with pytest.raises((ConfigError, PermanentError), match="block size 1"):
            run_job(job)
    assert len(calls) == 1
    monkeypatch.setenv(runner.INVOCATION, "second")
    with pytest.raises(ConfigError):
        run_job(job)
    assert len(calls) == 2


def watching(controller: str) -> subprocess.Popen[str]:
    """A process that does nothing but watch its controller."""
    script = (
        "import time\nfrom dflash.runner import watch_controller\nwatch_controller(0.05)\nprint('up', flush=True)\n"
    )
    script += "time.sleep(60)\n"
    environment = {**os.environ, runner.CONTROLLER: controller}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_job_ends_when_its_workflow_is_gone(job: Job) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = watching(f"{parent.pid}:{runner.process_start(parent.pid)}")
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    assert child.poll() is None
    parent.kill()
    parent.wait()
    assert child.wait(timeout=60) == 1


def test_a_job_ends_when_the_pid_of_its_workflow_has_become_somebody_elses() -> None:
    child = watching(f"{os.getpid()}:1")
    try:
        assert child.wait(timeout=60) == 1
    finally:
        child.kill()


def test_an_unknown_step_is_refused(job: Job) -> None:
    with pytest.raises(PermanentError, match="no step was given"):
        _ = replace(job, stage=BY_NAME["evaluate"]).receipt
