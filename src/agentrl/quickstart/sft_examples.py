"""Writes assets/sft/*.jsonl, conversations with a calculator; ``python -m agentrl.quickstart.sft_examples``.

``tiny.jsonl`` teaches a model from scratch the form of a call and the copying of numbers;
``tiny_mixed.jsonl`` then adds the flaws that leave reinforcement learning something to find;
``calculator.jsonl`` answers questions such as those of ``assets/tasks/calculator_train.jsonl``, with their
system prompt. The same bytes every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from agentrl.quickstart.servers.arithmetic import evaluate
from agentrl.quickstart.tasks import CALCULATOR_TOOLS, QUESTION, expressions, worked_examples
from agentrl.quickstart.tiny import Conversation, tiny_sft_conversations

SFT_DIR = Path("assets/sft")
SEED = 11
COUNTS = {"tiny.jsonl": 768, "tiny_mixed.jsonl": 256, "calculator.jsonl": 128}


def example_files() -> dict[str, list[str]]:
    """The lines of every file, by its name."""
    made: dict[str, Iterable[Conversation]] = {
        "tiny.jsonl": tiny_sft_conversations(SEED, COUNTS["tiny.jsonl"], mixed=False),
        "tiny_mixed.jsonl": tiny_sft_conversations(SEED, COUNTS["tiny_mixed.jsonl"], mixed=True),
        "calculator.jsonl": map(_calculator, islice(expressions(SEED), COUNTS["calculator.jsonl"])),
    }
    return {name: [json.dumps(item) for item in conversations] for name, conversations in made.items()}


def _calculator(expression: str) -> Conversation:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    value = evaluate(expression)
    messages = [
        {"role": "system", "content": worked_examples()},
        {"role": "user", "content": QUESTION.format(expression)},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"<answer>{value}</answer>"},
    ]
    return {"messages": messages, "tools": CALCULATOR_TOOLS}


def main(argv: list[str]) -> int:
    """Write the files into the folder that ``argv`` names, or into ``assets/sft``."""
    folder = Path(argv[0]) if argv else SFT_DIR
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in example_files().items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
