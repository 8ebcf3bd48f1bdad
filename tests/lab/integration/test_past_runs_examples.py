"""The examples that look back at a run, as a reader starts them: every command of their ``run.sh``."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient
from stored_run import StoredRun

ASSETS = Path(__file__).parents[3] / "assets"
RUNS = ("", "_fork", "_gspo", "_without", "_student", "_student_dpo")
SECONDS = 280

pytestmark = pytest.mark.integration


@pytest.fixture
def past(mongo_uri: str, tmp_path: Path) -> Iterator[StoredRun]:
    """The run of past_runs, which its script makes; the databases of both examples are dropped at the end."""
    past = StoredRun(f"t{uuid.uuid4().hex[:12]}", mongo_uri, tmp_path / "model", tmp_path)
    (tmp_path / "assets").symlink_to(ASSETS)
    yield past
    with MongoClient[dict[str, object]](mongo_uri) as client:
        for name in RUNS:
            client.drop_database(past.name + name)


def run_script(example: str, run: str, past: StoredRun, python: Path) -> str:
    """Run an example's script in a folder that has the shipped files alone; return its output."""
    environment = {
        **os.environ, "AGENTRL_VENV": str(python.parents[1]), "MONGO_URI": past.uri, "RUN_NAME": run,
        "SAMPLERS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    log, script = past.folder / f"{example}.txt", past.folder / "assets" / "examples" / example / "run.sh"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["bash", str(script)], env=environment, stdout=sink, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    output = log.read_text(encoding="utf-8", errors="replace")
    assert code == 0, output[-6000:]
    return output


@pytest.mark.timeout(600)
async def test_every_command_of_the_examples(past: StoredRun, warm_python: Path) -> None:
    said = run_script("past_runs", past.name, past, warm_python)
    assert "0 violations" in said.splitlines()[-1]
    assert "the run is back at step" in said
    blamed = (past.folder / f".agentrl/examples/past_runs/{past.name}-blamed.txt").read_text().split()
    assert len(blamed) == 5
    steps = await past.steps()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert {*blamed}.isdisjoint(key for step in steps for key in step.data)
    async with await past.open() as store:
        assert sorted(await store.database["Tombstone"].distinct("_id")) == sorted(blamed)
        assert await store.ancestry.living_children() == []

    student = f"{past.name}_student"
    said = run_script("teacher_student", student, past, warm_python)
    assert "0 violations" in said.splitlines()[-1]
    for name, metric in ((student, "kl_teacher"), (f"{student}_dpo", "kl_reference")):
        steps = await past.steps(name)
        assert [step.step for step in steps if metric in step.metrics] == [1, 2, 3, 4, 5, 6]
