"""Find how many trajectories a sampler runs at a time from what its engines report.

For ``--target_concurrency auto``. Pure logic: it takes observations and returns a number. Additive increase
and multiplicative decrease, as TCP (Chiu and Jain 1989; CUBIC, RFC 9438) and as CONCUR does it for agents
(arXiv 2601.22705). Samplers that share an engine do not talk: each decides by the engine's own figures, which
are the same for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.documents.run import EngineFigures, InferenceService
from agentrl.documents.status import ServiceStatus

_READY = ServiceStatus.READY

WINDOW_SECONDS, LONGEST_WINDOW_SECONDS = 30.0, 600.0
"""What is measured before a decision: one turnover of the trajectories, within these times.

Contexts grow with a trajectory: an engine that is given twice as many is full one lifetime later.
"""
_REST_SECONDS = 15.0
"""After new weights: prefixes that the update dropped are computed again."""
_GROWTH = 1.5
"""Factor of each step until a limit is near."""
_STEPS = 16
"""Part of all trajectories at an engine that is added at a time near its limit, by all samplers together."""
_CUT = 0.75
"""Factor under pressure. It is deep, because a congested engine computes evicted prefixes again and again
until trajectories have left; then the number goes back to ``_BELOW`` of the one that was too large."""
_BELOW = 0.95
_PATIENCE, _LONGEST_PATIENCE = 4, 12
"""Windows before a larger number than the last limit is tried again; pressure doubles it."""
_FULL, _ROOM = 0.97, 0.9
"""Use of the KV cache that is pressure, and to which growth goes by expectation."""
_PREEMPTED = 0.02
"""Preemptions a minute and request that are pressure."""
_QUEUED = 0.25
"""Part of the requests in the queue that is more than an engine needs."""
_EVICTS, _SLOWER = 1.5, 0.94
"""Prompt tokens computed for each generated one, and tokens/s, against those before: prefixes are evicted."""
_BETTER = 1.025
"""Growth of tokens/s that counts."""
_LIGHTER = 0.6
"""How full the engine is against the last limit: below it the load has changed, and that says nothing."""
_RECOVERY_WINDOWS = 4


@dataclass(slots=True)
class Window:
    """Sums over the intervals between two reports of one engine."""

    seconds: float = 0.0
    turnover: float = 0.0
    """Trajectories that ended, by the number of those that run."""
    generated: int = 0
    computed: int = 0
    preempted: int = 0
    _requests: float = 0.0
    _waiting: float = 0.0
    _kv_usage: float = 0.0

    def add(self, before: EngineFigures, now: EngineFigures) -> None:
        """Add the interval between two reports."""
        seconds = now.at - before.at
        self.seconds += seconds
        self.generated += now.generated - before.generated
        self.computed += now.computed - before.computed
        self.preempted += now.preempted - before.preempted
        self._requests += seconds * (now.running + now.waiting)
        self._waiting += seconds * now.waiting
        self._kv_usage += seconds * now.kv_usage

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self.generated / self.seconds

    @property
    def requests(self) -> float:
        """Mean number of requests that run or wait."""
        return self._requests / self.seconds

    @property
    def kv_usage(self) -> float:
        """Mean share of the KV cache that running requests hold."""
        return self._kv_usage / self.seconds

    @property
    def queued(self) -> float:
        """Share of the requests that wait."""
        return self._waiting / self._requests if self._requests else 0.0

    @property
    def cost(self) -> float:
        """Prompt tokens that the engine computes for each token that it generates."""
        return self.computed / max(self.generated, 1)


@dataclass(slots=True)
class EngineLimit:
    """How many trajectories one sampler runs at one engine, and why."""

    number: int
    why: str = "the start"
    most: float = float("inf")
    """Where pressure was met last, or tokens/s no longer grew; more is tried after ``_patience`` windows."""
    _is_fast: bool = True
    _is_recovering: bool = False
    _windows: int = 0
    """Since the number stays, or since it recovers."""
    _patience: int = _PATIENCE
    _best: tuple[int, float] | None = None
    """The number with which tokens/s were last clearly better, and those."""
    _cost: float | None = None
    _fill: float = 0.0
    """How full the KV cache was in the last window: by running requests, or by all contexts."""
    _fill_at_limit: float = 0.0
    _window: Window = field(default_factory=Window)
    _last: EngineFigures | None = None
    _era: Hashable = None
    _era_at: float = float("-inf")
    _rests_until: float = 0.0

    def observe(
        self, now: EngineFigures, *, era: Hashable, works: bool, is_full: bool, held: int, turned: float,
        step: float, context: float,
    ) -> None:  # fmt: skip
        """Take the report ``now`` of the engine; change ``number`` when enough is measured.

        ``era`` names its weights, and ``works`` is False during an update. ``is_full``: this sampler runs as
        many trajectories as it may; with fewer, the number says nothing. ``held`` of them are at this engine,
        and the part ``turned`` of all has ended since the last report. ``step`` is added near the limit.
        ``context`` is the part of the engine's KV cache that the contexts of all trajectories would fill,
        those that wait for tools among them.
        """
        last, self._last = self._last, now
        if era != self._era:
            # Rest for half of a short era at most: a run of small steps would leave no time to measure.
            self._rests_until = now.at + min(_REST_SECONDS, (now.at - self._era_at) / 2)
            self._era, self._era_at = era, now.at
        is_next = last is not None and last.at < now.at and last.generated <= now.generated
        # Leave an interval with an update out, and go on with the window: a run may update each minute.
        if last is None or not is_next or not works or now.at < self._rests_until:
            return
        # After a cut wait until trajectories have ended: until then the number has changed nothing.
        if not is_full or held > self.number:
            return
        window = self._window
        window.add(last, now)
        window.turnover += turned
        has_turned = window.turnover >= 1 or window.seconds >= LONGEST_WINDOW_SECONDS
        if window.seconds >= WINDOW_SECONDS and (has_turned or self._is_recovering or self._pressure(window)):
            self._window = Window()
            self._decide(window, max(step, 1.0), context)

    def _pressure(self, window: Window) -> str:
        """Return what shows that the engine has too many trajectories; empty if nothing does."""
        if window.preempted >= max(2.0, _PREEMPTED * window.requests * window.seconds / 60):
            return f"{window.preempted} preemptions"
        if window.kv_usage >= _FULL:
            return f"{window.kv_usage:.0%} of the KV cache in use"
        if self._cost is None or self._best is None or window.seconds < 2 * WINDOW_SECONDS:
            return ""
        if window.cost > _EVICTS * self._cost and window.rate < _SLOWER * self._best[1]:
            return f"evicted prefixes: {window.cost:.1f} prompt tokens computed for each generated one"
        return ""

    def _decide(self, window: Window, step: float, context: float) -> None:
        pressure, self._fill = self._pressure(window), max(window.kv_usage, context)
        if self._is_recovering:
            self._recover(window, pressure)
        elif pressure:
            self._cut(pressure)
        elif window.queued >= _QUEUED:
            self._stay_below(self.number * _BELOW, f"{window.queued:.0%} of the requests wait")
        else:
            self._cost = window.cost if self._cost is None else self._cost + 0.3 * (window.cost - self._cost)
            self._climb(window, step, context)

    def _cut(self, why: str) -> None:
        most = self.number * _BELOW
        self._stay_below(self.number * _CUT, why)
        self.most, self._is_recovering = most, True
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE)

    def _recover(self, window: Window, pressure: str) -> None:
        """Wait until the engine is calm, then go back to just below the limit."""
        self._windows += 1
        is_cheap = self._cost is None or window.cost < _EVICTS * self._cost
        if not pressure and window.kv_usage < _ROOM and is_cheap:
            self._is_recovering, self._windows = False, 0
            self._set(self.most, f"below its limit, after {self.why}")
        elif self._windows > _RECOVERY_WINDOWS:
            self._is_recovering, self._windows = False, 0
            if pressure:
                self._cut(pressure)
            else:
                # Fewer trajectories did not make prompts cheaper: they are so now.
                self._cost = window.cost

    def _climb(self, window: Window, step: float, context: float) -> None:
        number, rate = self._best or (self.number, 0.0)
        if window.rate >= rate * _BETTER:
            self._best = self.number, window.rate
        elif self.number > number and window.rate < rate * _SLOWER:
            self._stay_below(number, f"tokens/s fell from {rate:,.0f} to {window.rate:,.0f}")
            return
        elif self.number >= 2 * number:
            self._stay_below(1.25 * number, f"tokens/s did not grow above {window.rate:,.0f}")
            return
        if self._fill < _LIGHTER * self._fill_at_limit:
            self.most, self._is_fast, self._fill_at_limit = float("inf"), True, 0.0
        if context * _GROWTH > _ROOM:
            self._is_fast = False
        target = self.number + max(step, (_GROWTH - 1) * self.number if self._is_fast else 0.0)
        if window.kv_usage > 0:
            target = min(target, self.number * _ROOM / window.kv_usage)
        if int(min(target, self.most)) > self.number:
            self._windows = 0
            self._set(min(target, self.most), f"tokens/s grow: {window.rate:,.0f}")
            return
        self._windows += 1
        if self._windows >= self._patience and window.kv_usage < _ROOM:
            self._patience = max(_PATIENCE, self._patience // 2)
            self.most, self._best = max(self.most, self.number + step), (self.number, window.rate)
            self._windows = 0
            self._set(self.number + step, f"a try of more than {self.number}")

    def _stay_below(self, number: float, why: str) -> None:
        self.most, self._is_fast, self._best = number, False, None
        self._fill_at_limit = self._fill
        self._windows = 0
        self._set(number, why)

    def _set(self, number: float, why: str) -> None:
        # Round down: half of a small number would stay what it was.
        self.number, self.why = max(1, int(number)), why


class TargetConcurrency:
    """How many trajectories a sampler runs at a time: the sum of its limits at its engines."""

    def __init__(self, start: int, most: int) -> None:
        """Begin with ``start``, which stays at engines that report no figures; never exceed ``most``."""
        self.number = start
        self.why = "the start"
        self._most = most
        self._limits: dict[str, EngineLimit] = {}
        """By the engine's URL."""
        self._silent = set[str]()

    @property
    def limits(self) -> dict[str, int]:
        """Return {URL of an engine: the number there}."""
        return {url: limit.number for url, limit in self._limits.items()}

    def observe(
        self, engines: Sequence[InferenceService], *, held: Mapping[str, int], tokens: Mapping[str, int],
        running: int, ended: int, share: float, samplers: int,
    ) -> list[str]:  # fmt: skip
        """Take the last heartbeats of ``engines``; return URLs of those that report no figures, each once.

        ``held`` and ``tokens`` are this sampler's trajectories at each engine and their contexts; both are
        empty if a router chooses the engine. It has ``running`` trajectories in all, ``ended`` since the last
        call, and ``share`` of those of all ``samplers``.
        """
        for url in self._limits.keys() - {service.url for service in engines}:
            del self._limits[url]
        for service in engines:
            if service.url not in self._limits:
                self._limits[service.url] = EngineLimit(max(1, round(self.number / len(engines))))
        # While it has more, as after a cut, it claims nothing, and other engines lose theirs.
        is_full, changed = 0.95 * self.number - 1 <= running <= self.number, []
        for service in engines:
            limit, figures = self._limits[service.url], service.figures
            if figures is None:
                continue
            before, part = limit.number, limit.number / max(self.number, 1)
            limit.observe(
                figures,
                era=(service.instance, service.policy_version),
                works=service.status is _READY,
                is_full=is_full,
                held=held.get(service.url, 0) if held else round(running * part),
                turned=ended / max(running, 1),
                step=limit.number / (_STEPS * share * samplers),
                context=(tokens[service.url] / share / figures.capacity)
                if figures.capacity and service.url in tokens
                else 0.0,
            )
            limit.number = max(1, limit.number - max(0, sum(self.limits.values()) - self._most))
            if limit.number != before:
                changed.append(f"{service.url}: {limit.why}")
        if engines:
            self.number = sum(self.limits.values())
        if changed:
            self.why = "; ".join(changed)
        silent = {service.url for service in engines if service.figures is None and service.status is _READY}
        new, self._silent = sorted(silent - self._silent), self._silent | silent
        return new
