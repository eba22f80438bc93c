"""A tiny Llama as a GGUF file, in the way of SmolLM2's: tied head, bos = eos = `<|im_start|>`, no pad."""

import json
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 32, 2, 4, 2, 48
NAME = "tiny.gguf"


def write_gguf(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Path:
    """Write `tiny.gguf` with random weights, quantised as Q8_0, and the tokenizer; its path."""
    path = folder / NAME
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer, tokenizer)
    generator = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        values = generator.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokenizer), HIDDEN)
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{norm}.weight", np.ones(HIDDEN, np.float32))
        add(f"{block}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"{block}.attn_k.weight", kv_width, HIDDEN)
        add(f"{block}.attn_v.weight", kv_width, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"{block}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        # Q8_0 has blocks of 32 columns.
        down = generator.normal(0, 0.2, (HIDDEN, INTERMEDIATE)).astype(np.float32)
        writer.add_tensor(f"{block}.ffn_down.weight", down)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if name.startswith("<|") else gguf.TokenType.NORMAL for name in names]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    start = names.index("<|im_start|>")
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(start)
    writer.add_vocab_size(len(names))
    assert isinstance(tokenizer.chat_template, str)
    writer.add_chat_template(tokenizer.chat_template)
