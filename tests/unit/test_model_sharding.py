"""A target spread over several devices computes what the whole one computes, and nothing meets on two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import SPECS, drafter_config
from pydantic import ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache

from dflash.base.errors import ConfigError
from dflash.base.params import Params
from dflash.evaluate.decode import Decoder
from dflash.evaluate.evaluate_params import EvaluateParams
from dflash.evaluate.references_params import ReferencesParams
from dflash.model import sharding
from dflash.model.drafter import Drafter
from dflash.model.sharding import check_devices, runs_of_layers
from dflash.model.target import Target, load_target, random_target

TAPS = (1, 3, 5)
PROMPTS = [[5, 6, 7], list(range(40, 60)), [9] * 11]
LIMIT = 8


@pytest.fixture(params=list(SPECS), scope="module")
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SPECS[request.param]


@pytest.fixture(scope="module")
def whole(spec: dict[str, Any]) -> dict[str, Any]:
    return everything(random_target(spec))


def everything(target: Target) -> dict[str, Any]:
    """Features with and without padding, logits over a cache, continuations of a batch, and decodes."""
    ids = torch.full((3, 20), target.facts.pad_id)
    mask = torch.zeros(3, 20, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    cache = DynamicCache(config=target.model.config)
    first = target.read(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]]), cache, TAPS)
    second = target.read(torch.tensor([[4, 5]]), torch.tensor([[3, 4]]), cache, TAPS, last_only=True)
    drafter = Drafter(drafter_config(), seed=0)
    decoder = Decoder.of(target, drafter)
    return {
        "padded features": target.features(ids, mask, TAPS),
        "features": target.features(torch.tensor([PROMPTS[1]]), None, TAPS),
        "features of early layers": target.features(torch.tensor([PROMPTS[1]]), None, [0, 1]),
        "read": [*first, *second],
        "greedy": target.generate(PROMPTS, LIMIT),
        # Stop tokens that do come, so that rows leave the batch at different times.
        "stopped": target.generate(PROMPTS, LIMIT, stop_ids=range(0, 260, 3)),
        "sampled": target.generate(PROMPTS, LIMIT, temperature=1.0, seeds=[1, 2, 3]),
        "chain": [decoder.chain(prompt, LIMIT).output for prompt in PROMPTS],
        "tree": [decoder.tree(prompt, LIMIT, 6).output for prompt in PROMPTS],
    }


@pytest.mark.parametrize("count", [2, 4])
def test_spread_over_devices_it_computes_what_the_whole_one_computes(
    spec: dict[str, Any], whole: dict[str, Any], count: int
) -> None:
    spread = everything(random_target(spec, device=["cpu"] * count))
    for name, value in whole.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, spread[name]), name
        elif isinstance(value[0], Tensor):
            assert all(torch.equal(one, other) for one, other in zip(value, spread[name], strict=True)), name
        else:
            assert value == spread[name], name


def test_a_checkpoint_is_spread_as_it_is_loaded(tmp_path: Path, spec: dict[str, Any]) -> None:
    made = random_target(spec)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    whole, spread = load_target(tmp_path), load_target(tmp_path, device=["cpu", "cpu"])
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(whole.features(ids, None, TAPS), spread.features(ids, None, TAPS))
    assert spread.generate(PROMPTS, LIMIT) == whole.generate(PROMPTS, LIMIT)


class Apart(TorchDispatchMode):
    """Every tensor belongs to a device that is only thought of: weights to that of their layer, what is made of them likewise,
    and what is made of nothing to where it is made. Tensors that were moved by hand (`.to(device)`) may be anywhere."""

    def __init__(self, target: Target, count: int) -> None:
        super().__init__()
        self.here = 0
        self.owner = WeakIdKeyDictionary()
        self._own(target.model, 0)
        layers = target.model.model.layers
        for device, run in enumerate(runs_of_layers(len(layers), count)):
            for number in run:
                self._own(layers[number], device)
                layers[number].register_forward_pre_hook(lambda *_, device=device: setattr(self, "here", device))
                layers[number].register_forward_hook(lambda *_: setattr(self, "here", 0))

    def _own(self, module: torch.nn.Module, device: int) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            self.owner[tensor] = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [item for item in tree_leaves([args, kwargs or {}]) if isinstance(item, Tensor)]
        owners = {self.owner[item] for item in given if item in self.owner}
        assert len(owners) < 2, f"{function} is given tensors of devices {owners}"
        made = function(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            if isinstance(item, Tensor):
                self.owner[item] = next(iter(owners), self.here)
        return made


class Moved(TorchFunctionMode):
    """`.to(device)` gives a tensor that may be anywhere."""

    def __init__(self, apart: Apart) -> None:
        super().__init__()
        self.apart = apart

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.Tensor.to and any(isinstance(item, torch.device | str) for item in args[1:]):
            made = made.clone()
            self.apart.owner.pop(made, None)
        return made


@contextmanager
def apart(target: Target, count: int) -> Iterator[None]:
    mode = Apart(target, count)
    with Moved(mode), mode:
        yield


def test_no_operation_is_given_tensors_of_two_devices(spec: dict[str, Any]) -> None:
    target = random_target(spec, device=["cpu"] * 3)
    with apart(target, 3):
        everything(target)


def leave_the_mask(mover: sharding.Mover, value: Any) -> Any:
    """A mover that forgets everything that all layers share."""
    return value


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_shared", leave_the_mask), ("move", lambda self, value: value)],
    ids=["angles and mask stay", "nothing is moved"],
)
def test_a_tensor_that_stays_behind_is_found_out(
    spec: dict[str, Any], name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding.Mover, name, broken)
    target = random_target(spec, device=["cpu", "cpu"])
    with apart(target, 2), pytest.raises(AssertionError, match="is given tensors of devices"):
        target.features(torch.tensor(PROMPTS[:1]), None, TAPS)


def test_what_all_layers_share_is_moved_once_a_run_and_not_kept_for_the_next_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = random_target(SPECS["dense"], device=["cpu"] * 2)
    moves: list[int] = []
    plain = sharding.Mover.move

    def counted(mover: sharding.Mover, value: Tensor) -> Tensor:
        moves.append(value.ndim)
        return plain(mover, value)

    monkeypatch.setattr(sharding.Mover, "move", counted)
    for _ in range(2):
        moves.clear()
        target.features(torch.tensor(PROMPTS[:1]), None, [5])
        assert len(moves) <= 3 + 4, "the hidden states of three layers; cosines, sines, positions and mask once"


def test_what_was_moved_for_one_forward_is_not_taken_for_what_the_next_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding.Mover, "move", lambda mover, value: value.clone())
    mover, layer, mask = sharding.Mover(torch.device("cpu")), torch.nn.Identity(), torch.zeros(3)
    for number in range(2):
        mask.fill_(number)
        mover.begin(layer, ())
        _, given = mover(layer, (), {"attention_mask": mask})
        assert given["attention_mask"].tolist() == [number] * 3


def test_layers_are_dealt_out_in_order_and_the_first_device_gets_no_more_than_the_others() -> None:
    for layers, devices in [(64, 2), (64, 3), (7, 2), (5, 5)]:
        runs = runs_of_layers(layers, devices)
        assert [number for run in runs for number in run] == list(range(layers))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        assert len(runs[0]) == min(map(len, runs)), "it holds embedding and head too"


def test_devices_that_make_no_sense_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="7 devices for a target of 6 layers"):
        random_target(SPECS["dense"], device=["cpu"] * 7)
    with pytest.raises(ConfigError, match="'warp:1' is unknown"):
        check_devices(["cpu", "warp:1"], 6)
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"'{missing}' is not here: this machine shows"):
        check_devices([missing], 6, where="references.target_devices")
    with pytest.raises(ConfigError, match="no device is named"):
        check_devices([], 6)


@pytest.mark.parametrize("model", [ReferencesParams, EvaluateParams])
@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["gpu:0"], "'gpu:0' is no device"),
        (["cuda:0", "cuda:00"], "'cuda:00' is no device"),
        (["cuda:\N{ARABIC-INDIC DIGIT THREE}"], "is no device"),
        (["cuda:99999999999999999999"], "is no device"),
        (["cpu", "cuda:0"], "of one kind"),
        (["cuda", "cuda:1"], "name each by its number"),
        (["cuda:1", "cuda:1"], "names a GPU twice"),
    ],
)
def test_the_option_takes_devices_that_go_together(model: type[Params], devices: list[str], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"target_devices": devices})
    (problem,) = [item for item in refused.value.errors() if item["loc"][0] == "target_devices"]
    assert said in problem["msg"]
    assert model.role_of("target_devices") == "placement", "in no key"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", list(SPECS))
def test_two_gpus_give_what_one_gives(name: str) -> None:
    whole = random_target(SPECS[name], device="cuda:0", kernels="torch")
    spread = random_target(SPECS[name], device=["cuda:0", "cuda:1"], kernels="torch")
    assert {weight.device.index for weight in spread.model.parameters()} == {0, 1}
    ids = torch.tensor(PROMPTS[:1], device="cuda:0")
    assert torch.equal(whole.features(ids, None, TAPS), spread.features(ids, None, TAPS))
    assert spread.generate(PROMPTS, LIMIT) == whole.generate(PROMPTS, LIMIT)
    decoders = [Decoder.of(target, Drafter(drafter_config(), seed=0).to("cuda:0")) for target in (whole, spread)]
    for prompt in PROMPTS:
        assert decoders[0].chain(prompt, LIMIT).output == decoders[1].chain(prompt, LIMIT).output
        assert decoders[0].tree(prompt, LIMIT, 6).output == decoders[1].tree(prompt, LIMIT, 6).output
