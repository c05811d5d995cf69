"""Real decodes: lossless, as long as the offline numbers say, and unbiased when they sample."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_samples import TAPS, continue_prompt, drafter_config, target, train

from dflash.evaluate import decode
from dflash.evaluate.acceptance import Continuation, Drafts, draft_continuation
from dflash.evaluate.decode import Decoder, Reader, accept_or_resample, probabilities
from dflash.model.clients import export_for
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.export import save_drafter
from dflash.model.target import draw_weights, load_target, target_from_state

KINDS = ("dense", "hybrid")
MOST = 24
BUDGET = 12


@cache
def prompts(count: int = 100) -> list[list[int]]:
    """Random bytes: lengths 1 to 20, on both sides of the convolution's four tokens."""
    generator = np.random.default_rng(0)
    return [generator.integers(32, 127, size=1 + number % 20).tolist() for number in range(count)]


@cache
def decoder(kind: str) -> Decoder:
    """A drafter that is right now and then: it was fitted to some of the prompts that it is judged on."""
    model = target(kind)
    drafter = Drafter(drafter_config(4, model.facts.num_layers), seed=0)
    train(drafter, model, [continue_prompt(model, prompt, MOST) for prompt in prompts()[:24]], 240)
    return Decoder.of(model, drafter.eval())


@cache
def alone(kind: str) -> list[list[int]]:
    """What the target writes alone, token by token."""
    return [decoder(kind).plain(prompt, MOST).output for prompt in prompts()]


def offline(kind: str, prompt: list[int], output: list[int]) -> Drafts:
    made = decoder(kind)
    features = made.target.features(torch.tensor([[*prompt, *output]]), None, TAPS)[0]
    return draft_continuation(
        made.drafter, Continuation(prompt, output, MOST), features, made.embed, made.head, top=BUDGET
    )


@pytest.mark.timeout(1200)  # 20 s a kind on an idle core
@pytest.mark.parametrize("kind", KINDS)
def test_chains_and_trees_give_the_targets_own_text_with_the_offline_lengths_on_100_prompts(kind: str) -> None:
    made, lengths = decoder(kind), set()
    for prompt, output in zip(prompts(), alone(kind), strict=True):
        drafts = offline(kind, prompt, output)
        chain, tree = made.chain(prompt, MOST), made.tree(prompt, MOST, BUDGET)
        assert chain.output == tree.output == output
        assert chain.lengths == drafts.walk_chain().lengths
        assert tree.lengths == drafts.walk_tree(BUDGET).lengths
        lengths.update(chain.lengths)
    assert {1, 2, 4} <= lengths, "the drafter is not right now and then, so the test proves little"
    ends = {output[-1] in made.stops for output in alone(kind)}
    assert ends == {True, False}, "the prompts do not cover both ways to end"


def crop_only(reader: Reader, places: list[int]) -> None:
    """A rollback as it is often written: keys and values are cut, the convolution's state is put back, and nothing is done
    about the recurrent state."""
    assert reader._kept is not None
    for layer, before in zip(reader._cache.layers, reader._kept, strict=True):
        if hasattr(layer, "keys"):
            layer.keys = layer.keys[:, :, : reader._cached + len(places)]
            layer.values = layer.values[:, :, : reader._cached + len(places)]
        else:
            layer.conv_states = before.conv_states
    reader._cached += len(places)


@pytest.mark.timeout(600)
def test_a_rollback_that_only_crops_is_caught_on_a_hybrid_target(monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoder("hybrid")
    whole = Reader.keep

    def keep(reader: Reader, places: list[int]) -> None:
        (crop_only if len(places) < len(reader._last) else whole)(reader, places)

    monkeypatch.setattr(decode.Reader, "keep", keep)
    wrong = [
        made.chain(prompt, MOST).output != output for prompt, output in zip(prompts(), alone("hybrid"), strict=True)
    ]
    assert sum(wrong) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_verification_of_a_chain_is_one_pass_of_the_target(kind: str) -> None:
    chain = decoder(kind).chain(prompts()[1], MOST)
    assert chain.passes == 1 + len(chain.lengths)


def test_a_tree_is_one_pass_of_a_dense_target() -> None:
    tree = decoder("dense").tree(prompts()[1], MOST, BUDGET)
    assert tree.passes == 1 + len(tree.lengths)


@pytest.mark.parametrize("most", [0, 3])
def test_tokens_that_wait_to_be_read_again_get_a_pass_of_their_own_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    made, prompt = decoder("hybrid"), prompts()[1]
    patient = made.chain(prompt, MOST)
    monkeypatch.setattr(decode, "MOST_PENDING", most)
    hasty = made.chain(prompt, MOST)
    assert (hasty.output, hasty.lengths) == (patient.output, patient.lengths)
    assert hasty.passes > patient.passes


def test_what_is_taken_back_leaves_no_trace_in_the_cache() -> None:
    for kind in KINDS:
        model, text = target(kind), prompts()[19]
        straight, winding = Reader(model), Reader(model)
        straight.read(text, returns=False)
        straight.keep(range(len(text)))
        winding.read(text[:6], returns=False)
        winding.keep(range(6))
        winding.read([*text[6:9], 1, 2, 3])
        winding.keep(range(3))
        winding.read(text[9:])
        winding.keep(range(len(text) - 9))
        (one, _), (other, _) = straight.read([5, 6]), winding.read([5, 6])
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


THEIR_DECODE = """
import json
import sys
import time
import torch
import dflash.model
from transformers import AutoModelForCausalLM

dflash.model._cuda_time = time.perf_counter  # there is no GPU to wait for
target = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
drafter = dflash.model.DFlashDraftModel.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
case = json.load(open(sys.argv[3]))
found = []
for prompt in case["prompts"]:
    made = dflash.model.dflash_generate(
        drafter, target, torch.tensor([prompt]), case["limit"], case["stops"], return_stats=True
    )
    found.append([made.output_ids[0, len(prompt):].tolist(), made.acceptance_lengths])
json.dump(found, open(sys.argv[4], "w"))
"""


@pytest.mark.timeout(600)
def test_the_published_client_gives_the_same_tokens_and_acceptance_lengths_with_our_export(
    tmp_path: Path, require_or_skip: Callable[[str, str], None]
) -> None:
    packages = os.environ.get("DFLASH_ZLAB_PATH")
    if not packages:
        require_or_skip("zlab", "DFLASH_ZLAB_PATH names no folder with the published dflash 0.1.0")
    made = decoder("dense")
    made.target.model.save_pretrained(tmp_path / "target")
    save_drafter(made.drafter, tmp_path / "step_7" / "drafter")
    export_for("zlab", tmp_path / "step_7", tmp_path / "exported")
    case = {"prompts": prompts(), "limit": MOST, "stops": sorted(made.stops)}
    (tmp_path / "case.json").write_text(json.dumps(case))
    # Its package has our name, so it gets a process and a path of its own.
    folders = [str(tmp_path / name) for name in ("target", "exported", "case.json", "found.json")]
    subprocess.run(
        [sys.executable, "-c", THEIR_DECODE, *folders],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=tmp_path,
        check=True,
        timeout=250,
    )
    theirs = json.loads((tmp_path / "found.json").read_text())
    assert len(theirs) == 100
    for prompt, (output, lengths) in zip(prompts(), theirs, strict=True):
        ours = made.chain(prompt, MOST)
        assert (ours.output, ours.lengths) == (output, lengths)
        assert offline("dense", prompt, output).walk_chain().lengths == lengths


# Sampling --------------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic over its degrees of freedom's standard deviation: about 0 with deviation 1 when they agree."""
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def verified_pairs(p: torch.Tensor, q: torch.Tensor, draws: int) -> np.ndarray:
    """How often each pair of tokens is committed first, when the chain is drafted from `q` and the target is `p`."""
    generator = torch.Generator().manual_seed(1)
    counts = np.zeros((5, 5))
    for _ in range(draws):
        drafted = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
        accepted, bonus = accept_or_resample(drafted, q, p, generator)
        tokens = [*drafted[:accepted], bonus]
        while len(tokens) < 2:  # the next verification would draw it from the target, which here knows no context
            tokens.append(int(torch.multinomial(p[len(tokens)], 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
    return counts


def test_rejection_sampling_is_distributed_as_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (probabilities(torch.randn(rows, 5, generator=generator) * 1.5, 1.0) for rows in (3, 2))
    draws = 20_000
    counts = verified_pairs(p, q, draws)
    exact = (p[0][:, None] * p[1][None]).numpy() * draws
    assert abs(chi_square(counts.flatten(), exact.flatten())) < 3
    biased = (q[0][:, None] * q[1][None]).numpy() * draws
    assert chi_square(counts.flatten(), biased.flatten()) > 100, "drafter and target are too alike to tell"


@cache
def tiny() -> Decoder:
    """A target of four tokens, and a drafter that knows nothing of it."""
    fields = {
        "model_type": "qwen3", "vocab_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    source = load_target({"model_type": "qwen3", **{name: fields[name] for name in fields if name not in (
        "vocab_size", "model_type", "eos_token_id", "pad_token_id")}})  # fmt: skip
    state = {
        name: weight[:4] if "embed" in name or "lm_head" in name else weight
        for name, weight in source.model.state_dict().items()
    }
    config = DrafterConfig(
        hidden_size=16, num_hidden_layers=1, block_size=3, vocab_size=4, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_target_layers=3, target_layer_ids=(1,), mask_token_id=3,
        layer_types=("full_attention",),
    )  # fmt: skip
    drafter = Drafter(config, seed=None)
    draw_weights(drafter, 5)
    return Decoder.of(target_from_state(fields, state), drafter.eval(), stop_ids=[])


def exact_distribution(made: Decoder, prompt: list[int], length: int, temperature: float) -> np.ndarray:
    """The probability of each text of `length` tokens after a prompt."""
    texts = list(itertools.product(range(4), repeat=length))
    logits = made.target.model(torch.tensor([[*prompt, *text] for text in texts])).logits
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    found = []
    for row, text in enumerate(texts):
        places = range(len(prompt) - 1, len(prompt) - 1 + length)
        found.append(sum(float(log_p[row, place, token]) for place, token in zip(places, text, strict=True)))
    return np.exp(found)


@pytest.mark.timeout(600)
def test_a_sampled_decode_draws_whole_texts_as_often_as_the_target_alone_would() -> None:
    made, prompt, draws, temperature = tiny(), [0, 2, 1], 1500, 0.8
    exact = exact_distribution(made, prompt, 3, temperature)
    for sampler in (
        lambda seed: made.sampled(prompt, 3, temperature, seed),
        lambda seed: made.plain(prompt, 3, temperature=temperature, seed=seed),
    ):
        counts = np.zeros(64)
        for seed in range(draws):
            first, second, third = sampler(seed).output
            counts[16 * first + 4 * second + third] += 1
        # Rare texts together, so that every cell has some.
        common = exact * draws >= 5
        merged = np.append(counts[common], counts[~common].sum())
        assert abs(chi_square(merged, np.append(exact[common], exact[~common].sum()) * draws)) < 3


def test_a_sampled_decode_is_a_function_of_its_seed() -> None:
    made = decoder("hybrid")
    one, again, other = (made.sampled(prompts()[3], MOST, 0.7, seed).output for seed in (1, 1, 2))
    assert one == again != other
