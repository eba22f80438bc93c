import pytest

from specforge_launch.show import bytes_text, ranks_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_bytes_have_a_fitting_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_ranks_are_ranges() -> None:
    assert ranks_text([0, 1, 2, 3, 6, 8, 9]) == "0-3, 6, 8-9"
    assert ranks_text([]) == ""
