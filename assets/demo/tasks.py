"""Generate the quickstart's task files, ``assets/tasks/*.jsonl``.

    python -m agentrl.base.installation demo/tasks.py

Each task is arithmetic with numbers of two digits and needs one call of the calculator and one answer.
SmolLM2-135M cannot solve it alone. It imitates a conversation better than it follows an instruction, so two
worked examples, as chat messages, precede its question. Every call writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.arithmetic import evaluate

TASK_DIR = Path("assets/tasks")
QUESTION = "What is {}?"
SMALLEST, LARGEST = 10, 99
EXAMPLES = ("5 * 7", "9 + 4")

CALCULATOR_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluates arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
"""The tool of the calculator server, in the form that a chat template receives."""


def expressions(
    seed: int | str, *, smallest: int = SMALLEST, largest: int = LARGEST, operators: str = "+-*"
) -> Iterator[str]:
    """Yield expressions such as ``37 * 48`` without end, chosen by ``seed``; never one of the examples."""
    rng = random.Random(seed)
    while True:
        left, right = rng.randint(smallest, largest), rng.randint(smallest, largest)
        expression = f"{left} {rng.choice(operators)} {right}"
        if expression not in EXAMPLES:
            yield expression


def tiny_expressions(seed: int | str) -> Iterator[str]:
    """Yield sums of three digits: all have one length, so that two layers soon learn to copy numbers."""
    return expressions(seed, smallest=50, operators="+")


def tool_call(expression: str) -> dict[str, Any]:
    """Return a call of the calculator as it stands in an assistant message."""
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return {"type": "function", "function": function}


def call_text(expression: str) -> str:
    """Return a call of the calculator in the Hermes format, as the chat template writes it."""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def conversation(asked: str, called: str | None = None) -> list[dict[str, Any]]:
    """Return a question, a call of the calculator with ``called`` (default: ``asked``), and its answer."""
    expression = called or asked
    result = evaluate(expression)
    return [
        {"role": "user", "content": QUESTION.format(asked)},
        {"role": "assistant", "content": "", "tool_calls": [tool_call(expression)]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"<answer>{result}</answer>"},
    ]


def worked_examples() -> list[dict[str, Any]]:
    """Return the messages in front of every question to the 135M model: an instruction, then examples."""
    examples = [message for expression in EXAMPLES for message in conversation(expression)]
    return [{"role": "system", "content": "Use the tool."}, *examples]


def make_tasks(
    name: str, count: int, candidates: Iterator[str], *, messages: list[dict[str, Any]], without: set[str]
) -> list[str]:
    """Return ``count`` different tasks as JSON lines; skip expressions in ``without``, and add to it."""
    lines: list[str] = []
    for expression in candidates:
        if len(lines) == count:
            break
        if expression in without:
            continue
        without.add(expression)
        task: dict[str, Any] = {
            "id": f"{name}-{len(lines):04d}",
            "query": QUESTION.format(expression),
            "answer": evaluate(expression),
            "scorer": "exact",
            "answer_schema": "answer",
            "agent_name": "react",
            "tools": ["calculator"],
            "max_turns": 2,
        }
        if messages:
            task["messages"] = messages
        lines.append(json.dumps(task))
    return lines


def task_files() -> dict[str, list[str]]:
    """Return {file name: its lines}; training and evaluation tasks have different questions."""
    asked: set[str] = set()
    examples = worked_examples()
    train = make_tasks("calc", 400, expressions(1), messages=examples, without=asked)
    held_out = make_tasks("eval", 64, expressions(2), messages=examples, without=asked)
    tiny = make_tasks("tiny", 512, tiny_expressions(3), messages=[], without=set())
    return {
        "calculator_train.jsonl": train,
        "calculator_eval.jsonl": held_out,
        "tiny_train.jsonl": tiny,
    }


def main(argv: list[str]) -> int:
    """Write the task files into folder ``argv[0]``; into ``assets/tasks`` if there is none."""
    folder = Path(argv[0]) if argv else TASK_DIR
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in task_files().items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
