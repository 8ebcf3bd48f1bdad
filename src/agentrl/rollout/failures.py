"""The text of a failure as it is stored: its secrets hidden, every character storable, its length bounded."""

from __future__ import annotations

from agentrl.errors import AgentRLError
from agentrl.observe.redact import redact_and_cut
from agentrl.user_code import describe

MESSAGE_CHARS = 8 * 1024
"""Characters of a message that are stored; a notice says how many are left out."""


def failure_text(error: BaseException | str) -> str:
    """The message of ``error``, behind the name of its class unless it is one of ours. Raises nothing."""
    if isinstance(error, str):
        text = error
    else:
        text = str(error) if isinstance(error, AgentRLError) else describe(error)
    shown = redact_and_cut(text, MESSAGE_CHARS)
    return shown.encode("utf-8", "replace").decode("utf-8")
