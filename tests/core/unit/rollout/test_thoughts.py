"""Train what was sampled although a template drops earlier thoughts."""

from __future__ import annotations

from pathlib import Path

import chat_models as models
import pytest
from trajectories import Trajectory, trained

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CALL = f"<think>\nadd first\n</think>\n\n{ADD}"
ANSWER = "<think>\nthree\n</think>\n\n<answer>3</answer>"


def started(folder: Path, template: str, *script: str) -> Trajectory:
    trajectory = Trajectory(*script)
    trajectory.engine.chat_format = models.opened(folder, template, name="template")
    return trajectory


@pytest.mark.parametrize(
    ("template", "parents"),
    [
        (models.KEEPS_NONE, [None, None, None]),
        (models.KEEPS_CYCLE, [None, "train/0/t/0/1/0", "train/0/t/0/1/1"]),
    ],
    ids=["none", "tool_cycle"],
)
async def test_every_sampled_token_is_trained_once_where_thoughts_are_dropped(
    tmp_path: Path, template: str, parents: list[str | None]
) -> None:
    trajectory = started(tmp_path, template, CALL, CALL.replace("first", "again"), ANSWER)
    assert (await trajectory.run()).final_answer == "3"
    assert [call.parent for call in trajectory.calls] == parents
    assert sorted(trained(trajectory)) == sorted(trajectory.engine.outputs)
    seen = ["add first" in trajectory.engine.chat_format.decode(ids) for ids in trajectory.engine.prompts]
    assert seen == ([False] * 3 if parents[1] is None else [False, True, True])


async def test_a_branch_holds_all_messages_of_its_prompt(tmp_path: Path) -> None:
    trajectory = started(tmp_path, models.KEEPS_NONE, CALL, ANSWER)
    await trajectory.run()
    last = trajectory.calls[-1]
    assert [message["role"] for message in last.messages] == ["user", "assistant", "tool"]
    assert last.messages[-1]["content"] == "3"
    assert last.tools is not None
    assert trajectory.rollout.context_resets == 0
