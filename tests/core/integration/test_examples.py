"""Every example under assets/examples, loaded by its flag, in a run that samples and trains two steps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unmoved.train_dump import make_model

from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

EXAMPLES = Path(__file__).parents[3] / "assets" / "examples"
FLAGS = {
    "sample": (
        "--agent_name", "custom_agent:second_look", "--new_context", "custom_context_manager:keep_latest",
        "--tools", "custom_tool:Calculator", "--advantage", "custom_advantage:difficulty_weighted",
        "--group_filter", "custom_group_filter:finished_and_tried",
    ),
    "train": (
        "--loss_calculater", "custom_loss:dr_grpo", "--loss_args", '{"clip": 0.3}', "--max_steps", "2",
        "--data_wait_seconds", "150",
    ),
    "serve": (),
}  # fmt: skip
SMALL = (
    "--groups_per_step", "2", "--num_generations", "4", "--max_staleness", "9", "--max_turns", "4",
    "--max_prompt_tokens", "160", "--prompt_reserve_tokens", "48", "--max_new_tokens", "40",
    "--max_tokens", "2048", "--min_score_spread", "0", "--drop_zero_advantage", "false",
    "--publish_steps", "1", "--save_steps", "100",
)  # fmt: skip


@pytest.fixture
def processes(
    run_config: RunConfig, tmp_path: Path, warm_python: Path
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """An engine, a sampler and a trainer of one run; killed at the end."""
    model = make_model(tmp_path / "model")
    tasks = tmp_path / "tasks.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "id": f"sum{number}", "query": f"What is {50 + number} + {99 - 2 * number}?",
            "answer": str(149 - number), "answer_schema": "answer",
            "scorer": "custom_scorer:close_number", "needs_tools": True,
        }
        for number in range(12)
    ]  # fmt: skip
    tasks.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    common = [
        "--run_name", run_config.run_name, "--db_connection_string", str(run_config.db_connection_string),
        "--output_dir", str(run_config.output_dir), "--log_dir", run_config.log_dir,
        "--model_name_or_path", str(model), *SMALL,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    started = {}
    for command, own in FLAGS.items():
        more = ("--train_file", str(tasks)) if command == "sample" else ()
        with (tmp_path / f"{command}.txt").open("wb") as sink:
            started[command] = subprocess.Popen(
                [str(warm_python), "-m", "agentrl", command, *common, *own, *more],
                env=environment, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip
    yield started
    for process in started.values():
        process.kill()
        process.wait(10)


def test_an_example_has_thirty_lines_at_most() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) >= 9
    assert [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 30] == []


@pytest.mark.timeout(240)
async def test_the_examples_sample_and_train_two_steps(
    store: Store, processes: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    try:
        code = processes["train"].wait(200)
    except subprocess.TimeoutExpired:
        code = None
    output = "".join((tmp_path / f"{name}.txt").read_text(errors="replace")[-3000:] for name in FLAGS)
    assert code == 0, output
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == 2
    database = store.database
    records = [item async for item in database["Record"].find({"status": "ready"})]
    assert {item["score_details"]["scorer"] for item in records} == {"custom_scorer:close_number"}
    assert any(item["score"] == 1 for item in records)
    calls = [item async for item in database["DispatchedSamplingTask"].find({})]
    used = [execution for call in calls for execution in call["tool_executions"]]
    assert {item["server"] for item in used} == {"Calculator"}
    contents = [message.get("content") or "" for call in calls for message in call["messages"]]
    assert any(content.startswith("Check your") for content in contents)
    assert any(call["parent"] is None and call["index"] > 0 for call in calls), "no context was reset"
    groups = [item["group"] async for item in database["Task"].find({"group.outcome": "trained"})]
    assert {group["rules"]["advantage"] for group in groups} == {"custom_advantage:difficulty_weighted"}
    assert {group["rules"]["group_filter"] for group in groups} == {"custom_group_filter:finished_and_tried"}
