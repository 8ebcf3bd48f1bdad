"""Draw a task set: how many squares are in the picture, and which colour are they?

python assets/examples/vision/make_tasks.py FOLDER [COUNT]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue", "black")
SIDE = 8
"""Pixels of a square, and of the gap around it."""


def draw(color: str, count: int, columns: int = 3) -> Image.Image:
    """Return a picture of ``count`` squares of ``color``."""
    rows = -(-count // columns)
    picture = Image.new("RGB", ((2 * columns + 1) * SIDE, (2 * rows + 1) * SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for number in range(count):
        left, top = (1 + 2 * (number % columns)) * SIDE, (1 + 2 * (number // columns)) * SIDE
        pen.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), fill=color)
    return picture


def make_tasks(folder: Path, count: int = 64, seed: int = 0) -> Path:
    """Write ``count`` pictures and ``tasks.jsonl``, which names them; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    lines = []
    for number in range(count):
        color, squares = rng.choice(COLORS), rng.randint(1, 9)
        draw(color, squares).save(folder / f"{number}.png")
        lines.append(
            json.dumps({
                "id": f"squares-{number}", "images": [f"{number}.png"], "answer": f"{squares} {color}",
                "query": "<image>How many squares are there, and which colour do they have? Answer such as"
                " <answer>3 red</answer>.",
                "scorer": "exact",
            })
        )  # fmt: skip
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(make_tasks(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64))
