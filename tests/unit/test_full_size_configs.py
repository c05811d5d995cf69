"""The real job's configuration plans on a machine without weights and prompts, and its numbers are those it says it has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from dflash.base.errors import ConfigError
from dflash.base.files import DigestCache
from dflash.data.batches import BatchPlan
from dflash.model.drafter import parameter_count
from dflash.model.facts import identify
from dflash.model.identity import target_digest
from dflash.model.taps import default_taps
from dflash.model.target_params import TargetSection
from dflash.plan.code import source_root
from dflash.plan.config import load_config
from dflash.plan.graph import Plan, build_plan
from dflash.plan.places import planned_place, target_on
from dflash.train.prepare import drafter_config

FULL = "config/qwen3.6-27b.yaml"
ONE_GPU = "config/qwen3.6-27b.one-gpu.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configuration files and nothing else."""
    (tmp_path / "config").mkdir()
    for file in (source_root() / "config").glob("*.yaml"):
        shutil.copy(file, tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def plan_of(*files: str) -> Plan:
    return build_plan(load_config([Path(file) for file in files]))


def test_it_plans_without_weights_and_without_prompts() -> None:
    plan = plan_of(FULL)
    train = plan.runs[0].nodes["train"]
    assert len(train.steps) == 38
    assert planned_place(plan, train) == "gpu-host"
    assert planned_place(plan, plan.runs[0].nodes["evaluate"]) == "eval-host"
    assert str(target_on(plan.config.inventory, "gpu-host", train)) == "/srv/models/qwen3.6-27b"
    assert train.placement["topology"] == {"colocate": False, "targets": 5, "drafters": 3}


def test_one_gpu_is_placement_alone() -> None:
    many, one = plan_of(FULL), plan_of(FULL, ONE_GPU)
    keys = [{name: node.key for name, node in plan.runs[0].nodes.items() if name != "report"} for plan in (many, one)]
    assert keys[0] == keys[1]
    train = one.runs[0].nodes["train"]
    assert train.placement["topology"] == {"colocate": True, "targets": 1, "drafters": 1}
    assert planned_place(one, train) == "local"


def test_the_drafter_is_the_published_one() -> None:
    train = plan_of(FULL).config.runs[0].train
    assert train.target_layer_ids == list(default_taps(64, 5)) == [1, 16, 31, 46, 61]
    config = drafter_config(train)
    assert parameter_count(config) == pytest.approx(1.73e9, rel=0.003)
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (16, 248070, 248320)
    assert config.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert (config.sliding_window, config.rope_theta, train.max_anchors) == (2048, 1e7, 512)


def test_the_shapes_of_the_benchmarks_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(source_root() / "tests/bench/gpu"))
    import shapes

    train = plan_of(FULL).config.runs[0].train
    facts = train.target
    assert [facts.num_layers, facts.hidden_size, facts.vocab_size, facts.max_position_embeddings] == [
        shapes.SHAPES_27B[name]
        for name in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    ]
    assert facts.hybrid
    for name, value in shapes.drafter_27b().items():
        assert getattr(train, name) == value, name


def test_the_prompts_are_902_087_and_what_made_them_1_1_million() -> None:
    *base, growth = plan_of(FULL).config.runs[0].prompts
    assert sum(source.limit or 0 for source in base) == 902_087
    assert 902_087 + (growth.limit or 0) == 1_100_000


def test_the_schedule_is_six_epochs_of_batches_that_every_rank_shares_evenly() -> None:
    run = plan_of(FULL).config.runs[0]
    batching, train = run.batching, run.train
    draw = np.random.default_rng(8)
    lengths = np.clip(draw.lognormal(7.4, 0.75, 110_000), 16, 8192)
    lengths = np.clip(lengths * 2202 / lengths.mean(), 16, 8192).astype(np.int64)
    assert lengths.mean() == pytest.approx(2202, rel=0.01)
    epoch = BatchPlan(lengths, [""] * len(lengths), batching, "0" * 12).batches_per_epoch * 10
    assert train.schedule_steps == pytest.approx(6 * epoch / batching.batches_per_step, rel=0.02)
    assert train.warmup == pytest.approx(0.04 * train.schedule_steps, rel=0.02)
    assert batching.batches_per_step % train.topology.targets == 0
    assert batching.batches_per_step % train.topology.drafters == 0


def test_every_line_says_why() -> None:
    """A value without a reason is one that nobody dares to change. The shape of a source is told once, above the sources."""
    told = {"huggingface", "split", "revision", "limit", "answers", "malformed", "shards", "prompt_field", "mapping"}
    silent = []
    for line in Path(FULL).read_text().splitlines():
        name = line.strip().removeprefix("- ").partition(":")[0]
        if line.startswith(" ") and not line.strip().startswith("#") and ":" in line and "#" not in line:
            silent.append(name)
    above = {
        "digest",
        "facts",
        "max_anchors",
        "schedule_steps",
        "topology",
        "prompt_sets",
        "{name",
    }  # their reason stands over them
    assert set(silent) - told - above == set()


# What was declared, and what lies there ---------------------------------------------------------------------------


def made(root: Path) -> tuple[Path, dict]:
    """A target's folder, and the section that declares it."""
    shutil.copytree(source_root() / "config/demo/target", root / "target")
    config = {"path": str(root / "target"), "digest": target_digest(root / "target")}
    found = identify(TargetSection(**config), DigestCache())
    facts = found.model_dump(exclude={"digest", "revision", "random"})
    return root / "target", {**config, "facts": facts}


def test_declared_facts_give_the_identity_that_the_directory_gives(folder: Path) -> None:
    target, section = made(folder)
    there = identify(TargetSection(**section), DigestCache())
    target.rename(folder / "elsewhere")
    assert identify(TargetSection(**section), DigestCache()) == there


def test_a_declared_fact_that_the_directory_contradicts_is_named(folder: Path) -> None:
    _, section = made(folder)
    section["facts"]["num_layers"] += 1
    with pytest.raises(ConfigError, match=r"`target.facts.num_layers: 9`: the target in .* has 8"):
        identify(TargetSection(**section), DigestCache())


def test_without_facts_a_missing_directory_says_what_else_could_be_given(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        identify(TargetSection(path="nowhere"), DigestCache())
    assert "`digest` and `facts`" in caught.value.message()


def test_facts_without_a_digest_are_refused_with_their_line(folder: Path) -> None:
    config = yaml.safe_load(Path(FULL).read_text())
    del config["target"]["digest"]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"`facts` say nothing of the weights: give `digest` too"):
        plan_of("config.yaml")


def test_a_wrong_digest_is_answered_with_the_one_that_lies_there(folder: Path) -> None:
    from dflash.base.errors import PermanentError
    from dflash.model.identity import target_source

    target, section = made(folder)
    declared = identify(TargetSection(**{**section, "digest": "0" * 64}), DigestCache())
    with pytest.raises(PermanentError) as caught:
        target_source(declared, target)
    assert f"`target.digest: {section['digest']}`" in caught.value.message()
