from pathlib import Path

import pytest

from specforge_config.recipes import find


def test_a_recipe_is_a_file_or_the_name_of_a_shipped_one(tmp_path: Path) -> None:
    mine, shipped = tmp_path / "mine.yaml", {"quick": tmp_path / "quick.yaml"}
    mine.touch()
    assert find(str(mine), shipped) == mine
    assert find("quick", shipped) == shipped["quick"]


def test_an_unknown_name_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no recipe 'slow': required the path of a YAML file or one of quick$"
    ):
        find("slow", {"quick": tmp_path})
    with pytest.raises(ValueError, match=r"it is a folder; required .* or one of none$"):
        find(str(tmp_path), {})
    with pytest.raises(ValueError, match=r"did you mean 'quickstart'\?$"):
        find("quikstart", {"quickstart": tmp_path})
