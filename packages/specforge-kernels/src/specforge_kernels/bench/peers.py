"""The peers' DSpark training steps, as their own packages make them: SpecForge 0.2 and speculators 0.9.

They are no dependency: unpack their wheels (with speculators' `hs-connectors`, `loguru`, `pydantic-settings`)
in a folder and name it. Both need transformers. Weights are random, options as their own trainers set them.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .steps import Build, Contender, Sample, StepShapes

# Packages whose __init__ imports every draft model and its extras: only the modules under test are loaded.
_SPECFORGE_SHELLS = (
    "specforge", "specforge.modeling", "specforge.modeling.draft", "specforge.algorithms",
    "specforge.algorithms.common", "specforge.core",
)  # fmt: skip


def find_peer(name: str, wheels: Path) -> Build:
    """The peer's builder.

    Raises:
        ValueError: an unknown peer, or one that is not in `wheels`.
    """
    builders: dict[str, Build] = {"specforge": build_specforge, "speculators": build_speculators}
    if name not in builders:
        raise ValueError(f"unknown peer {name!r}: choose one of {', '.join(builders)}")
    if str(wheels) not in sys.path:
        sys.path.insert(0, str(wheels))
    if not (wheels / name).is_dir() or find_spec("transformers") is None:
        raise ValueError(f"{name} is timed from its wheel unpacked in {wheels}, with transformers installed")
    if name == "specforge":
        for package in _SPECFORGE_SHELLS:
            shell = ModuleType(package)
            shell.__path__ = [str(wheels / package.replace(".", "/"))]
            sys.modules[package] = shell
    return builders[name]


class _Peer:
    """A peer's model with the optimizer both peers use: bf16 weights and moments, a clip pass, fused
    AdamW.
    """

    packs = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.parameters: Sequence[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def forward(self, sample: Sample) -> Tensor:
        raise NotImplementedError

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Nothing is held."""


def _load(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _backbone_config(shapes: StepShapes, **extra: Any) -> Any:
    return _load("transformers", "Qwen3Config")(
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        vocab_size=shapes.vocabulary,
        num_hidden_layers=shapes.draft_layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.key_heads,
        head_dim=shapes.head_dim,
        max_position_embeddings=40960,
        rope_theta=shapes.rope_theta,
        rms_norm_eps=shapes.rms_norm_eps,
        **extra,
    )


def build_specforge(shapes: StepShapes, device: torch.device) -> Contender:
    """SpecForge's flex attention (on a CPU its dense one) and chunked objective."""
    online_model = _load("specforge.algorithms.common.dflash_family_model", "OnlineDSparkModel")
    draft_model = _load("specforge.modeling.draft.dspark", "DSparkDraftModel")
    config = _backbone_config(
        shapes,
        block_size=shapes.block,
        num_target_layers=shapes.target_layers,
        dflash_config={
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": shapes.markov_rank,
            "mask_token_id": shapes.mask_token,
            "projector_type": "dspark",
            "target_layer_ids": list(shapes.captured),
        },
    )
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    config._attn_implementation = attention
    with device:
        draft = draft_model(config).to(torch.bfloat16)
        head = nn.Linear(shapes.hidden, shapes.vocabulary, bias=False, dtype=torch.bfloat16)
        embed = nn.Embedding(shapes.vocabulary, shapes.hidden, dtype=torch.bfloat16)
    draft.config._attn_implementation = attention
    for frozen in (head, embed):
        nn.init.normal_(frozen.weight, std=0.02)
        frozen.requires_grad_(False)
    model = online_model(
        draft, head, embed, shapes.mask_token, block_size=shapes.block, attention_backend=attention,
        num_anchors=shapes.anchors, loss_decay_gamma=shapes.decay, objective_chunk_blocks=128,
    ).to(device)  # fmt: skip

    class SpecForge(_Peer):
        def forward(self, sample: Sample) -> Tensor:
            hidden, last_hidden = sample.hidden[None], sample.last_hidden[None]
            return self.model(sample.device_tokens, hidden, sample.device_loss_mask, last_hidden)[0]

    return SpecForge(model)


def build_speculators(shapes: StepShapes, device: torch.device) -> Contender:
    """speculators' compiled forward; with eager losses, as its fused ones do not trace on torch 2.11."""
    draft_model = _load("speculators.models.dspark.core", "DSparkDraftModel")
    proposal = _load("speculators.proposals.greedy", "GreedyTokenProposalConfig")
    layer = _backbone_config(shapes)
    layer._attn_implementation = "simple_flex_attention"
    verifier = Path(tempfile.mkdtemp())
    (verifier / "config.json").write_text(json.dumps(layer.to_dict(), default=str))
    config = _load("speculators.models.dspark.config", "DSparkSpeculatorConfig")(
        transformer_layer_config=layer,
        draft_vocab_size=shapes.vocabulary,
        block_size=shapes.block,
        aux_hidden_state_layer_ids=list(shapes.captured),
        mask_token_id=shapes.mask_token,
        sample_from_anchor=True,
        speculators_config=_load("speculators.config", "SpeculatorsConfig")(
            algorithm="dspark",
            default_proposal_method="greedy",
            proposal_methods=[proposal(speculative_tokens=shapes.block)],
            verifier=_load("speculators.config", "VerifierConfig")(
                name_or_path=str(verifier), architectures=["Qwen3ForCausalLM"]
            ),
        ),
    )
    with device:
        model = draft_model(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, float("norm" in name))
        parameter.requires_grad_(not any(part in name for part in ("embed_tokens", "lm_head", "verifier")))
    options, _ = draft_model.get_trainer_kwargs(
        loss_implementation="eager", loss_fn='{"ce": 0.1, "tv": 0.9}', max_anchors=shapes.anchors
    )

    class Speculators(_Peer):
        # Packed, it draws its anchors once for the whole row: a fraction of the work of one draw a sample.
        packs = False

        def forward(self, sample: Sample) -> Tensor:
            tokens = sample.device_tokens
            return self.model(
                hidden_states=sample.hidden[None],
                input_ids=tokens,
                loss_mask=sample.device_loss_mask,
                verifier_last_hidden_states=sample.last_hidden[None],
                document_ids=torch.zeros_like(tokens),
                position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None],
                **options,
            )[1]

    return Speculators(model)
