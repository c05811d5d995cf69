"""The doctor turns facts into what must be done, and names every field in which two hosts would compute other numbers."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest

from dflash.hosts import doctor
from dflash.hosts.doctor import (
    Checkup,
    all_problems,
    as_json,
    differing_fields,
    hosts_to_examine,
    judge_kernels,
    judge_machine,
    render,
    size,
)
from dflash.hosts.entry import HostEntry
from dflash.hosts.inventory import Inventory

GIB = 1 << 30
GPU = {"index": 0, "name": "NVIDIA H200", "uuid": "a", "memory_bytes": 140 * GIB, "held_bytes": 0, "holders": []}
MACHINE: dict[str, Any] = {
    "cores": 16,
    "memory": {"total_bytes": 128 * GIB, "available_bytes": 100 * GIB, "limit_bytes": None, "limit_used_bytes": None},
    "shared_memory": {"total_bytes": 64 * GIB, "free_bytes": 64 * GIB},
    "disk": {"total_bytes": 900 * GIB, "free_bytes": 500 * GIB, "refused": ""},
    "driver": {"kernel": "580.1", "library": "580.1"},
    "gpus": [GPU],
}
NUMERIC: dict[str, Any] = {
    "numerics": {
        "cpu": "AMD EPYC",
        "device": "cuda",
        "torch.version": "2.13.0",
        "torch.driver": "580.1",
        "torch.threads": "8",
        "gpus.0.name": "NVIDIA H200",
        "gpus.1.name": "NVIDIA L4",
        "distributions.transformers": "5.24.0",
        "kernels.linear": "fla",
    },
    "kernels": {"linear": "fla", "attention": "sdpa"},
    "self_test": [
        {"function": "chunk", "bound": "fla.chunk", "error": 0.003, "tolerance": 0.02, "right": True, "failure": ""}
    ],
    "peer_to_peer": [],
    "torch": {"version": "2.13.0", "cuda": "13.0", "cudnn": 91002},
    "gpus": [{"name": "NVIDIA H200", "capability": "9.0"}, {"name": "NVIDIA L4", "capability": "8.9"}],
}


def checkup(host: str = "box", role: str = "gpu", device: str = "cuda") -> Checkup:
    facts = {"reachable": True, "seconds_a_command": 0.2, "machine": MACHINE, "numeric": NUMERIC}
    return Checkup(host, (role,), device, copy.deepcopy(facts))


def judged(device: str = "cuda", **changes: Any) -> Checkup:
    found = checkup(device=device)
    judge_machine(found, {**MACHINE, **changes})
    return found


def test_a_healthy_machine_has_nothing_to_say() -> None:
    found = judged()
    judge_kernels(found, NUMERIC)
    assert (found.problems, found.notes) == ([], [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": []}, "device cuda, but nvidia-smi shows no GPU"),
        ({"driver": {"kernel": "580.1", "library": "575.2"}}, "the NVIDIA library is 575.2, the kernel module 580.1"),
        ({"disk": {**MACHINE["disk"], "refused": "/srv: Read-only file system"}}, "cannot be written .* Read-only"),
        ({"gpus": [GPU, GPU], "shared_memory": {"total_bytes": 64 << 20, "free_bytes": 0}}, "/dev/shm holds 67.1 MB"),
    ],
)
def test_what_would_make_a_stage_fail_is_a_problem(changes: dict[str, Any], words: str) -> None:
    (problem,) = judged(**changes).problems
    assert re.search(words, problem)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk": {**MACHINE["disk"], "free_bytes": GIB}}, "only 1.1 GB are free"),
        (
            {"memory": {**MACHINE["memory"], "limit_bytes": 8 * GIB}},
            "a control group allows 8.6 GB of the machine's 137.4 GB",
        ),
        (
            {"gpus": [{**GPU, "held_bytes": 90 * GIB, "holders": [{"user": "jo", "program": "vllm", "pid": 7}]}]},
            "GPU 0: 96.6 GB are held by others (jo: vllm 7)",
        ),
    ],
)
def test_what_is_worth_knowing_is_a_note(changes: dict[str, Any], words: str) -> None:
    found = judged(**changes)
    assert found.problems == []
    assert words in found.notes[0]


def test_a_cpu_needs_no_gpu_driver_or_shared_memory() -> None:
    found = judged(device="cpu", gpus=[], driver={"kernel": "1", "library": "2"}, shared_memory=None)
    assert (found.problems, found.notes) == ([], [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": 0.5}, "it is off by 5.0e-01; 2e-02 is allowed"),
        ({"error": None, "failure": "RuntimeError: no triton"}, "RuntimeError: no triton"),
        ({"error": None}, "it is not finite"),
    ],
)
def test_a_kernel_that_computes_something_else_is_a_problem(change: dict[str, Any], words: str) -> None:
    found = checkup()
    bad = {**NUMERIC["self_test"][0], "right": False, **change}
    judge_kernels(found, {**NUMERIC, "self_test": [bad]})
    assert "chunk (fla.chunk) is wrong: " in found.problems[0]
    assert words in found.problems[0]


def test_slow_kernels_and_missing_links_are_notes() -> None:
    found = checkup()
    kernels = {"linear": "torch", "attention": "sdpa"}
    judge_kernels(found, {**NUMERIC, "kernels": kernels, "peer_to_peer": [[0, 1], [0, 2]]})
    assert found.problems == []
    assert "torch reference" in found.notes[0]
    assert "GPUs 0-1, 0-2" in found.notes[1]


def pair(**numerics: str) -> list[Checkup]:
    ours, theirs = checkup("trainer", "gpu"), checkup("judge", "eval")
    theirs.facts["numeric"]["numerics"] |= numerics
    return [ours, theirs]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.version", "2.12.0"),
        ("distributions.transformers", "5.20"),
        ("kernels.linear", "torch"),
        ("device", "cpu"),
    ],
)
def test_every_field_that_decides_numbers_is_compared(name: str, value: str) -> None:
    found = pair(**{name: value})
    assert differing_fields(found) == {name: {"trainer": NUMERIC["numerics"][name], "judge": value}}
    assert all_problems(found) == [f"the hosts do not compute the same hidden states; they differ in {name}"]
    assert f"differs: {name}" in render(found)
    assert json.loads(as_json(found))["differ"] == differing_fields(found)


def test_the_interpreters_of_two_roles_of_one_host_are_compared_as_two_hosts_are() -> None:
    box, further = checkup(), checkup(role="eval")
    box.roles, box.further = ("gpu", "eval"), [further]
    further.facts["python"] = {"version": "3.12.1", "executable": "/opt/eval/bin/python"}
    assert differing_fields([box]) == {}
    assert "box and box (eval) would compute the same hidden states" in render([box])
    further.facts["numeric"]["numerics"]["torch.version"] = "2.12.0"
    assert differing_fields([box]) == {"torch.version": {"box": "2.13.0", "box (eval)": "2.12.0"}}
    assert "/opt/eval/bin/python" in render([box])
    assert set(json.loads(as_json([box]))["hosts"]["box"]["further"]) == {"eval"}


def test_what_decides_no_number_is_not_compared() -> None:
    found = pair(**{"torch.driver": "575", "torch.threads": "1", "cpu": "other", "gpus.1.name": "none"})
    assert differing_fields(found) == {}
    assert all_problems(found) == []
    assert "trainer and judge would compute the same hidden states" in render(found)


def test_the_gpu_of_the_device_counts_and_no_other() -> None:
    found = [checkup("trainer", "gpu", "cuda:0"), checkup("judge", "eval", "cuda:1")]
    assert differing_fields(found) == {
        "gpu.name": {"trainer": "NVIDIA H200", "judge": "NVIDIA L4"},
        "gpu.capability": {"trainer": "9.0", "judge": "8.9"},
    }


def test_a_cpu_of_another_kind_counts_where_cpus_compute() -> None:
    found = [checkup("trainer", "gpu", "cpu"), checkup("judge", "eval", "cpu")]
    found[1].facts["numeric"]["numerics"]["cpu"] = "Intel"
    assert list(differing_fields(found)) == ["cpu"]


def test_hosts_that_compute_nothing_are_not_compared() -> None:
    found = [*pair(), checkup("writer", "generate")]
    found[2].facts["numeric"]["numerics"]["torch.version"] = "1.0"
    assert differing_fields(found) == {}


def test_problems_name_their_host_once() -> None:
    one = checkup()
    one.problems = ["its clock is wrong", "box: the connection failed"]
    assert all_problems([one]) == ["box: its clock is wrong", "box: the connection failed"]
    assert "PROBLEM" in render([one])


def test_this_machine_is_looked_at_when_it_plays_a_role() -> None:
    entries = {"box": HostEntry(kind="ssh", address="b", agent=True)}
    assert hosts_to_examine(Inventory()) == ["local"]
    assert hosts_to_examine(Inventory({"gpu": ("box",), "eval": ("box",)}, entries)) == ["box"]
    assert hosts_to_examine(Inventory({"gpu": ("box",), "eval": ("local",)}, entries)) == ["box", "local"]


def test_sizes_are_told_as_people_say_them() -> None:
    assert [size(number) for number in (0, 999, 1000, 143_800_000_000, 5 * 10**12, None)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "143.8 GB",
        "5.0 TB",
        "unknown",
    ]


def test_what_takes_its_time_is_told_of_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SAY_EVERY", 0.02)
    said: list[str] = []
    with doctor.telling(said.append, "reachable; looking at the machine", 300.0):
        deadline = time.monotonic() + 10
        while len(said) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(said)
    assert said[0] == "reachable; looking at the machine"
    assert re.fullmatch(r"still looking at the machine, \d+ s so far; it is given up after 300 s", said[1])
    time.sleep(0.1)
    assert len(said) == count
