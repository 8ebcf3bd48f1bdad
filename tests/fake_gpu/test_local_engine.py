"""The local engine on a GPU that is not there: nothing that it computes is on another device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policy import write_tiny_policy

from fake_gpu.conftest import Fake

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(300)]


def test_a_prompt_and_a_running_sequence_on_a_fake_gpu(run_fake: Fake, tmp_path: Path) -> None:
    [found] = run_fake("fake_engine", str(write_tiny_policy(tmp_path / "model")))
    assert (found["device"], found["mixed"]) == ("cuda:0", {})
    assert found["shape"][0] == 2
