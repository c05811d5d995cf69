"""What is exported is what others load, and what is loaded is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import SLIDING, drafter_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.model.clients import CLIENTS, export_for
from dflash.model.drafter import Drafter, draft_all
from dflash.model.export import load_config, load_drafter, read_metadata, save_drafter


@pytest.fixture
def drafter() -> Drafter:
    made = Drafter(drafter_config(layer_types=SLIDING, sliding_window=6))
    made.draw_weights(5, std=0.3)
    return made


@pytest.fixture
def exported(drafter: Drafter, tmp_path: Path) -> Path:
    save_drafter(drafter, tmp_path / "drafter", {"config": '{"lr": 1}'})
    return tmp_path / "drafter"


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def test_an_export_comes_back_with_the_same_config_and_bits(drafter: Drafter, exported: Path) -> None:
    loaded = load_drafter(exported)
    assert loaded.config == drafter.config
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]


def test_the_tensors_have_the_published_names(exported: Path) -> None:
    layer = [
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    ]  # fmt: skip
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{n}.{name}.weight" for n in range(2) for name in layer}
    assert set(load_file(exported / "model.safetensors")) == expected


def test_the_config_has_the_published_fields(exported: Path) -> None:
    content = json.loads((exported / "config.json").read_text())
    assert content["architectures"] == ["DFlashDraftModel"]
    assert content["model_type"] == "qwen3"
    assert (content["block_size"], content["num_target_layers"]) == (4, 6)
    assert content["dflash_config"] == {"mask_token_id": 259, "target_layer_ids": [1, 3]}
    assert (content["layer_types"], content["sliding_window"]) == (list(SLIDING), 6)
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 1e7
    assert content["dtype"] == "float32"


def test_a_lone_file_still_explains_itself(exported: Path) -> None:
    assert read_metadata(exported / "model.safetensors") == {"config": '{"lr": 1}', "format": "pt"}


def test_equal_weights_are_equal_bytes_whatever_the_order_of_the_metadata(drafter: Drafter, tmp_path: Path) -> None:
    told = {f"fact {number}": "x" * number for number in range(20)}
    files = []
    for place, metadata in (("one", told), ("two", dict(reversed(told.items())))):
        save_drafter(drafter, tmp_path / place, metadata)
        files.append((tmp_path / place / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert read_metadata(tmp_path / "one" / "model.safetensors") == {**told, "format": "pt"}


def test_an_export_for_serving_is_bfloat16_and_leaves_the_masters_alone(drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in load_drafter(tmp_path).parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in load_drafter(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}
    assert {weight.dtype for weight in drafter.parameters()} == {torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda state: state.pop("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda state: state.update({"lm_head.weight": torch.ones(2)}), r"lm_head\.weight is not a drafter's"),
        (lambda state: state.update({"fc.weight": torch.ones(32, 32)}), r"fc\.weight has shape \[32, 32\].*\[32, 64\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(spoil: Any, said: str, exported: Path) -> None:
    state = load_file(exported / "model.safetensors")
    spoil(state)
    save_file(state, exported / "model.safetensors")
    with pytest.raises(CorruptError, match=said):
        load_drafter(exported)


def test_half_a_file_is_refused(exported: Path) -> None:
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="unreadable"):
        load_drafter(exported)
    file.unlink()
    with pytest.raises(CorruptError, match="no \\*"):
        load_drafter(exported)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": "absent"}, "block_size"),
        ({"block_size": 1}, "block_size = 1"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [1, 9], "mask_token_id": 259}}, "outside the target"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "rope_theta"),
        ({"hidden_size": "32"}, "no sense"),
    ],
)
def test_a_config_field_that_is_wrong_is_named(changes: dict[str, Any], said: str, exported: Path) -> None:
    edit(exported, **changes)
    with pytest.raises(CorruptError, match=said):
        load_drafter(exported)


@pytest.mark.parametrize("option", ["conv_kernel_size", "selector_rank", "final_logit_softcapping", "attention_bias"])
def test_a_drafter_with_arithmetic_that_we_lack_is_refused(option: str, exported: Path) -> None:
    edit(exported, **{option: 4})
    with pytest.raises(PermanentError, match=option):
        load_drafter(exported)


def test_published_spellings_are_understood(exported: Path) -> None:
    nested = {"mask_token_id": 259, "target_layer_ids": [1, 3], "block_size": 8}
    edit(exported, block_size="absent", dflash_config=nested, rope_parameters="absent", layer_types="absent")
    config = load_config(exported)
    assert (config.block_size, config.rope_theta, config.layer_types) == (8, 1e7, ("full_attention",) * 2)


PUBLISHED_PACKAGE = """
import sys
import torch
from dflash.model import DFlashDraftModel

model, info = DFlashDraftModel.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
case = torch.load(sys.argv[2], weights_only=True)
blocks = case["embed"][case["block"]]
out = model(
    target_hidden=case["features"], noise_embedding=blocks, position_ids=torch.arange(case["features"].shape[1] +
    4)[None]
)
torch.save(out.detach(), sys.argv[3])
"""


def test_the_published_package_loads_an_export_strictly_and_drafts_the_same(
    drafter: Drafter, exported: Path, tmp_path: Path, require_or_skip: Callable[[str, str], None]
) -> None:
    packages = os.environ.get("DFLASH_ZLAB_PATH")
    if not packages:
        require_or_skip("zlab", "DFLASH_ZLAB_PATH names no folder with the published dflash 0.1.0")
    generator = torch.Generator().manual_seed(0)
    embed, features = (torch.randn(shape, generator=generator) for shape in ((260, 32), (1, 11, 64)))
    ids = torch.randint(0, 256, (1, 12), generator=generator)
    block = torch.tensor([[int(ids[0, 11]), 259, 259, 259]])
    torch.save({"embed": embed, "features": features, "block": block}, tmp_path / "case.pt")
    # Its package has our name, so it gets a process and a path of its own.
    subprocess.run(
        [sys.executable, "-c", PUBLISHED_PACKAGE, exported, tmp_path / "case.pt", tmp_path / "out.pt"],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    theirs = torch.load(tmp_path / "out.pt", weights_only=True)
    ours = draft_all(drafter, features, ids[0], [11], lambda tokens: embed[tokens], lambda hidden: hidden)
    torch.testing.assert_close(ours, theirs[:, 1:], atol=1e-5, rtol=0)


# For a client -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_an_export_for_a_client_is_the_same_drafter_without_code_to_fetch(
    client: str, drafter: Drafter, exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "step_7").mkdir()
    exported.rename(tmp_path / "step_7" / "drafter")
    notes = export_for(client, tmp_path / "step_7", tmp_path / "out")
    made = load_drafter(tmp_path / "out")
    assert made.config == drafter.config
    for name, weight in drafter.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight.to(made.norm.weight.dtype)), name
    server = client in ("vllm", "sglang")
    assert made.norm.weight.dtype == (torch.bfloat16 if server else torch.float32)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in content
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 1e7
    assert ("rope_scaling" in content) == server
    assert (content["layer_types"], content["dflash_config"]["block_size"]) == (list(SLIDING), 4)
    assert any("mixed" in note for note in notes) == server
    assert read_metadata(tmp_path / "out" / "model.safetensors")["config"] == '{"lr": 1}'
    read_as = AutoConfig.from_pretrained(tmp_path / "out")
    assert type(read_as).__name__ == "Qwen3Config"
    assert read_as.rope_parameters["rope_theta"] == 1e7


def test_an_export_is_not_written_over_something_or_from_nothing(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds something"):
        export_for("vllm", exported, exported)
    with pytest.raises(ConfigError, match="no drafter here"):
        export_for("vllm", tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ConfigError, match="names no client"):
        export_for("tgi", exported, tmp_path / "out")


def as_speculators(exported: Path, **changes: Any) -> None:
    """Rewrites an export in the layout of speculators 0.9.0: taps count the embedding, layers have a config of their own."""
    flat = json.loads((exported / "config.json").read_text())
    content = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "block_size": flat.pop("block_size"),
        "draft_vocab_size": flat["vocab_size"],
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": 259,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "transformer_layer_config": {
            name: value for name, value in flat.items() if name not in ("dflash_config", "num_target_layers")
        },
        **changes,
    }
    (exported / "config.json").write_text(json.dumps(content))


def test_a_drafter_of_speculators_reads_the_same_layers_under_numbers_that_are_one_lower(
    drafter: Drafter, exported: Path
) -> None:
    state = load_file(exported / "model.safetensors")
    save_file({**state, "embed_tokens.weight": torch.ones(260, 32)}, exported / "model.safetensors")
    as_speculators(exported)
    loaded = load_drafter(exported, num_target_layers=6)
    assert loaded.config == drafter.config
    assert loaded.config.target_layer_ids == (1, 3)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab_size": 100}, "a vocabulary of 100 tokens of its own"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "reads the target's embedding"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal"),
        ({"speculators_model_type": "eagle3"}, "of kind eagle3"),
    ],
)
def test_a_drafter_of_speculators_that_drafts_otherwise_is_refused(
    changes: dict[str, Any], said: str, exported: Path
) -> None:
    as_speculators(exported, **changes)
    with pytest.raises(PermanentError, match=said):
        load_drafter(exported, num_target_layers=6)


def test_rotary_positions_over_a_part_of_the_head_are_refused(exported: Path) -> None:
    edit(exported, rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25})
    with pytest.raises(PermanentError, match=r"partial_rotary_factor = 0\.25"):
        load_drafter(exported)
