"""The tiny target's tokenizer: byte-level BPE with 1,024 entries and a ChatML template.

Invariant: normaliser and pre-tokenizer are those of `Qwen2Tokenizer`, because transformers rebuilds them from
the class whenever the model is a Qwen3; any others would tokenize differently after loading. `<|mask|>` is
reserved for draft models: no text produces it.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer

VOCABULARY = 1024
PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

# `generation` marks what the assistant wrote: the answer and the <|im_end|> that closes it.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Learn the merges from `texts`; the same texts give the same tokenizer, byte for byte."""
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]  # what BPE takes, though the class asks for str
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
