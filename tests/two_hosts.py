"""The demo over three machines that are one: two throwaway sshd on loopback play GPU host and eval host, this one controls.

    python tests/two_hosts.py [--configfile config/config.yaml] [--results results/two-hosts] [--repeat N]

Each sshd runs as the user who calls, with keys, port and workdir of its own, and both are gone at the end with all that they
ever started; results stay. With `--repeat N` it starts from nothing N times and prints the wall time of each run against the
longest chain of its parts, which is what a run costs when everything that can overlap does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sshd import Sshd, start_sshd, why_not

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"gpu": "trainbox", "eval": "judge"}


def write_configs(folder: Path, servers: dict[str, Sshd], results: Path) -> Path:
    """The hosts file, and the piece of config that names it; returns the latter."""
    hosts = {name: server.host_entry(folder / name / "work", python=sys.executable) for name, server in servers.items()}
    (folder / "hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "roles": ROLES}))
    config = folder / "two-hosts.yaml"
    config.write_text(yaml.safe_dump({"hosts": str(folder / "hosts.yaml"), "results": str(results)}))
    return config


def dflash(*arguments: str) -> float:
    """Runs `dflash ...`, and returns how long it took, in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "dflash", *arguments], env=environment)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # a Ctrl-C reaches it by itself; a signal to us alone does not
        process.wait(60)
        raise
    if status:
        raise subprocess.CalledProcessError(status, process.args)
    return time.monotonic() - start


def seconds(results: Path, name: str) -> float:
    """What Snakemake measured of one job; 0 for one that did not run."""
    total = 0.0
    for path in sorted((results / "benchmarks").glob(name)):
        with path.open() as stream:
            total = max(total, *(float(row["s"]) for row in csv.DictReader(stream, delimiter="\t")))
    return total


def longest_chain(results: Path) -> dict[str, float]:
    """The parts of the longest chain of a run, in seconds: nothing of it can overlap."""
    steps = sorted(int(path.stem.removeprefix("step_")) for path in results.glob("store/train/*/receipts/step_*.json"))
    return {
        "prompts": seconds(results, "prompts/*.tsv"),
        "completions": seconds(results, "completions/*.tsv"),
        "dataset": seconds(results, "dataset/*.tsv"),
        "buckets": seconds(results, "buckets/*.tsv"),
        "ship data": seconds(results, "ship/*/trainbox.tsv"),
        "training": sum(seconds(results, f"train/*/step_{step}.tsv") for step in steps),
        "ship last": seconds(results, f"ship/*/judge_{steps[-1]}.tsv"),
        "evaluate last": seconds(results, f"evaluate/*/step_{steps[-1]}.tsv"),
        "report": seconds(results, "manifest/*/*.tsv") + seconds(results, "report/*/*.tsv"),
    }


def all_parts(results: Path) -> float:
    """The time of all jobs one after the other, in seconds."""
    return sum(
        float(row["s"])
        for path in (results / "benchmarks").rglob("*.tsv")
        for row in csv.DictReader(path.open(), delimiter="\t")
    )


def tell_where(results: Path) -> None:
    """Where each stage ran, and what was shipped."""
    places: dict[str, set[str]] = {}
    for pattern in ("*/*/receipt.json", "train/*/receipts/step_*.json", "evaluate/*/step_*.json"):
        for path in (results / "store").glob(pattern):
            receipt = json.loads(path.read_text())
            if "host" in receipt:
                places.setdefault(receipt["host"], set()).add(receipt["stage"])
    for host, stages in sorted(places.items()):
        print(f"{host}: {', '.join(sorted(stages))}")
    records = [json.loads(path.read_text())["shipment"] for path in (results / "store/ship").glob("*/*/*.json")]
    print(
        f"shipped: {len(records)} artifacts, {sum(record['bytes_sent'] for record in records) / 1e6:.1f} MB, verified"
    )


def main() -> int:
    """Starts the servers, runs, tells, and cleans up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configfile", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--results", type=Path, default=Path("results/two-hosts"))
    parser.add_argument("--repeat", type=int, default=0, help="measure N runs from nothing; results are removed")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"two_hosts: {reason}; install the OpenSSH server and client", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="dflash-two-hosts-"))
    servers: dict[str, Sshd] = {}
    try:
        for name in ROLES.values():
            own = {"XDG_CACHE_HOME": str(folder / name / "cache"), "DFLASH_LEASES": str(folder / name / "leases")}
            servers[name] = start_sshd(folder / name, environment=own)
        config = write_configs(folder, servers, arguments.results)
        call = ["run", "--configfile", str(arguments.configfile), "--configfile", str(config)]
        if not arguments.repeat:
            dflash(*call)
            tell_where(arguments.results)
            return 0
        ratios = []
        for _ in range(arguments.repeat):
            shutil.rmtree(arguments.results, ignore_errors=True)
            for name in servers:
                shutil.rmtree(folder / name / "work", ignore_errors=True)
            wall = dflash(*call)
            chain = longest_chain(arguments.results)
            ratios.append(wall / sum(chain.values()))
            line = {
                "wall_s": wall,
                "chain_s": sum(chain.values()),
                "all_parts_s": all_parts(arguments.results),
                **chain,
            }
            print(json.dumps({name: round(value, 2) for name, value in line.items()}), flush=True)
        shutil.rmtree(arguments.results, ignore_errors=True)
        found = {"n": len(ratios), "min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        print(json.dumps({"name": "wall over longest chain", **{k: round(v, 3) for k, v in found.items()}}))
        return 0
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    finally:
        for server in servers.values():
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
