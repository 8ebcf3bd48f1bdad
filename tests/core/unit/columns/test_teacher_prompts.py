"""A teacher that writes its own prompts is shown the conversation as the policy read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from rollout_fakes import format_of
from trajectories import Trajectory

from agentrl.chat.chat_format import ChatFormat, Message, ToolSchemas
from agentrl.columns.teacher import Scored, Teaching


class Teacher:
    """Scores any ids, and keeps what its prompts show."""

    name = "teacher"

    def __init__(self) -> None:
        self.shown: list[tuple[list[str], list[str]]] = []
        self._format = format_of()

    def render(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        named = [tool["function"]["name"] for tool in tools or ()]
        self.shown.append(([str(message["content"]) for message in messages], named))
        return self._format.render(messages, tools)

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        return Scored(np.zeros(len(ids) - first, np.float32))


async def test_the_tools_of_a_conversation_are_shown_in_each_of_its_turns() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    trajectory = Trajectory(call, "So it is <answer>3</answer>")
    await trajectory.run()
    teacher = Teacher()
    teaching = Teaching(cast("Any", teacher), teacher=cast("ChatFormat", teacher))
    values, _ = await teaching.values(trajectory.task, trajectory.calls)
    assert len(values) == sum(call.generated_tokens for call in trajectory.calls)
    (first, offered), (second, offered_again) = teacher.shown
    assert second[: len(first)] == first
    assert len(second) == len(first) + 2
    assert "add" in offered
    assert offered_again == offered
