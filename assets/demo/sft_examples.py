"""Generate conversations with a calculator for fine-tuning; write them to ``assets/sft/*.jsonl``.

    python -m agentrl.base.installation demo/sft_examples.py

``tiny.jsonl`` teaches a model with random weights the form of a tool call and the copying of numbers.
``tiny_mixed.jsonl`` adds mistakes, so that reinforcement learning has something to improve.
``calculator.jsonl`` answers questions such as those of ``assets/tasks/calculator_train.jsonl``, behind
the same examples, which are context: ``train: false``. Every call writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from demo.arithmetic import evaluate
from demo.tasks import (
    CALCULATOR_TOOLS,
    QUESTION,
    conversation,
    expressions,
    tiny_expressions,
    worked_examples,
)

SFT_DIR = Path("assets/sft")
SEED = 11
COUNTS = {"tiny.jsonl": 768, "tiny_mixed.jsonl": 256, "calculator.jsonl": 128}
MIXTURE = {"right": 0.3, "guess": 0.65, "wrong call": 0.05}
"""Fraction of each kind of conversation in the mixed phase."""

Conversation = dict[str, Any]
"""One line of an SFT file: ``{"messages": [...], "tools": [...]}``."""


def example_files() -> dict[str, list[str]]:
    """Return {file name: its lines}."""
    made: dict[str, Iterable[Conversation]] = {
        "tiny.jsonl": tiny_sft_conversations(SEED, COUNTS["tiny.jsonl"], mixed=False),
        "tiny_mixed.jsonl": tiny_sft_conversations(SEED, COUNTS["tiny_mixed.jsonl"], mixed=True),
        "calculator.jsonl": map(_calculator, islice(expressions(SEED), COUNTS["calculator.jsonl"])),
    }
    return {name: [json.dumps(item) for item in conversations] for name, conversations in made.items()}


def tiny_sft_conversations(seed: int, count: int, *, mixed: bool) -> Iterator[Conversation]:
    """Yield ``count`` conversations about arithmetic: a question, a tool call, its result and an answer.

    Without ``mixed`` all are correct and teach the form of a call. With ``mixed`` most guess instead of
    calling the tool, and a few call it with a wrong expression, so that the model is correct only sometimes
    and reinforcement learning has something to improve.
    """
    rng = random.Random(f"{seed}/{mixed}")
    for expression, _ in zip(tiny_expressions(rng.getrandbits(32)), range(count), strict=False):
        kind = rng.choices(tuple(MIXTURE), weights=tuple(MIXTURE.values()))[0] if mixed else "right"
        yield {"messages": _messages(rng, expression, kind), "tools": CALCULATOR_TOOLS}


def _messages(rng: random.Random, expression: str, kind: str) -> list[dict[str, Any]]:
    question = {"role": "user", "content": QUESTION.format(expression)}
    if kind == "guess":
        return [question, _answer(_wrong(rng, evaluate(expression)))]
    return conversation(expression, _wrong_call(rng, expression) if kind == "wrong call" else None)


def _answer(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def _wrong(rng: random.Random, value: str) -> str:
    """Return another number of about the same size."""
    return str(int(value) + rng.choice([-10, -2, -1, 1, 2, 10]))


def _wrong_call(rng: random.Random, expression: str) -> str:
    """Return the expression with another second number."""
    left, operator, right = expression.split()
    return f"{left} {operator} {_wrong(rng, right)}"


def main(argv: list[str]) -> int:
    """Write the files into folder ``argv[0]``; into ``assets/sft`` if there is none."""
    folder = Path(argv[0]) if argv else SFT_DIR
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in example_files().items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _calculator(expression: str) -> Conversation:
    shown = [
        {**message, "train": False} if message["role"] == "assistant" else message
        for message in worked_examples()
    ]
    messages = [*shown, *conversation(expression)]
    return {"messages": messages, "tools": CALCULATOR_TOOLS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
