"""Values and untrusted text as pages show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from agentrl.dashboard.text import MISSING, ago, duration, excerpt, number, percent, visible


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, MISSING), (float("nan"), MISSING), (float("inf"), MISSING), (True, MISSING), ("1", MISSING),
        (0, "0"), (12345, "12,345"), (0.5, "0.500"), (0.000012, "1.2e-05"), (12000.0, "12,000"),
        (-0.25, "-0.250"),
    ],
)  # fmt: skip
def test_numbers(value: object, shown: str) -> None:
    assert number(value) == shown


def test_shares_and_durations() -> None:
    assert [percent(0.256), percent(None)] == ["26 %", MISSING]
    seconds = (0.35, 12.5, 200, 18120, 183600, None)
    shown = ["350 ms", "12.5 s", "3 min 20 s", "5 h 2 min", "2 d 3 h", MISSING]
    assert [duration(value) for value in seconds] == shown


def test_ages() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert ">5 min ago<" in str(ago(at - timedelta(minutes=5), at))
    assert str(ago(None)) == MISSING
