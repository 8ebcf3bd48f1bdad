"""Compare recipes with the executed code of the systems that they are named after: loss and gradient.

    python scripts/peers/compare.py --python PYTHON --sources FOLDER [SYSTEM …]

Called by ``scripts/peers/compare.sh``. Each system computes the step of the golden values (docs/losses.md)
with its own functions; ours is the loss that training computes. The exit status is 1 if a loss differs by
more than ``RELATIVE`` of it or a gradient by more than ``GRADIENT``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/core/unit/losses")]

import torch  # noqa: E402
from golden import RELATIVE, STEP, Example, batch_of  # noqa: E402
from recipes import CONFIGS  # noqa: E402
from token_batches import step_loss  # noqa: E402

from agentrl.config.schema import LossConfig  # noqa: E402
from agentrl.losses.settings import LossSettings  # noqa: E402

GRADIENT = 1e-5
"""Largest |difference| of a token's gradient."""

SECONDS = 300.0
"""Time limit of one system; most of it is imports."""

GRADIENT_ONLY = {"dppo": "verl writes it as −A·sg(ρ)·log πθ"}
"""Recipes whose loss has another value there, of the same gradient."""

SYSTEMS = ("verl", "trl", "areal", "slime", "prime_rl", "skyrl", "nemo_rl")


def padded(example: Example) -> str:
    """Return the step as ``losses.py`` reads it."""
    rows = sorted(set(example.row))
    width = max(example.row.count(row) for row in rows)

    def of(values: Sequence[float]) -> list[list[float]]:
        found = [[v for v, own in zip(values, example.row, strict=True) if own == row] for row in rows]
        return [[*row, *[0.0] * (width - len(row))] for row in found]

    names = ("advantages", "logprobs", "start", "behavior", "reference", "age")
    return json.dumps(
        {name: of(getattr(example, name)) for name in names} | {"mask": of([1] * len(example.row))}
    )


def ours(recipe: str) -> tuple[float, torch.Tensor]:
    """Return the loss of the step and its gradient, float32[tokens]."""
    settings = LossSettings.of(CONFIGS[recipe][LossConfig])
    batch = batch_of(STEP, settings)
    loss, _ = step_loss(batch, settings)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return loss.item(), gradient


def theirs(system: str, python: str, sources: Path) -> Mapping[str, Any]:
    """Return {recipe: its loss and gradient} that ``system`` computes. Raises SystemExit if it cannot."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("losses.py")), system, str(sources / system)],
        input=padded(STEP), capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{system}: its losses do not run\n{done.stderr[-2000:]}")
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("systems", nargs="*", default=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    given = parser.parse_args()
    wrong = 0
    print(f"{'recipe':16} {'system':9} {'theirs':>11} {'ours':>11} {'largest difference of gradients':>32}")
    for system in given.systems:
        for recipe, found in theirs(system, given.python, given.sources).items():
            loss, gradient = ours(recipe)
            apart = float((torch.tensor(found["gradient"]) - gradient).abs().max())
            is_same = recipe in GRADIENT_ONLY or abs(loss - found["loss"]) <= RELATIVE * abs(loss)
            is_equal = is_same and apart <= GRADIENT
            wrong += not is_equal
            mark = GRADIENT_ONLY.get(recipe, "") if is_equal else "differs"
            print(f"{recipe:16} {system:9} {found['loss']:11.6f} {loss:11.6f} {apart:32.1e}  {mark}".rstrip())
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
