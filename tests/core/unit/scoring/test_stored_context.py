"""A scorer that reads a stored trajectory again is shown its conversation, not all of its branches."""

from __future__ import annotations

from model_calls import TASK, model_call, record

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.scoring.scorers import stored_context


def made(index: int, parent: int | None, text: str) -> DispatchedSamplingTask:
    messages = ({"role": "user", "content": f"ask {text}"},)
    return model_call(record().id, index, parent, messages=messages,
                      response={"role": "assistant", "content": text})  # fmt: skip


def shown(*calls: DispatchedSamplingTask) -> list[str]:
    return [message["content"] for message in stored_context(TASK, record(), calls, "").messages]


def test_calls_in_a_row_are_one_conversation_from_the_last_reset_on() -> None:
    rows = made(0, None, "a"), made(1, 0, "b"), made(2, None, "c"), made(3, 2, "d")
    assert shown(*rows) == ["ask c", "c", "ask d", "d"]


def test_of_branches_the_longest_is_shown_and_a_trajectory_may_have_no_calls() -> None:
    branches = made(0, None, "a"), made(1, 0, "b"), made(2, 0, "aside"), made(3, 1, "c")
    assert shown(*branches) == ["ask a", "a", "ask b", "b", "ask c", "c"]
    assert shown() == []
