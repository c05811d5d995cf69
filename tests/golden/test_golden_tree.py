"""Our draft trees are those of the published DDTree code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dflash.evaluate.tree import build_tree


def test_every_tree_holds_exactly_the_golden_prefixes(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "ddtree.json").read_text())["cases"]
    assert cases
    for number, case in enumerate(cases):
        logits = np.array(case["logits"])
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tree = build_tree(log_probs, case["budget"])
        assert {tuple(path) for path in case["paths"]} == set(tree), f"case {number}, budget {case['budget']}"
        assert len(tree) == len(case["paths"])
