"""The self-test of the kernels passes where they are right and names the one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash.model.kernels import FUNCTIONS
from dflash.model.selftest import SPEC, Tried, numeric_facts, qwen3_5, tried_functions
from dflash.model.target import Target, load_target


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(SPEC)


def tried(target: Target, dtype: str = "float32") -> dict[str, Tried]:
    return {one.function: one for one in tried_functions(qwen3_5, target.kernels, "cpu", dtype)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_functions_of_a_cpu_are_right(target: Target, dtype: str) -> None:
    found = tried(target, dtype)
    assert set(found) == set(FUNCTIONS)
    assert all(one.right for one in found.values()), found
    chunked = found["chunk_gated_delta_rule"]
    assert 0 < chunked.error < chunked.tolerance, "the chunked form is checked against the recurrent one"


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with 1 added to a single number of its output."""

    def changed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        first = result[0] if isinstance(result, tuple) else result
        first[(0,) * first.ndim] += 1 + first.abs().max()
        return result

    changed.__wrapped__ = function  # type: ignore[attr-defined]
    return changed


def raising(function: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image\nfor this device")

    changed.__wrapped__ = function  # type: ignore[attr-defined]
    return changed


def empty(function: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        first = result[0] if isinstance(result, tuple) else result
        first.fill_(float("nan"))
        return result

    changed.__wrapped__ = function  # type: ignore[attr-defined]
    return changed


@pytest.mark.parametrize("ours", list(FUNCTIONS))
@pytest.mark.parametrize("how", [wrong, raising, empty])
def test_the_function_that_is_wrong_is_named(
    target: Target, ours: str, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_5, FUNCTIONS[ours], how(getattr(qwen3_5, FUNCTIONS[ours])))
    found = tried(target)
    assert [name for name, one in found.items() if not one.right] == [ours]
    assert found[ours].failure == ("RuntimeError: no kernel image" if how is raising else "")
    assert json.loads(json.dumps(found[ours].to_dict()))["right"] is False


def test_what_is_tested_is_what_a_target_of_this_machine_gets() -> None:
    found = numeric_facts("cpu")
    json.dumps(found, allow_nan=False)
    assert found["kernels"]["linear"] == "torch"
    assert found["numerics"]["torch.version"] == torch.__version__
    assert {one["bound"] for one in found["self_test"]} == set(found["kernels"]["functions"].values())
    assert found["peer_to_peer"] == []
