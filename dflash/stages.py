"""THE list of stages, in the order of the road. Everything that needs to know what a stage is reads it here.

    prompts -> completions -> dataset -> buckets -> train -> evaluate -> report
                                  \\________ references ____/

Importing this costs nothing: params models and entry points are named as `module:attribute` and loaded when used, so that
planning never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dflash.base.loading import loading
from dflash.base.params import Params


@dataclass(frozen=True)
class Stage:
    """One stage.

    section: its part of the config. params: its params model. entry: its `run` function. upstream: stages it reads, `*`
    after a name when a run may have several. role: which host runs it. costly: code-only changes ask before recomputing.
    stepwise: one result a checkpoint, `step` as wildcard.
    """

    name: str
    section: str
    params: str
    entry: str
    upstream: tuple[str, ...]
    role: str
    costly: bool = False
    stepwise: bool = False

    def params_model(self) -> type[Params]:
        """Loads the params model (no torch)."""
        model = _load(self.params)
        assert issubclass(model, Params)
        return model

    def run(self) -> Any:
        """Loads the entry point (may import torch)."""
        with loading():
            return _load(self.entry)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


STAGES: tuple[Stage, ...] = (
    Stage("prompts", "prompts", "dflash.data.prompts_params:PromptsParams", "dflash.data.prompts:run", (), "generate"),
    Stage(
        "completions",
        "completions",
        "dflash.data.completions_params:CompletionsParams",
        "dflash.data.completions:run",
        ("prompts",),
        "generate",
        costly=True,
    ),
    Stage(
        "dataset",
        "dataset",
        "dflash.data.dataset_params:DatasetParams",
        "dflash.data.dataset:run",
        ("completions*", "prompts*"),
        "generate",
    ),
    Stage(
        "buckets",
        "batching",
        "dflash.data.buckets_params:BucketsParams",
        "dflash.data.buckets:run",
        ("dataset",),
        "generate",
    ),
    Stage(
        "train",
        "train",
        "dflash.train.train_params:TrainParams",
        "dflash.train.trainer:run",
        ("dataset", "buckets"),
        "gpu",
        costly=True,
        stepwise=True,
    ),
    Stage(
        "references",
        "references",
        "dflash.evaluate.references_params:ReferencesParams",
        "dflash.evaluate.references:run",
        ("dataset",),
        "eval",
    ),
    Stage(
        "evaluate",
        "evaluate",
        "dflash.evaluate.evaluate_params:EvaluateParams",
        "dflash.evaluate.evaluate:run",
        ("train", "references*", "dataset"),
        "eval",
        stepwise=True,
    ),
    Stage(
        "report",
        "report",
        "dflash.report.report_params:ReportParams",
        "dflash.report.report:run",
        ("evaluate",),
        "controller",
    ),
)

BY_NAME: dict[str, Stage] = {stage.name: stage for stage in STAGES}
