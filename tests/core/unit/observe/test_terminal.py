"""Values as people read them, and text that cannot touch a terminal."""

from __future__ import annotations

import pytest

from agentrl.observe.terminal import MISSING, clean, duration, excerpt, number, percent


def test_clean_keeps_text_and_drops_sequences() -> None:
    assert clean("a\tb\r\nc\x1b[1;31md\x1b[0m é 漢\x7f") == "a\tb\ncd é 漢"
    assert clean("line\x1b]0;no end\nnext") == "linenext"
    assert excerpt("a\n b   c", 10) == "a b c"
    assert excerpt("x" * 20, 5) == "xxxx…"


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
