"""Which text of a growing answer is certain, and when it is released."""

from __future__ import annotations

import pytest
from rollout_fakes import END, format_of

from agentrl.chat.chat_format import TextStream

FORMAT = format_of()
MARKS = ("<tool_call>",)


def released(text: str, marks: tuple[str, ...] | None = MARKS, stops: tuple[str, ...] = ()) -> str:
    """The content that is sent before the answer's end, one byte at a time."""
    stream = TextStream(FORMAT, (), stops, marks)
    ids = FORMAT.tokens.encode(text)
    deltas = [delta for place, token in enumerate(ids) for delta in stream.add(place, [token])]
    assert all(delta.kind == "content" for delta in deltas)
    assert END not in ids
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("if a < b and d[0] == {1: `x`}.", "if a < b and d[0] == {1: `x`}."),
        ("a <tool> b", "a <tool> b"),
        ("I add. <tool_call>{}</tool_call> more", "I add."),
        ("so <tool_cal", "so"),
        ("one <think>two</think> three", "one"),
        ("é ü", "é ü"),
    ],
)
def test_text_is_held_only_while_it_may_begin_a_call(text: str, sent: str) -> None:
    assert released(text) == sent


def test_any_bracket_is_held_where_the_format_of_calls_is_not_known() -> None:
    assert released("if a < b", None) == "if a"


def test_a_stop_string_is_held() -> None:
    assert released("a, b STO c STOP d", stops=("STOP",)) == "a, b STO c"


def test_the_end_of_an_answer_completes_what_was_sent() -> None:
    stream = TextStream(FORMAT, (), (), MARKS)
    (first,) = stream.add(0, FORMAT.tokens.encode("I add. <tool_call>{}</tool_call> more"))
    rest = stream.finish("", "I add.  more")
    assert rest is not None
    assert first.text + "".join(delta.text for delta in rest) == "I add.  more"
    assert stream.finish("", "another answer") is None
