"""One drafter step (forward, loss, backward) on one GPU: ours in several placements, and the training model of SpecForge.

    python tests/bench/gpu/drafter_step.py --specforge FOLDER [--rounds 7] [--placed plain flex ...]
    python tests/bench/gpu/drafter_step.py --small [--specforge FOLDER]                  (a CPU, seconds)

FOLDER is the unpacked wheel of SpecForge 0.2.0 (`python -m zipfile -e specforge-0.2.0-py3-none-any.whl FOLDER`); without it
ours run alone. Shapes of the published drafter of Qwen3.6-27B, random weights, fresh random features every round.

Two kinds of work. `long`: one sequence of 8,192 tokens with 512 anchors. `mean`: sequences of mean 2,202; SpecForge takes
one a step with 512 anchors, as its trainer does at batch size 1; ours takes a batch of the plan, once with 512 anchors a
*batch* (the same blocks a step, so the gain of packing) and once with 512 a *sequence* (as `train.max_anchors` counts
them).

First both must learn the same: on a small drafter in float32 with equal weights and every anchor taken, loss and all
gradients are compared. Prints a JSON line for that and one a kind of work: tokens per second with spread, seconds, peak
memory over what was allocated before (activations and gradients), ratio to SpecForge. Estimated, not yet run there: 4 minutes
on an H200.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import Work, alternate, matmul_ceiling, report, tell  # noqa: E402
from shapes import LENGTHS_27B, SHAPES_27B, SMALL, SMALL_DRAFTER, SMALL_LENGTHS, drafter_27b, lengths  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from train_store import identity  # noqa: E402

from dflash.data.batches import Batch, BatchPlan  # noqa: E402
from dflash.data.buckets_params import BucketsParams  # noqa: E402
from dflash.model.drafter import Drafter, DrafterConfig  # noqa: E402
from dflash.model.target_params import RandomTarget  # noqa: E402
from dflash.train import forward  # noqa: E402
from dflash.train.anchors import batch_anchors  # noqa: E402
from dflash.train.forward import DraftForward  # noqa: E402
from dflash.train.objective import labels_and_weights, objective  # noqa: E402
from dflash.train.prepare import drafter_config  # noqa: E402
from dflash.train.train_params import TrainParams  # noqa: E402

PLACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"anchor_chunk": 128},
    "flex": {"attention": "flex"},
    "fused": {"fuse": True},
    "fused flex": {"fuse": True, "attention": "flex"},
    "compiled": {"compile": True},
    "compiled flex": {"compile": True, "attention": "flex"},
}
"""Placements of ours: none of them changes what is learned."""
GAMMA = 7.0


@dataclass
class Setting:
    """What both sides share: sizes, device, type, and the target's frozen ends."""

    params: TrainParams
    config: DrafterConfig
    device: torch.device
    dtype: torch.dtype
    embed: nn.Embedding
    head: nn.Linear

    @classmethod
    def make(cls, small: bool, device: str, anchors: int) -> Setting:
        """The published drafter's shapes, or tiny ones."""
        target = RandomTarget(**(SMALL if small else SHAPES_27B))
        shape = SMALL_DRAFTER if small else drafter_27b()
        kind = "float32" if small else "bfloat16"
        params = TrainParams(
            target=identity(target), max_anchors=anchors, gamma=GAMMA, dtype=kind, mask_token_id=target.vocab_size - 1, **shape
        )  # fmt: skip
        dtype = torch.float32 if small else torch.bfloat16
        with torch.device(device):
            embed = nn.Embedding(target.vocab_size, target.hidden_size, dtype=dtype).requires_grad_(False)
            head = nn.Linear(target.hidden_size, target.vocab_size, bias=False, dtype=dtype).requires_grad_(False)
        return cls(params, drafter_config(params), torch.device(device), dtype, embed, head)

    def drafter(self) -> Drafter:
        """Ours, with the weights that every contender has."""
        return Drafter(self.config, seed=0).to(device=self.device, dtype=self.dtype)

    def inputs(self, sizes: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features, tokens and loss mask of right-padded rows, drawn on the device: everything after the first token trains."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (len(sizes), max(sizes))
        mask = torch.arange(shape[1], device=self.device) < torch.tensor(sizes, device=self.device)[:, None]
        ids = torch.randint(0, self.config.vocab_size - 1, shape, generator=generator, device=self.device) * mask
        features = torch.randn(
            *shape, self.config.feature_size, generator=generator, device=self.device, dtype=self.dtype
        )
        return features * mask[..., None], ids, mask.float()


# ---------------------------------------------------------------- ours


def our_loss(setting: Setting, draft: DraftForward, inputs: Any, batch: Batch, anchors: int, seed: int) -> Tensor:
    """Weighted cross entropy over its weights, of one batch."""
    features, ids, mask = inputs
    names = [f"{seed}:{row}" for row in range(len(batch.rows))]
    at, valid = batch_anchors(mask, seed=0, sample_ids=names, epoch=0, max_anchors=anchors)
    hidden = draft(
        features, ids, at, setting.embed, anchor_valid=valid, attention_mask=mask.long(), bucket=batch.bucket
    )
    labels, weights = labels_and_weights(ids, mask, at, setting.config.block_size, gamma=GAMMA, anchor_valid=valid)
    sums = objective(
        hidden, labels, weights, setting.head, logit_chunk=setting.params.logit_chunk, entropy=draft.entropy
    )
    return sums.loss_sum / sums.weight_sum


def ours(setting: Setting, drafter: Drafter, placed: dict[str, Any], plan: BatchPlan, a_batch: int | None) -> Work:
    """Steps of a batch each. a_batch: anchors of a whole batch; None for `max_anchors` a sequence."""
    params = setting.params.model_copy(update=placed)
    # The same weights under modules of its own: fused kernels would stay in those that others run.
    drafter = copy.deepcopy(drafter, {id(weight): weight for weight in drafter.parameters()})
    draft = DraftForward(params, drafter)
    draft.fix_shapes(plan)

    def work(number: int) -> int:
        batch = plan.batch(number % plan.batches_per_epoch)
        anchors = params.max_anchors if a_batch is None else max(1, a_batch // len(batch.rows))
        drafter.zero_grad(set_to_none=True)
        inputs = setting.inputs(batch.lengths.tolist(), number + 100)
        our_loss(setting, draft, inputs, batch, anchors, number).backward()
        return int(batch.lengths.sum())

    return work


# ---------------------------------------------------------------- SpecForge's


def peer(folder: Path, setting: Setting, weights: dict[str, Tensor]) -> nn.Module:
    """SpecForge's training model with the given weights, in the attention it comes with (on a CPU torch's own)."""
    sys.path.insert(0, str(folder))
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    config = setting.config
    attention = "flex_attention" if setting.device.type == "cuda" else "sdpa"
    given = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=262144,
        use_sliding_window=config.sliding_window is not None,
        sliding_window=config.sliding_window,
        layer_types=list(config.layer_types),
        attn_implementation=attention,
    )
    given.block_size, given.num_target_layers = config.block_size, config.num_target_layers
    given.dflash_config = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    with torch.device(setting.device):
        draft = DFlashDraftModel(given)
    draft.to(setting.dtype).load_state_dict(weights)
    return OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=setting.head,
        target_embed_tokens=setting.embed,
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=setting.params.max_anchors,
        loss_decay_gamma=GAMMA,
    )


def theirs(setting: Setting, model: nn.Module, sizes: list[int]) -> Work:
    """Steps of one sequence each."""

    def work(number: int) -> int:
        size = sizes[number % len(sizes)]
        model.zero_grad(set_to_none=True)
        features, ids, mask = setting.inputs([size], number + 100)
        model(ids, features, mask)[0].backward()
        return size

    return work


def same_learning(folder: Path, device: str) -> dict[str, Any]:
    """Loss and gradients of both on a small drafter in float32: every anchor, equal weights, one padded batch."""
    setting = Setting.make(True, device, anchors=200)
    drafter = setting.drafter()
    model = peer(folder, setting, drafter.state_dict())
    sizes = [40, 23, 64]
    plan = plan_of(sizes, 200)
    batch = plan.batch(0)
    inputs = setting.inputs(batch.lengths.tolist(), 5)
    loss = our_loss(setting, DraftForward(setting.params, drafter), inputs, batch, 200, 0)
    loss.backward()
    features, ids, mask = inputs
    other = model(ids, features, mask)[0]
    other.backward()
    other_gradients = {name: weight.grad for name, weight in model.draft_model.named_parameters()}
    apart = {
        name: float((weight.grad - other_gradients[name]).norm() / other_gradients[name].norm())
        for name, weight in drafter.named_parameters()
    }
    return report(
        "drafter step: the same learning",
        rows=len(batch.rows),
        loss=round(float(loss.detach()), 6),
        loss_difference=abs(float(loss.detach()) - float(other.detach())),
        largest_gradient_difference=max(apart.values()),
        of=max(apart, key=lambda name: apart[name]),
        same=abs(float(loss.detach()) - float(other.detach())) < 1e-4 and max(apart.values()) < 1e-3,
    )


# ---------------------------------------------------------------- the work


def plan_of(sizes: list[int], budget: int, buckets: int = 1) -> BatchPlan:
    """Batches of sequences of given lengths."""
    params = BucketsParams(token_budget=budget, max_seq_len=min(budget, max(sizes)), quantiles=buckets)
    return BatchPlan(np.asarray(sizes), [str(number) for number in range(len(sizes))], params, "0" * 12)


def measure(given: argparse.Namespace) -> bool:
    """All comparisons; whether both learned the same."""
    same = True
    if given.specforge:
        tell("comparing with SpecForge on a small drafter")
        same = same_learning(given.specforge, given.device)["same"]
    setting = Setting.make(given.small, given.device, given.anchors)
    tell("drawing the drafter's weights")
    drafter = setting.drafter()
    model = peer(given.specforge, setting, drafter.state_dict()) if given.specforge else None
    longest = int(given.lengths["longest"])
    drawn = lengths(given.samples, **given.lengths).tolist()
    ceiling = matmul_ceiling(setting.device, setting.dtype, 256 if given.small else 8192)
    long, mixed = plan_of([longest] * 8, longest), plan_of(drawn, longest, 8)
    for name, plan, sizes in (("long", long, [longest]), ("mean", mixed, drawn)):
        contenders: dict[str, Work] = {}
        for place in given.placed:
            contenders[place] = ours(setting, drafter, PLACED[place], plan, given.anchors)
            if name == "mean":
                some = {"anchor_chunk": 128, **PLACED[place]}  # all at once are 170 GB of activations
                contenders[f"{place}, all anchors"] = ours(setting, drafter, some, plan, None)
        if model is not None:
            contenders["specforge"] = theirs(setting, model, sizes)
        found = alternate(f"drafter, {name}", contenders, setting.device, given.rounds, given.warm_up)
        base = found.get("specforge")
        report(
            f"drafter step, {name}",
            unit="tokens/s",
            device=torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "cpu",
            anchors=given.anchors,
            mean_length=round(float(np.mean(sizes))),
            matmul_tflops=round(ceiling / 1e12, 3),
            **{contender: readings.told() for contender, readings in found.items()},
            ratio={} if base is None else {key: round(value.rate / base.rate, 3) for key, value in found.items()},
        )
    return same


def main(arguments: list[str] | None = None) -> int:
    """1 when ours and SpecForge's do not learn the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--placed", nargs="+", default=["plain", "chunked", "fused flex"], choices=list(PLACED))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny drafter on a CPU")
    given = parser.parse_args(arguments)
    given.lengths = SMALL_LENGTHS if given.small else LENGTHS_27B
    if given.small:
        given.device, given.samples, given.anchors, given.rounds, given.warm_up = "cpu", 60, 16, 3, 1
        forward.BACKEND = "eager"  # no compiler
    return 0 if measure(given) else 1


if __name__ == "__main__":
    raise SystemExit(main())
