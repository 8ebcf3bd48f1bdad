"""What blame refuses, before it loads any weights; scripts/bench/blame.py --quick runs the rest.

And what commands that compute refuse before they import torch.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_run import add_task, claim, publish, score
from tiny_policy import write_tiny_policy
from training_data import training_configs

from agentrl.config.agreement import public_flags
from agentrl.config.load import Configs
from agentrl.config.schema import GroupConfig, ModelConfig, RunConfig
from agentrl.documents.run import Evaluation
from agentrl.documents.training import StepOrigin, TrainStep
from agentrl.errors import ConfigError
from agentrl.lab import lab_cli
from agentrl.lab.blame import blame
from agentrl.lab.flags import BlameConfig
from agentrl.observe.progress import Parts
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def evaluate(store: Store, step: int | None, scores: Mapping[str, float]) -> str:
    """Store a finished evaluation of a step, with one trajectory for each task."""
    split = f"eval-v{step or 0:06d}-{'step' if step is not None else 'folder'}"
    evaluation = Evaluation(
        id=split, version=step, step=step, model=None, file="test.jsonl", tasks_digest="t",
        settings_digest="s", samples=1, right_threshold=0.5,
    )  # fmt: skip
    await store.evaluations.begin(evaluation)
    for order, (name, value) in enumerate(scores.items()):
        await add_task(store, f"{split}/0/{name}", order, generations=1)
        await score(store, await claim(store, split), value)
    await GroupFinalizer(store, GroupConfig(), split=split, seed=0).run_waiting()
    await store.evaluations.end(split, {"total": {}})
    return split


async def refused(run_config: RunConfig, a: str, b: str, changes: str = "fell") -> str:
    """Return why blame refuses."""
    flags = BlameConfig(changes=changes)  # type: ignore[arg-type]
    configs = Configs([*training_configs(run_config), flags])
    with pytest.raises(ConfigError) as caught:
        await blame(configs, a, b, Parts("blame", asyncio.Event()))
    return str(caught.value)


async def test_blame_says_why_it_has_nothing_to_rank(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await publish(store, tmp_path, 0, step=0, train_step=None)
    a = await evaluate(store, 0, {"right": 1.0, "wrong": 0.0})
    b = await evaluate(store, 2, {"right": 1.0, "wrong": 0.5})
    other = await evaluate(store, 3, {"another": 0.5})
    folder = await evaluate(store, None, {"right": 1.0})
    assert "no step of the run leads to it" in await refused(run_config, a, folder)
    assert "name the evaluation of the earlier version first" in await refused(run_config, b, a)
    assert "has no committed step from 1 to 2" in await refused(run_config, a, b)
    await store.steps.plan(TrainStep(id="1/1", step=1, policy_version=0, data=(), owner="me"))
    await store.steps.commit("1/1", {}, ())
    assert "does not hold the flags of the trainer of step 1" in await refused(run_config, a, b)
    model = ModelConfig(model_name_or_path=str(write_tiny_policy(tmp_path / "base")))
    own = public_flags(training_configs(run_config, model))
    await store.settings.join("train", own, given=(), packages={})
    assert "the mean score of no task fell" in await refused(run_config, a, b)
    assert "have no scored task in common" in await refused(run_config, a, other)
    assert "the training data of steps 1 to 1 are deleted" in await refused(run_config, a, b, "rose")
    origin = StepOrigin(run="parent", train_step="1/2", step=2)
    again = TrainStep(id="1/2", step=2, policy_version=1, data=(), owner="me", recorded=origin)
    await store.steps.plan(again)
    await store.steps.commit("1/2", {}, ())
    assert "blame evaluations of parent" in await refused(run_config, a, b)


def test_the_command_takes_a_run_and_two_evaluations() -> None:
    with pytest.raises(ConfigError, match="takes a run and two evaluations, and 1 words are given"):
        lab_cli.blame(["math", "--top", "3"])


def test_files_and_labels_are_checked_before_anything_is_computed(tmp_path: Path) -> None:
    for flags, problem in (
        (["--out", str(tmp_path)], "it is a folder"), (["--csv", str(tmp_path)], "it is a folder"),
        (["--label", "x" * 65], "the label has 65 characters"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            lab_cli.blame(["nowhere", "1", "2", *flags])


WITHOUT_TORCH = """
import json, sys
from agentrl.cli.main import main
for words in json.loads(sys.argv[1]):
    print(words, main(words), "torch" in sys.modules)
"""


def test_wrong_names_are_refused_without_torch(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    """Importing torch takes seconds: commands that compute look up runs, evaluations and folders before."""
    server = ["--db_connection_string", run_config.db_connection_string, "--log_dir", str(tmp_path / "logs")]
    empty = str(tmp_path / "empty")
    refusals = {
        "there is no run 'nosuch'": ["blame", "nosuch", "1", "2", *server],
        "there is no run 'no_such'": ["whatif", "no_such", *server],
        "there is no run 'none_such'": ["whatif", "--compare", "none_such", *server],
        "has no finished evaluation named '17'": ["blame", run_config.run_name, "17", "18", *server],
        "has no trained step": ["whatif", run_config.run_name, *server],
        "is not a what-if": ["whatif", "--compare", run_config.run_name, *server],
        f"--model_name_or_path {empty}1 is not a folder": ["parity", "--model_name_or_path", f"{empty}1"],
        f"--model {empty}2 is not a folder": ["plan", "--model", f"{empty}2", "--gpus", "H100"],
        f"{empty}3 is not a model folder": [
            "teach", "--run_name", "nosuch", "--model_name_or_path", empty, "--teacher", f"{empty}3", *server
        ],
    }  # fmt: skip
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*refusals.values()])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=True)
    answers = [line.split()[-2:] for line in ended.stdout.splitlines()]
    assert len(answers) == len(refusals)
    assert all(int(code) > 0 and torch == "False" for code, torch in answers)
    for said in refusals:
        assert said in ended.stderr
