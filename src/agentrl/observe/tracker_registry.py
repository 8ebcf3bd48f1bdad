"""Where trackers of metrics register: the interface, and the decorator ``@tracker``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agentrl.config.schema import RunConfig
from agentrl.registry import Registry


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's metrics, all of them finite numbers."""

    def close(self) -> None:
        """Flush and close."""


TrackerFactory = Callable[[RunConfig, Path, Mapping[str, Any]], Tracker]
"""Opens a tracker for a run, with its output folder and the parameters to show beside the run."""

TRACKERS: Registry[TrackerFactory] = Registry("tracker", group="agentrl.trackers", flag="--report_to")


def tracker(*names: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Register a class or function ``(RunConfig, output folder, parameters) -> Tracker`` under ``names``."""
    return TRACKERS.register(*names)
