"""Relative: a run's parent or one of its children, as the ``Run`` collections of both name each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from agentrl.documents.base import Root, now

PARENT: Final = "parent"
"""``_id`` of the document in a child's ``Run`` that names its parent."""
CHILD_PREFIX: Final = "child/"
"""Begins the ``_id`` of each document in a parent's ``Run`` that names a child."""

Kinship = Literal["fork", "whatif"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative(Root):
    """Where a child begins, and what it reads of its parent. The child and the parent hold the same values.

    In the child's ``Run`` it is the document ``parent``, and ``run`` names the parent. In the parent's it is
    ``child/NAME``, and ``run`` names the child; the parent keeps the checkpoint and the data that it names.
    """

    id: str
    run: str
    """The other run, a database of the same server."""
    kind: Kinship
    step: int
    """The child's weights begin as the parent's after this many optimizer steps."""
    checkpoint: str
    """Absolute path of the parent's checkpoint of that step; empty for step 0, which is the base model."""
    steps: tuple[int, ...] = ()
    """``whatif``: the first and the last step of the parent whose data the child trains; else empty."""
    since: int = 0
    """``whatif``: the step from which ``changed`` holds; earlier ones are trained with the parent's flags."""
    without: tuple[str, ...] = ()
    """``whatif``: ``_id`` of Records of the parent that the child leaves out."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Flag → [the parent's value, the child's value]."""
    at: datetime = field(default_factory=now)

    @property
    def shown(self) -> str:
        """``NAME, fork at step 40``."""
        of_steps = f" of steps {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        return f"{self.run}, {self.kind}{of_steps or f' at step {self.step}'}"


def child_key(name: str) -> str:
    """Return the ``_id`` in the parent's ``Run`` of the document that names the child ``name``."""
    return f"{CHILD_PREFIX}{name}"
