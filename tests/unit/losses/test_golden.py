"""Every golden value of docs/losses.md, through the functions that training uses."""

from __future__ import annotations

import golden
import pytest


@pytest.mark.parametrize("case", golden.GOLDEN, ids=lambda case: case.name)
def test_golden_value(case: golden.Golden) -> None:
    value, kept = golden.evaluate(case)
    assert value == pytest.approx(case.expected, abs=golden.TOLERANCE)
    assert case.kept in (None, kept)


def test_main_reports_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main() == 0
    assert f"{len(golden.GOLDEN)} of {len(golden.GOLDEN)} agree" in capsys.readouterr().out


def test_main_fails_on_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = golden.Golden(name="wrong", settings=golden.GOLDEN[0].settings, expected=0.0)
    monkeypatch.setattr(golden, "GOLDEN", (wrong,))
    assert golden.main() == 1
    assert "WRONG" in capsys.readouterr().out
