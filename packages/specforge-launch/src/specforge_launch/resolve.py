"""What a run's parts must agree on, resolved once. No weight is read.

The mask token, the captured layers and the tokenizer's hash are settled here, before any model loads; all
parts get them from here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge_capture.prompts.cache import PromptSet, open_or_build
from specforge_capture.prompts.chat import ChatRenderer, NoTokenizer, has_tokenizer, load_tokenizer
from specforge_capture.prompts.samples import Progress
from specforge_capture.prompts.sources import detect_format
from specforge_capture.prompts.special_tokens import SpecialTokens, resolve_mask_token, resolve_special_tokens
from specforge_capture.spec import resolve_capture_spec
from specforge_config.features import CaptureSpec
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, read_target_shape


@dataclass(frozen=True)
class Resolved:
    """The settled facts of a run."""

    config: RunConfig
    target: TargetShape
    renderer: ChatRenderer
    special: SpecialTokens
    mask_token_id: int
    spec: CaptureSpec

    def prompts(self, progress: Progress | None = None) -> PromptSet:
        """The training prompts, from the cache or built into it."""
        return open_or_build(
            self.config.data,
            self.renderer,
            vocab_size=self.target.vocab_size,
            mask_token_id=self.mask_token_id,
            progress=progress,
        )


def resolve(config: RunConfig) -> Resolved:
    """Settle a run's facts.

    Raises:
        ValueError: for a target without configuration, or without tokenizer where rows are not tokenised
            already, and for a mask token or layer that does not fit it.
    """
    target, data = read_target_shape(config.target.path), config.data
    tokenizer = None if _needs_no_tokenizer(config) else load_tokenizer(config.target.path)
    renderer = (
        ChatRenderer(tokenizer, data.chat_template, data.enable_thinking) if tokenizer else NoTokenizer()
    )
    special = resolve_special_tokens(tokenizer, config.target.path, renderer)
    configured: Any = getattr(config.draft, "mask_token_id", None)
    mask = resolve_mask_token(tokenizer, target.vocab_size, configured, special)
    spec = resolve_capture_spec(config, target, renderer.hash)
    return Resolved(config, target, renderer, special, mask, spec)


def _needs_no_tokenizer(config: RunConfig) -> bool:
    """Whether the target has no tokenizer and each file holds rows of tokens."""
    if has_tokenizer(config.target.path):
        return False
    files = [*map(Path, config.data.train), *map(Path, config.evaluation.prompts)]
    return all(detect_format(path) == "tokens" for path in files)
