"""Target features per second on one GPU: ours, transformers as it comes, and what the matmuls alone would allow.

    python tests/bench/gpu/features.py [--rounds 7] [--layers 64] [--kernels fla]
    python tests/bench/gpu/features.py --small                                       (a CPU, seconds)

Random weights of Qwen3.6-27B's shapes, lengths as real completions have them (mean 2,202, longest 8,192), the batches that
training would get; the tokens of every round are new. `ours` is `Target.features`: no layer after the last tap, no logits, packed
where the bound kernels keep documents apart. `transformers` is its model on the same batches, padded, with `output_hidden_states`.
`transformers_unsorted` pads samples in the order in which they come, as a plain data loader does. Useful tokens only: padding is
not counted. Both must give the same features first: largest difference relative to the norm of a token, by tap.

Prints one JSON line: rates, ratios, and the share of the matmul ceiling in model FLOPs (twice the weights that a token passes,
and 2 * length * width a token in each layer of full attention; the recurrence of the linear layers is not counted).
Estimated, not yet run there: 5 minutes on an H200, most of it drawing weights; 62 GB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import alternate, matmul_ceiling, report, tell  # noqa: E402
from shapes import LENGTHS_27B, SHAPES_27B, SMALL, SMALL_LENGTHS, drafter_27b, fla_is_there, lengths  # noqa: E402
from torch import Tensor  # noqa: E402

from dflash.data.batches import BatchPlan  # noqa: E402
from dflash.data.buckets_params import BucketsParams  # noqa: E402
from dflash.model.target import DTYPES, Target, load_target  # noqa: E402


def padded(sizes: list[int], vocabulary: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and their mask, rows of the given lengths padded on the right; drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (len(sizes), max(sizes))
    mask = torch.arange(shape[1], device=device) < torch.tensor(sizes, device=device)[:, None]
    ids = torch.randint(0, vocabulary, shape, generator=generator, device=device)
    return ids * mask, mask.long()


def batches(given: argparse.Namespace) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Lengths of the samples of each batch of each round: as the plan cuts them, and the same samples unsorted."""
    drawn = lengths(given.samples, **given.lengths)
    params = BucketsParams(token_budget=given.lengths["longest"], max_seq_len=given.lengths["longest"], quantiles=8)
    plan = BatchPlan(drawn, [str(number) for number in range(len(drawn))], params, "0" * 12)
    sorted_ones, unsorted = [], []
    for number in range(given.rounds + given.warm_up):
        rounds = [batch.lengths.tolist() for batch in plan.step(number)]
        loose = np.random.default_rng(number).permutation([size for batch in rounds for size in batch]).tolist()
        sorted_ones.append(rounds)
        unsorted.append(loose_batches(loose, given.lengths["longest"]))
    return sorted_ones, unsorted


def loose_batches(sizes: list[int], budget: int) -> list[list[int]]:
    """Samples in the order in which they come, as many at a time as fit the budget when padded."""
    found: list[list[int]] = [[]]
    for size in sizes:
        if found[-1] and max(*found[-1], size) * (len(found[-1]) + 1) > budget:
            found.append([])
        found[-1].append(size)
    return found


def model_flops(target: Target, taps: list[int], rounds: list[list[list[int]]]) -> float:
    """Mean operations a useful token, up to the last tap."""
    layers = target.model.model.layers[: max(taps) + 1]
    weights = sum(weight.numel() for weight in layers.parameters() if weight.ndim == 2)
    config = target.model.config
    full = sum(kind == "full_attention" for kind in config.layer_types[: max(taps) + 1])
    sizes = [size for rows in rounds for batch in rows for size in batch]
    attended = sum(size * size for size in sizes) / sum(sizes)  # a causal token sees half of its text on average
    return 2.0 * weights + 2.0 * full * attended * config.num_attention_heads * config.head_dim


@torch.no_grad()
def as_it_comes(model: Any, ids: Tensor, mask: Tensor, taps: list[int]) -> Tensor:
    """The features from transformers' own outputs."""
    states = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1] for tap in taps], dim=-1)


def difference(target: Target, taps: list[int], sizes: list[int], device: torch.device) -> list[float]:
    """Largest difference of a token's features, relative to its norm, by tap; on rows of one batch."""
    ids, mask = padded(sizes, target.facts.vocab_size, device, 99)
    both = target.features(ids, mask, taps), as_it_comes(target.model.model, ids, mask, taps)
    ours, theirs = (found[mask.bool()].double().unflatten(-1, (len(taps), -1)) for found in both)
    return [round(value, 6) for value in ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).amax(0).tolist()]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; returns the line."""
    device = torch.device(given.device)
    tell("target: drawing weights")
    target = load_target(given.spec, given.dtype, given.device, kernels=given.kernels)
    taps = given.taps
    planned, unsorted = batches(given)
    tell("comparing features")
    apart = difference(target, taps, planned[0][0], device)

    def contender(rounds: list[list[list[int]]], compute: Any) -> Any:
        def work(number: int) -> int:
            for place, sizes in enumerate(rounds[number]):
                ids, mask = padded(sizes, target.facts.vocab_size, device, 1000 * (number + 10) + place)
                compute(ids, mask)
            return sum(sum(sizes) for sizes in rounds[number])

        return work

    contenders = {
        "ours": contender(planned, lambda ids, mask: target.features(ids, mask, taps)),
        "transformers": contender(planned, lambda ids, mask: as_it_comes(target.model.model, ids, mask, taps)),
        "transformers_unsorted": contender(
            unsorted, lambda ids, mask: as_it_comes(target.model.model, ids, mask, taps)
        ),
    }
    found = alternate("features", contenders, device, given.rounds, given.warm_up)
    ceiling = matmul_ceiling(device, DTYPES[given.dtype], 256 if given.small else 8192)
    flops = model_flops(target, taps, planned)
    return report(
        "target features",
        unit="tokens/s",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        kernels=target.kernels.to_dict(),
        layers=target.facts.num_layers,
        mean_length=round(float(np.mean([size for rows in planned for batch in rows for size in batch]))),
        difference_by_tap=apart,
        **{name: readings.told() for name, readings in found.items()},
        ratio=round(found["ours"].rate / found["transformers"].rate, 3),
        ratio_unsorted=round(found["ours"].rate / found["transformers_unsorted"].rate, 3),
        matmul_tflops=round(ceiling / 1e12, 3),
        gflop_a_token=round(flops / 1e9, 4),
        share_of_matmul={
            name: round(readings.rate * flops / ceiling, 4)
            for name, readings in found.items()
            if name != "transformers_unsorted"
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--kernels", default=None, choices=["fla", "torch"], help="fla where it can be imported")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny hybrid target on a CPU")
    given = parser.parse_args(arguments)
    if given.small:
        given.device, given.kernels, given.dtype, given.samples, given.rounds = "cpu", "torch", "float32", 60, 3
        given.spec, given.taps, given.lengths = SMALL, [1, 2], SMALL_LENGTHS
    else:
        given.kernels = given.kernels or ("fla" if fla_is_there() else "torch")
        given.spec, given.dtype, given.lengths = (
            {**SHAPES_27B, "num_hidden_layers": given.layers},
            "bfloat16",
            LENGTHS_27B,
        )
        given.taps = drafter_27b(given.layers)["target_layer_ids"]
    measure(given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
