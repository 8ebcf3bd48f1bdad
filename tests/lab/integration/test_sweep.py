"""``agentrl sweep`` on a real database: two settings in a race, killed in its midst, and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from db_command import violations
from stored_run import StoredRun
from tiny_policy import write_tiny_policy
from waiting import until

from agentrl.errors import ConfigError
from agentrl.lab import lab_cli
from agentrl.lab.sweep import Sweep, read_sweep

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SWEEP = """
name: s
run: {run}
settings:
- learning_rate: 1.0e-3
- {{}}
eval:
  file: held_out.jsonl
  samples: 2
  flags: {{max_turns: 1, max_new_tokens: 4, prompt_reserve_tokens: 64, max_total_tokens: 4096}}
"""


@pytest.fixture
def run(mongo_uri: str, tmp_path: Path) -> Iterator[StoredRun]:
    """Two steps of two groups."""
    run = StoredRun(f"t{time.monotonic_ns()}", mongo_uri, write_tiny_policy(tmp_path / "base"), tmp_path)
    tasks = [
        json.dumps({"id": f"h{n}", "query": f"{n}?", "answer": f"{n}", "scorer": "exact"}) for n in "012"
    ]
    (tmp_path / "held_out.jsonl").write_text("\n".join(tasks))
    (tmp_path / "sweep.yml").write_text(SWEEP.format(run=run.name))
    asyncio.run(run.fill(4))
    run.train()
    yield run
    asyncio.run(run.drop(*children(read_sweep(tmp_path / "sweep.yml"))))


def children(sweep: Sweep) -> list[str]:
    return [sweep.child(setting, seed) for setting in sweep.all for seed in sweep.seeds]


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)


def output_of(words: Sequence[str]) -> bytes:
    process = start(words)
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 0
    return said


async def test_a_killed_sweep_goes_on_and_trains_no_finished_child_again(
    run: StoredRun, warm_python: Path
) -> None:
    """The first setting is killed in its first step; a what-if by hand has trained the second one before."""
    out = run.folder / "out"
    sweep = [
        str(warm_python), "-m", "agentrl",
        "sweep", str(run.folder / "sweep.yml"), "--output_dir", str(out), "--db_connection_string", run.uri,
    ]  # fmt: skip
    late, where = run.folder / "late.yml", ["--db_connection_string", run.uri, "--output_dir"]
    late.write_text(f"{SWEEP.format(run=run.name)}steps: 1-9\n")
    with pytest.raises(ConfigError, match="has trained 2 steps, and steps is 1-9"):
        await asyncio.to_thread(lab_cli.sweep, [str(late), *where, str(out)])
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        await asyncio.to_thread(lab_cli.sweep, [str(late), *where, str(late)])
    slow, same = children(read_sweep(run.folder / "sweep.yml"))
    run.whatif(same)
    trained = await run.steps(same)
    process = start(sweep)
    try:
        async with await run.open(slow) as store:
            await until(lambda: store.steps.find(), 200)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    state = json.loads(output_of([*sweep, "--state", "--json"]))
    assert not state["is_finished"]
    assert {each["run"]: each["is_trained"] for item in state["settings"] for each in item["runs"]} == {
        slow: False,
        same: True,
    }
    output_of([*sweep, "--parallel", "2"])
    found = json.loads((out / f"{run.name}_s.json").read_text())
    assert found["is_finished"]
    best, other = found["settings"]
    assert (best["flags"], other["flags"]) == ({"learning_rate": "0.001"}, {})
    assert best["best_minus_this"] is None
    assert other["best_minus_this"]["effect"]["value"] == 0.0, "random policies solve nothing"
    assert [each["steps"] for item in found["settings"] for each in item["runs"]] == [2, 2]
    assert await run.steps(same) == trained
    async with await run.open(slow) as store:
        assert [step.metrics["lr"] for step in await store.steps.find()] == [1e-3, 1e-3]
        assert await violations(store) == []
