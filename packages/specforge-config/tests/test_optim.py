import pytest
from pydantic import ValidationError

from specforge_config.optim import OptimizerConfig, ScheduleConfig


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_betas_lie_below_one(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match=r"required: two numbers in \[0, 1\)"):
        OptimizerConfig(betas=betas)


def test_warmup_is_given_once() -> None:
    with pytest.raises(ValidationError, match="warmup_steps and warmup_ratio are both set"):
        ScheduleConfig(warmup_steps=0, warmup_ratio=0.0)


def test_warmup_and_decay_fit_into_the_run() -> None:
    ScheduleConfig(kind="wsd", warmup_ratio=0.5, decay_ratio=0.5)
    ScheduleConfig(kind="cosine", warmup_ratio=0.9, decay_ratio=0.5)
    with pytest.raises(ValidationError, match="required: a sum of at most 1"):
        ScheduleConfig(kind="wsd", warmup_ratio=0.6, decay_ratio=0.5)
