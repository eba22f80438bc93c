"""The shipped chats: prompts of the generator, answered greedily by the tiny target itself.

A draft learns to guess what its target says, so the answers must be the target's own. Invariant of a strict
answerer: the text of every kept answer tokenizes back to exactly the ids that the target chose, and the
target ended it itself.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from tiny_target.chats import Chat, chats

BATCH = 128
MOST_DROPPED = 8  # dropped chats for each one asked for

Messages = list[dict[str, str]]


def distinct_chats(seed: int, taken: set[str]) -> Iterator[Chat]:
    """Chats whose first question is not in `taken`; each one drawn joins it, so no question comes twice."""
    for chat in chats(seed):
        first = next(m["content"] for m in chat.messages if m["role"] == "user")
        if first not in taken:
            taken.add(first)
            yield chat


@dataclass
class Answerer:
    """A target that answers chats, and the tally of the chats kept and dropped.

    `strict` drops chats with an answer that does not end within `max_new_tokens` or does not tokenize back; a
    barely trained target needs it off.
    """

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    strict: bool
    tally: dict[str, int] = field(default_factory=lambda: {"kept": 0, "not ended": 0, "not canonical": 0})

    @torch.inference_mode()
    def greedy(self, prompts: list[Messages]) -> list[list[int]]:
        """The answer ids of each prompt, with the `<|im_end|>` that ends them unless they were cut."""
        texts = [
            self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in prompts
        ]
        batch = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        output = self.model.generate(  # ty: ignore[invalid-argument-type]
            **batch, max_new_tokens=self.max_new_tokens, do_sample=False
        )
        answers = output[:, batch["input_ids"].shape[1] :].tolist()
        end = self.tokenizer.eos_token_id
        return [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]

    def text(self, ids: list[int]) -> str | None:
        """The text of an answer, or None where a strict answerer drops it."""
        ended = ids[-1] == self.tokenizer.eos_token_id
        said = ids[:-1] if ended else ids
        text = str(self.tokenizer.decode(said))
        canonical = self.tokenizer.encode(text, add_special_tokens=False) == said
        if self.strict and not (ended and canonical):
            self.tally["not canonical" if ended else "not ended"] += 1
            return None
        return text

    def answer(self, asked: list[Chat]) -> list[Messages]:
        """Replace the answers of `asked` by the target's; every turn sees the target's earlier answers."""
        done: dict[int, Messages] = {i: [] for i in range(len(asked))}
        for position in range(max(len(chat.messages) for chat in asked)):
            replying = []
            for i in done:
                message = asked[i].messages[position] if position < len(asked[i].messages) else None
                if message and message["role"] == "assistant":
                    replying.append(i)
                elif message:
                    done[i].append(message)
            if not replying:
                continue
            for i, ids in zip(replying, self.greedy([done[i] for i in replying]), strict=True):
                text = self.text(ids)
                if text is None:
                    del done[i]
                else:
                    done[i].append({"role": "assistant", "content": text})
        self.tally["kept"] += len(done)
        return list(done.values())

    def write(self, path: Path, count: int, source: Iterator[Chat], report: Callable[[int], None]) -> None:
        """Write `count` answered chats, one JSON object a line; `report(lines written)` after each batch.

        Raises `ValueError` where the target rarely ends its answers, instead of asking it for ever.
        """
        written = dropped = 0
        with path.open("w", encoding="utf-8") as file:
            while written < count:
                asked = [next(source) for _ in range(min(BATCH, count - written))]
                answered = self.answer(asked)
                file.writelines(json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in answered)
                written += len(answered)
                dropped += len(asked) - len(answered)
                report(written)
                if dropped > MOST_DROPPED * count:
                    raise ValueError(
                        f"dropped {dropped} chats and kept {written} ({self.tally}), but {count} are "
                        "required: train the target for more steps"
                    )
