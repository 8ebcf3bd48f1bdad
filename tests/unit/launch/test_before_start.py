"""What is refused before any process of a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError, ModelError
from agentrl.launch.before_start import require_teacher


def test_a_teacher_is_there_and_trajectories_wait_for_it(tmp_path: Path) -> None:
    require_teacher(str(tmp_path), ("teacher",))
    require_teacher("http://gpu7:30000", ("teacher",))
    with pytest.raises(ModelError, match="which is not a folder"):
        require_teacher("Qwen/Qwen3-8B", ("teacher",))
    with pytest.raises(ConfigError, match="no trajectory would wait for it"):
        require_teacher(str(tmp_path), ())
