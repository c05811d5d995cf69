"""Features and continuations of dense and hybrid targets are what transformers computes, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import DENSE, HYBRID, SPECS
from torch import Tensor

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.model.target import (
    Target,
    byte_tokenizer,
    check_features,
    load_target,
    load_tokenizer,
    random_target,
    target_from_state,
)

TAPS = (1, 3)
TEXTS = ("hello there, what", "hi", "a longer prompt that goes on and on " * 3)


@pytest.fixture(params=list(SPECS), scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    return random_target(SPECS[request.param])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [byte_tokenizer().encode(text) for text in TEXTS]


def padded(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    length = max(map(len, prompts))
    ids = torch.tensor([p + [pad] * (length - len(p)) for p in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (length - len(p)) for p in prompts])
    return ids, mask


def test_a_tap_is_what_a_hook_on_that_layer_sees(target: Target, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts[:1])
    seen: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda _m, _i, output, k=k: seen.__setitem__(k, output))
        for k, layer in enumerate(target.model.model.layers)
    ]
    output = target.model(ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for k in range(target.facts.num_layers):
        feature = target.features(ids, None, [k])
        assert torch.equal(feature, seen[k]), k
        if k + 1 < target.facts.num_layers:
            assert torch.equal(feature, output.hidden_states[k + 1]), k


def test_the_last_layers_tap_is_raw_and_gives_the_logits_when_normed_once(
    target: Target, prompts: list[list[int]]
) -> None:
    ids = torch.tensor(prompts[:1])
    logits = target.model(ids).logits
    raw = target.features(ids, None, [target.facts.num_layers - 1])
    norm = target.model.model.norm
    torch.testing.assert_close(target.lm_head(norm(raw)), logits)
    # The norm of a random target is neutral; a trained one is not, and norming twice must then show.
    weight = norm.weight.data.clone()
    norm.weight.data += torch.linspace(0.5, 2.0, len(weight))
    once, twice = target.lm_head(norm(raw)), target.lm_head(norm(norm(raw)))
    norm.weight.data = weight
    assert not torch.allclose(once, twice, atol=1e-2)


def test_taps_are_concatenated_in_the_order_asked_for(target: Target, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts[:1])
    three, one = target.features(ids, None, [3, 1]).chunk(2, dim=-1)
    assert torch.equal(target.features(ids, None, [1, 3]), torch.cat([one, three], dim=-1))


def test_nothing_runs_after_the_last_tap(target: Target, prompts: list[list[int]]) -> None:
    ran: list[str] = []
    backbone = target.model.model
    later = [*backbone.layers[4:], backbone.norm, target.lm_head]
    handles = [module.register_forward_hook(lambda m, *_: ran.append(type(m).__name__)) for module in later]
    target.features(torch.tensor(prompts[:1]), None, TAPS)
    assert ran == []
    target.features(torch.tensor(prompts[:1]), None, [4])
    assert len(ran) == 1
    for handle in handles:
        handle.remove()


def test_changing_the_last_target_layer_changes_no_feature(prompts: list[list[int]]) -> None:
    target = random_target(DENSE)
    ids = torch.tensor(prompts[:1])
    before = target.features(ids, None, TAPS)
    for weight in target.model.model.layers[-1].parameters():
        weight.data += 1.0
    assert torch.equal(target.features(ids, None, TAPS), before)


@pytest.mark.parametrize(("spec", "form"), [(DENSE, "chunked"), (HYBRID, "chunked"), (HYBRID, "recurrent")])
def test_a_padded_batch_gives_the_features_of_its_rows_one_by_one(
    spec: dict[str, Any], form: str, prompts: list[list[int]]
) -> None:
    target = load_target(spec, form=form)
    ids, mask = padded(prompts, target.facts.pad_id)
    together = target.features(ids, mask, TAPS)
    for row, prompt in enumerate(prompts):
        alone = target.features(torch.tensor([prompt]), None, TAPS)[0]
        torch.testing.assert_close(together[row, : len(prompt)], alone, atol=2e-5, rtol=0)
        assert not together[row, len(prompt) :].any()


def test_left_padding_is_refused_with_and_without_a_mask(target: Target, prompts: list[list[int]]) -> None:
    ids, mask = padded(prompts, target.facts.pad_id)
    with pytest.raises(PermanentError, match=r"rows \[1\].*no attention mask"):
        target.features(torch.cat([ids[:1], ids[1:2].flip(1)]), None, TAPS)
    with pytest.raises(PermanentError, match=r"rows \[0, 1\]"):
        target.features(ids.flip(1), mask.flip(1), TAPS)
    mask[2, 4] = 0
    with pytest.raises(PermanentError, match=r"rows \[2\]"):
        target.features(ids, mask, TAPS)


def test_left_padding_that_nobody_refused_would_move_the_features_of_a_hybrid_target(
    prompts: list[list[int]],
) -> None:
    target = random_target(HYBRID)
    prompt = prompts[0]
    alone = target.features(torch.tensor([prompt]), None, TAPS)[0]
    # Token 0 is not the pad token, so the guard lets it pass: the harm is real.
    shifted = target.features(torch.tensor([[0] * 9 + prompt]), None, TAPS)[0, 9:]
    assert float((shifted - alone).abs().max()) > 0.1


@pytest.mark.parametrize("taps", [(1, 1), (1, 6), (-1,), ()])
def test_taps_outside_the_target_or_repeated_are_refused(target: Target, taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        target.features(torch.tensor([[1, 2]]), None, taps)


# Features that no healthy target gives
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x: x.zero_(), "zero"),
        (lambda x: x[1, 2].zero_(), "row 1 are zero"),
        (lambda x: x[0, :, 8:].zero_(), "row 0 are zero"),
        (lambda x: x.fill_(0.5), "constant"),
        (lambda x: x.copy_(x[:, :1].clone()), "constant"),
        (lambda x: x[0, 0, 0].fill_(float("nan")), "NaN"),
        (lambda x: x[1, 3, 5].fill_(float("inf")), "infinity"),
    ],
)
def test_sick_features_are_refused_with_the_batch_named(spoil: Any, said: str) -> None:
    features = torch.randn(2, 5, 16)
    check_features(features, 5, "17", taps=2, width=16)
    spoil(features)
    with pytest.raises(PermanentError, match=f"batch 17.*{said}"):
        check_features(features, 5, "17", taps=2)


def test_features_of_the_wrong_length_or_width_are_refused_with_the_batch_named() -> None:
    features = torch.randn(2, 5, 16)
    check_features(features, [5, 2], "b3")
    check_features(features[0], 5, "b3")
    for counts in (4, 6, [5], [4, 4], [5, 5, 5]):
        with pytest.raises(PermanentError, match=r"batch b3.*do not fit"):
            check_features(features, counts, "b3")
    with pytest.raises(PermanentError, match=r"batch b3.*width 16, not 32"):
        check_features(features, 5, "b3", width=32)


def test_features_of_real_targets_pass_the_check(target: Target, prompts: list[list[int]]) -> None:
    ids, mask = padded(prompts, target.facts.pad_id)
    check_features(target.features(ids, mask, TAPS), [len(p) for p in prompts], "0", taps=2, width=64)


# Generation
# ------------------------------------------------------------------------------------------------------------


def test_greedy_generation_is_the_argmax_without_a_cache(target: Target, prompts: list[list[int]]) -> None:
    tokens, reason = target.generate(prompts[:1], 15, stop_ids=())[0]
    assert (len(tokens), reason) == (15, "length")
    sequence = list(prompts[0])
    for token in tokens:
        assert token == int(target.model(torch.tensor([sequence])).logits[0, -1].argmax())
        sequence.append(token)


def test_a_batch_generates_what_its_prompts_generate_alone(target: Target, prompts: list[list[int]]) -> None:
    together = target.generate(prompts, 25)
    assert together == [target.generate([prompt], 25)[0] for prompt in prompts]


def test_generation_ends_with_the_stop_token_and_rows_that_end_leave_the_others_alone(
    target: Target, prompts: list[list[int]]
) -> None:
    free = target.generate(prompts, 20, stop_ids=())
    stop = free[0][0][4]
    stopped = target.generate(prompts, 20, stop_ids=[stop])
    for (tokens, reason), (all_tokens, _) in zip(stopped, free, strict=True):
        end = all_tokens.index(stop) + 1 if stop in all_tokens else 20
        assert tokens == all_tokens[:end]
        assert reason == ("stop" if stop in all_tokens else "length")
    assert stopped[0][1] == "stop"


def test_a_sample_depends_on_its_own_seed_only(target: Target, prompts: list[list[int]]) -> None:
    def sample(chosen: list[list[int]], seeds: list[int]) -> list[tuple[list[int], str]]:
        return target.generate(chosen, 20, temperature=1.0, seeds=seeds)

    together = sample(prompts, [5, 6, 7])
    assert together == [sample([p], [s])[0] for p, s in zip(prompts, [5, 6, 7], strict=True)]
    changed = sample(prompts, [5, 60, 70])
    assert changed[0] == together[0]
    assert changed[1:] != together[1:]


def test_sampling_follows_the_probabilities() -> None:
    target = random_target(DENSE)
    prompt = byte_tokenizer().encode("x")
    expected = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1] / 0.5, dim=-1)
    draws = target.generate([prompt] * 2000, 1, temperature=0.5, seeds=range(2000), stop_ids=())
    counts = torch.bincount(torch.tensor([tokens[0] for tokens, _ in draws]), minlength=260) / 2000
    assert float((counts - expected).abs().max()) < 0.03


def test_generation_without_sense_is_refused(target: Target) -> None:
    for arguments in (
        ([[]], 5, {}),
        ([[1]], 0, {}),
        ([[1]], 5, {"temperature": -1.0}),
        ([[1]], 5, {"temperature": 1.0}),
        ([[1]], 5, {"temperature": 1.0, "seeds": [1, 2]}),
    ):
        with pytest.raises(ConfigError):
            target.generate(arguments[0], arguments[1], **arguments[2])
    assert target.generate([], 5) == []


# Loading
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SPECS))
def test_float16_weights_on_disk_run_in_float32(name: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    target = random_target(SPECS[name], "float16")
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    loaded = load_target(tmp_path)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert loaded.facts.dtype == "float32"
    assert (loaded.facts.eos_ids, loaded.facts.pad_id) == ((257,), 256)
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == prompts[0]
    exact = random_target(SPECS[name])
    for weight in exact.model.parameters():
        weight.data = weight.data.half().float()
    ids = torch.tensor(prompts[:1])
    assert torch.equal(loaded.features(ids, None, TAPS), exact.features(ids, None, TAPS))


@pytest.mark.parametrize("name", list(SPECS))
def test_a_bfloat16_target_keeps_its_rotary_frequencies_in_float32(name: str) -> None:
    exact, rounded = random_target(SPECS[name]), random_target(SPECS[name], "bfloat16")
    assert {weight.dtype for weight in rounded.model.parameters()} == {torch.bfloat16}
    assert torch.equal(rounded.model.model.rotary_emb.inv_freq, exact.model.model.rotary_emb.inv_freq)


def test_a_random_target_is_the_same_every_time_and_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (random_target({**HYBRID, "seed": seed}) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, left), right in zip(one.model.state_dict().items(), same.model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_embedding_and_head_are_frozen(target: Target) -> None:
    assert not any(weight.requires_grad for weight in target.model.parameters())
    # Features can be trained on: they are plain tensors, not inference-mode ones.
    feature = target.features(torch.tensor([[1, 2, 3]]), None, TAPS)
    assert not feature.is_inference()


def test_a_target_can_be_built_from_a_state_dict_which_must_be_complete() -> None:
    original = random_target(DENSE)
    fields = {key: value for key, value in DENSE.items() if key != "seed"}
    fields["vocab_size"] = 260
    state = dict(original.model.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    copy = target_from_state(fields, state)
    assert torch.equal(copy.features(ids, None, TAPS), original.features(ids, None, TAPS))
    state.pop("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(CorruptError, match=r"layers\.2\.mlp\.up_proj"):
        target_from_state(fields, state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"hidden_sise": 3}, "hidden_sise"),
        ({"vocab_size": 100}, "vocab_size = 100"),
    ],
)
def test_a_spec_without_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        random_target({**DENSE, **change})


def test_a_directory_without_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PermanentError, match="llama"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptError):
        load_target(tmp_path)


def test_the_byte_tokenizer_gives_back_any_text_and_renders_a_generation_prompt() -> None:
    tokenizer = byte_tokenizer()
    text = "héllo\n\n€ 𝄞  \x00 end "
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 260
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (256, 257, 259)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(rendered)[0] == 258
