"""A context manager of your own: a full context keeps the question and the latest messages.

Name it on every sampler, no registration needed; the folder must be on PYTHONPATH::

    agentrl sample --run_name my_run --new_context custom_context_manager:keep_latest …
"""

from agentrl import Message, Rollout, context_manager

LATEST = 2


@context_manager("keep_latest")
async def keep_latest(rollout: Rollout) -> list[Message] | None:
    """Return the messages that the new context starts with; None would end the trajectory."""
    messages = rollout.messages
    first = [message for message in messages[:2] if message["role"] in ("system", "user")]
    return [*first, *messages[len(first) :][-LATEST:]]
