"""Ages of policy versions: how many optimizer steps the weights that train are past those that sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.store.client import Store


class VersionSteps:
    """The step that each version was published at: an age counts from it, also of a withdrawn version.

    Version numbers may jump when a trainer resumes, steps do not. Reads each version once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, int] = {}
        self._newest = -1

    async def ages(self, versions: Iterable[int], step: int) -> dict[int, int]:
        """{version: age} of those ``versions`` that were published, for weights of ``step`` steps."""
        wanted = set(versions)
        if not wanted <= self._steps.keys():
            await self._read()
        return {number: max(0, step - self._steps[number]) for number in sorted(wanted & self._steps.keys())}

    async def _read(self) -> None:
        self._steps |= await self._store.policies.steps_above(self._newest)
        self._newest = max(self._steps, default=-1)
