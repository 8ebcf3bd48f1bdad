"""Which folders of a run's output are checkpoints, and in which order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from agentrl.documents.training import (
    STATE,
    CheckpointState,
    checkpoint_folders,
    read_checkpoint,
    read_checkpoints,
)
from agentrl.errors import ConfigError

NAMES = (
    "checkpoint-000010", "checkpoint-000002", "checkpoint-000004-3", "undone-checkpoint-000012",
    ".tmp-checkpoint-000013-7", "checkpoint-best", "weights",
)  # fmt: skip
STATE_7 = CheckpointState(run_name="r", step=7, policy_version=6, train_steps=("1/1",), architecture={})


def write(folder: Path, text: str = "{}") -> None:
    folder.mkdir()
    (folder / STATE).write_text(text)


def test_the_last_trainers_newest_checkpoint_is_last(tmp_path: Path) -> None:
    for name in NAMES:
        write(tmp_path / name)
    (tmp_path / "checkpoint-000020").mkdir()  # not complete
    first = ["checkpoint-000002", "checkpoint-000010"]
    assert [path.name for path in checkpoint_folders(tmp_path)] == [*first, "checkpoint-000004-3"]
    assert [path.name for path in checkpoint_folders(tmp_path, attempt=2)] == first
    found = [path.name for path in checkpoint_folders(tmp_path, undone=True)]
    assert found == [*first, "undone-checkpoint-000012", "checkpoint-000004-3"]
    assert checkpoint_folders(tmp_path / "missing") == []


def test_a_state_is_read_with_or_without_an_attempt(tmp_path: Path) -> None:
    state = dataclasses.replace(STATE_7, attempt=2)
    content = dataclasses.asdict(state)
    write(tmp_path / state.folder_name, json.dumps(content | {"of_later": 1}))
    assert [item.state for item in read_checkpoints(tmp_path)] == [state]
    del content["attempt"]
    write(tmp_path / "checkpoint-000007", json.dumps(content))
    assert read_checkpoint(tmp_path / "checkpoint-000007").state == dataclasses.replace(state, attempt=1)


def test_renamed_and_unfinished_checkpoints_are_read_too(tmp_path: Path) -> None:
    for step, name in enumerate(NAMES):
        write(tmp_path / name, json.dumps(dataclasses.asdict(dataclasses.replace(STATE_7, step=step))))
    assert [item.folder.name for item in read_checkpoints(tmp_path)] == [*NAMES[:3], "checkpoint-best"]
    assert [item.folder.name for item in read_checkpoints(tmp_path, undone=True)] == list(NAMES[:-1])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": 1}'])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path / "checkpoint-000001", text)
    with pytest.raises(ConfigError, match=r"checkpoint-000001/state\.json cannot be read"):
        read_checkpoints(tmp_path)
