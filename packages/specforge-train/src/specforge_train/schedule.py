"""Learning rate over the run, as a factor of the peak: linear warm-up, then constant, cosine, linear or WSD.

Sources: cosine (arXiv 1608.03983), warm-up-stable-decay (arXiv 2404.06395).
"""

from __future__ import annotations

import math

from specforge_config.optim import ScheduleConfig


def warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of warm-up out of `total_steps`; none unless the schedule asks for some."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return math.ceil((schedule.warmup_ratio or 0.0) * total_steps)


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor of the peak learning rate in optimizer step `step`.

    Warm-up of w steps rises as step / w: the first step already learns, step w runs at the peak. Then the
    factor falls from 1 towards `min_ratio`, which the step after the last one would have: with a ratio of 0
    the last step still learns. `wsd` stays at 1 until the last `decay_ratio` of all steps, then falls
    linearly.

    Args:
        schedule: its settings.
        step: 1 to `total_steps`.
        total_steps: optimizer steps of the whole run.
    """
    warm = warmup_steps(schedule, total_steps)
    if step <= warm:
        return step / warm
    if schedule.kind == "constant":
        return 1.0
    start = warm
    if schedule.kind == "wsd":
        start = max(warm, total_steps - math.ceil(schedule.decay_ratio * total_steps))
    if step <= start:
        return 1.0
    progress = (step - start) / (total_steps + 1 - start)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * remaining
