"""The shipped chats: prompts of the generator, answered greedily by the tiny target itself.

A draft learns to guess what its target says, so the answers must be the target's own. Invariant: the text of every
kept answer tokenizes back to exactly the ids that the target chose, and ends with `<|im_end|>`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from tiny_target.chats import Chat, chats

MAX_NEW_TOKENS = 192
BATCH = 64

Messages = list[dict[str, str]]


@dataclass
class Tally:
    """What became of the prompts: chats kept, and those dropped with the reason."""

    kept: int = 0
    unended: int = 0
    not_canonical: int = 0


def distinct_chats(seed: int, taken: set[str]) -> Iterator[Chat]:
    """Chats whose first question is not in `taken`; each one drawn joins it, so no question comes twice."""
    for chat in chats(seed):
        first = next(m["content"] for m in chat.messages if m["role"] == "user")
        if first not in taken:
            taken.add(first)
            yield chat


@torch.inference_mode()
def greedy_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[Messages]
) -> list[list[int]]:
    """The answer ids of each prompt, `<|im_end|>` included where the model said it within `MAX_NEW_TOKENS`."""
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    output = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answers = output[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]


def answer_chats(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: list[Chat], tally: Tally
) -> list[Messages]:
    """Replace the answers of `asked` by the model's; every turn sees the model's earlier answers."""
    done: list[Messages] = [[] for _ in asked]
    alive = list(range(len(asked)))
    for position in range(max(len(chat.messages) for chat in asked)):
        replying = []
        for i in alive:
            if position < len(asked[i].messages):
                message = asked[i].messages[position]
                if message["role"] == "assistant":
                    replying.append(i)
                else:
                    done[i].append(message)
        if not replying:
            continue
        for i, ids in zip(replying, greedy_answers(model, tokenizer, [done[i] for i in replying]), strict=True):
            text = tokenizer.decode(ids[:-1])
            ended = ids[-1] == tokenizer.eos_token_id
            canonical = ended and tokenizer.encode(text, add_special_tokens=False) == ids[:-1]
            tally.unended += not ended
            tally.not_canonical += ended and not canonical
            if canonical:
                done[i].append({"role": "assistant", "content": text})
            else:
                alive.remove(i)
    tally.kept += len(alive)
    return [done[i] for i in alive]


def write_chats(
    path: Path,
    count: int,
    source: Iterator[Chat],
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    report: Callable[[int], None],
) -> Tally:
    """Write `count` answered chats, one JSON object a line; calls `report(lines written)` after each batch."""
    tally, written = Tally(), 0
    with path.open("w", encoding="utf-8") as file:
        while written < count:
            asked = [next(source) for _ in range(min(BATCH, count - written))]
            for messages in answer_chats(model, tokenizer, asked, tally):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                written += 1
            report(written)
    return tally
