"""Conversations for ``agentrl sft``, and the losses that it prints."""

from __future__ import annotations

import json
from pathlib import Path


def write_conversations(file: Path) -> None:
    """Forty questions after a number, each answered odd or even."""
    lines = []
    for number in range(40):
        question = {"role": "user", "content": str(number)}
        answer = {"role": "assistant", "content": "odd" if number % 2 else "even"}
        lines.append(json.dumps({"messages": [question, answer]}))
    file.write_text("\n".join(lines))


def losses(text: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in text.splitlines() if "  loss " in line]
