"""Make the embedded tiny target: its tokenizer, its weights, and the chats that it answered itself.

    python scripts/make_tiny_target.py --device cuda                # everything, into recipes/
    python scripts/make_tiny_target.py --shortened --out /tmp/tiny  # the same path in seconds, for a test

Products: OUT/tiny-target/ (a transformers folder) and OUT/tiny-chats/{train,eval}.jsonl. The seed decides the
text and the tokenizer byte for byte; the weights also depend on torch's version and the device.
"""

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tiny_target.answers import Answerer, distinct_chats
from tiny_target.chats import chats
from tiny_target.model import train_model
from tiny_target.tokenizer import train_tokenizer
from transformers import Qwen2Tokenizer, Qwen3ForCausalLM


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the defaults made the shipped folders."""

    tokenizer_chats: int = 4000
    steps: int = 2000
    batch_size: int = 16
    train_chats: int = 1800
    eval_chats: int = 64
    max_new_tokens: int = 192
    strict: bool = True  # drop answers that do not end, or do not tokenize back


SHIPPED = Path("recipes")
SHORTENED = Sizes(
    tokenizer_chats=300, steps=10, batch_size=4, train_chats=6, eval_chats=3, max_new_tokens=24, strict=False
)


def make_tokenizer(target: Path, sizes: Sizes, seed: int) -> None:
    texts = (m["content"] for chat in islice(chats(seed), sizes.tokenizer_chats) for m in chat.messages)
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(target)
    print(f"tokenizer: {len(tokenizer)} entries in {target}")


def make_model(target: Path, sizes: Sizes, seed: int, device: str, progress: Progress) -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(target)
    bar = progress.add_task("training", total=sizes.steps)

    def report(step: int, loss: float) -> None:
        progress.update(bar, completed=step, description=f"training, loss {loss:.3f}")
        if step % 100 == 0 or step == sizes.steps:
            progress.print(f"step {step}: loss {loss:.4f}")

    model = train_model(
        tokenizer,
        seed=seed,
        steps=sizes.steps,
        batch_size=sizes.batch_size,
        device=device,
        report=report,
    )
    model.save_pretrained(target)
    print(f"model: {model.num_parameters():,} parameters in {target}")


def make_answers(target: Path, folder: Path, sizes: Sizes, seed: int, progress: Progress) -> None:
    """Draw the evaluation prompts first: scarce questions reach both files, but no question is in both."""
    answerer = Answerer(
        Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval(),
        Qwen2Tokenizer.from_pretrained(target),
        max_new_tokens=sizes.max_new_tokens,
        strict=sizes.strict,
    )
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, count, source_seed in (
        ("eval", sizes.eval_chats, seed + 1),
        ("train", sizes.train_chats, seed + 2),
    ):
        bar = progress.add_task(f"answering {name}", total=count)
        answerer.write(
            folder / f"{name}.jsonl",
            count,
            distinct_chats(source_seed, taken),
            report=lambda written, bar=bar: progress.update(bar, completed=written),
        )
    print(f"chats: {answerer.tally} in {folder}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=["tokenizer", "train", "answers", "all"], default="all")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder of tiny-target/ and tiny-chats/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="where to train: cpu or cuda; answers are always the CPU's"
    )
    parser.add_argument(
        "--shortened", action="store_true", help="a few steps and answers: a test of the path only"
    )
    arguments = parser.parse_args()
    if arguments.shortened and arguments.out == SHIPPED:
        parser.error("--shortened would overwrite the shipped target: set --out to a throw-away folder")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    sizes = SHORTENED if arguments.shortened else Sizes()
    target, stage, seed = arguments.out / "tiny-target", arguments.stage, arguments.seed
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        if stage in ("tokenizer", "all"):
            make_tokenizer(target, sizes, seed)
        if stage in ("train", "all"):
            make_model(target, sizes, seed, arguments.device, progress)
        if stage in ("answers", "all"):
            make_answers(target, arguments.out / "tiny-chats", sizes, seed, progress)


if __name__ == "__main__":
    main()
