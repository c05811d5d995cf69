"""The `dflash` command: parses, calls, prints. Starts in about 0.15 s; rooms are imported by the command that needs them.

Exit codes: 0 done; 1 the work failed or a decision is needed; 2 usage or config error. Errors are one line on stderr;
`--debug` (or DFLASH_DEBUG=1) shows the traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.base.errors import ConfigError, DflashError, PermanentError
from dflash.base.words import number_of
from dflash.cli_gc import register as register_gc
from dflash.cli_hosts import register as register_hosts
from dflash.cli_ship import register as register_ship

if TYPE_CHECKING:
    from dflash.plan.graph import Plan, PlannedRun
    from dflash.report.feed import Feed
    from dflash.report.watch import Watched

USES = """\
dflash trains drafters for speculative decoding, from prompts to an evaluated checkpoint, and can explain every result.

  Run the whole pipeline      dflash run [--configfile FILE]
  See what would be redone    dflash plan [--configfile FILE]      (and why; `dflash run` then redoes just that)
  See what made a result      dflash inspect results/runs/RUN/latest/manifest.json   (or any checkpoint)

`dflash --help` lists all commands, `dflash COMMAND --help` explains one. README.md has the tour.
"""

app = typer.Typer(
    help="Train DFlash drafters: prompts -> completions -> dataset -> buckets -> checkpoints -> evaluation -> report.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--configfile", help="Configuration; repeat to merge, later over earlier.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context, debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False
) -> None:
    """What to show when no command is given."""
    if debug:
        os.environ["DFLASH_DEBUG"] = "1"
    if context.invoked_subcommand is None:
        print(USES, end="")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
def run(context: typer.Context) -> None:
    """Run the whole pipeline: dflash run [--configfile FILE] [-n] [--detach] [--recompute STAGE] [--resume] [--deep] [snakemake
    options].

    Verifies what stands, makes what is stale, links results/runs/RUN/latest and prints the table of results.
    -n shows the plan only. --detach runs in the background and survives the terminal; `dflash run` then follows its log.
    --recompute STAGE makes a costly stage anew after a change of its code. --resume continues a training ended by `dflash
    stop`. --deep re-reads every byte when verifying. --accept-env "why" lets a training go on whose probe has drifted on this
    machine, and records why. Other options go to Snakemake.
    """
    from dflash.run import detach, split_options
    from dflash.run import run as run_workflow
    from dflash.stages import BY_NAME

    options = split_options(context.args)
    if any(word.partition("=")[0] == "--accept-env" for word in context.args) and not options.accept_env.strip():
        raise ConfigError("`--accept-env` gives no reason", remedy='Say why: --accept-env "new driver, checked".')
    for name in options.recompute:
        if name not in BY_NAME or not BY_NAME[name].costly:
            raise ConfigError(f"`--recompute {name}` names no costly stage", remedy="Costly: completions, train.")
    raise typer.Exit(detach(options, context.args) if options.detach else run_workflow(options))


@app.command()
def plan(
    configfile: ConfigFiles = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also look for damaged results.")] = False,
    as_json: AsJson = False,
    topology: Annotated[bool, typer.Option("--topology", help="How many targets and drafters are best.")] = False,
    rates: Annotated[Path | None, typer.Option("--rates", help="Measured rates for --topology (JSON).")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs to split, for --topology.")] = None,
) -> None:
    """Show each stage with its key, whether it is fresh, and why not. With --topology: what each split of the GPUs gives."""
    if topology:
        _plan_topology(configfile, rates, gpus, as_json)
        return
    if rates is not None or gpus is not None:
        raise ConfigError("`--rates` and `--gpus` belong to `--topology`", remedy="Add --topology.")
    from dflash.plan.config import load_config
    from dflash.plan.costly import require_decisions
    from dflash.plan.graph import build_plan
    from dflash.plan.verify import find_damage
    from dflash.plan.workflow import DEFAULT_CONFIG
    from dflash.run import check_elsewhere, plan_as_json, print_plan, require_reachable

    made = build_plan(load_config(configfile or [DEFAULT_CONFIG]))
    print(plan_as_json(made)) if as_json else print_plan(made)
    sys.stdout.flush()
    damages = find_damage(made, there=check_elsewhere(made), everything=True) if verify else []
    for damage in damages:
        print(f"damaged: {damage.sentence()}; made again by {damage.remedy()}", file=sys.stderr)
    require_decisions(made)
    require_reachable(made)
    if damages:
        raise PermanentError(
            number_of(len(damages), "damaged result"),
            remedy="Each line above says how it is made again.",
        )


def _plan_topology(configfile: list[Path] | None, file: Path | None, gpus: int | None, as_json: bool) -> None:
    """Predicts tokens per second of every split, from a rates file or from what the config's first run has measured."""
    from dflash.plan import topology
    from dflash.plan.config import load_config
    from dflash.plan.graph import build_plan
    from dflash.plan.workflow import DEFAULT_CONFIG

    run = build_plan(load_config(configfile or [DEFAULT_CONFIG])).runs[0]
    train = run.nodes["train"]
    rates = topology.read_rates(file) if file else topology.rates_of_run(train.directory, run.name)
    batches = int(run.nodes["buckets"].params.params["batches_per_step"])
    placed = train.placement.get("topology") or {}
    count = gpus or rates.gpus or max(2, int(placed.get("targets", 1)) + int(placed.get("drafters", 1)))
    found = topology.predict(rates, count, batches)
    print((topology.as_json if as_json else topology.render)(rates, count, batches, found))


@app.command()
def adopt(
    stage: Annotated[str, typer.Argument(help="completions or train")],
    old_key: Annotated[str, typer.Argument(help="key of the result to keep")],
    why: Annotated[str, typer.Option("--why", help="the reason, kept for ever")],
    configfile: ConfigFiles = None,
) -> None:
    """Keep a result although the code that made it has changed."""
    from dflash.plan.config import load_config
    from dflash.plan.costly import code_changes, twins
    from dflash.plan.graph import build_plan
    from dflash.plan.workflow import DEFAULT_CONFIG
    from dflash.stages import BY_NAME

    if stage not in BY_NAME or not BY_NAME[stage].costly:
        raise ConfigError(f"`{stage}` is not a costly stage", remedy="Costly: completions, train.")
    if not why.strip():
        raise ConfigError("`--why` is empty", remedy="Say why the old result may stand for the new code.")
    made = build_plan(load_config(configfile or [DEFAULT_CONFIG]))
    fitting = [
        node
        for node in made.nodes.values()
        if node.stage.name == stage and old_key in [old.key for old in twins(node, made.store)]
    ]
    if not fitting:
        offered = [f"{change.node.stage.name} {change.old_key}" for change in code_changes(made)]
        raise ConfigError(
            f"{stage} {old_key} is not a result of this config's params and upstreams under other code",
            remedy=f"Results waiting for a decision: {', '.join(offered) or 'none'}.",
        )
    for node in fitting:
        made.decisions.add("adopt", stage, old_key, node.key, why)
        print(f"{stage} {old_key} stands for {node.key} from now on ({made.decisions.path})")


def _planned(run_name: str, configfile: list[Path] | None) -> tuple[Plan, PlannedRun]:
    """The plan of a config and its run of that name."""
    from dflash.plan.config import load_config
    from dflash.plan.graph import build_plan
    from dflash.plan.workflow import DEFAULT_CONFIG

    made = build_plan(load_config(configfile or [DEFAULT_CONFIG]))
    runs = [item for item in made.runs if item.name == run_name]
    if not runs:
        known = ", ".join(item.name for item in made.runs)
        raise ConfigError(
            f"no run `{run_name}` in this config", remedy=f"Runs: {known}. `--configfile FILE` names another config."
        )
    return made, runs[0]


def _training_of(
    run_name: str, configfile: list[Path] | None
) -> tuple[Path, Callable[[dict[str, Any]], dict[str, Any]] | None]:
    """The folder of a run's training, which has begun, and what asks its host when that is another machine."""
    from dflash.plan.places import LOCAL, training_place

    made, planned = _planned(run_name, configfile)
    node = planned.nodes["train"]
    if not node.directory.is_dir():
        raise PermanentError(f"run {run_name} has not begun to train", where=str(node.directory))
    place = training_place(made, node)
    if place == LOCAL:
        return node.directory, None
    from dflash.remote import of_training

    host = made.config.inventory.get(place)
    return node.directory, lambda request: of_training(host, made.store, node.key, request)


@app.command()
def stop(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="name of the run")],
    finish: Annotated[bool, typer.Option("--finish", help="evaluate and report what exists on the next run")] = False,
    force: Annotated[bool, typer.Option("--force", help="also a training that somebody else has started")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """End a run's training after its present step; a rerun does not revive it (`dflash run --resume` does)."""
    from dflash.train.launch import stop_training

    directory, elsewhere = _training_of(run_name, configfile)
    if elsewhere is not None:
        elsewhere({"do": "stop", "run": run_name, "finish": finish, "force": force})
    else:
        stop_training(directory, run_name, finish=finish, force=force)
    config = "".join(f" --configfile {path}" for path in configfile or [])
    tail = (
        f"`dflash run{config}` evaluates and reports the scheduled checkpoints that exist"
        if finish
        else f"`dflash run --resume{config}` continues it, `dflash stop {run_name} --finish{config}` reports what exists"
    )
    print(f"training of {run_name} ({directory.name}) has ended; {tail}")


@app.command()
def checkpoint(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="name of the run")],
    at_once: Annotated[bool, typer.Option("--now", help="save the step that is being trained")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """Save a checkpoint of a training that is at work, beside the scheduled ones; the step joins its schedule."""
    from dflash.train.launch import checkpoint_now

    if not at_once:
        raise ConfigError("`dflash checkpoint` needs `--now`", remedy="Later steps: train.checkpoint_every.")
    directory, elsewhere = _training_of(run_name, configfile)
    if elsewhere is not None:
        step = int(elsewhere({"do": "checkpoint", "run": run_name})["step"])
    else:
        step = checkpoint_now(directory, run_name)
    print(f"step {step} of {run_name} is saved: {directory / f'step_{step}'}")


@app.command()
def rehearse(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="name of the run")],
    as_json: AsJson = False,
    configfile: ConfigFiles = None,
) -> None:
    """Try a run's training on its real hosts in minutes: the longest batches on all ranks, a checkpoint, its shipment and an
    evaluation. Says what memory, disk and time the run needs, and what does not fit. Leaves nothing behind."""

    from dflash.rehearsal import as_json as everything
    from dflash.rehearsal import rehearse as rehearse_run
    from dflash.rehearsal import render

    made, planned = _planned(run_name, configfile)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that hosts are cleared up
    found = rehearse_run(made, planned)
    print(everything(found) if as_json else render(found))
    sys.stdout.flush()
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise PermanentError(f"{found.problems[0]}{more}")


@app.command()
def prompts(
    name: Annotated[str, typer.Argument(help="gsm8k, math500, humaneval, mbpp or mt-bench")],
    to: Annotated[Path, typer.Option("--to", help="JSONL file to write, for `references.prompt_sets`")],
    instruction: Annotated[str | None, typer.Option("--instruction", help="text to put below every question")] = None,
) -> None:
    """Write a published prompt set to a file that a config can name."""
    from dflash.data.prompt_sets import lines, published_prompts

    if to.exists():
        raise ConfigError("the file exists", where=str(to), remedy="Name another one.")
    made = list(lines(name, published_prompts(name), instruction))
    to.write_text("".join(f"{line}\n" for line in made))
    print(f"{to}: {number_of(len(made), 'prompt')}")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="a checkpoint's folder, or a drafter's of another system")],
    client: Annotated[str, typer.Option("--for", help="vllm, sglang, transformers or zlab")],
    to: Annotated[Path | None, typer.Option("--to", help="folder to write; default ./drafter-CLIENT")] = None,
    target_layers: Annotated[
        int | None, typer.Option("--target-layers", help="layers of the target, when the drafter's config does not say")
    ] = None,
) -> None:
    """Write a drafter as a server or a client loads it."""
    from dflash.model.clients import export_for

    destination = to or Path(f"drafter-{client}")
    for note in export_for(client, path, destination, num_target_layers=target_layers):
        print(f"note: {note}", file=sys.stderr)
    print(destination)


@app.command()
def inspect(
    path: Path,
    everything: Annotated[bool, typer.Option("--all", help="Every field of the record, one a line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what made a result: a checkpoint folder, a lone safetensors, a drafter, a receipt, a manifest or a params file."""
    from dflash.report.inspect import describe, show

    print(json.dumps(describe(path), indent=2, sort_keys=True) if as_json else show(path, everything))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    as_json: AsJson = False,
) -> None:
    """Say why B came out otherwise than A: runs, checkpoints, lone safetensors or drafters; most likely explanation first."""
    from dflash.report.compare import compare as diagnose
    from dflash.report.compare import render

    found = diagnose(a, b)
    print(json.dumps(found.as_json(), indent=2, sort_keys=True) if as_json else render(found))


@app.command()
def reproduce(
    manifest: Path,
    check: Annotated[bool, typer.Option("--check", help="compare, fail when anything differs, keep nothing")] = False,
    steps: Annotated[str, typer.Option("--steps", help="A:B, one segment of the training", metavar="A:B")] = "",
    tolerance: Annotated[bool, typer.Option("--tolerance", help="compare values where bits cannot be equal")] = False,
    lock: Annotated[Path | None, typer.Option("--lock", help="only write the recorded packages to a file")] = None,
) -> None:
    """Make a run again with the code and the config it was made with, and compare every output and tensor."""
    import shutil
    import tempfile

    from dflash.report.reproduce import end_trainers, lock_lines, read_manifest
    from dflash.report.reproduce import reproduce as repeat

    if lock is not None:
        lock.write_text(lock_lines(read_manifest(manifest)))
        print(f"the recorded packages are in {lock}; install them with pip install -r {lock}")
        return
    folder = Path(tempfile.mkdtemp(prefix="dflash-reproduce-"))
    try:
        verdict = repeat(manifest, folder, steps=steps, tolerance=tolerance)
    except BaseException:
        if not check and (folder / "results").exists():
            print(f"kept in {folder}", file=sys.stderr)
        raise
    finally:
        end_trainers(folder / "results")
        if check or not (folder / "results").exists():  # without results nothing was made
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(verdict.lines))
    if not check:
        print(f"kept in {folder}")
    if verdict.problems:
        raise PermanentError(f"not reproduced: {'; '.join(verdict.problems[:5])}", where=str(manifest))
    print(f"reproduced: {verdict.compared} outputs compared, none differs")


@app.command("import")
def import_command(
    path: Path,
    wandb_config: Annotated[Path | None, typer.Option("--wandb-config", help="what W&B recorded of it")] = None,
    argv: Annotated[Path | None, typer.Option("--argv", help="file with the command line that launched it")] = None,
    results: Annotated[Path, typer.Option("--results", help="results folder")] = Path("results"),
) -> None:
    """Bring in an old checkpoint (.pt), a drafter, a tokenised dataset, a W&B config or a command line.

    What the content itself does not show is tagged `asserted` and stays so.
    """
    from dflash.report.importing import import_path, render

    record = import_path(path, results, wandb_config=wandb_config, argv=argv)
    print(render(record, results / "store"))


@app.command()
def watch(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="name of the run")],
    once: Annotated[bool, typer.Option("--once", help="one look, then end")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """Show how far a run is, live; from its files alone, so also after the fact. Plain lines when piped."""
    from dflash.report.watch import watch as show_run

    watched = _watched(run_name, configfile)
    try:
        show_run(watched, sys.stdout, follow=not once)
    finally:
        if watched.feed is not None:
            watched.feed.close()


def _watched(run_name: str, configfile: list[Path] | None) -> Watched:
    """What the config asks for, once it has begun; else the run's last state, when there is one."""
    from dflash.report.watch import Watched, of_manifest

    latest = Path("results/runs") / run_name / "latest/manifest.json"
    try:
        made, planned = _planned(run_name, configfile)
    except ConfigError:
        if configfile or not latest.exists():
            raise
        return of_manifest(latest)
    latest = made.config.results / "runs" / run_name / "latest/manifest.json"
    if not planned.nodes["train"].directory.is_dir() and latest.exists():
        print(f"dflash: this config has not begun; shown is the last state of {run_name}", file=sys.stderr)
        return of_manifest(latest)
    results = [(name, node.stage.name, node.key) for name, node in planned.nodes.items() if name != "report"]
    return Watched(run_name, made.store, results, planned.steps, planned.directory, _feed(made, planned))


def _feed(made: Plan, planned: PlannedRun) -> Feed | None:
    """What listens to the host that trains; None when that is this machine, or nothing is left to train."""
    from dflash.plan.places import LOCAL, training_place
    from dflash.report.feed import Feed

    node = planned.nodes["train"]
    place = training_place(made, node)
    if place == LOCAL or not node.missing() or not node.directory.is_dir():
        return None
    return Feed(made.config.inventory.get(place), node.stage.role, node.key)


@app.command(hidden=True)
def stage(
    name: str,
    params: Annotated[Path, typer.Option("--params", help="params.json of the result")],
    store: Annotated[Path, typer.Option("--store", help="root of the store")] = Path("results/store"),
    step: Annotated[int | None, typer.Option("--step", help="checkpoint, for train and evaluate")] = None,
    placement: Annotated[str, typer.Option("--placement", help="JSON of what enters no key")] = "{}",
    run_name: Annotated[str, typer.Option("--run", help="runs that asked for it")] = "",
) -> None:
    """Run one stage; what the rules call."""
    from dflash.runner import main_stage

    try:
        placed = json.loads(placement)
    except ValueError as error:
        raise ConfigError(f"`--placement` is not JSON ({error})") from error
    _refuse_other_code(name, placed.get("code"))
    main_stage(name, params, store, step, placed, run_name)


def _refuse_other_code(name: str, planned: str | None) -> None:
    """Stops a job whose code was edited after the plan was made: its result would lie under the key of the old code."""
    from dflash.plan.code import code_digest
    from dflash.plan.graph import stage_modules
    from dflash.stages import BY_NAME

    if planned and name in BY_NAME and code_digest(stage_modules(BY_NAME[name])).digest != planned:
        raise PermanentError(
            "the code of this stage has changed since the plan was made",
            where=name,
            remedy="Run `dflash run` again; it plans with the code as it is now.",
        )


@app.command("ship-result", hidden=True)
def ship_result(
    record: Path,
    store: Annotated[Path, typer.Option("--store", help="root of the store")],
    shipment: Annotated[str, typer.Option("--shipment", help="JSON: what, from where, to where")],
) -> None:
    """Ship one result to another host; what the rules call."""
    from dflash.shipments import ship_result as run_shipment

    run_shipment(record, store, json.loads(shipment))


@app.command("write-params", hidden=True)
def write_params(path: Path, document: str) -> None:
    """Write the params.json of a result; what the rules call."""
    from dflash.base.records import ParamsFile

    made = ParamsFile.model_validate_json(document)
    if not made.key == made.compute_key() == path.parent.name:
        raise ConfigError(
            f"the document has key {made.compute_key()}, the folder is {path.parent.name}", where=str(path)
        )
    made.write(path)


@app.command("write-manifest", hidden=True)
def write_manifest(
    params: Path,
    store: Annotated[Path, typer.Option("--store", help="root of the store")] = Path("results/store"),
    source: Annotated[str, typer.Option("--source", help="JSON of the run's configuration")] = "{}",
) -> None:
    """Write the manifest of a run's state beside its params.json; what the rules call."""
    from dflash.plan.kept_code import keep_code
    from dflash.plan.manifest import build_manifest

    code = keep_code(store.parent)
    build_manifest(params.parent, store, json.loads(source), code).write(params.parent / "manifest.json")


register_gc(app)
register_hosts(app)
register_ship(app)


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody foresaw: one line for the reader, the traceback on demand."""
    if os.environ.get("DFLASH_DEBUG"):
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"dflash: unexpected {kind.__name__}: {error}. `dflash --debug ...` shows where.", file=sys.stderr)


def main() -> None:
    """Runs the command line; turns errors into one line and an exit code."""
    if "stage" not in sys.argv[1:2]:  # the log of a stage keeps its traceback
        sys.excepthook = _unexpected
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        typer.main.get_command(app)()  # `app()` would put a hook of its own over ours
    except KeyboardInterrupt:
        sys.exit(130)
    except DflashError as error:
        if os.environ.get("DFLASH_DEBUG"):
            raise
        if not error.told:
            print(f"dflash: {error.message()}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
