"""A fixed run trains the same losses, bit for bit."""

import json
import subprocess
from pathlib import Path

import pytest
from train_dump import LOSSES, ROOT, STEPS, made_here


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_fixed_run_trains_the_same_losses_bit_for_bit(warm_python: Path) -> None:
    """Where torch or the CPU are others than those of ``losses.json``, rounding may differ, up to 1e-5."""
    script = ROOT / "tests" / "unmoved" / "train_dump.py"
    done = subprocess.run(
        [str(warm_python), str(script)], cwd=ROOT, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
    before = json.loads(LOSSES.read_text(encoding="utf-8"))
    if made_here().items() <= before.items():
        assert done.stdout.rstrip().endswith(f"bit-equal: {STEPS} of {STEPS}"), done.stdout
