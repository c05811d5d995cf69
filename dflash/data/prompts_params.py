"""Parameters of the `prompts` stage: one source of prompts or of ready samples, by the digest of its file."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dflash.base.params import Params, derived, keyed, placement


class PromptsParams(Params):
    """One entry of `prompts:`, a source: a JSONL or Parquet file, a dataset of the Hugging Face hub, or an earlier version."""

    name: str = Field(description="name of the source; stands in the dataset's `source` column")
    kind: Literal["prompts", "imported", "dataset"] = Field(
        "prompts",
        description="`prompts`: the target answers them; `imported`: rows of `input_ids` and `loss_mask`, taken as they are; "
        "`dataset`: an earlier version, by its `dataset.json`",
    )
    path: str | None = placement(
        None, description="JSONL or Parquet file (or `dataset.json`); its content, not its path, is the identity"
    )
    digest: str = derived("", description="sha256 of the file")
    huggingface: str | None = Field(None, description="in place of `path`: a dataset of the hub, `owner/name`")
    revision: str | None = Field(None, description="what was taken: for the hub a commit of 40 hex digits, required")
    subset: str | None = Field(None, description="configuration of the dataset on the hub")
    split: str = Field("train", description="split of the dataset on the hub")
    licence: str | None = placement(None, description="licence of the source; recorded beside its result")
    mapping: Literal["auto", "messages", "prompt", "sharegpt"] = Field(
        "auto",
        description="how a row is read: a list of messages, a prompt text (a response beside it is ignored), or "
        "`conversations` of {from, value}; `auto` looks for them in this order: messages, conversations, prompt",
    )
    prompt_field: str = Field("prompt", description="field with the prompt text, when there is no `messages`")
    messages_field: str = Field("messages", description="field with a list of {role, content}")
    conversations_field: str = Field("conversations", description="field with a list of {from, value}")
    answers: Literal["refuse", "drop"] = Field(
        "refuse", description="answers at the end of a conversation: the target writes its own"
    )
    malformed: Literal["stop", "skip"] = Field(
        "stop", description="a malformed row stops the stage, or is skipped, counted, and named in rejected.jsonl"
    )
    system: str | None = Field(None, description="system message put before every prompt of this source")
    limit: int | None = keyed(None, ge=1, unit="prompts", description="take only the first so many")
    shards: int = keyed(1, ge=1, unit="jobs", description="parts that are answered as jobs of their own, in any order")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not value or not all(letter.isalnum() or letter in "-_." for letter in value) or value.startswith("."):
            raise ValueError("use letters, digits, '-', '_' and '.'")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> PromptsParams:
        if (self.path is None) == (self.huggingface is None):
            raise ValueError("give exactly one of `path` and `huggingface`")
        if self.huggingface is not None and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                f"`revision: {self.revision}` is not a commit of 40 hex digits, without which {self.huggingface} can change"
            )
        if self.kind != "prompts" and (self.system is not None or self.shards > 1):
            raise ValueError(f"`system` and `shards` are for prompts to be answered, not for kind `{self.kind}`")
        if self.kind == "dataset" and (self.path is None or self.limit is not None):
            raise ValueError("an earlier version is given by the `path` of its dataset.json, and taken whole")
        return self
