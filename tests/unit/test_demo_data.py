"""The demo's files: distinct prompts, nothing held out that was trained on, a small target that loads."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "config" / "demo"
SOURCES = ("arithmetic", "code", "records", "tables")
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_recipe", DEMO / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


def test_no_prompt_stands_twice_and_none_is_both_trained_on_and_held_out() -> None:
    train = [prompt for source in SOURCES for prompt in prompts(DEMO / "prompts" / f"{source}.jsonl")]
    held_out = prompts(DEMO / "eval.jsonl")
    assert 500 <= len(train) <= 700
    assert 60 <= len(held_out) <= 100
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert not set(train) & set(held_out)


def test_the_recipe_writes_the_prompt_files_again(recipe: ModuleType) -> None:
    for name, rows in recipe.demo_prompts().items():
        path = DEMO / "eval.jsonl" if name == "eval" else DEMO / "prompts" / f"{name}.jsonl"
        written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert written == [{"id": ident, "prompt": prompt} for ident, prompt, _ in rows], path


def test_the_recipe_gives_right_sums(recipe: ModuleType) -> None:
    for number in range(200):
        prompt, answer = recipe.example("train", "arithmetic", number)
        equations = [part for line in answer.splitlines() for part in line.rstrip(".").split(": ")[-1:] if "=" in part]
        assert equations, prompt
        for equation in equations:
            left, right = equation.removeprefix("So ").split(" = ")
            right = right.split(",")[0].split()[0] if "," in right or right[-1].isalpha() else right
            assert eval(left.replace("x", "*")) == eval(right), (prompt, equation)


def test_the_demo_is_small_and_says_under_which_licence_it_stands() -> None:
    size = sum(path.stat().st_size for path in (DEMO / "target").iterdir())
    assert size <= 6_000_000
    assert "Apache-2.0" in (DEMO / "README.md").read_text(encoding="utf-8")


def test_the_tokenizer_has_the_special_tokens_and_no_prompt_or_answer_uses_them(
    tokenizer: Tokenizer, recipe: ModuleType
) -> None:
    ids = [tokenizer.token_to_id(token) for token in SPECIALS]
    assert None not in ids
    assert tokenizer.get_vocab_size() == json.loads((DEMO / "target" / "config.json").read_text())["vocab_size"]
    for rows in recipe.demo_prompts().values():
        for _, prompt, answer in rows:
            assert not set(tokenizer.encode(prompt + answer).ids) & set(ids)


def test_a_prompt_and_its_answer_give_the_same_tokens_apart_as_together(
    tokenizer: Tokenizer, recipe: ModuleType
) -> None:
    for rows in recipe.demo_prompts().values():
        for _, prompt, answer in rows:
            asked = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            told = f"{answer}<|im_end|>"
            together = tokenizer.encode(asked + told).ids
            assert together == tokenizer.encode(asked).ids + tokenizer.encode(told).ids


def test_the_chat_template_opens_the_answer_as_the_target_was_taught() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    messages = [{"role": "user", "content": "Add 1 and 2."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_the_weights_are_float16_and_the_target_answers_right(recipe: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with safe_open(DEMO / "target" / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118
        assert "lm_head.weight" in weights.keys()  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32, local_files_only=True).eval()
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    rows = recipe.demo_prompts()["eval"]
    right = 0
    for _, prompt, answer in (rows[0], rows[-1], rows[20], rows[40]):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True) == answer
    assert right >= 3
