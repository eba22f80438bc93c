from pathlib import Path

import pytest

from specforge_launch import doctor


def test_this_machine_is_fit_for_a_run(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in doctor.examine(str(tmp_path))}
    assert {"python", "packages", "torch", "disk", "/dev/shm", "ports", "outputs folder"} <= set(findings)
    assert findings["ports"].level == "ok"
    assert all(finding.advice for finding in findings.values() if finding.level != "ok")


def test_too_little_room_is_a_warning_that_says_what_to_do(tmp_path: Path) -> None:
    finding = doctor._space("disk", tmp_path / "not" / "made", 1 << 60, "free some")
    assert (finding.level, finding.advice) == ("warn", "free some")


def test_a_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("config", "nothing"))
    finding = doctor._packages()
    assert finding.level == "fail"
    assert "specforge-nothing" in finding.advice
