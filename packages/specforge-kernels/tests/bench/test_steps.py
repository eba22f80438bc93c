import math
import time
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from specforge_kernels.bench.peers import find_peer
from specforge_kernels.bench.steps import (
    TURNS,
    UNSUPERVISED,
    Sample,
    StepShapes,
    draw_lengths,
    draw_sample,
    measure_steps,
    print_reports,
)

CPU = torch.device("cpu")
SHAPES = StepShapes(hidden=8, vocabulary=40, mask_token=39, captured=(0, 2))


class Linear:
    """A trainer of one matrix that maps the captured states to the final ones."""

    packs = False

    def __init__(self, shapes: StepShapes, device: torch.device) -> None:
        self.layer = nn.Linear(
            len(shapes.captured) * shapes.hidden, shapes.hidden, dtype=torch.bfloat16, device=device
        )
        self.parameters: Sequence[torch.Tensor] = list(self.layer.parameters())
        self.seen: list[int] = []

    def forward(self, sample: Sample) -> torch.Tensor:
        self.seen.append(sample.tokens.shape[0])
        return (self.layer(sample.hidden) - sample.last_hidden).square().mean()

    def update(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        pass


def test_lengths_are_those_of_the_published_run() -> None:
    lengths = draw_lengths(count=1000)
    assert lengths[:24] == draw_lengths()
    assert draw_lengths(seed=8) != draw_lengths()
    assert min(lengths) >= 43
    assert max(lengths) <= 3911
    assert draw_lengths(7, 8, 128) == [min(n, 128) for n in lengths[:8]]
    # log-normal around e^6.5
    assert 600 < sorted(lengths)[500] < 750


def test_sample_has_the_shapes_of_a_capture() -> None:
    sample = draw_sample(SHAPES, [20], CPU)
    assert sample.hidden.shape == (20, 16)
    assert sample.last_hidden.shape == (20, 8)
    assert sample.tokens.max() < SHAPES.mask_token
    assert sample.loss_mask.tolist() == [False] * int(20 * UNSUPERVISED) + [True] * 14
    assert torch.equal(sample.device_loss_mask[0].bool(), sample.loss_mask)


def test_every_contender_takes_the_same_lengths(capsys) -> None:
    built = []

    def build(shapes: StepShapes, device: torch.device) -> Linear:
        built.append(Linear(shapes, device))
        return built[-1]

    reports = [measure_steps(name, build, SHAPES, [[5, 9]], [4], CPU)[0] for name in ("one", "two")]
    assert [contender.seen for contender in built] == [[5, 9] * 3 + [4] * 6] * 2
    assert reports[0].parameters == 16 * 8 + 8
    assert reports[0].samples_per_s > 0
    assert math.isclose(reports[0].samples_per_s, 1e3 / reports[0].mean.total)
    print_reports(reports)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-6:] == ["GiB", "4", "packed", "over", "1", "GiB"]
    assert [line[0] for line in lines[1:]] == ["one", "two"]
    assert float(lines[1][4]) == 1
    assert math.isclose(
        float(lines[2][4]), reports[0].samples_per_s / reports[1].samples_per_s, abs_tol=0.006
    )


class Waiting(Linear):
    """Takes ten milliseconds a step, however many sequences it holds."""

    packs = True

    def update(self) -> None:
        time.sleep(0.01)
        super().update()


def test_packed_steps_take_turns_with_single_ones(capsys) -> None:
    built = []

    def build(shapes: StepShapes, device: torch.device) -> Waiting:
        built.append(Waiting(shapes, device))
        return built[-1]

    lengths = [5, 9, 3, 4, 2, 6, 7, 8]
    first, second = measure_steps("one", build, SHAPES, [lengths, [3] * 4], [], CPU)
    turn = [5, 9, 3, 4, 21, 2, 6, 7, 8, 23]
    assert built[0].seen[:64] == lengths * 3 + turn * (1 + TURNS)
    assert built[0].seen[64:] == [3] * 12 + [3, 3, 3, 3, 12] * (1 + TURNS)
    for report in (first, second):
        assert report.packed is not None
        # Four steps in the time of one, but for what the machine adds.
        assert 1.5 < report.packed.over_single < 8
        assert 0 < report.packed.samples_per_s < 400
    assert first.packed is not None
    print_reports([first])
    assert f"{first.packed.over_single:.2f}" == capsys.readouterr().out.split()[-2]


def test_a_missing_peer_says_what_is_needed(tmp_path) -> None:
    with pytest.raises(ValueError, match="unknown peer 'eagle': choose one of specforge, speculators"):
        find_peer("eagle", tmp_path)
    with pytest.raises(ValueError, match="specforge is timed from its wheel unpacked in"):
        find_peer("specforge", tmp_path)
