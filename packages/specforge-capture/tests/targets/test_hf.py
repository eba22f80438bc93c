import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from specforge_capture.targets import sequence
from specforge_capture.targets.base import PromptRow
from specforge_capture.targets.hf import HFTarget
from specforge_config.features import CaptureSpec

LENGTHS = (1, 300, 7, 2, 130)
HIDDEN, VOCABULARY = 32, 320


def rows_of(lengths: tuple[int, ...]) -> list[PromptRow]:
    rng = np.random.default_rng(0)
    return [
        PromptRow(
            sample_id=f"r{i}",
            input_ids=rng.integers(0, VOCABULARY, n).astype(np.int32),
            loss_mask=rng.integers(0, 2, n).astype(bool),
            position=(1, i),
        )
        for i, n in enumerate(lengths)
    ]


def ids_of(row: PromptRow) -> Tensor:
    return torch.from_numpy(row.input_ids).long()


@pytest.fixture
def target(target_folder: Path, spec: CaptureSpec) -> Iterator[HFTarget]:
    target = HFTarget(target_folder, spec, stop_ids=(2,))
    yield target
    target.close()


@pytest.fixture
def plain(target_folder: Path) -> PreTrainedModel:
    """The same model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(target_folder).eval().requires_grad_(False)


def plain_states(model: Any, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Outputs of decoder layers [S, K * H] and logits [S, V] of a forward of one row."""
    outputs: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[k].register_forward_hook(lambda _m, _i, out, k=k: outputs.update({k: out[0]}))
        for k in layers
    ]
    logits = model(ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([outputs[k] for k in layers], dim=-1), logits


def test_packed_states_equal_a_forward_of_each_row(
    target: HFTarget, plain: PreTrainedModel, spec: CaptureSpec
) -> None:
    rows = rows_of(LENGTHS)
    batch = target.capture(rows)
    assert batch.last_hidden is not None
    assert batch.hidden.shape == (sum(LENGTHS), len(spec.layer_ids) * HIDDEN)
    for row, start, stop in zip(rows, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        states, logits = plain_states(plain, ids_of(row), spec.layer_ids)
        torch.testing.assert_close(batch.hidden[start:stop], states, rtol=1e-5, atol=1e-5)
        # The final state is the one that the vocabulary head reads.
        head = plain.get_output_embeddings()
        torch.testing.assert_close(head(batch.last_hidden[start:stop]), logits, rtol=1e-5, atol=1e-5)


def test_tokens_masks_and_identities_come_along(target: HFTarget) -> None:
    rows = rows_of(LENGTHS)
    batch = target.capture(rows)
    assert batch.tokens.tolist() == np.concatenate([row.input_ids for row in rows]).tolist()
    assert batch.loss_mask.tolist() == np.concatenate([row.loss_mask for row in rows]).tolist()
    assert batch.tokens.dtype == batch.cu_seqlens.dtype == torch.int64
    assert batch.sample_ids == ("r0", "r1", "r2", "r3", "r4")
    assert batch.positions == ((1, 0), (1, 1), (1, 2), (1, 3), (1, 4))


def test_the_last_layers_state_is_not_normed(target: HFTarget, plain: Any) -> None:
    batch = target.capture(rows_of((20,)))
    last_layer = batch.hidden[:, -HIDDEN:]
    assert batch.last_hidden is not None
    torch.testing.assert_close(plain.model.norm(last_layer), batch.last_hidden, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(last_layer, batch.last_hidden)


@pytest.mark.parametrize("layers", [(3,), (2, 0), (0, 1, 2, 3)])
def test_as_many_layers_as_asked_for_in_their_order(
    layers: tuple[int, ...], qwen3_folder: Path, spec: CaptureSpec
) -> None:
    target = HFTarget(qwen3_folder, spec.model_copy(update={"layer_ids": layers, "final_state": False}))
    batch = target.capture(rows_of((9,)))
    states, _ = plain_states(target.model, ids_of(rows_of((9,))[0]), layers)
    assert torch.equal(batch.hidden, states)
    assert batch.last_hidden is None


def test_captured_states_can_be_trained_on(target: HFTarget) -> None:
    batch = target.capture(rows_of((5,)))
    weight = torch.ones(batch.hidden.shape[1], 3, requires_grad=True)
    (batch.hidden @ weight).sum().backward()
    assert weight.grad is not None
    assert not batch.hidden.requires_grad


@pytest.mark.parametrize("lengths", [(), (3, 0)])
def test_nothing_to_capture_is_an_error(lengths: tuple[int, ...], target: HFTarget) -> None:
    with pytest.raises(ValueError, match="nothing to capture"):
        target.capture(rows_of(lengths))


def greedy(target: HFTarget, prompt: Tensor, count: int) -> list[int]:
    cache, ids, found = target.start(), prompt, []
    for _ in range(count):
        ids = target.extend(ids, cache).logits[-1:].argmax(-1)
        found.append(int(ids))
    return found


def test_decoding_equals_generate(target: HFTarget, plain: Any) -> None:
    prompt = torch.tensor([5, 6, 7, 8])
    expected = plain.generate(
        prompt[None], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert greedy(target, prompt, 24) == expected[0, 4:].tolist()


def test_extending_by_several_tokens_equals_one_forward(
    target: HFTarget, plain: PreTrainedModel, spec: CaptureSpec
) -> None:
    ids = ids_of(rows_of((40,))[0])
    states, logits = plain_states(plain, ids, spec.layer_ids)
    cache = target.start()
    parts = [target.extend(part, cache) for part in ids.split([10, 1, 8, 21])]
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.hidden for part in parts]), states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_steps_at_capacity_equal_steps_over_what_is_there(
    window: int | None, qwen3_folder: Path, tmp_path: Path, spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU records, run here as it is: from its third time on a length's step is `at_capacity`."""
    monkeypatch.setattr(sequence, "_LEAST_CAPACITY", 16)
    folder = sliding(qwen3_folder, tmp_path, window) if window else qwen3_folder
    recorded = []

    def record(step: sequence.Step, inputs: tuple[Tensor, ...]) -> sequence.Step:
        recorded.append(len(inputs[0]))
        return step

    plain, fixed = HFTarget(folder, spec), HFTarget(folder, spec, record=record)
    ids = ids_of(rows_of((60,))[0])
    for prompt in (9, 12):  # the second sequence takes over the first one's cache
        caches = plain.start(), fixed.start()
        at = 0
        for count in (prompt, 1, 5, 1, 5, 1, 5, 1, 1, 5, 1, 13):
            expected, found = (
                t.extend(ids[at : at + count], cache) for t, cache in zip((plain, fixed), caches, strict=True)
            )
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-5, atol=1e-5)
            at += count - 2 if count == 5 else count  # as after a block of which two tokens were rejected
            for t, cache in zip((plain, fixed), caches, strict=True):
                t.crop(cache, at)
        del caches, cache
    assert set(recorded) == {1, 5}
    assert len(fixed._idle) == 1


def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    target: HFTarget, target_folder: Path, spec: CaptureSpec
) -> None:
    tried = []

    def refuse(step: sequence.Step, inputs: tuple[Tensor, ...]) -> sequence.Step:
        tried.append(len(inputs[0]))
        raise RuntimeError("operation not permitted when stream is capturing")

    refusing = HFTarget(target_folder, spec, record=refuse)
    assert greedy(refusing, torch.tensor([5, 6, 7]), 8) == greedy(target, torch.tensor([5, 6, 7]), 8)
    assert tried == [1]


def test_a_cropped_cache_forgets(target: HFTarget) -> None:
    prompt, wrong, right = torch.tensor([5, 6, 7]), torch.tensor([8, 9]), torch.tensor([10, 11])
    cache = target.start()
    target.extend(prompt, cache)
    target.extend(wrong, cache)
    target.crop(cache, 3)
    found = target.extend(right, cache)
    straight = target.start()
    target.extend(prompt, straight)
    assert torch.equal(found.logits, target.extend(right, straight).logits)


def sliding(qwen3_folder: Path, tmp_path: Path, window: int) -> Path:
    """The model with a window in every other layer."""
    folder = tmp_path / "sliding"
    shutil.copytree(qwen3_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention"] * 2
    config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("window", [2, 5, 64])
def test_sliding_windows_are_followed(
    window: int, qwen3_folder: Path, tmp_path: Path, spec: CaptureSpec
) -> None:
    folder = sliding(qwen3_folder, tmp_path, window)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    target = HFTarget(folder, spec)
    rows = rows_of((30, 90))
    batch = target.capture(rows)
    for row, start in zip(rows, (0, 30), strict=True):
        states, _ = plain_states(plain, ids_of(row), spec.layer_ids)
        found = batch.hidden[start : start + len(row.input_ids)]
        torch.testing.assert_close(found, states, rtol=1e-5, atol=1e-5)
    prompt = ids_of(rows[1])
    expected = plain.generate(
        prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert greedy(target, prompt, 12) == expected[0, 90:].tolist()
    cache = target.start()
    target.extend(prompt, cache)
    target.crop(cache, 10)
    assert cache.length == 10


def test_half_precision_states_have_the_contracts_type(qwen3_folder: Path, spec: CaptureSpec) -> None:
    target = HFTarget(qwen3_folder, spec.model_copy(update={"dtype": "bfloat16"}))
    batch = target.capture(rows_of((6, 3)))
    assert batch.last_hidden is not None
    assert batch.hidden.dtype == batch.last_hidden.dtype == torch.bfloat16


def test_lack_of_memory_names_the_settings_to_lower(qwen3_folder: Path, spec: CaptureSpec) -> None:
    target = HFTarget(qwen3_folder, spec)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    rows = rows_of((1_000_000,))  # states of 384 MB
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory") as error:
            target.capture(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    (note,) = error.value.__notes__
    assert note.startswith("out of memory while capturing 1000000 tokens: lower training.batch_size")


def test_dummy_weights_need_the_configuration_alone_and_are_equal_on_all_ranks(
    qwen3_folder: Path, spec: CaptureSpec, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((qwen3_folder / "config.json").read_text())
    half = spec.model_copy(update={"dtype": "bfloat16"})
    rows, before = rows_of((6, 3)), torch.random.get_rng_state()
    first, again, other = (HFTarget(tmp_path, half, dummy_seed=seed).capture(rows) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.hidden.dtype == torch.bfloat16
    assert torch.equal(first.hidden, again.hidden)
    assert not torch.equal(first.hidden, other.hidden)
    with pytest.raises(ValueError, match=r"target\.path: no readable config\.json"):
        HFTarget(tmp_path / "absent", spec, dummy_seed=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_captures_what_a_cpu_does(dtype: str, target_folder: Path, spec: CaptureSpec) -> None:
    rows = rows_of(LENGTHS)
    expected = HFTarget(target_folder, spec).capture(rows)
    found = HFTarget(target_folder, spec.model_copy(update={"dtype": dtype}), "cuda").capture(rows)
    assert expected.last_hidden is not None
    assert found.last_hidden is not None
    assert found.tokens.device.type == found.loss_mask.device.type == "cpu"
    for have, want in ((found.hidden, expected.hidden), (found.last_hidden, expected.last_hidden)):
        # Four layers of bfloat16 arithmetic: an error of a few hundredths of the states' own scale.
        scale = 1e-4 if dtype == "float32" else 5e-2
        assert (have.float().cpu() - want).norm() < scale * want.norm()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[PreTrainedModel], Path]:
    def save(model: PreTrainedModel) -> Path:
        model.save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save


def test_models_that_change_their_logits_are_refused(
    saved: Callable[[PreTrainedModel], Path], spec: CaptureSpec
) -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    with pytest.raises(ValueError, match="behind the vocabulary head"):
        HFTarget(saved(Gemma2ForCausalLM(config)), spec)


def test_models_of_another_structure_are_refused(
    saved: Callable[[PreTrainedModel], Path], spec: CaptureSpec
) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=4, n_head=4))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no list of decoder layers"):
        HFTarget(saved(model), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": (0, 4)}, "'layers': \\(False, True\\)"),
        ({"hidden_size": 16}, "'hidden_size': \\(32, 16\\)"),
        ({"vocab_size": 300}, "'vocab_size': \\(320, 300\\)"),
    ],
)
def test_a_contract_for_another_model_is_refused(
    change: dict[str, Any], message: str, qwen3_folder: Path, spec: CaptureSpec
) -> None:
    with pytest.raises(ValueError, match=message):
        HFTarget(qwen3_folder, spec.model_copy(update=change))


def test_a_checkpoint_that_lacks_weights_is_refused(
    qwen3_folder: Path, tmp_path: Path, spec: CaptureSpec
) -> None:
    weights = load_file(qwen3_folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(qwen3_folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"lack \['model\.layers\.2\.mlp\.up_proj\.weight'\] \(1 in all"):
        HFTarget(tmp_path, spec)


def test_folders_without_a_model(qwen3_folder: Path, tmp_path: Path, spec: CaptureSpec) -> None:
    with pytest.raises(ValueError, match=r"target\.path: no config\.json in .*absent"):
        HFTarget(tmp_path / "absent", spec)
    shutil.copy(qwen3_folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"target\.path: no loadable model in"):
        HFTarget(tmp_path, spec)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match=r"target\.path: no loadable model in"):
        HFTarget(tmp_path, spec)
