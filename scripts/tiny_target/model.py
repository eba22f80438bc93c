"""The tiny target itself: a Qwen3 of 1.2 M parameters and the one loop that trains it.

The loss is the cross-entropy of the assistant's tokens only; what users say is only read. Rows hold one chat
each and are padded on the right, where causal attention never looks.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import (
    BatchEncoding,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_target.chats import chats

IGNORED = -100  # label of a token that carries no loss
PEAK_LR, WARMUP_STEPS, GROUP = 4e-3, 50, 16


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    """Random fp32 weights; 2 KV heads and a vocabulary of 16 x 64 let two tensor-parallel ranks share it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one chat; labels are `IGNORED` outside the assistant's tokens."""
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert isinstance(encoded, BatchEncoding)
    ids = encoded["input_ids"]
    labels = [token if mine else IGNORED for token, mine in zip(ids, encoded["assistant_masks"], strict=True)]
    return ids, labels


def training_batches(
    tokenizer: PreTrainedTokenizerBase, seed: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids [B, L], labels [B, L]) of fresh chats, grouped by length to waste little padding."""
    stream = chats(seed)
    generator = torch.Generator().manual_seed(seed)
    while True:
        group = sorted(
            (encode_chat(tokenizer, next(stream).messages) for _ in range(GROUP * batch_size)),
            key=lambda r: len(r[0]),
        )
        for start in torch.randperm(GROUP, generator=generator).tolist():
            rows = group[start * batch_size : (start + 1) * batch_size]
            width = max(len(ids) for ids, _ in rows)
            yield (
                torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]),
                torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows]),
            )


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    warmup = min(WARMUP_STEPS, steps // 4 + 1)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    steps: int,
    batch_size: int,
    device: str,
    report: Callable[[int, float], None],
) -> Qwen3ForCausalLM:
    """Train from scratch in fp32, call `report(step, loss)` after each step, and return bf16 weights."""
    model = build_model(tokenizer, seed).to(device).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    batches = training_batches(tokenizer, seed, batch_size)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        ids, labels = next(batches)
        loss = model(input_ids=ids.to(device), labels=labels.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1, loss.item())
    return model.eval().to("cpu", torch.bfloat16)
