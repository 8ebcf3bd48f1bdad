"""Reports of tests leave a process of ``pytest -n 2`` whatever the tests print."""

from __future__ import annotations

import json

import pytest


def test_a_lone_surrogate_in_a_report_is_escaped(request: pytest.FixtureRequest) -> None:
    report = pytest.TestReport("t", ("t.py", 1, "t"), {}, "passed", None, "call", [("log", "bad \udcff")])
    hook = request.config.hook
    data = hook.pytest_report_to_serializable(config=request.config, report=report)
    assert data["sections"] == [("log", "bad \\udcff")]
    assert json.dumps(data, ensure_ascii=False).encode()
