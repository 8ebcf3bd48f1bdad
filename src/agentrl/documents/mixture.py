"""A mixture: sources of tasks with weights, gates and pools, as its YAML file and as the run stores it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from agentrl.base.validation import (
    Number,
    Positive,
    PositiveWhole,
    SettingsModel,
    Text,
    broken,
    read_settings,
)
from agentrl.documents.document import Document
from agentrl.errors import nearest

MIXED_SPLIT: Final = "train"
"""The split whose tasks may be a mixture."""
SUFFIXES: Final = (".yml", ".yaml")
"""The ends of a task source that is a mixture."""
# Begin with a letter: an epoch of a source is stored as ``train/1/NAME``.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_HINT = "a mixture has sources: NAME: with path, and weight, gate, pools, task_preset, task_fields if needed"

_ADDRESS = re.compile("(env|hf):")

Share = Annotated[Number, Field(ge=0, le=1)]


def is_mixture(path: str | Path) -> bool:
    """Return whether a task source is a mixture of others: a file, not an address that names one."""
    return str(path).endswith(SUFFIXES) and not _ADDRESS.match(str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGate(Document, SettingsModel):
    """A source opens when the last ``groups`` groups of ``source`` have ``pass_rate`` on average."""

    source: str
    pass_rate: Annotated[Number, Field(gt=0, le=1)]
    groups: PositiveWhole = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWeight(SettingsModel):
    """The pool of tasks whose last pass rate is at most ``threshold``, and above those of other pools."""

    threshold: Share
    weight: Share
    """The share of these tasks that a pass over the source samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings(SettingsModel):
    """One source in a mixture's file."""

    path: Text
    """Any task source but a mixture; a path is relative to the mixture's file."""
    weight: Positive = 1.0
    gate: SourceGate | None = None
    pools: dict[str, PoolWeight] = field(default_factory=dict)
    task_preset: Text | None = None
    task_fields: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(SettingsModel):
    """The content of a mixture's file."""

    sources: dict[str, SourceSettings]

    def __post_init__(self) -> None:
        """Raise an error for rules that concern several values."""
        if not self.sources:
            raise broken("names no source", "sources", hint=_HINT)
        for name, source in self.sources.items():
            place = ("sources", name)
            if _NAME.fullmatch(name) is None:
                hint = "use up to 64 letters, digits, '_', '-' and '.', a letter first"
                raise broken("is no name of a source", *place, hint=hint)
            if is_mixture(source.path):
                raise broken(f"is {source.path!r}, another mixture", *place, "path", hint="name its sources")
            thresholds = [pool.threshold for pool in source.pools.values()]
            if len(set(thresholds)) < len(thresholds):
                raise broken("has a threshold twice", *place, "pools", hint="each pool needs its own")
            if thresholds and not any(pool.weight for pool in source.pools.values()):
                raise broken("has no weight above 0: nothing would be sampled twice", *place, "pools")
            if source.gate is not None and source.gate.source not in self.sources:
                raise broken(
                    f"is {source.gate.source!r}, which is no source of this file", *place, "gate", "source",
                    hint=nearest(source.gate.source, self.sources) or "name one of its sources",
                )  # fmt: skip
            if cycle := self._cycle(name):
                raise broken(
                    f"waits for itself: {' → '.join(cycle)}", *place, "gate",
                    hint="leave one of these gates out: a source without a gate is open from the start",
                )  # fmt: skip

    def _cycle(self, name: str) -> list[str]:
        """Return the gates that lead from a source back to it; empty if they do not."""
        way = [name]
        while (gate := self.sources[way[-1]].gate) is not None and gate.source in self.sources:
            way.append(gate.source)
            if gate.source == name:
                return way
            if gate.source in way[:-1]:
                return []
        return []

    @property
    def stored(self) -> tuple[MixtureSource, ...]:
        """The sources as a run stores them, before any group is begun."""
        return tuple(
            MixtureSource(
                name=name, weight=source.weight, gate=source.gate,
                pools=tuple(
                    Pool(name=pool, threshold=each.threshold, weight=each.weight)
                    for pool, each in sorted(source.pools.items(), key=lambda item: item[1].threshold)
                ),
            )
            for name, source in self.sources.items()
        )  # fmt: skip


def read_mixture(path: str | Path) -> Mixture:
    """Read and check the file of a mixture. Raises ConfigError, which names the line."""
    file = read_settings(path, hint=_HINT, what="the mixture")
    file.refuse_repeated("sources")
    return file.check(Mixture, file.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Document):
    """A pool of a stored source: see ``PoolWeight``."""

    name: str
    threshold: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOpening(Document):
    """When and why the gate of a source opened; it never closes again."""

    at: datetime
    because: Literal["pass_rate", "exhausted"]
    """``exhausted``: nothing else was left to sample, so its condition could not be met any more."""
    pass_rate: float | None
    """The mean pass rate of the gate's source at that time; None without a scored group."""
    after_step: int
    """The last committed step at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource(Document):
    """A source of a run's mixture, in ``Gate.sources``: what its file says, and how far it is.

    Every admission that begins groups writes it in its transaction.
    """

    name: str
    weight: float
    gate: SourceGate | None = None
    pools: tuple[Pool, ...] = ()
    """By rising threshold."""
    begun: int = 0
    """Groups that were begun."""
    credit: float = 0.0
    """Groups that its weight entitled it to, less those that were begun; the credits of a run sum to 0."""
    opened: GateOpening | None = None

    @property
    def is_open(self) -> bool:
        """Whether its groups may begin."""
        return self.gate is None or self.opened is not None

    def pool_of(self, pass_rate: float) -> Pool:
        """Return the pool of a task; rates above every threshold belong to the last one."""
        return next((pool for pool in self.pools if pass_rate <= pool.threshold), self.pools[-1])


@dataclass(slots=True)
class Turns:
    """Gives each group to a source: a smooth weighted round-robin, as nginx has it.

    With each group every source that takes part earns its share of the weights as credit, and the source
    with the most credit pays 1 for the group. So a source is never ahead of its share by a whole group. One
    that cannot take part earns nothing: later it does not catch up. nginx,
    ``src/http/ngx_http_upstream_round_robin.c``, ``ngx_http_upstream_get_peer``.
    """

    weights: Mapping[str, float]
    credits: dict[str, float]

    @classmethod
    def of(cls, sources: Sequence[MixtureSource]) -> Turns:
        """Return whose turn it is after the groups that were begun."""
        return cls({each.name: each.weight for each in sources}, {each.name: each.credit for each in sources})

    def next(self, names: Collection[str]) -> str:
        """Return the source of the next group among ``names``; of equal ones the first of the file."""
        total = sum(self.weights[name] for name in names)
        # Round: the sums of different orders differ in their last bits, and equals must stay equal.
        return max(names, key=lambda name: round(self.credits[name] + self.weights[name] / total, 9))

    def begin(self, name: str, names: Collection[str]) -> None:
        """Count a group of ``name``, while ``names`` took part."""
        total = sum(self.weights[each] for each in names)
        for each in names:
            self.credits[each] += self.weights[each] / total
        self.credits[name] -= 1.0
