"""``discard_all``: everything after the question gives way to the policy's own summary of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.chat.renderer import Message
    from agentrl.rollout.session import Rollout

REQUEST = (
    "The conversation has become too long to go on. Write down, for yourself, everything found out so far"
    " that matters for the question: facts, numbers, sources, what was tried and failed, and what to do next."
    " Call no tool and do not answer the question yet."
)
HEADING = "What you have found out so far:"


async def discard_all(session: Rollout) -> list[Message] | None:
    """The question with the summary behind it. The summary is one more model call of the trajectory: it is
    sampled in the reserve that ``--prompt_reserve_tokens`` leaves, recorded, and trained like any other."""
    session.append_messages([{"role": "user", "content": REQUEST}])
    turn = await session.generate()
    summary = turn.text.rpartition("</think>")[2].strip()
    question = session.question
    first = [message for message in session.messages[:1] if message["role"] == "system"]
    return [*first, {"role": "user", "content": f"{question}\n\n{HEADING}\n{summary}"}]
