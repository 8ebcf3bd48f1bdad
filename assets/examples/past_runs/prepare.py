"""Make the models and the tasks of this example: two random layers, and words to write.

    python -m agentrl.base.installation examples/past_runs/prepare.py

The reward is the share of vowels among the letters of a message, which random text has already: the run needs
no warm-up. The teacher has seen a few seconds of vowels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.tiny import build_tiny_model

FOLDER = Path(".agentrl/examples/past_runs")
MODEL, TEACHER = FOLDER / "model", FOLDER / "teacher"
WORDS = ("audio", "queue", "ocean", "idea", "piano", "radio", "cookie", "union")
TEACHER_STEPS, BATCH = 40, 16


def tasks(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield tasks; those with another ``first`` are held out."""
    for number in range(first, first + count):
        yield {
            "id": f"t{number}",
            "query": f"{WORDS[number % len(WORDS)]} {number}",
            "answer": "vowels",
            "scorer": "vowels:share",
        }


def lessons() -> Iterator[dict[str, Any]]:
    """Yield conversations of the teacher's training."""
    for number, task in enumerate(tasks(0, TEACHER_STEPS * BATCH)):
        said = "".join("aeiou"[(number + place) % 5] for place in range(6))
        yield {
            "messages": [{"role": "user", "content": task["query"]}, {"role": "assistant", "content": said}]
        }


def write(file: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Make what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write(FOLDER / "train.jsonl", tasks(0, 200))
    write(FOLDER / "held_out.jsonl", tasks(1000, 16))
    if not MODEL.is_dir():
        build_tiny_model(MODEL, 0, corpus=[*WORDS, "0123456789", "aeiou", "system user assistant"])
    if not TEACHER.is_dir():
        write(FOLDER / "lessons.jsonl", lessons())
        subprocess.run([
            sys.executable, "-m", "agentrl", "sft", "--run_name", "teacher",
            "--max_steps", str(TEACHER_STEPS), "--batch_size", str(BATCH), "--max_tokens", "2048",
            "--learning_rate", "2e-3", "--model_name_or_path", str(MODEL),
            "--train_file", str(FOLDER / "lessons.jsonl"), "--output_dir", str(TEACHER),
        ], check=True)  # fmt: skip


if __name__ == "__main__":
    main()
