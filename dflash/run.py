"""`dflash run`: verify, run Snakemake until nothing is stale or retired, relink `latest`, print the results.

One `dflash run` at a time works in a results folder: a lock that its Snakemake inherits tells whether anybody is alive, so
that a stale Snakemake lock (left by `kill -9`) can be removed without asking. Training is a detached process of its own:
ending this command leaves it running. With nothing stale Snakemake is not started: about 0.6 s.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.base.errors import ConfigError, DflashError, PermanentError, TransientError
from dflash.base.records import Failure
from dflash.base.words import number_of
from dflash.notify import Lookout, Notifier
from dflash.plan.code import source_root
from dflash.plan.config import load_config
from dflash.plan.costly import decide_recompute, require_decisions
from dflash.plan.explain import reasons
from dflash.plan.graph import Node, Plan, build_plan
from dflash.plan.links import relink_latest
from dflash.plan.places import LOCAL, begun_at, is_moved, place_of, planned_place, training_place
from dflash.plan.verify import CheckThere, find_damage, retire
from dflash.plan.workflow import ACCEPT_ENV, DEFAULT_CONFIG
from dflash.runner import INVOCATION, controller_identity, process_start

OWN_OPTIONS = ("--configfile", "--dry-run", "--detach", "--resume", "--deep", "--accept-env", "--recompute")
DETACHED = "DFLASH_DETACHED"
"""In a detached run, the file that it writes to."""
GRACE = 4.0
"""Seconds that jobs get between the first signal and SIGKILL: the prompt is back within five."""
MAX_ROUNDS = 5
STOPPED = "stopped; a training that was running goes on (`dflash run` attaches to it, `dflash stop RUN` ends it)"


@dataclass
class RunOptions:
    """What the command line says.

    accept_env: why trainings may go on although their probe has drifted. detach: in the background.
    snakemake: further arguments, passed on as they are. causes: of a failure, as stages have left them.
    """

    config_files: list[Path] = field(default_factory=list)
    dry_run: bool = False
    recompute: list[str] = field(default_factory=list)
    resume: bool = False
    deep: bool = False
    accept_env: str = ""
    detach: bool = False
    snakemake: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """The configuration files, the default one when none was named."""
        return self.config_files or [DEFAULT_CONFIG]


def say(text: str) -> None:
    """One line of progress, on stderr."""
    print(f"dflash: {text}", file=sys.stderr, flush=True)


def run(options: RunOptions) -> int:
    """Runs a configuration to its end; returns the exit code.

    Raises:
        ConfigError: bad input. DecisionNeeded: costly work would be redone. TransientError: another run is active here.
    """
    plan = build_plan(load_config(options.files))
    require_reachable(plan)
    if options.dry_run:
        there = check_elsewhere(plan, options.deep)
        for damage in find_damage(plan, deep=options.deep, there=there, everything=options.deep):
            say(f"damaged: {damage.sentence()}; made again by {damage.remedy()}")
        require_decisions(plan)
        print_plan(plan)
        return 0
    plan.config.results.mkdir(parents=True, exist_ok=True)
    notifier = Notifier(plan.config.inventory.notify, "+".join(run.name for run in plan.runs))
    try:
        with Lookout(notifier, plan.config.results, _trainings(plan)):
            status = _run_locked(plan, options)
    except DflashError as error:
        notifier.tell("failure", error.message())
        raise
    if status == 0:
        notifier.tell("finish", f"everything stands: {', '.join(str(run.directory) for run in plan.runs)}")
        print_results(plan)
    elif status < 128:
        notifier.tell("failure", "; ".join(options.causes) or "the workflow failed; its log names the stage")
    return status


def _run_locked(plan: Plan, options: RunOptions) -> int:
    """Verifies and makes what is missing, as the only `dflash run` of this results folder."""
    there = check_elsewhere(plan, options.deep)
    if os.environ.get(DETACHED):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with owner_lock(plan.config.results, follow=True) as descriptor:
        try:
            return _make(plan, options, descriptor, there)
        except KeyboardInterrupt:
            say(STOPPED)
            return 128 + signal.SIGINT


def _make(plan: Plan, options: RunOptions, descriptor: int, there: CheckThere | None) -> int:
    """Runs Snakemake until nothing is stale or damaged; returns the exit code."""
    decide_recompute(plan, options.recompute)
    _stopped(plan, options.config_files, resume=options.resume)
    for _ in range(MAX_ROUNDS):
        damages = find_damage(plan, deep=options.deep, there=there, everything=options.deep)
        if damages:
            for damage in damages:
                say(f"damaged: {damage.sentence()}")
            retire(plan, damages, options.recompute)
        require_decisions(plan)
        if not stale_paths(plan) and not options.snakemake:
            break
        if not damages:
            _announce(plan)
        _carry_over(plan)
        started = time.time()
        status = run_snakemake(plan, options, descriptor)
        if status != 0:
            options.causes = _explain_failure(plan, started)
            return status
        plan = build_plan(load_config(options.files))
        options.snakemake = []
    else:
        raise PermanentError(f"results are still damaged after {MAX_ROUNDS} rounds", remedy="Check the disk.")
    relink_latest(plan)
    return 0


def _trainings(plan: Plan) -> dict[str, Callable[[], dict[str, Any]]]:
    """What says how each unfinished training is, here or on its host."""
    from dflash.train.launch import health

    def look(node: Node) -> dict[str, Any]:
        place = training_place(plan, node)
        if place == LOCAL:
            return health(node.directory)
        from dflash.remote import of_training

        return of_training(plan.config.inventory.get(place), plan.store, node.key, {"do": "training"})

    return {
        node.runs[0]: partial(look, node)
        for node in plan.nodes.values()
        if node.stage.name == "train" and node.missing()
    }


def detach(options: RunOptions, arguments: Sequence[str]) -> int:
    """Starts `dflash run` in the background, in a session of its own, so that it survives this terminal.

    Returns when it holds the lock of the results folder, or has ended before that.

    Raises:
        ConfigError: bad input, found before anything is started. TransientError: another run is at work here.
    """
    plan = build_plan(load_config(options.files))
    require_reachable(plan)
    results = plan.config.results
    results.mkdir(parents=True, exist_ok=True)
    with owner_lock(results):
        pass  # nobody else is at work here
    log = results / "run.log"
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", "dflash", "run", *(word for word in arguments if word != "--detach")],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, DETACHED: str(log)},
        )
    while child.poll() is None and f"pid {child.pid}," not in (results / ".run.lock").read_text():
        time.sleep(0.05)
    if child.poll() not in (None, 0):
        print(log.read_text(), end="", file=sys.stderr)
        return int(child.returncode)
    say(f"running in the background (pid {child.pid}); log: {log}; `dflash run` looks in, `kill {child.pid}` ends it")
    return 0


def _attach(results: Path, log: Path) -> None:
    """Shows what a detached run writes until it has ended; Ctrl-C leaves it running."""
    say(f"a run is at work in the background; its log follows ({log}); Ctrl-C leaves it running")
    with log.open() as stream:
        while _locked(results):
            sys.stderr.write(stream.read())
            sys.stderr.flush()
            time.sleep(0.3)
        sys.stderr.write(stream.read())


def _locked(results: Path) -> bool:
    descriptor = os.open(results / ".run.lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def stale_paths(plan: Plan) -> list[Path]:
    """Receipts, params files and manifests that do not stand."""
    missing = [path for node in plan.nodes.values() for path in [node.directory / "params.json", *node.missing()]]
    missing += [run.directory / "manifest.json" for run in plan.runs]
    return [path for path in missing if not path.exists()]


def _announce(plan: Plan) -> None:
    why = reasons(plan)
    for (stage, key), reason in why.items():
        node = plan.node(stage, key)
        count = f", {len(node.missing())} of {number_of(len(node.steps), 'step')}" if node.stage.stepwise else ""
        say(f"{node.name} {key}{count}: {reason}")


def print_plan(plan: Plan) -> None:
    """The short table of `dflash run -n`: stage, key, state, reason."""
    why = reasons(plan)
    for (stage, key), node in plan.nodes.items():
        missing = len(node.missing())
        total = len(node.receipts())
        state = "fresh" if not missing else f"{missing} of {total} to make" if total > 1 else "to make"
        reason = why.get((stage, key), "")
        print(f"{node.name:<28} {key}  {state:<18} {reason}".rstrip())
    for node in plan.nodes.values():
        if is_moved(plan, node):
            place, role = begun_at(plan, node), planned_place(plan, node)
            print(
                f"training {node.key} of run {', '.join(node.runs)} lives on {place}, and roles.gpu is {role}"
                f"{f' in {plan.config.inventory.file}' if plan.config.inventory.file else ''}: `dflash run` without -n carries "
                f"it over to {role}; to keep it where it is, set the role to {place}"
            )


def require_reachable(plan: Plan) -> None:
    """Refuses scheduled steps that a training has passed without saving them.

    Raises:
        PermanentError: names the steps, how far training is, and the steps that exist.
    """
    from dflash.train.schedule import refuse_passed

    for node in plan.nodes.values():
        if node.stage.name == "train" and node.directory.is_dir():
            refuse_passed(node.directory, [step for step in node.steps if not node.receipt(step).exists()])


def require_ready(plan: Plan) -> None:
    """What the workflow itself, which moves nothing, must be sure of; see `require_reachable`.

    Raises:
        PermanentError: as there; or a training lives on another host than its role names.
    """
    require_reachable(plan)
    if any(is_moved(plan, node) for node in plan.nodes.values()):
        from dflash.moves import refuse_moved

        refuse_moved(plan)


def _carry_over(plan: Plan) -> None:
    """Carries trainings over to where their role runs now."""
    if any(is_moved(plan, node) for node in plan.nodes.values()):
        from dflash.moves import carry_over

        carry_over(plan)


def check_elsewhere(plan: Plan, deep: bool = False) -> CheckThere | None:
    """What asks other hosts about the files that were left there, and has them read every byte when `deep`; None when
    everything is here."""
    inventory = plan.config.inventory
    if all(place_of(inventory, host) == LOCAL for host in inventory.ids()):
        return None

    def check(place: str, files: list[list[Any]], shipped: list[str], *, deep: bool = deep) -> dict[str, str]:
        from dflash.remote import check_there
        from dflash.there import find_faults

        if place == LOCAL:
            return find_faults(Path(), files, shipped, deep=deep)
        if place not in inventory.entries:
            raise ConfigError(
                f"results that are needed were made on `{place}`, which is no longer a host",
                where=str(inventory.file),
                remedy="Name it again, or delete their receipts so that they are made anew.",
            )
        try:
            return check_there(inventory.get(place), files, shipped, deep=deep)
        except TransientError as error:
            say(f"what lies on {place} cannot be checked now: {error.what}")
            return {}

    return check


def _resume_there(plan: Plan, node: Node) -> None:
    """Removes the stop marker of a training on another host."""
    if training_place(plan, node) != LOCAL and node.missing():
        from dflash.moves import ask_home

        ask_home(plan, node, {"do": "resume"})


def _stopped(plan: Plan, config_files: Sequence[Path], *, resume: bool) -> None:
    """Refuses to revive a training that somebody stopped, unless asked to."""
    from dflash.train.launch import clear_stop, read_stop, refuse_stopped

    for node in plan.nodes.values():
        if node.stage.name == "train" and resume:
            _resume_there(plan, node)
        marker = read_stop(node.directory) if node.stage.name == "train" else None
        if marker is None:
            continue
        if resume:
            clear_stop(node.directory)
            say(f"{node.name} {node.key}: the stop marker is removed, training goes on")
        elif node.missing() and not marker.finish:
            try:
                refuse_stopped(node.directory)
            except PermanentError as error:
                config = "".join(f" --configfile {path}" for path in config_files)
                raise PermanentError(
                    error.what,
                    where=error.where,
                    remedy=f"`dflash run --resume{config}` continues it, "
                    f"`dflash stop {marker.run} --finish{config}` reports what exists.",
                ) from error


@contextlib.contextmanager
def owner_lock(results: Path, *, follow: bool = False) -> Iterator[int]:
    """Makes this process the one that runs the workflow in `results`; yields the lock's descriptor for Snakemake to inherit.

    Args:
        follow: show the log of a detached run until it has ended, instead of refusing.

    Raises:
        TransientError: another `dflash run` (or the Snakemake it started) is alive; says whose.
    """
    path = results / ".run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = path.read_text().strip() or "unknown"
            log = Path(owner.partition(", log ")[2])
            if not (follow and log.is_file()):
                raise TransientError(
                    f"another `dflash run` is at work here ({owner})",
                    where=str(results),
                    remedy="Wait for it, or end it with Ctrl-C there; training goes on either way.",
                ) from None
            _attach(results, log)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        log_note = f", log {os.environ[DETACHED]}" if os.environ.get(DETACHED) else ""
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}{log_note}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def snakemake_command(options: RunOptions) -> list[str]:
    """The argv of the workflow."""
    root = source_root()
    snakefile = Path("Snakefile") if Path("Snakefile").is_file() else root / "Snakefile"
    profile = Path("profiles/default") if Path("profiles/default").is_dir() else root / "profiles/default"
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile)]
    if "--workflow-profile" not in options.snakemake:
        command += ["--workflow-profile", str(profile)]
    command += ["--configfile", *map(str, options.config_files)] if options.config_files else []
    if not {"--quiet", "-q", "--verbose"} & set(options.snakemake):
        command += ["--quiet", "all"]
    return [*command, *options.snakemake]


def run_snakemake(plan: Plan, options: RunOptions, descriptor: int) -> int:
    """Runs Snakemake in its own process group and passes SIGINT and SIGTERM on to the group: as SIGINT, which jobs clear up on,
    or as SIGTERM while Snakemake still reads the Snakefile and would answer SIGINT with a traceback."""
    _unlock(options)
    _forget_incomplete(plan, options)
    environment = {**os.environ, INVOCATION: controller_identity(), ACCEPT_ENV: options.accept_env}
    paths = [str(source_root()), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in paths if part)
    children: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT if _may_have_jobs(options) else signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(
            snakemake_command(options), process_group=0, pass_fds=(descriptor,), env=environment, stdout=sys.stderr
        )
        children.append(child)
        if stopped:  # while it was being started
            child.terminate()
        while True:
            try:
                status = child.wait(timeout=GRACE if stopped else 0.5)
                break
            except subprocess.TimeoutExpired:
                if stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped:
        _remove_snakemake_locks()
        say(STOPPED)
        return 128 + stopped[0]
    return 1 if status else 0


def _may_have_jobs(options: RunOptions) -> bool:
    """Whether the Snakemake here may have started jobs: it locks the folder before the first one."""
    elsewhere = {"--nolock", "--directory", "-d"} & {word.partition("=")[0] for word in options.snakemake}
    return bool(elsewhere) or any(Path(".snakemake/locks").glob("*"))


def _unlock(options: RunOptions) -> None:
    """Removes the lock of a Snakemake that is gone. We hold the owner's lock, so only a plain `snakemake` can be alive."""
    if not any(Path(".snakemake/locks").glob("*")) or "--nolock" in options.snakemake:
        return
    alive = [pid for pid in _snakemakes_here() if pid != os.getpid()]
    if alive:
        raise TransientError(
            f"a snakemake (pid {alive[0]}) is at work in this folder",
            where=str(Path.cwd()),
            remedy="Wait for it to end.",
        )
    say("removing the lock of a workflow that was killed")
    _remove_snakemake_locks()


def _remove_snakemake_locks() -> None:
    for lock in Path(".snakemake/locks").glob("*"):
        lock.unlink(missing_ok=True)


def _snakemakes_here() -> list[int]:
    """Processes that run Snakemake in this working directory."""
    found = []
    here = Path.cwd().resolve()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            cwd = (folder / "cwd").resolve()
        except OSError:
            continue
        is_snakemake = any(word.endswith(b"/snakemake") or word == b"snakemake" for word in words[:4])
        if is_snakemake and cwd == here and process_start(int(folder.name)) is not None:
            found.append(int(folder.name))
    return found


def _forget_incomplete(plan: Plan, options: RunOptions) -> None:
    """A job orphaned by `kill -9` may have finished: its receipt is whole, but Snakemake holds it for incomplete and would
    delete it. Receipts were verified just before, so those that stand are good."""
    markers = {path.name for path in Path(".snakemake/incomplete").glob("*")}
    if not markers:
        return
    receipts = [str(path) for node in plan.nodes.values() for path in node.receipts() if path.exists()]
    finished = [run.directory for run in plan.runs if run.nodes["report"].receipt().exists()]
    receipts += [str(folder / name) for folder in finished for name in ("report.html", "evaluations.csv")]
    # Snakemake names a marker after the output's path, in URL-safe base64.
    whole = [path for path in receipts if base64.urlsafe_b64encode(path.encode()).decode() in markers]
    if whole:
        command = [*snakemake_command(RunOptions(options.config_files)), "--cleanup-metadata", *whole]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _explain_failure(plan: Plan, since: float) -> list[str]:
    """Says and returns the causes that stages have left behind since a time (seconds of the epoch)."""
    causes = []
    for node in plan.nodes.values():
        for path in sorted(node.directory.glob("failure*.json")):
            if path.stat().st_mtime < since:
                continue
            try:
                failure = Failure.read(path)
            except DflashError:
                continue
            if node.missing():
                causes.append(f"{node.name} {node.key}: {failure.message}")
                say(causes[-1])
    for path in sorted(plan.store.glob("ship/*/*/.*.failure.json")):
        with contextlib.suppress(DflashError):
            if path.stat().st_mtime >= since:
                failure = Failure.read(path)
                causes.append(f"{failure.stage} {failure.key} to {path.parent.name}: {failure.message}")
                say(causes[-1])
    return causes


def print_results(plan: Plan) -> None:
    """The table of results of every run, on stdout, and where its report is."""
    from dflash.report.tables import read_csv, results_table

    for planned in plan.runs:
        latest = planned.directory.parent / "latest"
        print(f"\nrun {planned.name} ({planned.runkey})")
        results_table(read_csv(latest / "evaluations.csv"), latest / "report.html", stream=sys.stdout)


def plan_as_json(plan: Plan) -> str:
    """`dflash plan --json`."""
    why = reasons(plan)
    nodes = [
        {
            "name": node.name,
            "stage": stage,
            "key": key,
            "runs": node.runs,
            "directory": str(node.directory),
            "fresh": not node.missing(),
            "missing": len(node.missing()),
            "receipts": len(node.receipts()),
            "adopted_for": node.adopted,
            "reason": why.get((stage, key), ""),
            "upstream": node.params.upstream,
        }
        for (stage, key), node in plan.nodes.items()
    ]
    runs = [
        {"name": item.name, "runkey": item.runkey, "directory": str(item.directory), "steps": item.steps}
        for item in plan.runs
    ]
    return json.dumps({"runs": runs, "nodes": nodes}, indent=2, sort_keys=True)


def split_options(arguments: Sequence[str]) -> RunOptions:
    """Reads `dflash run` arguments: ours by name, all others go to Snakemake in their order."""
    options = RunOptions()
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in ("--configfile", "--configfiles"):
            while waiting and not waiting[0].startswith("-"):
                options.config_files.append(Path(waiting.pop(0)))
        elif word.startswith("--configfile="):
            options.config_files.append(Path(word.partition("=")[2]))
        elif word in ("-n", "--dry-run", "--dryrun"):
            options.dry_run = True
        elif word == "--detach":
            options.detach = True
        elif word == "--resume":
            options.resume = True
        elif word == "--deep":
            options.deep = True
        elif word == "--accept-env" and waiting:
            options.accept_env = waiting.pop(0)
        elif word.startswith("--accept-env="):
            options.accept_env = word.partition("=")[2]
        elif word == "--recompute" and waiting:
            options.recompute.append(waiting.pop(0))
        elif word.startswith("--recompute="):
            options.recompute.append(word.partition("=")[2])
        else:
            meant = difflib.get_close_matches(word.partition("=")[0], OWN_OPTIONS, n=1, cutoff=0.85)
            if meant and word.startswith("--"):
                raise ConfigError(f"unknown option `{word}`", remedy=f"Did you mean `{meant[0]}`?")
            options.snakemake.append(word)
    return options
