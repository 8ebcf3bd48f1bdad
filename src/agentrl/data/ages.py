"""Ages of policy versions: optimizer steps between the weights that sampled and the weights that train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.store.client import Store


class VersionSteps:
    """Map each policy version to the step it was published at; ages count from it, also if it is withdrawn.

    Version numbers jump where a trainer resumes, and the steps behind them go back; ages do neither. Reads
    each version once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, int] = {}
        """{version: step}, ascending."""

    async def ages(self, versions: Iterable[int], step: int) -> dict[int, int]:
        """Return {version: age} for weights after ``step`` steps. Versions never published are left out."""
        wanted = set(versions)
        if not wanted <= self._steps.keys():
            await self._read()
        return {version: max(0, step - self._steps[version]) for version in wanted & self._steps.keys()}

    async def published_before(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return inclusive ranges of the versions published before ``step``, ascending."""
        await self._read()
        ranges: list[tuple[int, int]] = []
        is_open = False
        for version, published in self._steps.items():
            is_old = published < step
            if is_old:
                ranges.append((ranges.pop()[0], version) if is_open else (version, version))
            is_open = is_old
        return tuple(ranges)

    async def _read(self) -> None:
        newest = next(reversed(self._steps), -1)
        self._steps |= await self._store.policies.steps_above(newest)
