"""Applying and reverting patches on small trees of site-packages: whole, repeated, refused, killed."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specforge_capture import patching
from specforge_capture.patching import KNOWN, Installation, Known, find_sglang, make_manifest

STOCK = {
    "sglang/__init__.py": "",
    "sglang/a.py": "a = 1\n",
    "sglang/srt/b.py": "".join(f"b{n} = {n}\n" for n in range(30)),
    "sglang/srt/untouched.py": "c = 3\n",
    "sglang-0.5.18.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.18\n",
}
FIRST = """\
Change two files

diff --git a/sglang/a.py b/sglang/a.py
--- a/sglang/a.py
+++ b/sglang/a.py
@@ -1 +1,2 @@
-a = 1
+a = 2
+aa = 2
diff --git a/sglang/srt/b.py b/sglang/srt/b.py
--- a/sglang/srt/b.py
+++ b/sglang/srt/b.py
@@ -1,3 +1,3 @@
 b0 = 0
-b1 = 1
+b1 = 10
 b2 = 2
"""
SECOND = """\
Change one of them again

diff --git a/sglang/srt/b.py b/sglang/srt/b.py
--- a/sglang/srt/b.py
+++ b/sglang/srt/b.py
@@ -1,4 +1,5 @@
 b0 = 0
+b = 0
 b1 = 10
 b2 = 2
 b3 = 3
"""
TOUCHED = ("sglang/a.py", "sglang/srt/b.py")


def contents(site: Path) -> dict[str, bytes]:
    """All files of a tree, leftovers among them."""
    return {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder with an SGLang, for which there are two patches."""
    site, patches = tmp_path / "site", tmp_path / "patches"
    for path, text in STOCK.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (patches / "0.5.18").mkdir(parents=True)
    (patches / "0.5.18/0001-first.patch").write_text(FIRST)
    (patches / "0.5.18/0002-second.patch").write_text(SECOND)
    make_manifest(patches / "0.5.18", site)
    monkeypatch.setattr(patching, "PATCHES", patches)
    return site


def test_apply_and_revert_whole(site: Path) -> None:
    stock = contents(site)
    (site / TOUCHED[0]).chmod(0o640)
    installation = find_sglang(site)
    assert installation == Installation("0.5.18", site)
    assert [patch.summary for patch in installation.patch_set.patches] == [
        "Change two files",
        "Change one of them again",
    ]
    assert installation.states() == dict.fromkeys(TOUCHED, "stock")
    assert len(installation.bring("patched")) == 2
    assert installation.states() == dict.fromkeys(TOUCHED, "patched")
    assert (site / "sglang/a.py").read_text() == "a = 2\naa = 2\n"
    assert (site / "sglang/srt/b.py").read_text().startswith("b0 = 0\nb = 0\nb1 = 10\nb2 = 2\n")
    assert (site / TOUCHED[0]).stat().st_mode & 0o777 == 0o640
    patched = contents(site)
    assert {path for path in stock if patched.pop(path) != stock[path]} == set(TOUCHED)
    assert not patched
    assert len(installation.bring("stock")) == 2
    assert contents(site) == stock


def test_nothing_is_done_twice(site: Path) -> None:
    installation = find_sglang(site)
    for wanted in KNOWN:
        installation.bring(wanted)
        before = {path: (site / path).stat() for path in TOUCHED}
        assert installation.bring(wanted) == []
        assert {path: (site / path).stat() for path in TOUCHED} == before


def test_files_shared_with_a_package_cache_are_left_alone(site: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"
    os.link(site / TOUCHED[0], cached)
    find_sglang(site).bring("patched")
    assert cached.read_text() == STOCK[TOUCHED[0]]


@pytest.mark.parametrize("wanted", ["patched", "stock"])
def test_a_modified_tree_is_refused(site: Path, wanted: Known) -> None:
    installation = find_sglang(site)
    installation.bring("stock" if wanted == "patched" else "patched")
    (site / TOUCHED[1]).write_text("b = None\n")
    before = contents(site)
    with pytest.raises(ValueError, match=r"sglang/srt/b\.py is modified.*pip install --force-reinstall"):
        installation.bring(wanted)
    (site / TOUCHED[0]).unlink()
    with pytest.raises(ValueError, match=r"sglang/a\.py is missing, sglang/srt/b\.py is modified"):
        installation.bring(wanted)
    before.pop(TOUCHED[0])
    assert contents(site) == before


def test_unknown_versions_and_empty_folders_are_refused(site: Path, tmp_path: Path) -> None:
    metadata = site / "sglang-0.5.18.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.18", "0.5.17"))
    with pytest.raises(ValueError, match=r"holds sglang 0\.5\.17.*no patches here: install 0\.5\.18"):
        find_sglang(site).bring("patched")
    with pytest.raises(ValueError, match=r"found no sglang in .*--site"):
        find_sglang(tmp_path)


FIND = """
import site, sys
from specforge_capture.patching import find_sglang

site.addsitedir(sys.argv[1])
print(find_sglang())
"""


def test_an_editable_installation_is_patched_where_its_files_are(site: Path, tmp_path: Path) -> None:
    environment, info = tmp_path / "environment", "sglang-0.5.18.dist-info"
    environment.mkdir()
    (site / info).rename(environment / info)
    (environment / "sglang.pth").write_text(f"{site}\n")
    found = subprocess.run(
        [sys.executable, "-c", FIND, environment], check=True, capture_output=True, text=True, timeout=60
    )
    assert found.stdout == f"{Installation('0.5.18', site)}\n"
    with pytest.raises(ValueError, match=r"sglang 0\.5\.18 but not its files.*without --site"):
        find_sglang(environment)


def test_patches_that_make_something_else_are_refused(site: Path) -> None:
    patch = patching.PATCHES / "0.5.18/0001-first.patch"
    patch.write_text(FIRST.replace("+aa = 2", "+aa = 3"))
    stock = contents(site)
    with pytest.raises(ValueError, match=r"make another sglang/a\.py than manifest\.json"):
        find_sglang(site).bring("patched")
    assert contents(site) == stock


def test_a_failure_between_two_renames_restores_all(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = contents(site)
    rename, calls = os.replace, []

    def fail_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "the disk failed")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="the disk failed"):
        find_sglang(site).bring("patched")
    assert contents(site) == stock


def test_two_at_once_are_refused(site: Path) -> None:
    descriptor = os.open(site / "sglang", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process patches"):
            find_sglang(site).bring("patched")
    finally:
        os.close(descriptor)
    assert find_sglang(site).bring("patched")


KILLED = """
import os, signal, sys
from pathlib import Path
from specforge_capture import patching

patching.PATCHES = Path(sys.argv[2])
function, wanted, left = getattr(os, sys.argv[4]), sys.argv[3], int(sys.argv[5])

def kill_after(*arguments):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return function(*arguments)

setattr(os, sys.argv[4], kill_after)
patching.find_sglang(Path(sys.argv[1])).bring(wanted)
"""


@pytest.mark.parametrize("wanted", ["patched", "stock"])
@pytest.mark.parametrize(("function", "calls"), [("fsync", 1), ("replace", 0), ("replace", 1)])
@pytest.mark.parametrize("then", ["patched", "stock"])
def test_a_killed_run_is_completed_or_undone(
    site: Path, wanted: Known, function: str, calls: int, then: Known
) -> None:
    """Killed while a file is written, between that and the first rename, and between two renames."""
    stock = contents(site)
    installation = find_sglang(site)
    installation.bring("patched")
    patched = contents(site)
    if wanted == "patched":
        installation.bring("stock")
    command = [sys.executable, "-c", KILLED, site, patching.PATCHES, wanted, function, str(calls)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -9, killed.stderr
    assert contents(site) not in (stock, patched)  # temporaries, or one file of two
    assert set(installation.states().values()) <= {"stock", "patched"}
    installation.bring(then)
    assert contents(site) == {"patched": patched, "stock": stock}[then]
