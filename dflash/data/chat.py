"""How a conversation becomes the tokens that the target reads, and how many may follow them. Microseconds a prompt."""

from __future__ import annotations

from typing import Any


def render(tokenizer: Any, messages: list[dict[str, str]], *, thinking: bool, open_turn: bool = True) -> list[int]:
    """Token ids of a prompt, up to where the assistant begins to write (unless `open_turn` is false).

    Raises:
        jinja2.TemplateError: the target's template refuses the messages.
    """
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=open_turn, enable_thinking=thinking, tokenize=True, return_dict=False
    )
    return [int(token) for token in rendered]


def length_limit(max_new_tokens: int, longest: int, prompt_length: int) -> int:
    """Most tokens that may follow a prompt: `max_new_tokens`, or what the target's context of `longest` tokens leaves."""
    return min(max_new_tokens, longest - prompt_length)
