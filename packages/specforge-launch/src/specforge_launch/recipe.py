"""The recipes that are shipped with the package, as an entry point declares to the others."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from specforge_config import recipes

SHIPPED = (Path(__file__).parent / "recipes").resolve()
FAMILIES = ("quickstart", "smollm2", "qwen3", "kimi")
"""What names of shipped recipes begin with: the one to start from, then targets by their size."""


def shipped() -> dict[str, Path]:
    """Name -> path of the shipped recipes, in the order of their families."""

    def place(name: str) -> tuple[int, str]:
        return next((i for i, family in enumerate(FAMILIES) if name.startswith(family)), len(FAMILIES)), name

    found = {path.stem: path for path in SHIPPED.glob("*.yaml")}
    return {name: found[name] for name in sorted(found, key=place)}


def find(recipe: str) -> Path:
    """The path of `recipe`: a file, or the name of a shipped one.

    Raises:
        ValueError: if there is neither.
    """
    return recipes.find(recipe, shipped())


def summary(path: Path) -> str:
    """The first comment line of a recipe, which says what it does."""
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe and the files beside it that it names into `folder`, so that the copy runs as it is.

    Raises:
        ValueError: if the recipe is unknown, a file is in the way, or the folder cannot be written.
    """
    import yaml

    source = find(name)
    named = {text for text in _strings(yaml.safe_load(source.read_text())) if (source.parent / text).exists()}
    relative = [Path(source.name), *(Path(text) for text in sorted(named) if not Path(text).is_absolute())]
    if taken := [str(folder / path) for path in relative if (folder / path).exists()]:
        raise ValueError(f"not copied; there already: {', '.join(taken)}; choose another folder")
    try:
        for path in relative:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if (source.parent / path).is_dir():
                shutil.copytree(source.parent / path, folder / path)
            else:
                shutil.copyfile(source.parent / path, folder / path)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error}") from error
    return [folder / path for path in relative]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
