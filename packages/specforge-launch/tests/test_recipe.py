from pathlib import Path

import pytest

from specforge_config.loading import load_run
from specforge_launch import recipe as recipes


def test_every_shipped_recipe_is_valid_and_says_what_it_does() -> None:
    assert "quickstart" in recipes.shipped()
    for path in recipes.shipped().values():
        load_run(path)
        assert len(recipes.summary(path)) > 20


def test_shipped_recipes_come_in_the_order_in_which_they_are_tried() -> None:
    names = list(recipes.shipped())
    assert names[0] == "quickstart"
    found = [next(f for f in recipes.FAMILIES if name.startswith(f)) for name in names]
    assert found == sorted(found, key=recipes.FAMILIES.index)
    assert set(found) == set(recipes.FAMILIES)


def test_a_recipe_is_found_by_path_and_by_name(recipe: Path) -> None:
    assert recipes.find(str(recipe)) == recipe
    assert recipes.find("quickstart").name == "quickstart.yaml"


def test_an_unknown_recipe_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'nothing'.*quickstart"):
        recipes.find("nothing")


def test_a_copied_recipe_runs_where_it_lies(recipe: Path, tmp_path: Path) -> None:
    copied = recipes.copy(str(recipe), tmp_path / "mine")
    assert {path.name for path in copied} == {"small.yaml", "target", "train.jsonl", "eval.jsonl"}
    config = load_run(tmp_path / "mine" / "small.yaml")
    assert config.target.path == str(tmp_path / "mine" / "target")


def test_copying_overwrites_nothing(recipe: Path, tmp_path: Path) -> None:
    taken = tmp_path / "mine" / "eval.jsonl"
    taken.parent.mkdir()
    taken.write_text("mine")
    with pytest.raises(ValueError, match=r"there already: .*eval\.jsonl;"):
        recipes.copy(str(recipe), tmp_path / "mine")
    assert taken.read_text() == "mine"
    assert not (tmp_path / "mine" / "small.yaml").exists()


def test_a_folder_that_cannot_be_written_is_told(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*file/mine: .*Not a directory"):
        recipes.copy(str(recipe), tmp_path / "file" / "mine")
