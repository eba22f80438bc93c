"""The recipes that specforge-launch ships are found by name from where it is not imported."""

import subprocess
import sys

from specforge_config.recipes import declared
from specforge_launch import recipe

REGENERATE = [sys.executable, "-m", "specforge_capture.cli", "regenerate"]


def regenerate(name: str) -> str:
    """What the command says of a recipe that has nothing to answer, or is none."""
    ran = subprocess.run([*REGENERATE, name], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    return ran.stderr


def test_what_is_declared_is_what_is_shipped() -> None:
    assert declared() == recipe.shipped()


def test_regenerate_takes_the_name_of_a_shipped_recipe() -> None:
    assert "regeneration" in regenerate("quickstart")
    assert "no recipe 'quickest': required" in regenerate("quickest")
