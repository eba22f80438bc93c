#!/usr/bin/env python3
"""Train a DSpark draft twice from the same weights on the same batches, by the plain path and by the fast
one, and compare the two loss curves.

    python scripts/loss_curve.py                                     # the shipped tiny target's chats
    python scripts/loss_curve.py --data chain                        # H = 2048, V = 32000
    python scripts/loss_curve.py --data chain --hidden 4096 --vocabulary 151936 --lr 6e-5
    python scripts/loss_curve.py --device cpu --steps 4 --anchors 4  # a rehearsal, interpreted by Triton
    python scripts/loss_curve.py --read loss_curve.json --picture curve.png

The plain path is what defines the kernels: layers, attention over all pairs and objective in plain torch. The
fast path is what the policy chooses. All else is the trainer's own: float32 master weights, computing
in bfloat16 on a GPU and float32 on a CPU; clipping, AdamW, warm-up and decay.

`--data tiny-target` captures the states of recipes/tiny-target over its chats. `--data chain` is a target
made up at any size: each span of a document follows one of four Markov chains over 1024 tokens, and the
target is right about the chain. Its captured states tell token and chain under noise, so that a draft has to
look at its context to know the chain, and learns. Its default sizes are below Qwen3-8B's: the plain path
keeps the probabilities of all pairs, heads x slots x (tokens + slots) in float32, of each layer: 3.2 GiB each
at 3911 tokens and 32 heads.

The exit status is 1 if the losses of a step differ by more than `--limit`, or if the draft has not learned.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from specforge_config.draft import DSparkConfig
    from specforge_config.features import FeatureBatch
    from specforge_train.frozen import FrozenTarget
    from specforge_train.methods.base import DraftShape
    from specforge_train.parallel import World

ROOT = Path(__file__).resolve().parent.parent
SMOOTHED = 10
"""Steps of a running mean."""
CHAIN_LR = 1.2e-4
"""At five times this rate the loss of a chain passes through spikes, on either path, at which curves part."""
LEARNED = 0.95
"""Share of the first steps' mean loss that the last steps' must be below."""
STATES, TOPICS, SUCCESSORS = 1024, 4, (0.6, 0.25, 0.1, 0.05)
"""Tokens of a chain, chains, and the probabilities of a token's successors."""
SPAN = 32
"""Tokens of a document along one chain. All chains take turns, in an order that each round draws anew: a step
that misses one is followed by spikes of the confidence loss, and there curves part by rounding alone."""


@dataclass(frozen=True)
class Source:
    """A target's features, the same at every call."""

    shape: "DraftShape[DSparkConfig]"
    frozen: "FrozenTarget"
    batch: Callable[[int], "FeatureBatch"]
    """The batch of a step."""
    lr: float


def main(arguments: argparse.Namespace) -> int:
    """Train, or read what was trained; print, write and draw. Returns the exit status."""
    result = json.loads(arguments.read.read_text()) if arguments.read else measure(arguments)
    if not arguments.read:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    differences = relative_differences(result["reference"], result["fast"])
    if arguments.picture:
        draw(result, differences, arguments.picture)
    return judge(result, differences, arguments.limit)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both curves, and what they are of."""
    import torch

    from specforge_config.deployment import TrainerNodes
    from specforge_config.topology import Topology
    from specforge_kernels.policy import choose_attention, forced
    from specforge_train.parallel import compute_dtype, start_world

    world = start_world(TrainerNodes(device=arguments.device), Topology(1), "grad_op")
    dtype = compute_dtype("auto", world.device)
    source = SOURCES[arguments.data](arguments, world.device, dtype)
    # A CPU's own choice would not be the kernels.
    fast = forced("triton") if world.device.type == "cpu" else nullcontext()
    with forced("reference"):
        reference = train(source, world, dtype, arguments.steps)
    with fast:
        attention = choose_attention(world.device).name
        curve = train(source, world, dtype, arguments.steps)
    world.close()
    sizes = {name: getattr(source.shape, name) for name in ("hidden_size", "vocab_size", "num_heads")}
    facts = {"data": arguments.data, "torch": torch.__version__, "dtype": str(dtype), "attention": attention}
    return {**facts, **sizes, "reference": reference, "fast": curve}


def train(source: Source, world: "World", dtype: "torch.dtype", steps: int) -> list[float]:
    """The loss of each step."""
    import torch

    from specforge_config.optim import OptimizerConfig, ScheduleConfig
    from specforge_train.methods.dspark import DSpark
    from specforge_train.optim import build_adamw, squared_norm, update
    from specforge_train.parallel import shard
    from specforge_train.schedule import lr_factor

    method, schedule = DSpark(), ScheduleConfig(warmup_ratio=0.05)
    with torch.device("meta"):
        model = method.build(source.shape)
    shard(model, world, dtype).to_empty(device=world.device)
    model.init_weights(0)
    optimizer, losses = build_adamw(model, OptimizerConfig(lr=source.lr)), []
    for step in range(steps):
        batch = source.batch(step)
        inputs = method.prepare(batch, source.shape, 0)
        terms = model(inputs.to(world.device), batch.hidden, batch.last_hidden, source.frozen)
        terms.loss.backward()
        loss, weights = terms.sums["loss"]
        losses.append(loss / weights)
        lr = source.lr * lr_factor(schedule, step + 1, steps)
        update(optimizer, lr, 1.0, weights, squared_norm(model))
    return torch.stack(losses).tolist()


def tiny_target(arguments: argparse.Namespace, device: "torch.device", dtype: "torch.dtype") -> Source:
    """The shipped target over its training chats, as the quickstart recipe trains on them."""
    import numpy as np

    from specforge_capture.targets.hf import HFTarget
    from specforge_config.loading import load_run
    from specforge_launch.drafts import frozen_of
    from specforge_launch.resolve import resolve
    from specforge_train.methods.dspark import DSpark

    anchors = [f"draft.num_anchors={arguments.anchors}"] if arguments.anchors else []
    config = load_run(ROOT / "recipes" / "quickstart.yaml", anchors)
    resolved = resolve(config)
    prompts = resolved.prompts()
    target = HFTarget(config.target.path, resolved.spec, device, resolved.special.stop)
    size = config.batches.global_batch_size

    def batch(step: int) -> "FeatureBatch":
        rows = np.random.default_rng((0, step)).choice(len(prompts), size, replace=False)
        return target.capture([prompts.row(int(row), (0, size * step + i)) for i, row in enumerate(rows)])

    assert config.draft.method == "dspark"
    shape = DSpark().resolve(config.draft, resolved.target, resolved.mask_token_id)
    return Source(shape, frozen_of(resolved, dtype, device), batch, arguments.lr or config.optimizer.lr)


def chain(arguments: argparse.Namespace, device: "torch.device", dtype: "torch.dtype") -> Source:
    """A made-up target that knows which of four Markov chains a document follows."""
    import numpy as np
    import torch

    from specforge_config.features import CaptureSpec, FeatureBatch
    from specforge_kernels.bench.steps import UNSUPERVISED, StepShapes, draw_lengths
    from specforge_train.bench import draft_shape
    from specforge_train.frozen import FrozenTarget

    hidden, vocabulary = arguments.hidden, arguments.vocabulary
    heads = max(1, hidden // 128)
    shapes = StepShapes(
        hidden=hidden, intermediate=3 * hidden, vocabulary=vocabulary, heads=heads,
        key_heads=max(1, heads // 4), head_dim=min(128, hidden), anchors=arguments.anchors or 512,
        mask_token=vocabulary - 1,
    )  # fmt: skip
    draws = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draws, device=device)

    states, host = min(STATES, vocabulary - 1), np.random.default_rng(0)
    embedding, head = (normal(vocabulary, hidden) * hidden**-0.5 for _ in range(2))
    successors = host.integers(states, size=(TOPICS, states, len(SUCCESSORS)))
    # Rows of the head have norm 1, so logits are about these, which leave 1% to all other tokens.
    logits = torch.tensor(SUCCESSORS, device=device).log() + np.log(vocabulary) + 5
    last = torch.einsum("csjh,j->csh", head[torch.from_numpy(successors).to(device)], logits)
    of_token, of_chain = (normal(n, len(shapes.captured) * hidden) for n in (states, TOPICS))
    spec = CaptureSpec(
        method="dspark", layer_ids=shapes.captured, final_state=True, dtype="bfloat16", hidden_size=hidden,
        vocab_size=vocabulary, target_revision="chain", tokenizer_hash="none",
    )  # fmt: skip
    lengths = draw_lengths(longest=arguments.max_length)

    def batch(step: int) -> FeatureBatch:
        generator, size = np.random.default_rng((1, step)), lengths[step % len(lengths)]
        rounds = [generator.permutation(TOPICS) for _ in range(-(-size // (TOPICS * SPAN)))]
        topics = np.concatenate(rounds).repeat(SPAN)[:size]
        token, tokens = generator.integers(states), []
        for topic, choice in zip(topics, generator.choice(len(SUCCESSORS), size, p=SUCCESSORS), strict=True):
            tokens.append(token)
            token = successors[topic, token, choice]
        rows, topic_rows = (torch.from_numpy(np.array(x)).to(device) for x in (tokens, topics))
        noise = torch.Generator(device).manual_seed(step)
        captured = of_token[rows] + of_chain[topic_rows]
        captured += torch.randn(captured.shape, generator=noise, device=device)
        return FeatureBatch(
            tokens=rows.cpu(),
            loss_mask=torch.arange(size) >= UNSUPERVISED * size,
            cu_seqlens=torch.tensor([0, size]),
            hidden=captured.bfloat16(),
            last_hidden=last[topic_rows, rows].bfloat16(),
            sample_ids=(str(step),),
            positions=((0, step),),
            spec=spec,
        )

    frozen = FrozenTarget(embedding.to(dtype), head.to(dtype))
    return Source(draft_shape(shapes), frozen, batch, arguments.lr or CHAIN_LR)


SOURCES = {"tiny-target": tiny_target, "chain": chain}


def smoothed(values: Sequence[float]) -> Iterator[float]:
    """Means of the last `SMOOTHED` values."""
    for end in range(1, len(values) + 1):
        yield fmean(values[max(0, end - SMOOTHED) : end])


def relative_differences(reference: Sequence[float], fast: Sequence[float]) -> dict[str, list[float]]:
    """|fast - reference| / |reference| of each step: of the losses, and of their running means."""

    def of(first: Sequence[float], second: Sequence[float]) -> list[float]:
        return [abs(b - a) / abs(a) for a, b in zip(first, second, strict=True)]

    return {
        "unsmoothed": of(reference, fast),
        "smoothed": of([*smoothed(reference)], [*smoothed(fast)]),
    }


def judge(result: dict[str, Any], differences: dict[str, list[float]], limit: float) -> int:
    """Print what was found; 1 if it is not good enough."""
    first, last = (fmean(part) for part in (result["reference"][:SMOOTHED], result["reference"][-SMOOTHED:]))
    sizes = f"H = {result['hidden_size']}, V = {result['vocab_size']}"
    print(f"{result['data']}, {sizes}, {result['dtype']}, attention {result['attention']}")
    print(f"loss {first:.4f} -> {last:.4f} over {len(result['reference'])} steps (means of {SMOOTHED})")
    for name, values in differences.items():
        largest = max(values)
        print(
            f"relative difference, {name}: largest {largest:.2e} at step {values.index(largest)}, "
            f"last {values[-1]:.2e}"
        )
    # Written so that losses that are no numbers fail.
    equal = all(value <= limit for value in differences["unsmoothed"])
    learned = last < LEARNED * first
    print(f"within {limit:.2%}: {'yes' if equal else 'no'}; learned: {'yes' if learned else 'no'}")
    return 0 if equal and learned else 1


def draw(result: dict[str, Any], differences: dict[str, list[float]], path: Path) -> None:
    """Both curves, and their relative difference."""
    import matplotlib
    from matplotlib.figure import Figure

    from specforge_launch.charts import COLORS, STYLE

    with matplotlib.rc_context({**STYLE, "text.color": "#1e293b"}):
        figure = Figure(figsize=(12, 3.8), layout="constrained", facecolor="white")
        losses, relative = figure.subplots(1, 2)
        losses.plot(result["reference"], color=COLORS["grey"], linewidth=3, label="plain torch")
        losses.plot(result["fast"], color=COLORS["blue"], linewidth=1.2, label="kernels")
        losses.set(
            title=f"Loss, H = {result['hidden_size']}, V = {result['vocab_size']}",
            xlabel="step",
            ylim=(0, None),
        )
        losses.legend()
        for name, color in (("unsmoothed", "teal"), ("smoothed", "violet")):
            percent = [100 * value for value in differences[name]]
            relative.plot(percent, color=COLORS[color], linewidth=1.2, label=name)
        relative.set(title="Relative difference", xlabel="step", ylabel="%", ylim=(0, None))
        relative.legend()
        figure.savefig(path, dpi=130)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("tiny-target", "chain"), default="tiny-target")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=2048, help="of a chain's target; heads are of 128")
    parser.add_argument("--vocabulary", type=int, default=32000, help="of a chain's target")
    parser.add_argument("--lr", type=float, help=f"default: the recipe's, {CHAIN_LR:g} for a chain")
    parser.add_argument("--max-length", type=int, default=3911, help="tokens of a chain's document at most")
    parser.add_argument("--anchors", type=int, help="anchors of a sample at most; default: the recipe's, 512")
    parser.add_argument("--limit", type=float, default=0.005, help="largest relative difference of a step")
    parser.add_argument("--json", type=Path, default=Path("loss_curve.json"), help="file for both curves")
    parser.add_argument("--picture", type=Path, help="file for a drawing of them")
    parser.add_argument("--read", type=Path, metavar="JSON", help="judge and draw these curves again")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported
    return arguments


if __name__ == "__main__":
    sys.exit(main(parse()))
