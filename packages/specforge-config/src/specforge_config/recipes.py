"""A recipe is named by its path, or by its name where a package ships it. Such a package declares the folder
of its recipes as an entry point of `GROUP`; nobody who reads them needs to know who that is.
"""

import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "specforge_config.recipes"
"""Entry points, each the path of a folder of recipes."""


def declared() -> dict[str, Path]:
    """Name -> path of the recipes that installed packages ship."""
    folders = (entry.load() for entry in entry_points(group=GROUP))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find(recipe: str, shipped: Mapping[str, Path]) -> Path:
    """The path of `recipe`: a file, or the name of a shipped one.

    Raises:
        ValueError: if there is neither.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    if recipe in shipped:
        return shipped[recipe]
    near = difflib.get_close_matches(recipe, shipped, n=1)
    found = "it is a folder; " if path.is_dir() else ""
    raise ValueError(
        f"no recipe {recipe!r}: {found}required the path of a YAML file or one of "
        f"{', '.join(shipped) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")
    )
