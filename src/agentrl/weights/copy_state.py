"""What a host's copy of the weights holds, as its ``state.json`` says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.documents.run import PolicyVersion

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boot() -> str:
    """Return what identifies the time since the host was started: what was not on disk then is lost."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class CopyState:
    """What a copy holds: ``version``, in which the deltas ``applying`` may have been applied in part."""

    version: int | None = None
    identity: str | None = None
    applying: tuple[int, ...] = ()
    boot: str = field(default_factory=_boot)

    @classmethod
    def of(cls, version: PolicyVersion) -> CopyState:
        return cls(version.id, identity_of(version))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CopyState:
        """Return a stored state; nothing is held if the host was started again since."""
        state = cls(**(dict(value) | {"applying": tuple(value["applying"])}))
        return state if state.boot == _boot() else cls()

    def holds(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` was the last one that was whole; deltas may be half applied to it."""
        return (self.version, self.identity) == (version.id, identity_of(version))

    def is_whole(self, version: PolicyVersion) -> bool:
        """Whether ``version`` is held, and nothing else."""
        return self.holds(version) and not self.applying

    def rest_of(self, chain: list[PolicyVersion]) -> list[PolicyVersion]:
        """Return the deltas of ``chain`` that lead on from what is held; all of it if none do."""
        held = next((place for place, step in enumerate(chain) if self.holds(step)), None)
        rest = [] if held is None else chain[held + 1 :]
        leads_on = rest and tuple(step.id for step in rest)[: len(self.applying)] == self.applying
        return rest if leads_on else chain


def identity_of(version: PolicyVersion) -> str:
    files = "".join(f"{file.name}:{file.sha256}\n" for file in version.files)
    return version.digest or hashlib.sha256(files.encode()).hexdigest()
