"""One checkpoint judged offline and by real decodes, in one run on the demo's target: what working the numbers out saves.

    {"name": ..., "ratio": offline seconds a prompt / real decode's, "unit": "s", "n": prompts, ..., "speedup": ...}

Both judge chains and trees of 16 nodes on the same prompts, and must find the same acceptance lengths. Offline starts from the
references (continuations and features), which are made once for all checkpoints; their cost is a line of its own, and so is
what a real decode gains over the target alone. The drafter is trained here, for a minute.

Two cores under load, 8 prompts: 0.011 of the seconds of real decodes, so 92 times less; the references of a prompt 0.045. Target
and drafter are of one size here, and nothing is gained over the target alone (0.43).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "gpu")]

from kernel_gap import BUDGET, DEMO, LIMIT, demo_drafter, demo_prompts, demo_target  # noqa: E402

from dflash.evaluate.acceptance import Continuation, draft_continuation  # noqa: E402
from dflash.evaluate.decode import Decoder  # noqa: E402
from dflash.model.export import load_drafter  # noqa: E402

PROMPTS, STEPS, TRAINED_ON = 8, 80, 24


def told(name: str, seconds: list[float], baseline: list[float], **more: float) -> None:
    """Prints one line."""
    numbers = {
        "ratio": round(sum(seconds) / sum(baseline), 4),
        "unit": "s",
        "n": len(seconds),
        "min": round(min(seconds), 4),
        "median": round(statistics.median(seconds), 4),
        "max": round(max(seconds), 4),
    }
    print(json.dumps({"name": name, **numbers, **more}), flush=True)


def main() -> None:
    """Trains, judges both ways, prints."""
    torch.set_num_threads(1)
    target = demo_target("torch", "float32", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        demo_drafter(target, STEPS, Path(folder), TRAINED_ON)
        drafter = load_drafter(folder).eval()
    decoder = Decoder.of(target, drafter)
    prompts = demo_prompts(target, [DEMO / "eval.jsonl"])[:: 80 // PROMPTS][:PROMPTS]
    start = time.perf_counter()
    outputs = [tokens for tokens, _ in target.generate(prompts, LIMIT)]
    made = time.perf_counter() - start
    offline, online, plain, chain = [], [], [], []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        start = time.perf_counter()
        features = target.features(torch.tensor([[*prompt, *tokens]]), None, drafter.config.target_layer_ids)[0]
        made += time.perf_counter() - start
        continuation = Continuation(prompt, tokens, LIMIT)
        for _ in range(2):  # the first warms up
            start = time.perf_counter()
            drafts = draft_continuation(drafter, continuation, features, target.embed, target.lm_head, top=BUDGET)
            lengths = [drafts.walk_chain().lengths, drafts.walk_tree(BUDGET).lengths]
            seconds = time.perf_counter() - start
        offline.append(seconds)
        decodes = [decoder.chain(prompt, LIMIT), decoder.tree(prompt, LIMIT, BUDGET)]
        assert [item.lengths for item in decodes] == lengths
        online.append(sum(item.seconds for item in decodes))
        chain.append(decodes[0].seconds)
        plain.append(decoder.plain(prompt, LIMIT).seconds)
    told("checkpoint judged offline over real decodes, chain and tree", offline, online)
    told("references of a prompt, made once, over real decodes", [made / len(prompts)] * len(prompts), online)
    told("real decode with a chain over the target alone", chain, plain, speedup=round(sum(plain) / sum(chain), 3))


if __name__ == "__main__":
    main()
