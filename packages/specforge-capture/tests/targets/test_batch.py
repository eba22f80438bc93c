from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specforge_capture.targets import batch as batches
from specforge_capture.targets import cache
from specforge_capture.targets.batch import STRIDE, Answer, DecodingBatch, Request
from specforge_capture.targets.loading import load_model
from specforge_capture.targets.sampling import Sampling

VOCABULARY = 320


@pytest.fixture
def model(target_folder: Path) -> PreTrainedModel:
    return load_model(target_folder, torch.float32)


def requests(count: int = 7, limit: int = 30) -> list[Request]:
    """Prompts and limits of many lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(5 + 11 * i) % 40 + 1 for i in range(count)]
    draw = [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Request((i,), prompt, limit - 3 * (i % 4)) for i, prompt in enumerate(draw)]


def answer_all(
    model: PreTrainedModel,
    asked: list[Request],
    slots: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    stop: tuple[int, ...] = (),
) -> dict[int, Answer]:
    waiting, answers = list(asked), {}
    batch = DecodingBatch(model, stop, slots, sampling)
    while waiting or batch.running:
        entering, waiting = waiting[: batch.free], waiting[batch.free :]
        batch.admit(entering)
        answers |= {request.key[0]: answer for request, answer in batch.advance()}
    assert batch.free == slots
    return answers


def test_greedy_answers_are_those_of_generate(model: PreTrainedModel, target_folder: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(target_folder, attn_implementation="eager")
    answers = answer_all(model, requests(), slots=3)
    for request in requests():
        output = plain.generate(
            torch.tensor([request.prompt]), max_new_tokens=request.limit, do_sample=False, eos_token_id=None
        )
        assert answers[request.key[0]] == Answer(output[0, len(request.prompt) :].tolist(), "length")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, seed=3)])
def test_answers_do_not_depend_on_the_batch(model: PreTrainedModel, sampling: Sampling) -> None:
    alone = answer_all(model, requests(), 1, sampling, stop=(9, 10, 11))
    for slots in (2, 4, 16):
        assert answer_all(model, requests(), slots, sampling, stop=(9, 10, 11)) == alone


def test_an_answer_ends_with_its_stop_token(model: PreTrainedModel) -> None:
    (free,) = answer_all(model, requests(1), 1).values()
    stop = free.tokens[4]
    (stopped,) = answer_all(model, requests(1), 1, stop=(stop,)).values()
    end = free.tokens.index(stop)
    assert stopped == Answer(free.tokens[: end + 1], "stop")


@pytest.mark.parametrize("limit", [1, 2, STRIDE, STRIDE + 1, STRIDE + 2])
def test_no_answer_is_longer_than_its_limit(model: PreTrainedModel, limit: int) -> None:
    asked = [Request((0,), [5, 6, 7], limit), Request((1,), [8], 3)]
    answers = answer_all(model, asked, 2)
    assert [len(answers[i].tokens) for i in range(2)] == [limit, 3]
    assert {answer.finish for answer in answers.values()} == {"length"}


def test_the_cache_grows_and_long_prompts_are_prefilled_in_portions(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = answer_all(model, requests(), 4)
    monkeypatch.setattr(cache, "GROWTH", 8)
    monkeypatch.setattr(batches, "_ALIGNMENT", 8)
    monkeypatch.setattr(batches, "PREFILL_TOKENS", 40)
    assert answer_all(model, requests(), 4) == wide


def test_sliding_windows_are_kept(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
        use_sliding_window=True, sliding_window=6, max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain: Any = Qwen3ForCausalLM(config)
    plain.save_pretrained(tmp_path)
    assert set(config.layer_types or ()) == {"full_attention", "sliding_attention"}
    answers = answer_all(load_model(tmp_path, torch.float32), requests(), 3)
    for request in requests():
        output = plain.generate(
            torch.tensor([request.prompt]), max_new_tokens=request.limit, do_sample=False, eos_token_id=None
        )
        assert answers[request.key[0]].tokens == output[0, len(request.prompt) :].tolist()
