"""A dataset in a folder and the two stages of evaluation run on it, as the runner would, shared by their tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluate_samples import DENSE, TAPS, identity

from dflash.base.canonical import canonical_json
from dflash.base.files import sha256_file
from dflash.base.progress import Progress
from dflash.base.records import CodeDigest, ParamsFile, stage_key
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data.prompts import messages_id
from dflash.data.schemas import SAMPLES
from dflash.data.tables import write_table
from dflash.evaluate import evaluate, references
from dflash.evaluate.evaluate_params import EvaluateParams
from dflash.evaluate.references_params import PromptSet, ReferencesParams
from dflash.model.drafter import Drafter
from dflash.model.export import save_drafter

TRAINED = [f"train on {number}" for number in range(4)]
HELD_OUT = ["held out one", "held out two, which is longer"]


def context(**placement: Any) -> HostContext:
    return HostContext(placement=placement, progress=Progress(quiet=True))


def upstream(directory: Path, stage: str, params: dict[str, Any] | None = None) -> Upstream:
    code = CodeDigest(digest="0" * 64, modules={})
    key = stage_key(stage, params or {}, {}, code.digest)
    file = ParamsFile(stage=stage, key=key, params=params or {}, origins={}, upstream={}, code=code)
    return Upstream(directory, file, None)


def samples(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the dataset, made by hand."""
    made = []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        made.append(
            {
                "id": messages_id(messages),
                "source": "hand",
                "messages": canonical_json(messages).decode(),
                "input_ids": [*text.encode(), 65, 66, 67, 257],
                "prompt_length": len(text),
                "finish_reason": "stop",
            }
        )
    return made


@dataclass
class Road:
    """A dataset in a folder, and the stages run on it."""

    root: Path

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.dataset(TRAINED, HELD_OUT)

    def dataset(self, trained: Sequence[str], held_out: Sequence[str]) -> None:
        write_table(self.root / "train.parquet", SAMPLES, samples(trained))
        write_table(self.root / "validation.parquet", SAMPLES, samples(held_out))

    def prompts(self, name: str, lines: Sequence[Any]) -> tuple[PromptSet, dict[str, Path]]:
        """A prompt set of a JSONL file."""
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        digest = sha256_file(path)
        return PromptSet(name=name, path=str(path), digest=digest), {digest: path}

    def references(
        self,
        name: str = "references",
        *,
        files: dict[str, Path] | None = None,
        placement: dict[str, Any] | None = None,
        **values: Any,
    ) -> Outputs:
        params = references_params(**values)
        (self.root / name).mkdir()
        inputs = Inputs({"dataset": upstream(self.root, "dataset")}, files or {})
        return references.run(params, inputs, self.root / name, context(**(placement or {})))

    def checkpoint(self, drafter: Drafter, step: int = 7) -> None:
        save_drafter(drafter, self.root / "train" / f"step_{step}" / "drafter")

    def inputs(self, name: str = "references", step: int | None = 7, **values: Any) -> Inputs:
        params = references_params(**values).keyed_values()
        return Inputs(
            {
                "dataset": upstream(self.root, "dataset"),
                "train": upstream(self.root / "train", "train"),
                "references/torch": upstream(self.root / name, "references", params),
            },
            step=step,
        )

    def evaluate(
        self, inputs: Inputs, name: str = "evaluate", *, placement: dict[str, Any] | None = None, **values: Any
    ) -> Outputs:
        (self.root / name).mkdir()
        return evaluate.run(evaluate_params(**values), inputs, self.root / name, context(**(placement or {})))


def references_params(**values: Any) -> ReferencesParams:
    return ReferencesParams(**{"target": identity(DENSE), "taps": list(TAPS), "max_new_tokens": 20, **values})


def evaluate_params(**values: Any) -> EvaluateParams:
    given = {"target": identity(DENSE), "taps": list(TAPS), "block_size": 4, "budgets": [4, 8], "bootstrap": 20}
    return EvaluateParams(**{**given, **values})
