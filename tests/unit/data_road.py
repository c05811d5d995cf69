"""What the tests of the data road share: sources in a folder, a tiny random target, and stages run without the runner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash.base.files import sha256_file
from dflash.base.progress import Progress
from dflash.base.records import CodeDigest, ParamsFile, stage_key
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data import completions, dataset, prompts
from dflash.data.completions_params import CompletionsParams
from dflash.data.dataset_params import DatasetParams
from dflash.data.prompts import messages_id
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import COMPLETIONS
from dflash.data.tables import write_table
from dflash.model.target import Target, load_target
from dflash.model.target_params import RandomTarget, TargetIdentity

TINY = RandomTarget(hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8)
HYBRID = RandomTarget(model_type="qwen3_5_text", hidden_size=16, intermediate_size=16, num_hidden_layers=4, head_dim=8)


ENDS = [257, *range(0, 256, 10)]
"""So many tokens end a completion that a random target stops now and then."""


def context(**placement: Any) -> HostContext:
    """A quiet host."""
    return HostContext(placement=placement, progress=Progress(quiet=True))


def identity(random: RandomTarget = TINY) -> TargetIdentity:
    """How the plan would name a random target."""
    return TargetIdentity(
        digest=None,
        revision=None,
        random=random,
        num_layers=random.num_hidden_layers,
        hidden_size=random.hidden_size,
        vocab_size=random.vocab_size,
        hybrid=random.model_type != "qwen3",
        max_position_embeddings=random.max_position_embeddings,
        eos_token_ids=ENDS,
        pad_token_id=256,
        mask_token_id=259,
    )


@cache
def target(random: RandomTarget = TINY) -> Target:
    """The target itself, made once."""
    return load_target(random.fields_of_type())


def upstream(directory: Path, stage: str = "prompts") -> Upstream:
    """A folder as the runner hands it over."""
    code = CodeDigest(digest="0" * 64, modules={})
    key = stage_key(stage, {}, {}, code.digest)
    return Upstream(directory, ParamsFile(stage=stage, key=key, params={}, origins={}, upstream={}, code=code), None)


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def source(path: Path, **values: Any) -> PromptsParams:
    """The params of a source of prompts, digest included."""
    return PromptsParams(**{"name": "numbers", "path": str(path), "digest": sha256_file(path), **values})


def run_prompts(path: Path, workdir: Path, **values: Any) -> Outputs:
    """The prompts stage on one file."""
    workdir.mkdir(parents=True, exist_ok=True)
    params = source(path, **values)
    return prompts.run(params, Inputs({}, {params.digest: path}), workdir, context())


def run_completions(
    prompts_dir: Path, workdir: Path, *, placement: Mapping[str, Any] | None = None, **values: Any
) -> Outputs:
    """The completions stage on a folder of prompts."""
    workdir.mkdir(parents=True, exist_ok=True)
    params = completions_params(**values)
    return completions.run(params, Inputs({"prompts": upstream(prompts_dir)}), workdir, context(**(placement or {})))


def completions_params(**values: Any) -> CompletionsParams:
    """Short answers, cut or not."""
    return CompletionsParams(**{"target": identity(), "max_new_tokens": 6, "max_truncated_share": 1.0, **values})


def completion(text: str, written: Sequence[int] = (7, 8, 257), **values: Any) -> dict[str, Any]:
    """A row of `schemas.COMPLETIONS` made by hand."""
    messages = values.pop("conversation", [{"role": "user", "content": text}])
    return {
        "id": messages_id(messages),
        "source": "hand",
        "messages": json.dumps(messages, sort_keys=True, separators=(",", ":")),
        "prompt_ids": list(text.encode()),
        "completion_ids": list(written),
        "finish_reason": "stop",
        "seed": 0,
        **values,
    }


def run_dataset(
    workdir: Path, sources: Mapping[str, list[dict[str, Any]]], files: Sequence[Path] = (), **values: Any
) -> Outputs:
    """The dataset stage on completions made by hand, by source."""
    given = {}
    for name, rows in sources.items():
        folder = workdir.parent / f"{workdir.name}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        folder.mkdir(parents=True)
        write_table(folder / "completions.parquet", COMPLETIONS, rows)
        given[f"completions/{name}"] = upstream(folder, "completions")
    workdir.mkdir(parents=True)
    by_digest = {sha256_file(path): path for path in files}
    params = DatasetParams(exclude=[str(path) for path in files], exclude_digests=sorted(by_digest), **values)
    return dataset.run(params, Inputs(given, by_digest), workdir, context())


def read_ledger(workdir: Path) -> list[dict[str, str]]:
    """The lines of a ledger."""
    return [json.loads(line) for line in (workdir / "ledger.jsonl").read_text().splitlines()]
