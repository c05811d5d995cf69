"""Large random models: the same numbers wherever and however they are drawn, and normal enough to be weights."""

from __future__ import annotations

import pytest
import torch

from dflash.model import draws
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.target import load_ends, random_target

HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def drawn(name: str = "layers.0.weight", seed: int = 0, count: int = 100_000, std: float = 1.0) -> torch.Tensor:
    weight = torch.empty(count)
    draws.draw_normal(weight, name, seed, std)
    return weight


def test_the_numbers_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(count=1000)
    monkeypatch.setattr(draws, "PIECE", 7)
    assert torch.equal(drawn(count=1000), whole)


def test_they_are_the_numbers_that_they_always_were() -> None:
    """Literals: another machine, device or version of torch must draw these, or a recorded random target is another one."""
    expected = [0.3564389944076538, 1.1895910501480103, -0.09221284836530685, -2.0376975536346436, -1.0848233699798584]
    assert drawn("model.embed_tokens.weight", 3, 5).tolist() == pytest.approx(expected, abs=0.0)


def test_they_are_normal_and_independent_of_their_neighbours() -> None:
    numbers = drawn(std=0.5) / 0.5
    assert abs(float(numbers.mean())) < 0.01
    assert abs(float(numbers.std()) - 1) < 0.01
    assert abs(float((numbers**4).mean()) - 3) < 0.1
    for lag in (1, 2, 64, 4096):
        assert abs(float((numbers[lag:] * numbers[:-lag]).mean())) < 0.02


def test_names_and_seeds_draw_different_numbers() -> None:
    one = drawn()
    for other in (drawn(seed=1), drawn(name="layers.1.weight")):
        assert abs(float((one * other).mean())) < 0.02
        assert not torch.equal(one.sort().values, other.sort().values)


def test_the_ends_of_a_large_target_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "LARGE", 0)
    whole, ends = random_target(HYBRID, "bfloat16"), load_ends(HYBRID, "bfloat16")
    assert torch.equal(whole.embed.weight, ends.embed.weight)
    assert torch.equal(whole.lm_head.weight, ends.lm_head.weight)
    assert whole.facts.dtype == "bfloat16"
    assert all(buffer.dtype == torch.float32 for name, buffer in whole.model.named_buffers() if "inv_freq" in name)
    assert abs(float(whole.embed.weight.float().std()) - 1) < 0.05


def test_a_large_target_is_drawn_alike_twice_and_leaves_the_global_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "LARGE", 0)
    before = torch.get_rng_state()
    one, two = random_target(HYBRID, "bfloat16"), random_target(HYBRID)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), before)
    for (name, ours), theirs in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name


def test_a_large_drafter_is_drawn_by_counter_in_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "LARGE", 0)
    config = DrafterConfig(16, 1, 4, 64, 16, 2, 1, 8, 4, (1,), 3, ("full_attention",))
    one, two = Drafter(config, seed=5), Drafter(config, seed=None).to(torch.float64)
    two.draw_weights(5)
    assert all(torch.equal(a.double(), b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
