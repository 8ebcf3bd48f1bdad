"""What samplers of a chaos run do at each turn: call a tool whose effects cannot be taken back.

Every text of the model is a call of ``note``. The agent asks for a random stamp by ``rollout.once`` and shows
it to the model: an owner that continued a trajectory with another stamp would diverge at the first turn.
"""

from __future__ import annotations

import asyncio
import os
import uuid

from agentrl import Outcome, Rollout, tool, tool_state
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall, Tools
from agentrl.rollout.agents import react
from agentrl.rollout.rollout import current_rollout

LOG = "AGENTRL_CHAOS_NOTES"
"""The environment variable with the path of the tool's log."""

SECONDS = "AGENTRL_CHAOS_NOTE_SECONDS"
"""The environment variable with the time that a note takes."""

_NOTE_SECONDS = float(os.environ.get(SECONDS, "2.5"))
"""Long enough that kills hit trajectories in the middle, also where the trainer is what they wait for."""


class EveryText:
    """A parser that reads any text as a call of ``note``; it never reports a malformed one."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Return the call."""
        return ParsedMessage(text, (ToolCall("note", {"text": text}),))


@tool_state("outside")
@tool("note")
async def note(text: str) -> str:
    """Note it."""
    # Log before and after: a call whose process was killed in between must not run again either.
    rollout, number = current_rollout(), uuid.uuid4().hex
    _log("began", rollout.record_id, rollout.turns, number)
    await asyncio.sleep(_NOTE_SECONDS)
    _log("ended", rollout.record_id, rollout.turns, number)
    return number


async def stamped(rollout: Rollout) -> Outcome:
    """Show the model a random stamp, then run ``react``."""
    stamp = await rollout.once("stamp", lambda: uuid.uuid4().hex[:6])
    rollout.append_messages([{"role": "user", "content": stamp}])
    return await react(rollout)


def _log(*words: object) -> None:
    """Append a line in one write, so that lines of several processes never mix."""
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(file)
