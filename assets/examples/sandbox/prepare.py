"""Write the tasks of the sandbox example, and make its model: two layers that know the form of a program.

    python -m agentrl.base.installation examples/sandbox/prepare.py

Each task is a sum. The model writes ``print(57 + 83)``, the tool ``code_interpreter`` runs it in the sandbox,
and the model answers with what it printed. The warm-up shows correct conversations first, then guesses:
the reward starts low, and reinforcement learning finds out that running the program pays.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from demo.smollm import CHAT_TEMPLATE, install_template
from demo.tasks import QUESTION, tiny_expressions
from demo.tiny import build_tiny_model

HERE = Path(__file__).parent
TASKS = Path(".agentrl/examples/sandbox/tasks.jsonl")
MODEL = Path(".agentrl/models/sandbox-seed0")
TOOL = "code_interpreter"
SEED = 0
PHASES = ({"guesses": 0.0, "steps": 320, "rate": 3e-3}, {"guesses": 0.65, "steps": 60, "rate": 5e-4})
BATCH = 16


def tasks(count: int) -> Iterator[dict[str, Any]]:
    """Yield different sums; the answer of each is a number, and only the tool is offered."""
    seen: set[str] = set()
    for expression in tiny_expressions(3):
        if len(seen) == count:
            return
        if expression not in seen:
            seen.add(expression)
            yield {
                "id": f"sum-{len(seen):04d}",
                "query": QUESTION.format(expression),
                "answer": value(expression),
                "scorer": "exact",
                "tools": [TOOL],
            }


def conversations(count: int, guesses: float, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yield conversations of the warm-up; a share of ``guesses`` answers wrongly without a program."""
    rng = random.Random(f"{seed}/{guesses}")
    tools = [entry["tool_schema"] for entry in yaml.safe_load((HERE / "tools.yml").read_text())["tools"]]
    for expression, _ in zip(tiny_expressions(rng.getrandbits(32)), range(count), strict=False):
        question = {"role": "user", "content": QUESTION.format(expression)}
        if rng.random() < guesses:
            wrong = int(value(expression)) + rng.choice([-10, -2, -1, 1, 2, 10])
            yield {"messages": [question, answer(str(wrong))], "tools": tools}
            continue
        call = {"type": "function", "function": {"name": TOOL, "arguments": {"code": f"print({expression})"}}}
        yield {
            "messages": [
                question,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": value(expression)},
                answer(value(expression)),
            ],
            "tools": tools,
        }


def answer(text: str) -> dict[str, str]:
    """Return the assistant's last message."""
    return {"role": "assistant", "content": f"<answer>{text}</answer>"}


def value(expression: str) -> str:
    """Return the sum."""
    left, right = expression.split(" + ")
    return str(int(left) + int(right))


def make_model(scratch: Path) -> None:
    """Make the model with random weights, and warm it up in two phases of ``agentrl sft``."""
    model = build_tiny_model(scratch / "random", SEED)
    for number, phase in enumerate(PHASES):
        print(f"warm-up {number + 1} of {len(PHASES)}: {phase['steps']} steps", flush=True)
        file = scratch / f"phase{number}.jsonl"
        lines = conversations(int(phase["steps"]) * BATCH, phase["guesses"])
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        output = MODEL if phase is PHASES[-1] else scratch / f"phase{number}"
        command = [
            sys.executable, "-m", "agentrl", "sft", "--run_name", "sandbox-sft", "--seed", str(SEED),
            "--max_steps", str(phase["steps"]), "--batch_size", str(BATCH), "--max_tokens", "2048",
            "--learning_rate", str(phase["rate"]), "--lr_scheduler_type", "linear", "--warmup_steps", "5",
            "--model_name_or_path", str(model), "--train_file", str(file), "--output_dir", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=1800)
        model = output


def main() -> None:
    """Write what is missing."""
    TASKS.parent.mkdir(parents=True, exist_ok=True)
    TASKS.write_text("".join(f"{json.dumps(task)}\n" for task in tasks(256)), encoding="utf-8")
    if not (MODEL / "config.json").is_file():
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODEL.parent, prefix=".tmp-sandbox-") as scratch:
            make_model(Path(scratch))
    install_template(CHAT_TEMPLATE, MODEL)


if __name__ == "__main__":
    main()
