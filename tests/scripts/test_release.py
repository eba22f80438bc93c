"""A release tag must fit the tree."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, over a workspace of two packages of which one requires the other."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("release")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    write_package(tmp_path, "specforge-config", "1.2.0", [])
    write_package(tmp_path, "specforge-train", "0.3.0", ["specforge-config==1.2.0", "torch>=2"])
    return module


def write_package(root: Path, name: str, version: str, requirements: list[str]) -> None:
    folder = root / "packages" / name
    folder.mkdir(parents=True, exist_ok=True)
    project = f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {requirements}\n'
    (folder / "pyproject.toml").write_text(project)
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n## [{version}] - 2026-01-31\n")


def test_a_tag_that_fits_names_its_package(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["release.py", "specforge-train-v0.3.0"])
    release.main()
    assert capsys.readouterr().out == "specforge-train\n"


@pytest.mark.parametrize(
    "tag", ["v0.3.0", "specforge-train-0.3.0", "specforge-other-v0.3.0", "specforge-train-v0.3"]
)
def test_other_tags_are_refused(release: ModuleType, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    monkeypatch.setattr("sys.argv", ["release.py", tag])
    with pytest.raises(SystemExit, match="is no release tag"):
        release.main()


def test_version_and_changelog_must_agree(release: ModuleType) -> None:
    found = release.problems("specforge-train", "0.4.0")
    assert [problem.split(" ")[0] for problem in found] == ["pyproject.toml", "the"]
    changelog = release.ROOT / "packages/specforge-train/CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [0.3.0]\n")
    assert "## [0.3.0] - YYYY-MM-DD" in release.problems("specforge-train", "0.3.0")[0]


def test_siblings_are_pinned_to_the_tree(release: ModuleType) -> None:
    write_package(release.ROOT, "specforge-config", "1.3.0", [])
    assert release.problems("specforge-train", "0.3.0") == [
        "requires specforge-config==1.2.0: pin it ==1.3.0, the version in the tree"
    ]
