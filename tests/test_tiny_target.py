"""The embedded tiny target: its script in the shortened form, and the folders that the repository ships."""

import importlib
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
TARGET, CHATS = ROOT / "recipes/tiny-target", ROOT / "recipes/tiny-chats"
TARGET_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def first_questions(chats: list[list[dict[str, str]]]) -> list[str]:
    return [next(m["content"] for m in messages if m["role"] == "user") for messages in chats]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The products of one shortened run of the whole script."""
    out = tmp_path_factory.mktemp("tiny")
    script = ROOT / "scripts/make_tiny_target.py"
    command = [sys.executable, str(script), "--shortened", "--seed", "0", "--out", str(out)]
    subprocess.run(command, check=True, timeout=280, cwd=out)
    return out


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_tiny_target")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TARGET)


def test_the_shortened_run_makes_every_file(shortened: Path):
    assert {path.name for path in (shortened / "tiny-target").iterdir()} == TARGET_FILES
    assert len(read_chats(shortened / "tiny-chats/eval.jsonl")) == 3
    assert len(read_chats(shortened / "tiny-chats/train.jsonl")) == 6


def test_the_shortened_target_loads_and_has_the_shipped_shapes(shortened: Path):
    made = AutoModelForCausalLM.from_pretrained(shortened / "tiny-target")
    shipped = AutoModelForCausalLM.from_pretrained(TARGET)
    assert {name: (p.shape, p.dtype) for name, p in made.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in shipped.named_parameters()
    }
    template = (TARGET / "chat_template.jinja").read_text(encoding="utf-8")
    assert load_tokenizer(shortened / "tiny-target").chat_template == template


def test_the_seed_gives_the_shipped_tokenizer_byte_for_byte(script: ModuleType, tmp_path: Path):
    script.make_tokenizer(tmp_path, script.Sizes(), seed=0)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (TARGET / path.name).read_bytes(), path.name


def test_the_generator_is_a_function_of_the_seed(script: ModuleType):
    first, again, other = (list(islice(script.chats(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_the_shipped_folders_are_complete_and_small():
    files = {path.name: path.stat().st_size for path in TARGET.iterdir()}
    assert set(files) == TARGET_FILES | {"README.md"}
    assert sum(files.values()) < 4_000_000
    assert sum(path.stat().st_size for path in CHATS.iterdir()) < 1_500_000


def test_a_strict_answerer_refuses_a_target_that_does_not_end(script: ModuleType, tmp_path: Path):
    model = Qwen3ForCausalLM.from_pretrained(TARGET)
    answerer = script.Answerer(model, load_tokenizer(TARGET), max_new_tokens=4, strict=True)
    with pytest.raises(ValueError, match="more steps"):
        answerer.write(tmp_path / "chats.jsonl", 1, script.distinct_chats(5, set()), report=print)
    assert answerer.tally["kept"] == 0
    assert (tmp_path / "chats.jsonl").read_text() == ""


def test_two_tensor_parallel_ranks_can_share_the_target():
    config = AutoModelForCausalLM.from_pretrained(TARGET).config
    assert config.vocab_size % 64 == 0
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0
    assert not config.tie_word_embeddings


def test_special_tokens_have_their_roles(tokenizer: PreTrainedTokenizerBase):
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.mask_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|mask|>",
    )
    assert [tokenizer.encode(token) for token in SPECIALS] == [[0], [1], [2], [3]]


def test_the_template_marks_exactly_what_the_assistant_says(tokenizer: PreTrainedTokenizerBase):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Good day."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
        "<|im_start|>assistant\nGood day.<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert text[: len(prompt)] == prompt
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert isinstance(encoded, BatchEncoding)
    said = [t for t, mine in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(said) == "Good day.<|im_end|>"


def test_train_and_evaluation_questions_are_distinct_and_without_special_tokens():
    train, evaluation = (read_chats(CHATS / name) for name in ("train.jsonl", "eval.jsonl"))
    assert len(evaluation) == 64
    assert len(train) >= 1500
    questions = first_questions(train) + first_questions(evaluation)
    assert len(set(questions)) == len(questions)
    for messages in train + evaluation:
        assert messages[-1]["role"] == "assistant"
        assert not any(special in m["content"] for m in messages for special in SPECIALS)


def test_the_shipped_answers_are_the_targets_own_greedy_answers(tokenizer: PreTrainedTokenizerBase):
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    chats = read_chats(CHATS / "eval.jsonl")[:2] + read_chats(CHATS / "train.jsonl")[:1]
    for messages in chats:
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                messages[:position], add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            assert isinstance(prompt, BatchEncoding)
            output = model.generate(**prompt, max_new_tokens=192)
            answer = output[0, prompt["input_ids"].shape[1] :]
            assert tokenizer.decode(answer) == message["content"] + "<|im_end|>"
