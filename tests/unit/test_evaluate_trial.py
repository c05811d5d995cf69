"""A rehearsed evaluation loads the target as the evaluation will: over the devices that the config spreads it over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_store import make_folder, plan_of

from dflash import rehearsal
from dflash.base.errors import PermanentError
from dflash.evaluate import trial
from dflash.hosts.host import LocalHost
from dflash.plan.places import LOCAL


def request_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """What the eval host is asked for by the rehearsal of the micro run with some values changed."""
    plan = plan_of(**changes)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(rehearsal, "rehearse_part", lambda _, request: asked.append(request))
    site = rehearsal.Site(LOCAL, LocalHost(), plan.store.resolve(), ".rehearsal-0123456789ab")
    evaluate = plan.runs[0].nodes["evaluate"]
    rehearsal._evaluate(plan, evaluate, site, site, Path("drafter"), [[1, 2]], shipped=False)
    return asked[0]


@pytest.mark.parametrize(
    ("evaluate", "references", "devices"),
    [
        ([], [], "cuda:7"),
        (["cuda:0", "cuda:1"], [], ["cuda:0", "cuda:1"]),
        ([], ["cuda:2", "cuda:3"], ["cuda:2", "cuda:3"]),
    ],
)
def test_the_target_is_spread_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: list[str], references: list[str], devices: Any
) -> None:
    monkeypatch.chdir(make_folder(tmp_path))
    request = request_of(monkeypatch, evaluate={"target_devices": evaluate}, references={"target_devices": references})
    loaded: list[Any] = []

    def load_target(source: Any, dtype: str, where: Any, *, kernels: str) -> None:
        loaded.append(where)
        raise MemoryError("out of memory")

    drafter = SimpleNamespace(eval=lambda: None)
    monkeypatch.setattr(trial, "load_drafter", lambda *_, **__: SimpleNamespace(to=lambda _: drafter))
    for name in ("check_drafter", "target_source", "load_ends"):
        monkeypatch.setattr(trial, name, lambda *_: None)
    monkeypatch.setattr(trial, "Meter", lambda _: None)
    monkeypatch.setattr(trial, "load_target", load_target)
    monkeypatch.setattr(trial.torch.cuda, "is_available", lambda: True)
    with pytest.raises(PermanentError, match="out of memory"):
        trial.try_drafter(tmp_path, "", {**request, "device": "cuda:7"})
    assert loaded == [devices]
