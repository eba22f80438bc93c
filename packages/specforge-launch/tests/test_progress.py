from io import StringIO

from rich.console import Console

from specforge_launch.progress import View, numbers

EVENTS = [
    {"stage": "prompts"},
    {"stage": "untrained", "done": 0, "total": 4},
    {
        "stage": "train",
        "step": 1,
        "total": 3,
        "loss": 2.5,
        "tau_estimate": 1.02,
        "first_step_seconds": 7.5,
        "startup_seconds": {"launch": 3.0, "target": 4.25, "target/import": 4.0, "first step": 0.25},
    },
    {"stage": "train", "step": 2, "total": 3, "loss": 2.25, "tau_estimate": 1.5, "samples_per_s": 12.3},
    {"stage": "checkpoint", "step": 2, "path": "x"},
    {"stage": "evaluate", "step": 2, "tau": 1.625},
    {"stage": "train", "step": 3, "total": 3, "loss": 2.0, "tau_estimate": 1.75},
    {"stage": "export"},
]


def shown(*, terminal: bool) -> str:
    text = StringIO()
    with View(Console(file=text, force_terminal=terminal, width=160, color_system=None)) as view:
        for event in EVENTS:
            view.show(event)
        view.message("a [line] of rank 0")
    return text.getvalue()


def test_without_a_terminal_each_stage_is_a_line() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "starting the ranks",
        "preparing prompts",
        "measuring the untrained draft  0/4",
        "seconds to the first step 8: launch 3.0, target 4.2, first step 0.2",
        "training  1/3  loss 2.500  τ̂ 1.02",
        "step 2: τ 1.62 measured",
        "training  3/3  loss 2.000  τ̂ 1.75  samples/s 12.3",
        "exporting",
        "a [line] of rank 0",
    ]


def test_on_a_terminal_a_bar_shows_the_stage() -> None:
    text = shown(terminal=True)
    assert "training" in text
    assert "exporting" in text
    assert "a [line] of rank 0" in text


def test_the_numbers_of_an_event() -> None:
    assert numbers({"loss": 1.0, "tau_estimate": 2.345, "other": 3}) == "loss 1.000  τ̂ 2.35"
    assert numbers({"loss": None}) == ""
