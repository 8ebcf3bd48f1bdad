"""The plot of a run's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe.plotting import StepMetrics, plot_curve, running_mean


def test_the_curve_is_a_picture_of_the_committed_steps(tmp_path: Path) -> None:
    steps = {number: {"reward": 0.25 * number, "staleness_mean": 0.5} for number in (1, 2, 3)}
    out = tmp_path / "plots" / "curve.png"
    plot_curve("demo", steps, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    vector = tmp_path / "curve.svg"
    plot_curve("demo", {1: steps[1]}, vector)
    assert "<svg" in vector.read_text(encoding="utf-8")
    plot_curve("demo", {1: steps[1], 2: steps[2]}, vector)
    assert "mean of 2 steps" in vector.read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [{}, {1: {}}, {1: {"loss": 0.5}}])
def test_a_run_without_a_reward_has_no_curve(steps: StepMetrics, tmp_path: Path) -> None:
    with pytest.raises(AgentRLError, match="no committed optimizer step"):
        plot_curve("demo", steps, tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["curve.notaformat", "file/curve.png"])
def test_a_plot_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_curve("demo", {1: {"reward": 1.0}}, tmp_path / name)


def test_running_mean_is_over_what_came_before() -> None:
    assert running_mean([1.0, 2.0, 6.0, 1.0], 3) == [1.0, 1.5, 3.0, 3.0]
