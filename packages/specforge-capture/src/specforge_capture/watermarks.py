"""How far the producer may run ahead of the trainer.

Invariant: the samples of the window that the trainer takes next are always admitted; a high mark holds at
least one window, so that they fit.
"""

import numpy as np

from specforge_capture.prompts.plan import PromptPlan
from specforge_config.producer import Watermarks


class Held:
    """Samples that were asked for and not acknowledged, against the marks.

    Args:
        marks: the marks.
        acknowledged: the last acknowledged step.
    """

    def __init__(self, marks: Watermarks, acknowledged: int) -> None:
        self.acknowledged = acknowledged
        """The last step that was released."""
        self.samples = self.bytes = 0
        self._marks, self._paused = marks, False
        self._steps: dict[int, tuple[int, int]] = {}

    def admits(self, step: int, nbytes: int) -> bool:
        """Whether the next sample, of `step`, may be asked for; else a pause begins, until the low marks."""
        marks = self._marks
        if step <= self.acknowledged + 1:
            return True
        if self._paused:
            self._paused = self.samples > marks.low_samples or (
                marks.low_bytes is not None and self.bytes > marks.low_bytes
            )
        if self.samples + 1 > marks.high_samples or (
            marks.high_bytes is not None and self.bytes + nbytes > marks.high_bytes
        ):
            self._paused = True
        return not self._paused

    def add(self, step: int, nbytes: int) -> None:
        """Count a sample of `step`."""
        samples, size = self._steps.get(step, (0, 0))
        self._steps[step] = samples + 1, size + nbytes
        self.samples += 1
        self.bytes += nbytes

    def release(self, step: int) -> None:
        """The windows up to `step` were acknowledged."""
        self.acknowledged = step
        for done in [s for s in self._steps if s <= step]:
            samples, size = self._steps.pop(done)
            self.samples -= samples
            self.bytes -= size


def largest_window(plan: PromptPlan, lengths: np.ndarray) -> int:
    """Tokens of the longest optimizer window of a plan.

    Args:
        plan: the order of prompts.
        lengths: tokens of each prompt, [num_rows].
    """
    used = plan.steps_per_epoch * plan.global_batch
    windows = (
        lengths[plan.permutation(epoch)[:used]].reshape(-1, plan.global_batch) for epoch in range(plan.epochs)
    )
    return max(int(window.sum(axis=1).max()) for window in windows)
