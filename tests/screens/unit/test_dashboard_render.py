"""Values and untrusted text as pages show them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from agentrl.observe.terminal import MISSING
from agentrl.screens.dashboard.render import ago, excerpt, visible

ROOT = Path(__file__).parents[3]


def test_untrusted_text_is_escaped_and_its_hidden_characters_are_shown() -> None:
    shown = str(visible("<script>alert(1)</script>\x1b[31mred\u202eevil\u200b\U000e0041\n\tend"))
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    for escape in (r"\x1b", r"\u202e", r"\u200b", r"\U000e0041"):
        assert f">{escape}</span>" in shown
    assert shown.endswith("\n\tend")


def test_an_emoji_of_several_characters_stays_whole() -> None:
    assert str(visible("👨\u200d👩")) == "👨\u200d👩"


def test_an_excerpt_is_one_line() -> None:
    assert str(excerpt("a\n\n  b", 10)) == "a b"
    assert str(excerpt("x" * 50, 10)) == "x" * 9 + "…"
    assert str(excerpt(None)) == ""


def test_ages() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert ">5 min ago<" in str(ago(at - timedelta(minutes=5), at))
    assert str(ago(None)) == MISSING


def test_every_flag_that_a_page_names_exists() -> None:
    pages = (ROOT / "src/agentrl/screens/dashboard/templates").glob("*.html")
    named = {flag for page in pages for flag in re.findall(r"--[a-z_]{3,}", page.read_text(encoding="utf-8"))}
    listed = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("flags.md", "commands.md", "scoring.md")
    )
    assert len(named) > 3
    assert {flag for flag in named if not re.search(rf"{flag}\b", listed)} == set()
