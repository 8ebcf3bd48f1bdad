"""The example: unmodified mini-swe-agent fixes a bug; it is recorded exactly and trains in one chain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installed_harnesses import ROOT, InstalledRun, call

from agentrl.documents.record import Ending
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(100)]

EXAMPLE = ROOT / "assets" / "examples" / "mini_swe_agent"
COMMANDS = [
    "cat intervals.py",
    "sed -i 's/return last - first/return max(0, last - first + 1)/' intervals.py",
    "python3 -m unittest tests/test_intervals.py; echo '' > tests/test_intervals.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
]
VENV = Path(os.environ.get("AGENTRL_HARNESS_VENV") or ROOT / ".venv-harnesses")


def next_command(prompt: str) -> str:
    """Run the next command; the thought before it is not what a tokenizer would encode."""
    turn = prompt.count("<|im_start|>assistant") - 1
    return f"THOUGHT: step {turn + 1}.\n\n{call('bash', command=COMMANDS[turn])}"


async def test_mini_swe_agent_fixes_a_bug_and_is_recorded_exactly(store: Store) -> None:
    if not (VENV / "bin" / "mini").exists():
        pytest.skip("mini-swe-agent is not installed; run: bash scripts/setup_harnesses.sh mini-swe-agent")
    run = InstalledRun(store, EXAMPLE / "harness.yml", next_command)
    record = await run.run("length(3, 5) in intervals.py returns 2. Fix it.", "")
    assert record.failure is None, record.failure.message
    assert (record.status, record.stop_reason, record.score) == (
        RecordStatus.SCORED,
        StopReason.ANSWERED,
        1.0,
    )
    assert record.harness is not None
    assert record.harness.scoring is not None
    assert record.harness.scoring.ended is Ending.EXITED
    assert "Ran 2 tests" in record.harness.scoring.stderr
    assert "+    return max(0, last - first + 1)" in record.harness.diff
    assert record.harness.changed_files == ("intervals.py", "tests/test_intervals.py")
    assert len(run.main) == len(run.calls) == len(COMMANDS)
    run.check_exact(record)
