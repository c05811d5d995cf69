"""A judged request as text, so that a reader sees which tokens were drafted and which of them the target accepted.

A sample is {prompt_set, id, prompt: text, output: [text of each token], origin: [where each output token came from],
verifications: [{anchor, drafted: [text], accepted, committed}]}. `anchor` is an index into `output`; the `accepted` first
drafted tokens equal the output after it; `committed` counts the bonus token too. `origin` is `prefill` (the first token),
`draft` (drafted and accepted) or `bonus` (the target's own token after the last accepted one).

Costs one decoding a token of the few requests that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.evaluate.acceptance import Drafts, Walk


def text_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text each token adds to the ones before it. Characters of several tokens come with their last token, so that
    the pieces joined are the decoded text."""
    pieces: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text: str = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4:
            pieces.append("")
        else:
            pieces.append(text)
            pending = []
    if pending:
        pieces[-1] = str(tokenizer.decode(pending, skip_special_tokens=False))
    return pieces


def sample(row: dict[str, Any], walk: Walk, drafts: Drafts, tokenizer: Any) -> dict[str, Any]:
    """One row of the references under the chain walk."""
    continuation = drafts.continuation
    origin = ["prefill"] + ["bonus"] * (len(continuation.output) - 1)
    verifications = []
    for index, committed in zip(walk.anchors, walk.lengths, strict=True):
        drafted = drafts.chain(index, min(drafts.tokens.shape[1], continuation.limit - index - 1))
        accepted = drafts.matched_chain(index, len(drafted))
        origin[index + 1 : index + 1 + accepted] = ["draft"] * accepted
        verifications.append(
            {
                "anchor": index,
                "drafted": [str(tokenizer.decode([token], skip_special_tokens=False)) for token in drafted],
                "accepted": accepted,
                "committed": committed,
            }
        )
    return {
        "prompt_set": row["prompt_set"],
        "id": row["id"],
        "prompt": str(tokenizer.decode(continuation.prompt, skip_special_tokens=False)),
        "output": text_pieces(tokenizer, continuation.output),
        "origin": origin,
        "verifications": verifications,
    }
