"""An agent of a few lines: asks the model, converts, asks again, and writes a score. It retries for long."""

import http.client
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PATIENCE_SECONDS = 90
TOOL = {"type": "function", "function": {"name": "convert", "description": "Converts.", "parameters": {}}}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next message; retry while the gateway is away."""
    body = json.dumps({"model": os.environ["AGENTRL_MODEL"], "messages": messages, "tools": [TOOL]}).encode()
    head = {"Authorization": f"Bearer {os.environ['AGENTRL_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['AGENTRL_BASE_URL']}/chat/completions"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=30) as answer:
                message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            if error.code < 500 or time.monotonic() > deadline:
                sys.exit(f"{error.code}: {error.read()[:300]!r}")
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                sys.exit(repr(error))
        time.sleep(0.5)


def main() -> None:
    """Make four calls or so."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": os.environ["AGENTRL_TASK"]}]
    for _ in range(3):
        message = ask(messages)
        messages.append({name: value for name, value in message.items() if value is not None})
        calls = message.get("tool_calls") or ()
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "1000"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "Are you sure?"})
    with open("score.txt", "w") as target:
        target.write(str(random.random()))


main()
