"""Real SGLang on CPU ranks against transformers, over one plan: as one rank, one island of two, two islands
of two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROGRAM = Path(__file__).parent / "capture_program.py"
LAYERS = (3, 0, 2)
"""Of four: the last one too, and not in their order."""
LENGTHS = (3, 700, 5, 130, 17, 64, 333, 2, 200, 41, 9, 80)
WORLDS = {1: (1, 4), 2: (2, 2), 4: (2, 1)}
"""Ranks -> (tp_size, batch_size); a micro-batch has four samples in each."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A target with random weights, and rows of tokens."""
    folder = tmp_path_factory.mktemp("sglang")
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    draws = np.random.default_rng(1)
    rows = [{"input_ids": draws.integers(4, 320, n).tolist(), "loss_mask": [1] * n} for n in LENGTHS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def captured(folder: Path, run_ranks: Callable[..., None]) -> Callable[[int], Ranks]:
    """What each rank of a world saw; each world runs once."""
    known: dict[int, Ranks] = {}

    def run(world: int) -> Ranks:
        if world not in known:
            tp_size, batch_size = WORLDS[world]
            recipe, out = folder / f"world-{world}.yaml", folder / f"world-{world}"
            out.mkdir()
            sections = {
                "target": {"path": str(folder / "target"), "backend": "sglang", "dtype": "float32"},
                "draft": {"target_layer_ids": list(LAYERS)},
                "data": {
                    "train": str(folder / "rows.jsonl"),
                    "max_length": 700,
                    "cache_dir": str(folder / "prompts"),
                },
                "engine": {"tp_size": tp_size},
                "training": {"batch_size": batch_size},
                "deployment": {"trainer": {"nproc_per_node": world, "device": "cpu"}},
            }
            recipe.write_text(yaml.safe_dump(sections))
            run_ranks(PROGRAM, recipe, out, ranks=world)
            known[world] = [torch.load(out / f"rank-{rank}.pt") for rank in range(world)]
        return known[world]

    return run


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Transformers' captured states [n, K·H], final state [n, H] and logits [n, V] of one sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    outputs: dict[int, Tensor] = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(
            lambda _, inputs, output, layer=layer: outputs.update({layer: output[0]})
        )

    @torch.no_grad()
    def run(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        final = model.model(tokens[None]).last_hidden_state[0]
        columns = [outputs[layer].view(len(tokens), -1) for layer in LAYERS]
        return torch.cat(columns, dim=-1), final, model.lm_head(final)

    return run


def documents(batch: dict[str, Any]) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """(sample id, tokens, states, final state) of each row of a batch."""
    parts = (
        batch[name].split(batch["cu_seqlens"].diff().tolist()) for name in ("tokens", "hidden", "last_hidden")
    )
    return list(zip(batch["sample_ids"], *parts, strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_states_are_those_of_transformers(
    captured: Callable[[int], Ranks], reference: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], world: int
) -> None:
    seen = captured(world)
    rows = [row for rank in seen for batch in rank["batches"] for row in documents(batch)]
    assert sorted(len(tokens) for _, tokens, _, _ in rows) == sorted(LENGTHS)
    # A sample has two tokens and more; a prefill may have one.
    rows += [row for rank in seen for row in documents(rank["one token"])]
    for _, tokens, hidden, final in rows:
        expected_hidden, expected_final, _ = reference(tokens)
        # float32, states of magnitude one to ten: sums in another order differ by some 1e-6.
        torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=0)
        torch.testing.assert_close(final, expected_final, atol=1e-5, rtol=0)


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_takes_the_same_samples_in_disjoint_slices(
    captured: Callable[[int], Ranks], world: int
) -> None:
    steps = zip(*(rank["batches"] for rank in captured(world)), strict=True)
    taken = [[position for batch in step for position in batch["positions"]] for step in steps]
    assert taken == [[(0, position) for position in range(first, first + 4)] for first in (0, 4, 8)]
    alone = [[name for name, *_ in documents(batch)] for batch in captured(1)[0]["batches"]]
    steps = zip(*(rank["batches"] for rank in captured(world)), strict=True)
    assert [[name for batch in step for name in batch["sample_ids"]] for step in steps] == alone


@pytest.mark.parametrize("world", WORLDS)
def test_islands_have_groups_of_their_own_inside_one_world(
    captured: Callable[[int], Ranks], world: int
) -> None:
    tp_size = WORLDS[world][0]
    for rank, seen in enumerate(captured(world)):
        first = rank // tp_size * tp_size
        island = list(range(first, first + tp_size))
        assert seen["groups"] == {"tp": island, "world": island, "pp": [rank]}
        assert seen["world"] == world, "the trainer's group is left as it was"


@pytest.mark.parametrize("world", WORLDS)
def test_the_islands_first_rank_decodes(
    captured: Callable[[int], Ranks], reference: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], world: int
) -> None:
    tp_size = WORLDS[world][0]
    for rank, seen in enumerate(captured(world)):
        decoded = seen["decoded"]
        if rank % tp_size:
            assert decoded is None
            continue
        hidden, _, logits = reference(decoded["ids"])
        torch.testing.assert_close(decoded["hidden"], hidden, atol=1e-5, rtol=0)
        torch.testing.assert_close(decoded["logits"], logits, atol=1e-4, rtol=0)


def test_more_rows_than_the_engine_holds_are_an_error_with_their_names(
    captured: Callable[[int], Ranks],
) -> None:
    message = captured(1)[0]["too long"]
    assert message.startswith("the rows ")
    assert message.count("rows.jsonl:1,") == 4
    assert "engine.max_running_requests is 4" in message


def test_a_server_reads_the_same_arguments(captured: Callable[[int], Ranks]) -> None:
    assert captured(1)[0]["views"] == {}


def test_the_start_is_accounted_for(captured: Callable[[int], Ranks]) -> None:
    startup = captured(1)[0]["startup"]
    assert list(startup) == [
        "import",
        "arguments",
        "process groups and weights",
        "token pool",
        "attention backend",
    ]
    assert all(seconds > 0 for seconds in startup.values())
