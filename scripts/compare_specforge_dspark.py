"""Train the same DSpark draft twice in one loop: with our model and objective, and with SpecForge 0.2's.

    python scripts/compare_specforge_dspark.py RECIPE [section.key=value ...] --wheels FOLDER [--steps 500]

Both start from the same weights and take the same captured features, anchors, loss weights, learning rates
and AdamW (float32 master weights, computation in the recipe's type). What differs is each one's own code for
the draft and its loss. Each step's loss and estimate of τ are recorded, and at the end both drafts decode the
recipe's evaluation prompts through our speculative decoding. FOLDER holds SpecForge's wheel, unpacked.
Written are `curves.json` and `curves.png`.
"""

import argparse
import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from specforge_capture.prompts.evaluation import load_eval_prompts
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.stream import LocalRolloutStream
from specforge_capture.targets.gguf import with_saved_target
from specforge_capture.targets.hf import HFTarget
from specforge_config.draft import DSparkConfig
from specforge_config.features import FeatureBatch
from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_kernels.bench.peers import find_peer
from specforge_kernels.bench.steps import StepShapes
from specforge_launch.drafts import shape_of
from specforge_launch.resolve import Resolved, resolve
from specforge_launch.target import transformers_target
from specforge_train.decode import speculative_decode
from specforge_train.frozen import FrozenTarget, load_frozen
from specforge_train.methods.base import DraftShape
from specforge_train.methods.dspark.features import DSparkInputs
from specforge_train.methods.dspark.method import DSpark
from specforge_train.methods.dspark.model import DSparkModel
from specforge_train.parallel import compute_dtype
from specforge_train.schedule import lr_factor


@dataclass(frozen=True)
class Step:
    """What a step of a contender gave."""

    loss: Tensor
    """[] differentiable, over the sum of the loss weights."""
    tau: Tensor
    """[] estimate of the acceptance length: mean over blocks of 1 + Σ_k Π_{i<=k} a_i."""


class Contender:
    """A draft that trains: AdamW on float32 masters of the model's parameters."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=0.0,
            fused=True,
        )
        self.clip = config.optimizer.clip

    def forward(self, batch: FeatureBatch, inputs: DSparkInputs) -> Step:
        """Loss and estimate of τ on a batch."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The draft's weights under our names."""
        raise NotImplementedError

    def train(self, batch: FeatureBatch, inputs: DSparkInputs, lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; its loss and estimate of τ, on the device."""
        step = self.forward(batch, inputs)
        step.loss.backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return step.loss.detach(), step.tau.detach()


class Ours(Contender):
    """specforge_train's DSpark."""

    def __init__(self, model: DSparkModel, frozen: FrozenTarget, config: RunConfig) -> None:
        super().__init__(model, config)
        self.model, self.frozen = model, frozen

    def forward(self, batch: FeatureBatch, inputs: DSparkInputs) -> Step:
        moved = inputs.to(self.frozen.head.device)
        terms = self.model(moved, batch.hidden, batch.last_hidden, self.frozen)
        numerator, denominator = terms.sums["tau_estimate"]
        return Step(terms.loss / inputs.weight_sum, numerator / denominator)

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class SpecForge(Contender):
    """SpecForge's draft and objective, from its wheel. It takes padded rows, and is handed our anchors."""

    def __init__(
        self,
        start: dict[str, Tensor],
        shape: DraftShape[Any],
        frozen: FrozenTarget,
        resolved: Resolved,
        wheels: Path,
    ) -> None:
        # Built on the host it takes its dense attention: flex attention compiles anew for a batch's lengths.
        built: Any = find_peer("specforge", wheels)(step_shapes(shape), torch.device("cpu"))
        self.online = built.model.to(frozen.head.device, frozen.head.dtype)
        self.online.lm_head.weight.data = frozen.head
        self.online.embed_tokens.weight.data = frozen.embedding
        self.online.draft_model.load_state_dict(start, strict=True)
        self.online._sample_anchor_positions = lambda *_: self.anchors
        self.anchors: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        super().__init__(self.online.draft_model, resolved.config)

    def forward(self, batch: FeatureBatch, inputs: DSparkInputs) -> Step:
        device = batch.hidden.device
        offsets = batch.cu_seqlens.tolist()
        rows = [slice(*pair) for pair in pairwise(offsets)]
        assert batch.last_hidden is not None

        def padded(values: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence([values[row].to(device) for row in rows], batch_first=True)

        anchors = [
            inputs.anchors[(inputs.anchors >= r.start) & (inputs.anchors < r.stop)] - r.start for r in rows
        ]
        kept = [torch.ones(len(own), dtype=torch.bool) for own in anchors]
        positions, present = (
            nn.utils.rnn.pad_sequence(part, batch_first=True).to(device) for part in (anchors, kept)
        )
        self.anchors = positions, present
        dtype = self.parameters[0].dtype
        # Padded blocks see nothing at all, of which the fused kernels make no zeros.
        with sdpa_kernel(SDPBackend.MATH):
            loss, _, metrics = self.online(
                padded(batch.tokens),
                padded(batch.hidden).to(dtype),
                padded(batch.loss_mask.float()),
                padded(batch.last_hidden).to(dtype),
            )
        numerator, denominator = metrics["ratio_metrics"]["tau_probabilistic"]
        return Step(loss, numerator / denominator)

    def state(self) -> dict[str, Tensor]:
        return self.online.draft_model.state_dict()


def step_shapes(shape: DraftShape[DSparkConfig]) -> StepShapes:
    """A draft's sizes as the peers' builder takes them."""
    config = shape.config
    plain = (config.markov.head == "vanilla", config.confidence.enabled, config.confidence.with_markov)
    if not all(plain) or config.sliding_window is not None or config.rope_scaling is not None:
        raise ValueError(
            "the comparison is built for a vanilla Markov head, a confidence head that reads it, full "
            "attention and unscaled rotary embeddings: change draft"
        )
    loss = config.loss
    if (loss.ce, loss.l1, loss.confidence) != (0.1, 0.9, 1.0):
        raise ValueError("the comparison is built for draft.loss {ce: 0.1, l1: 0.9, confidence: 1.0}")
    return StepShapes(
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        vocabulary=shape.vocab_size,
        heads=shape.num_heads,
        key_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        captured=shape.layer_ids,
        target_layers=shape.num_target_layers,
        draft_layers=shape.num_layers,
        anchors=config.num_anchors,
        block=config.block_size,
        markov_rank=config.markov.rank,
        mask_token=shape.mask_token_id,
        decay=loss.decay,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.rms_norm_eps,
    )


def decode(
    state: dict[str, Tensor],
    shape: DraftShape[Any],
    frozen: FrozenTarget,
    target: HFTarget,
    resolved: Resolved,
    count: int,
) -> dict[str, float]:
    """τ of a draft on `count` prompts of each evaluation file, by speculative decoding."""
    method, settings = DSpark(), resolved.config.evaluation
    model = method.build(shape).to(frozen.head.device, frozen.head.dtype).eval()
    model.load_state_dict(state, strict=True)
    drafter = method.drafter(model, frozen)
    rounds = emitted = 0
    for prompt in load_eval_prompts(settings.prompts, resolved.renderer, count):
        decoded = speculative_decode(
            target, drafter, prompt.input_ids, settings.max_new_tokens, resolved.special.stop
        )
        rounds += len(decoded.emitted)
        emitted += sum(decoded.emitted)
    return {"tau": emitted / rounds, "rounds": rounds}


def train(
    contenders: dict[str, Contender],
    stream: LocalRolloutStream,
    shape: DraftShape[Any],
    config: RunConfig,
    steps: int,
) -> dict[str, dict[str, list[float]]]:
    """Train all contenders on each batch of the stream; loss, estimate of τ and seconds of each step."""
    curves: dict[str, dict[str, list[Any]]] = {
        name: {"loss": [], "tau_estimate": [], "seconds": []} for name in contenders
    }
    for step in range(1, steps + 1):
        batch = next(stream)
        inputs = DSpark().prepare(batch, shape, config.seed)
        lr = config.optimizer.lr * lr_factor(config.schedule, step, steps)
        for name, contender in contenders.items():
            start = time.perf_counter()
            loss, tau = contender.train(batch, inputs, lr)
            values = loss.item(), tau.item(), time.perf_counter() - start
            for curve, value in zip(curves[name].values(), values, strict=True):
                curve.append(value)
        if step == 1 or step % 20 == 0:
            shown = (
                f"{name} loss {c['loss'][-1]:.5f} τ {c['tau_estimate'][-1]:.3f}" for name, c in curves.items()
            )
            print(f"step {step} of {steps}: {'; '.join(shown)}", flush=True)
    return curves


def draw(result: dict[str, Any], path: Path) -> None:
    """Both curves in one picture, as running means."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for panel, key, label in zip(panels, ("loss", "tau_estimate"), ("loss", "estimated τ"), strict=True):
        for (name, curves), style in zip(result["curves"].items(), ("-", "--"), strict=True):
            values = curves[key]
            window = max(1, len(values) // 40)
            means = [
                sum(values[max(0, i - window) : i + 1]) / len(values[max(0, i - window) : i + 1])
                for i in range(len(values))
            ]
            panel.plot(
                range(1, len(means) + 1),
                means,
                style,
                label=f"{name}, τ decoded {result['decoded'][name]['tau']:.3f}",
            )
        panel.set_xlabel("step")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[1].legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Parse, train both, decode with both, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings, as section.key=value")
    parser.add_argument("--wheels", type=Path, required=True, help="folder with SpecForge's wheel, unpacked")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: all of the recipe's")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each evaluation file to decode")
    parser.add_argument("--out", type=Path, default=Path("outputs/comparison"))
    arguments = parser.parse_intermixed_args()
    config = with_saved_target(load_run(arguments.recipe, arguments.overrides))
    resolved = resolve(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    frozen = load_frozen(
        config.target.path, dtype=compute_dtype(config.training.dtype, device), device=device
    )
    target = transformers_target(resolved, device)
    prompts = resolved.prompts()
    plan = PromptPlan.of_run(config, len(prompts), prompts.fingerprint, prompts.lengths)
    shape = shape_of(resolved)
    model = DSpark().build(shape)
    model.init_weights(config.seed)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    contenders: dict[str, Contender] = {
        "specforge-train": Ours(model.to(device, frozen.head.dtype), frozen, config),
        "SpecForge 0.2": SpecForge(start, shape, frozen, resolved, arguments.wheels),
    }
    steps = min(arguments.steps or plan.total_steps, plan.total_steps)
    curves = train(contenders, LocalRolloutStream(target, prompts, plan), shape, config, steps)
    decoded = {
        name: decode(contender.state(), shape, frozen, target, resolved, arguments.prompts)
        for name, contender in contenders.items()
    }
    # Both saw the same blocks: the means of the last tenth differ by far less than decoding fluctuates.
    last = max(1, steps // 10)
    estimated = {name: sum(c["tau_estimate"][-last:]) / last for name, c in curves.items()}
    result = {"steps": steps, "estimated": estimated, "decoded": decoded, "curves": curves}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "curves.json").write_text(json.dumps(result) + "\n")
    draw(result, arguments.out / "curves.png")
    for name, measured in decoded.items():
        loss = sum(curves[name]["loss"][-last:]) / last
        print(
            f"{name}: over the last {last} steps loss {loss:.5f}, estimated τ {estimated[name]:.4f}; "
            f"τ decoded {measured['tau']:.3f} in {measured['rounds']} rounds"
        )


if __name__ == "__main__":
    main()
