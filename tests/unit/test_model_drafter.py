"""The drafter sees what it may see, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from model_samples import FULL, SLIDING, drafter_config
from torch import Tensor, nn

from dflash.base.errors import ConfigError, PermanentError
from dflash.model.drafter import (
    ATTENTIONS,
    Drafter,
    DrafterConfig,
    compiled_tiles,
    draft_all,
    draft_chunks,
    parameter_count,
)
from dflash.model.masks import block_mask, context_mask, document_positions, own_block_mask, sparse_block_mask
from dflash.model.taps import default_taps

LENGTH, BLOCK = 20, 4
KINDS = {"full": {"layer_types": FULL}, "sliding": {"layer_types": SLIDING, "sliding_window": 6}}


class Scene:
    """A drafter with strong random weights and one batch of two sequences."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.drafter = Drafter(drafter_config(**KINDS[kind]))
        self.drafter.draw_weights(5, std=0.3)
        self.embed = nn.Embedding(260, 32)
        self.embed.weight.data.normal_(generator=generator)
        self.features = torch.randn(2, LENGTH, 64, generator=generator)
        self.ids = torch.randint(0, 256, (2, LENGTH), generator=generator)
        self.anchors = torch.tensor([[2, 5, 6, 15], [1, 7, 11, 19]])

    @torch.no_grad()
    def draft(self, features: Tensor | None = None, anchors: Tensor | None = None, **options: Any) -> Tensor:
        options.setdefault("ids", self.ids)
        ids = options.pop("ids")
        return self.drafter(
            self.features if features is None else features,
            ids,
            self.anchors if anchors is None else anchors,
            self.embed,
            **options,
        )


@pytest.fixture(params=list(KINDS))
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, atol=1e-5, rtol=0)


def test_features_at_and_after_the_anchor_do_not_reach_its_block(scene: Scene) -> None:
    before = scene.draft()
    for row, column in ((0, 1), (1, 2)):
        anchor = int(scene.anchors[row, column])
        changed = scene.features.clone()
        changed[row, anchor:] += 3.0
        assert close(scene.draft(changed)[row, column], before[row, column])


def test_the_feature_just_before_the_anchor_reaches_every_slot(scene: Scene) -> None:
    before = scene.draft()
    anchor = int(scene.anchors[0, 2])
    changed = scene.features.clone()
    changed[0, anchor - 1] += 3.0
    moved = (scene.draft(changed)[0, 2] - before[0, 2]).abs().amax(dim=-1)
    assert bool((moved > 1e-3).all())


def test_many_anchors_in_one_forward_equal_one_forward_an_anchor(scene: Scene) -> None:
    together = scene.draft()
    for column in range(scene.anchors.shape[1]):
        alone = scene.draft(anchors=scene.anchors[:, column : column + 1])
        assert close(alone[:, 0], together[:, column])


def test_another_blocks_anchor_token_does_not_reach_a_block(scene: Scene) -> None:
    before = scene.draft()
    changed = scene.ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    after = scene.draft(ids=changed)
    assert close(after[0, [0, 2, 3]], before[0, [0, 2, 3]])
    assert not close(after[0, 1], before[0, 1])


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunking_the_anchors_changes_nothing(scene: Scene, chunk: int) -> None:
    assert close(scene.draft(anchor_chunk=chunk), scene.draft())


def test_chunks_and_recomputation_give_the_same_gradients(scene: Scene) -> None:
    def gradients(**options: Any) -> dict[str, Tensor]:
        scene.drafter.zero_grad()
        scene.drafter(scene.features, scene.ids, scene.anchors, scene.embed, **options).pow(2).sum().backward()
        return {name: weight.grad.clone() for name, weight in scene.drafter.named_parameters()}

    plain, chunked = gradients(), gradients(anchor_chunk=2, recompute=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_the_context_is_projected_once_however_many_chunks(scene: Scene) -> None:
    calls: list[int] = []
    scene.drafter.fc.register_forward_hook(lambda *_: calls.append(1))
    scene.draft(anchor_chunk=1)
    draft_all(scene.drafter, scene.features[0], scene.ids[0], [3, 5, 9], scene.embed, nn.Identity(), anchor_chunk=1)
    assert len(calls) == 2


def test_moving_every_position_changes_nothing_but_moving_the_block_alone_does(scene: Scene) -> None:
    positions = torch.arange(LENGTH).expand(2, -1)
    still = scene.draft(position_ids=positions)
    assert close(still, scene.draft())
    assert torch.allclose(scene.draft(position_ids=positions + 7), still, atol=1e-4)
    anchors = torch.tensor([[6], [6]])
    block_moved = positions + 2 * (positions >= 6)
    assert not torch.allclose(
        scene.draft(anchors=anchors, position_ids=block_moved), scene.draft(anchors=anchors), atol=1e-2
    )


def test_packed_documents_equal_the_same_documents_alone(scene: Scene) -> None:
    documents = torch.tensor([[0] * 8 + [1] * 12] * 2)
    packed = scene.draft(anchors=torch.tensor([[3, 11]] * 2), document_ids=documents)
    first = scene.draft(scene.features[:, :8], torch.tensor([[3]] * 2), ids=scene.ids[:, :8])
    second = scene.draft(scene.features[:, 8:], torch.tensor([[3]] * 2), ids=scene.ids[:, 8:])
    assert close(packed, torch.cat([first, second], dim=1))


def test_another_document_does_not_reach_a_block(scene: Scene) -> None:
    documents = torch.tensor([[0] * 8 + [1] * 12] * 2)
    options = {"anchors": torch.tensor([[9, 12]] * 2), "document_ids": documents}
    changed = scene.features.clone()
    changed[:, :8] += 3.0
    assert close(scene.draft(changed, **options), scene.draft(**options))


def test_padding_on_the_right_does_not_reach_a_block(scene: Scene) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    valid = torch.tensor([[True] * 4, [True, True, True, False]])
    noisy = scene.features.clone()
    noisy[1, 12:] = 99.0
    padded = scene.draft(noisy, attention_mask=mask, anchor_valid=valid)
    alone = scene.draft(scene.features[1:, :12], scene.anchors[1:, :3], ids=scene.ids[1:, :12])
    assert close(padded[1:, :3], alone)
    assert bool(padded.isfinite().all())


def test_padding_on_the_left_with_positions_does_not_reach_a_block(scene: Scene) -> None:
    padding = torch.full((2, 3, 64), 99.0)
    options = {
        "ids": torch.cat([torch.zeros(2, 3, dtype=torch.long), scene.ids], dim=1),
        "attention_mask": torch.tensor([[0] * 3 + [1] * LENGTH] * 2),
        "position_ids": (torch.arange(LENGTH + 3) - 3).clamp(min=0).expand(2, -1),
    }
    padded = scene.draft(torch.cat([padding, scene.features], dim=1), scene.anchors + 3, **options)
    assert close(padded, scene.draft())


def test_left_padding_without_positions_is_refused(scene: Scene) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(PermanentError, match="padded on the left"):
        scene.draft(attention_mask=mask)


def test_a_batch_without_a_valid_anchor_still_runs_forward_and_backward(scene: Scene) -> None:
    anchors, valid = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.bool)
    hidden = scene.drafter(scene.features, scene.ids, anchors, scene.embed, anchor_valid=valid)
    (hidden * 0).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in scene.drafter.parameters())


def test_slot_zero_is_the_anchor_token_and_the_others_are_masks(scene: Scene) -> None:
    seen: list[Tensor] = []
    scene.embed.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    scene.draft()
    blocks = seen[0].view(2, 4, BLOCK)
    assert torch.equal(blocks[..., 0], scene.ids.gather(1, scene.anchors))
    assert bool((blocks[..., 1:] == 259).all())


def test_drafting_for_evaluation_needs_no_features_from_the_anchor_on(scene: Scene) -> None:
    whole = draft_all(scene.drafter, scene.features[0], scene.ids[0], [4, 9], scene.embed, nn.Identity())
    cut = draft_all(scene.drafter, scene.features[0, :9], scene.ids[0, :10], [4, 9], scene.embed, nn.Identity())
    assert close(whole, cut)
    assert close(whole, scene.draft(anchors=torch.tensor([[4, 9]] * 2))[0, :, 1:])
    with pytest.raises(PermanentError, match="anchors"):
        draft_all(scene.drafter, scene.features[0, :8], scene.ids[0, :10], [9], scene.embed, nn.Identity())


def test_chunks_of_an_evaluation_come_in_order_and_may_be_shorter_blocks(scene: Scene) -> None:
    parts = list(
        draft_chunks(
            scene.drafter, scene.features[0], scene.ids[0], [4, 9, 2], scene.embed, nn.Identity(), anchor_chunk=2,
            block_size=3,
        )
    )  # fmt: skip
    assert [anchors for anchors, _ in parts] == [[4, 9], [2]]
    assert [tuple(logits.shape) for _, logits in parts] == [(2, 2, 32), (1, 2, 32)]


def test_features_of_another_width_or_length_are_refused(scene: Scene) -> None:
    with pytest.raises(PermanentError, match="width 32"):
        scene.draft(scene.features[..., :32])
    with pytest.raises(PermanentError, match="same forward"):
        scene.draft(scene.features[:, 1:])


# Masks, against their definition in words
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_the_mask_is_its_definition(window: int | None) -> None:
    anchors, documents = torch.tensor([[0, 4, 6, 11]]), torch.tensor([[0] * 5 + [1] * 7])
    positions = document_positions(documents)
    mask = block_mask(anchors, positions, BLOCK, window=window, document_ids=documents)[0]
    count, length = anchors.shape[1], documents.shape[1]
    for query in range(count * BLOCK):
        block, slot = divmod(query, BLOCK)
        anchor = int(anchors[0, block])
        at = int(positions[0, anchor]) + slot
        for key in range(length + count * BLOCK):
            if key < length:
                expected = key < anchor and documents[0, key] == documents[0, anchor]
                where = int(positions[0, key])
            else:
                other, other_slot = divmod(key - length, BLOCK)
                expected = other == block
                where = int(positions[0, anchor]) + other_slot
            if window is not None:
                expected = expected and at - (window - 1) <= where <= at
            assert bool(mask[query, key]) == bool(expected), (query, key)


def test_a_window_counts_the_query_itself() -> None:
    positions = torch.arange(10)[None]
    seen = context_mask(torch.tensor([[8]]), positions, BLOCK, window=6)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[3, 4, 5, 6, 7], [4, 5, 6, 7], [5, 6, 7], [6, 7]]
    assert own_block_mask(3, window=2).tolist() == [[True, False, False], [True, True, False], [False, True, True]]


def test_positions_restart_with_each_document() -> None:
    assert document_positions(torch.tensor([[4, 4, 4, 7, 7, 2], [1, 1, 1, 1, 1, 1]])).tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 1, 2, 3, 4, 5],
    ]


# Shapes and weights
# ----------------------------------------------------------------------------------------------------


def test_default_taps_are_the_published_ones() -> None:
    assert default_taps(64, 5) == (1, 16, 31, 46, 61)
    assert default_taps(12, 3) == (1, 5, 9)
    assert default_taps(64, 1) == (32,)
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(("target", "draft"), [(4, 2), (6, 5), (3, 2), (0, 1), (8, 0)])
def test_taps_that_repeat_or_leave_the_target_are_refused(target: int, draft: int) -> None:
    with pytest.raises(ConfigError):
        default_taps(target, draft)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("block_size", 1, "block_size = 1"),
        ("mask_token_id", 260, "mask_token_id = 260"),
        ("mask_token_id", -1, "mask_token_id = -1"),
        ("target_layer_ids", (1, 1), "tapped twice"),
        ("target_layer_ids", (1, 6), "outside the target"),
        ("target_layer_ids", (), "no target layer"),
        ("layer_types", ("full_attention",), "layer_types"),
        ("layer_types", ("full_attention", "linear"), "linear"),
        ("layer_types", SLIDING, "sliding_window = None"),
        ("num_key_value_heads", 3, "num_key_value_heads = 3"),
        ("head_dim", 7, "head_dim = 7"),
        ("hidden_size", 0, "hidden_size = 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        drafter_config(**{field: value})


def test_a_config_survives_json_and_refuses_unknown_fields() -> None:
    config = drafter_config(**KINDS["sliding"])
    assert DrafterConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="blocksize"):
        DrafterConfig.from_dict({**config.to_dict(), "blocksize": 4})


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (Drafter(drafter_config(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_the_parameter_count_is_known_without_building() -> None:
    config = drafter_config()
    assert parameter_count(config) == sum(weight.numel() for weight in Drafter(config).parameters())
    large = drafter_config(
        hidden_size=5120, num_hidden_layers=5, block_size=16, vocab_size=248320, intermediate_size=17408,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_target_layers=64,
        target_layer_ids=default_taps(64, 5), mask_token_id=248070, layer_types=("full_attention",) * 5,
    )  # fmt: skip
    assert parameter_count(large) == pytest.approx(1.73e9, rel=0.005)


@pytest.mark.parametrize("types", [FULL, SLIDING])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_attention_gives_what_the_whole_mask_gives(
    types: tuple[str, ...], chunk: int | None, documents: bool
) -> None:
    """Outputs and gradients in float64: tiles are a way to compute, not another mask. (On a CPU torch has no backward of flex
    attention; the gradients are those of its rule.)"""
    config = drafter_config(layer_types=types, sliding_window=5 if "sliding_attention" in types else None)
    draw = torch.Generator().manual_seed(4)
    features = torch.randn(2, 19, config.feature_size, generator=draw, dtype=torch.float64)
    ids = torch.randint(0, 256, (2, 19), generator=draw)
    anchors = torch.tensor([[0, 3, 9, 17], [1, 2, 5, 0]])
    valid = torch.tensor([[True, True, True, True], [True, True, True, False]])
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 11:] = 0
    ids_of_documents = torch.tensor([[0] * 8 + [1] * 11, [0] * 4 + [1] * 15]) if documents else None
    embed = torch.nn.Embedding(260, 32, dtype=torch.float64)
    found: dict[str, list[Any]] = {}
    for attention in ATTENTIONS:
        drafter = Drafter(config, seed=0).double()
        arguments = {
            "anchor_valid": valid, "attention_mask": mask, "document_ids": ids_of_documents, "anchor_chunk": chunk,
            "recompute": chunk is not None, "attention": attention,
        }  # fmt: skip
        hidden = drafter(features, ids, anchors, embed, **arguments)
        with torch.no_grad():  # flex attention itself
            alone = drafter(features, ids, anchors, embed, **arguments)
        torch.testing.assert_close(alone[valid], hidden[valid], rtol=1e-6, atol=1e-7)
        hidden[valid].square().sum().backward()
        found[attention] = [hidden[valid].detach(), *(weight.grad for weight in drafter.parameters())]
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_compiled_tiles_never_fall_back_to_every_pair(recwarn: pytest.WarningsRecorder) -> None:
    """Traced as the compiler would trace them: batches of one row and of several, one anchor, one tile, windows and none."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    draw = torch.Generator().manual_seed(1)
    for rows, length, count in [
        (3, 150, 40),
        (2, 200, 50),
        (1, 160, 35),
        (5, 64, 8),
        (3, 77, 1),
        (1, 40, 3),
        (1, 190, 1),
    ]:
        anchors = torch.randint(1, length - 1, (rows, count), generator=draw)
        positions = torch.arange(length).expand(rows, -1)
        keys = torch.randn(rows, 2, length + count * BLOCK, 16, generator=draw)
        query = torch.randn(rows, 4, count * BLOCK, 16, generator=draw)
        for window in (None, 30):
            mask = sparse_block_mask(anchors, positions, BLOCK, window=window)
            whole = block_mask(anchors, positions, BLOCK, window=window)[:, None]
            with torch.no_grad():
                found = compiled_tiles(query, keys, keys, mask, backend="eager")
            wanted = nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=whole, enable_gqa=True)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 8 < graphs <= 40, "more than torch compiles by itself, and not one a length"
    assert not [warning for warning in recwarn if "without torch.compile" in str(warning.message)]
