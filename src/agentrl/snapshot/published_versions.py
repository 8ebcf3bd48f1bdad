"""Describe the newest policy versions of a run: their bytes, and the seconds until engines served them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.store.views.rows import StepRow

LAST_VERSIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """One published version: its size, what it cost the trainer, and which engines have served it."""

    version: int
    step: int
    encoding: str
    """``full``, ``delta`` or ``adapter``; ``tensor`` or ``distributed`` in the trainer's memory alone."""
    bytes: int
    """Of its files; 0 in the trainer's memory."""
    seconds_waited: float | None
    """How long the trainer waited for it; None before the next step is committed."""
    engines: int
    """Engines that have loaded it."""
    seconds_until_served: float | None
    """From its publication to the last of those engines that serves it; None without one."""


def published_versions(
    versions: Sequence[PolicyVersion], steps: Sequence[StepRow], engines: Sequence[InferenceService]
) -> list[PublishedVersion]:
    """Return the published ones of ``versions``, in their order; ``steps`` are committed, oldest first."""
    waited = {step.step: step.metric("seconds_publish") for step in steps}
    return [
        PublishedVersion(
            version=version.id,
            step=version.step,
            encoding=version.live.kind if version.live and not version.files else version.encoding,
            bytes=version.bytes,
            # The metrics of a step are those of the last publication before it.
            seconds_waited=waited.get(version.step + 1) if version.id > 0 else None,
            engines=len(seconds),
            seconds_until_served=max(seconds, default=None),
        )
        for version in versions
        if version.status is VersionStatus.PUBLISHED
        for seconds in [_seconds_until_served(version, engines)]
    ]


def _seconds_until_served(version: PolicyVersion, engines: Sequence[InferenceService]) -> list[float]:
    """Return the seconds of each engine. They are 0 if the trainer's clock is ahead of the server's."""
    return [
        max(0.0, (served.at - version.published_at).total_seconds())
        for engine in engines
        for served in engine.served
        if served.version == version.id
    ]
