"""Ages of policy versions: how many optimizer steps the weights that train are past those that sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.store.client import Store


class VersionSteps:
    """The step that each version was published at. An age counts from it, also that of a withdrawn version.

    Version numbers jump where a trainer resumes, and the steps behind them go back; ages do neither. Reads
    each version once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, int] = {}
        """By version, ascending."""

    async def ages(self, versions: Iterable[int], step: int) -> dict[int, int]:
        """{version: age} of those ``versions`` that were published, for weights of ``step`` steps."""
        wanted = set(versions)
        if not wanted <= self._steps.keys():
            await self._read()
        return {version: max(0, step - self._steps[version]) for version in wanted & self._steps.keys()}

    async def published_before(self, step: int) -> tuple[tuple[int, int], ...]:
        """Inclusive ranges of the versions that were published before ``step``, ascending."""
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
