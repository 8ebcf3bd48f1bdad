"""Be the program of one trajectory: ask the model, look pages up as it says, until it answers.

    python scripts/bench/durable_program.py TOOL_SECONDS

Standard library only: it is started many times at once. Says the same each time it is started.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from typing import Any

RESULT = "The page is open."
"""As in ``durable_services.py``, whose engine counts it."""
_LOOK = {
    "name": "look",
    "description": "Looks a page up.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message."""
    tools = [{"type": "function", "function": _LOOK}]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def main(tool_seconds: float) -> None:
    """Run the loop."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": os.environ["AGENTRL_TASK"]}]
    while True:
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        if not calls:
            return
        for call in calls:
            time.sleep(tool_seconds)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})


if __name__ == "__main__":
    main(float(sys.argv[1]))
