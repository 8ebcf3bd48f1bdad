"""What a trainer takes its data from: the live stream of its run, or the stored steps of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.data.window import Window
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData, StepOrigin

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True)
class StepData:
    """The groups of one step. ``is_rest``: sampling has ended and left fewer groups than a step takes."""

    groups: tuple[str, ...]
    data: tuple[DBRecordData, ...]
    ages: Mapping[int, int]
    """{version: age in optimizer steps}, for every policy version in ``data``."""
    is_rest: bool
    recorded: StepOrigin | None = None
    """The stored step that trained the data in another run; None for data of this run."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """New scores of Records that the other run scored otherwise, by ``_id``."""


class StepSource(Protocol):
    """``data.stream.DataStream`` or ``data.recorded.RecordedStream``."""

    end: str
    """What is true at the end of the data, as the log says it."""

    def prefetch(self, step: int) -> None:
        """Start to wait for the data of ``step``."""

    async def take(self, step: int) -> StepData | None:
        """Return the data of ``step``; None at the end of the data."""

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Prefer groups other than those of ``data_ids``, whose step was skipped."""

    async def close(self) -> None:
        """Stop prefetching."""

    async def images(self, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
        """Return the images of ``data`` by hash."""

    async def window(self, batch: StepData) -> Window:
        """Return the groups that the metrics of ``batch`` count."""

    async def report(self, step: int, batch: StepData, window: Window) -> dict[str, Any]:
        """Return what ``step`` reports of sampling and of its source."""


async def images_of(store: Store, data: Sequence[DBRecordData]) -> Mapping[str, Image]:
    """Return the images of ``data`` by hash. Raises ImageError for one that ``store`` does not hold."""
    named = {image.sha256 for item in data for image in item.images}
    return await store.images.get(named) if named else {}
