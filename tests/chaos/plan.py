"""Plan the faults of a chaos run: a schedule that depends only on the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

DATABASE = "mongod"
TRAINER = "trainer"
WEIGHTS = "weights"


class FaultKind(StrEnum):
    """A kind of fault."""

    KILL = "kill"  # SIGKILL; restarted after ``seconds``
    FREEZE = "freeze"  # SIGSTOP for ``seconds``, longer than a lease (mongod: than a timeout), then SIGCONT
    CUT = "cut"  # all connections to the database are reset, new ones are refused for ``seconds``
    STALL = "stall"  # connections stay open and transfer nothing for ``seconds``
    DELAY = "delay"  # all data on a connection is ``latency`` seconds late, for ``seconds``
    FILL = "fill"  # the trainer's files cannot grow for ``seconds``: weights and checkpoints fail
    SUPERSEDE = "supersede"  # the trainer is frozen past its lease, and another one replaces it
    CORRUPT = "corrupt"  # a byte of the next published version is flipped before the engines load it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; it starts ``at`` seconds after the beginning and lasts ``seconds``."""

    at: float
    kind: FaultKind
    target: str
    seconds: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The names of the run's processes."""

    samplers: tuple[str, ...]
    engines: tuple[str, ...]
    openers: tuple[str, ...]

    @classmethod
    def of(cls, samplers: int, engines: int, openers: int) -> Members:
        """Return the names ``sampler-0`` …, ``engine-0`` …, ``opener-0`` …"""
        return cls(
            samplers=tuple(f"sampler-{number}" for number in range(samplers)),
            engines=tuple(f"engine-{number}" for number in range(engines)),
            openers=tuple(f"opener-{number}" for number in range(openers)),
        )

    @property
    def clients(self) -> tuple[str, ...]:
        """The processes that connect to the database."""
        return (*self.samplers, *self.engines, *self.openers, TRAINER)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One kind of fault: its possible targets, its relative frequency, and its range of durations."""

    kind: FaultKind
    targets: Sequence[str]
    weight: int
    seconds: tuple[float, float]


def make_plan(
    *, seed: int, seconds: float, gap: float, lease_seconds: float, members: Members, replica_set: bool
) -> list[Fault]:
    """Return faults about every ``gap`` seconds, in order of time; the same for the same arguments.

    Every choice occurs once, in random order, before any occurs again. With ``replica_set`` the database is
    killed far more often and connections are not disturbed, because clients reach the members directly.
    """
    rng = random.Random(f"chaos/{seed}")
    choices = _choices(members, lease_seconds, replica_set)
    coming: list[_Choice] = rng.sample(choices, len(choices))
    faults: list[Fault] = []
    at = rng.uniform(0.2, 1.0) * gap
    while at < seconds:
        choice = coming.pop() if coming else rng.choices(choices, [item.weight for item in choices])[0]
        faults.append(
            Fault(
                at=at,
                kind=choice.kind,
                target=rng.choice(choice.targets),
                seconds=rng.uniform(*choice.seconds),
                latency=rng.uniform(0.01, 0.25) if choice.kind is FaultKind.DELAY else 0.0,
            )
        )
        at += rng.uniform(0.5, 1.5) * gap
    return faults


def _choices(members: Members, lease_seconds: float, replica_set: bool) -> list[_Choice]:
    restart, past_lease = (0.5, 5.0), (1.1 * lease_seconds, 1.6 * lease_seconds)
    choices = [
        _Choice(FaultKind.KILL, members.samplers, 4, restart),
        _Choice(FaultKind.KILL, members.engines, 2, restart),
        _Choice(FaultKind.KILL, (TRAINER,), 3, restart),
        _Choice(FaultKind.KILL, (DATABASE,), 12 if replica_set else 2, (0.5, 12.0)),
        _Choice(FaultKind.KILL, members.openers, 2, restart),
        _Choice(FaultKind.FREEZE, members.samplers, 2, past_lease),
        _Choice(FaultKind.FREEZE, members.openers, 1, past_lease),
        _Choice(FaultKind.FREEZE, (DATABASE,), 2, (10.5, 14.0)),
        _Choice(FaultKind.SUPERSEDE, (TRAINER,), 1, past_lease),
        _Choice(FaultKind.FILL, (TRAINER,), 1, (8.0, 16.0)),
        _Choice(FaultKind.CORRUPT, (WEIGHTS,), 1, (4.0, 8.0)),
    ]
    if not replica_set:
        choices += [
            _Choice(FaultKind.KILL, (DATABASE,), 1, (20.0, 45.0)),
            _Choice(FaultKind.CUT, members.clients, 4, (0.2, 10.0)),
            _Choice(FaultKind.STALL, members.clients, 2, (2.0, 20.0)),
            _Choice(FaultKind.DELAY, members.clients, 2, (4.0, 12.0)),
        ]
    return choices
