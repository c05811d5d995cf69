"""Parameters of the `prompts` stage: one source of prompts, by the digest of its file."""

from __future__ import annotations

from pydantic import Field, field_validator

from dflash.base.params import Params, derived, keyed, placement


class PromptsParams(Params):
    """One entry of `prompts:`. A source is a JSONL file; each line is an object with `messages` or a prompt text."""

    name: str = Field(description="name of the source; stands in the dataset's `source` column")
    path: str = placement(description="JSONL file; its content, not its path, is the identity")
    digest: str = derived("", description="sha256 of the file")
    prompt_field: str = Field("prompt", description="field with the prompt text, when there is no `messages`")
    messages_field: str = Field("messages", description="field with a list of {role, content}")
    system: str | None = Field(None, description="system message put before every prompt of this source")
    limit: int | None = keyed(None, ge=1, unit="prompts", description="take only the first so many")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not value or not all(letter.isalnum() or letter in "-_." for letter in value) or value.startswith("."):
            raise ValueError("use letters, digits, '-', '_' and '.'")
        return value
