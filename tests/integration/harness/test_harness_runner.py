"""The agent ``command``: small shell commands as harnesses, and how each of them ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_run import CALL, HarnessRun, write_harness

from agentrl.documents.harness import Ending
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.store.client import Store
from agentrl.tools.sandbox.local import namespace_problem

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(params=["namespaces", "limits"])
def isolation(request: pytest.FixtureRequest) -> str:
    problem = namespace_problem() if request.param == "namespaces" else None
    if problem is not None:
        pytest.skip(f"no namespaces here: {problem}")
    return str(request.param)


async def test_a_harness_answers_changes_files_and_is_scored_by_a_command(
    store: Store, tmp_path: Path, isolation: str
) -> None:
    template = tmp_path / "template"
    (template / "tests").mkdir(parents=True)
    (template / "sum.py").write_text("def total(a, b):\n    return a - b\n")
    (template / "tests" / "check.sh").write_text("grep -q 'a + b' sum.py\n")
    command = f"{CALL}\nsed -i 's/a - b/a + b/' sum.py; echo true > tests/check.sh; cat $HOME/.rc >&2"
    path = write_harness(
        tmp_path, command, workspace={"template": "template"}, isolation=isolation,
        files={"~/.rc": "${AGENTRL_MODEL} of ${HOME}\n"},
        score={"command": "sh tests/check.sh", "restore": ["tests"]},
    )  # fmt: skip
    record = await HarnessRun(store, path).run()
    assert record.status is RecordStatus.SCORED, record.failure
    assert (record.score, record.stop_reason, record.turns) == (1.0, StopReason.ANSWERED, 1)
    assert record.final_answer == "the answer"
    run = record.harness
    assert run is not None
    assert run.scoring is not None
    assert (run.run.ended, run.scoring.ended) == (Ending.EXITED, Ending.EXITED)
    assert run.run.stdout == "the answer\n"
    assert run.run.stderr == "policy of ${HOME}\n"
    assert run.changed_files == ("sum.py", "tests/check.sh")
    assert "-    return a - b\n+    return a + b\n" in run.diff
