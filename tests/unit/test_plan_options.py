"""`config/README.md` says what the models say."""

from __future__ import annotations

from dflash.plan.code import source_root
from dflash.plan.options import options_markdown


def test_the_options_document_is_what_the_models_say() -> None:
    written = (source_root() / "config/README.md").read_text()
    assert written == options_markdown(), "run `make fmt`"


def test_every_option_has_a_meaning_or_speaks_for_itself() -> None:
    silent = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    silent |= {"head_dim", "rope_theta", "rms_norm_eps", "weight_decay"}
    rows = [line for line in options_markdown().splitlines() if line.startswith("| `")]
    unexplained = {row.split("`")[1] for row in rows if row.split("|")[-2].strip() == ""}
    assert unexplained <= silent
