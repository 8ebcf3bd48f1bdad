"""What is refused before any process of a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS
from agentrl.errors import ConfigError, ModelError
from agentrl.local import launch
from agentrl.local.launch import prepare, require_teacher


@pytest.mark.parametrize(
    ("flags", "says"),
    [({"mini_batches": 9}, "--mini_batches 9"), ({"import_modules": "nosuch"}, "--import_modules")],
)
def test_flags_of_training_are_checked_before_a_model_is_fetched(
    flags: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "demo_model", lambda: pytest.fail("fetched"))
    with pytest.raises(ConfigError, match=says):
        prepare("train", [], Configs.of(GROUPS, flags, flags), {})


def test_a_teacher_is_there_and_trajectories_wait_for_it(tmp_path: Path) -> None:
    require_teacher(str(tmp_path), ("teacher",))
    require_teacher("http://gpu7:30000", ("teacher",))
    with pytest.raises(ModelError, match="which is not a folder"):
        require_teacher("Qwen/Qwen3-8B", ("teacher",))
    with pytest.raises(ConfigError, match="no trajectory would wait for it"):
        require_teacher(str(tmp_path), ())
