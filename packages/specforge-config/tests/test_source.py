from pathlib import Path

import pytest

from specforge_config.source import ConfigError, Document, apply_override, dotted, read_recipe


def read(folder: Path, text: str) -> Document:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return read_recipe(path)


def labels(document: Document) -> dict[str, str]:
    return {dotted(path): origin.label.rpartition(":")[2] for path, origin in document.origins.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("1E+3", 1e3),
        ("2.5e-1", 0.25),
        (".5", 0.5),
        ("'6e-4'", "6e-4"),
        ("1e5x", "1e5x"),
        ("12", 12),
        ("2024-01-01", "2024-01-01"),
        ("host:29500", "host:29500"),
        ("~", None),
        ("", None),
        ("true", True),
    ],
)
def test_scalars_are_those_of_json(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"a: {text}\n").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_and_items_know_their_lines(tmp_path: Path) -> None:
    document = read(tmp_path, "# head\na:\n  b: 1\n  c:\n  - x\n  - {d: 2}\n")
    assert labels(document) == {
        "a": "2",
        "a.b": "3",
        "a.c": "4",
        "a.c[0]": "5",
        "a.c[1]": "6",
        "a.c[1].d": "6",
    }
    assert document.origin(("a", "c", 7, "e")).label.endswith(":4")
    assert document.origin(("z",)).label.endswith(":1")


def test_aliases_are_read_where_they_stand(tmp_path: Path) -> None:
    document = read(tmp_path, "a: &x {b: 1}\nc: *x\n")
    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}
    assert not document.problems


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: &x\n  b: *x\n", "2: a.b: an alias of its own parent; required: values without cycles"),
        (
            "a:\n  b: 1\n  c: 1\n  b: 2\n",
            "4: a.b: the key is given twice, first at {}:2; drop one of the two",
        ),
        ("a:\n  [1, 2]: 3\n", "2: a: a list or mapping as a key; required: a name"),
        ("a: 1\nb: !!int x\n", "2: b: 'x' cannot be read: invalid literal for int() with base 10: 'x'"),
        (
            "a: !secret x\n",
            "1: a: 'x' cannot be read: could not determine a constructor for the tag '!secret'",
        ),
    ],
)
def test_faults_of_reading_have_a_line(tmp_path: Path, text: str, fault: str) -> None:
    document = read(tmp_path, text)
    assert [str(problem) for problem in document.problems] == [
        f"{document.name}:{fault.format(document.name)}"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\n b: 2\n", ":2: not valid YAML: mapping values are not allowed here"),
        ("a: [1\n", ":2: not valid YAML: expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", ":2: not valid YAML: but found another document"),
        ("a: \x07\n", ":1: not valid YAML: "),
        ("- a\n", ":1: found no mapping; required: `section: …` keys"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'recipe.yaml'}{fault}")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.yaml: No such file or directory; required: a recipe in YAML"
    ):
        read_recipe(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"latin.yaml: not UTF-8 text"):
        read_recipe(tmp_path / "latin.yaml")


def test_overrides_replace_values_and_their_origins(tmp_path: Path) -> None:
    document = read(tmp_path, "a: {b: {c: 1, d: 2}}\n")
    apply_override(document, "a.b={c: [3]}", 0)
    apply_override(document, "x.y.z=4", 1)
    assert document.data == {"a": {"b": {"c": [3]}}, "x": {"y": {"z": 4}}}
    assert document.origin(("a", "b", "c", 0)).label == "override 'a.b={c: [3]}'"
    assert ("a", "b", "d") not in document.origins
    assert document.origin(("x", "y")).label == document.origin(("x", "y", "z")).label == "override 'x.y.z=4'"
    assert document.origin(("a",)).label.endswith(":1")
