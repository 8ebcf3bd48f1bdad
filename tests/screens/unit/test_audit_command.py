"""``agentrl audit``: its words and its help; the pages are tested beside it."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.screens.cli import audit


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["recrod"], "'recrod'"),
        (["record"], "id of a Record"),
        (["records", "--status", "lost"], "lost"),
        (["records", "--limit", "0"], "--limit"),
        (["curve", "--ouT", "x"], "--out"),
    ],
)
def test_wrong_words_are_config_errors(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        audit(argv)
    assert part in str(caught.value)


def test_help_lists_the_views(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {view}" in out for view in ("run", "record ID", "records", "curve"))
