"""``agentrl doctor``: its table and its exit code."""

from __future__ import annotations

import pytest

from agentrl.local import doctor
from agentrl.local.doctor import Check, State


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failed_check_sets_the_exit_code(
    state: State, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_checks(configs: object) -> list[Check]:
        return []

    check = Check("disk [x]", state, "found this", "do that")
    monkeypatch.setattr(doctor, "machine_checks", lambda configs: [check])
    monkeypatch.setattr(doctor, "_run_checks", no_checks)
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert all(part in out for part in (state, "disk [x]", "found this", "do that"))
