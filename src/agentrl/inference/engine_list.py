"""Cache the list of a run's live engines: which take calls, and of which the trainer has the devices."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from agentrl.concurrency import end_tasks
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.inference.engine import adapter_version
from agentrl.store.mechanics.retry import log_store_errors

log = logging.getLogger(__name__)

LiveEngines = Callable[[], Awaitable[Sequence[InferenceService]]]

_USABLE = (ServiceStatus.READY, ServiceStatus.UPDATING)
_MOST_AGES = 3
"""Multiple of ``max_age`` up to which a model call does not wait for a refresh of the list."""
_VERSIONS_AGE = 0.25
"""Fraction of ``max_age`` after which the versions that engines serve are read anew: work waits for it."""


class EngineList:
    """The engines that ``live`` returned last."""

    def __init__(
        self,
        live: LiveEngines,
        *,
        max_age: float = 1.0,
        tokenizer: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Cache the list for ``max_age`` seconds.

        A model call does not wait for a newer one until it is three times as old. An engine with another
        ``tokenizer`` (its fingerprint) takes no calls. ``max_model_len`` limits the context below that of the
        engines.
        """
        self._live = live
        self._max_age = max_age
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._services: tuple[InferenceService, ...] = ()
        self.context_length = max_model_len or None
        """The largest number of tokens of a prompt and its continuation; None if it is unknown."""
        self.foreign: dict[str, str] = {}
        """Id of an engine with another tokenizer → why it gets no calls."""
        self.oldest_adapter: str | None = None
        """The oldest adapter of the engines that were usable last: each of them still has it."""
        self.had_engine = False
        """Whether an engine has been usable since this process began."""
        self.lent_at = float("-inf")
        """When the trainer was last seen to have the devices of all engines, in ``time.monotonic``."""
        self._avoided_until: dict[str, float] = {}
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()
        self._refresh_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop a refresh in the background."""
        if self._refresh_task is not None:
            await end_tasks(self._refresh_task)

    def usable(self) -> list[InferenceService]:
        """Return the engines that take calls."""
        now = time.monotonic()
        return [
            s
            for s in self._services
            if s.status in _USABLE and self._avoided_until.get(s.url, 0.0) <= now and s.id not in self.foreign
        ]

    def is_lent(self) -> bool:
        """Return whether the trainer has the devices of all engines."""
        return not self.usable() and bool(self._lent())

    def policy_versions(self) -> frozenset[int]:
        """Return the policy versions that usable and lent engines serve; empty while none is known.

        It returns at once, and starts a refresh if the list is too old.
        """
        self._start_refresh(_VERSIONS_AGE * self._max_age)
        engines = (*self.usable(), *self._lent())
        return frozenset(s.policy_version for s in engines if s.policy_version is not None)

    def avoid(self, url: str, seconds: float) -> None:
        """Let the engine at ``url`` take no calls for ``seconds``."""
        self._avoided_until[url] = time.monotonic() + seconds

    async def fresh_for_call(self) -> None:
        """Wait until the list is new enough for a model call; start a refresh if one is due."""
        age = time.monotonic() - self._refreshed_at
        if age < _MOST_AGES * self._max_age and self.usable():
            self._start_refresh(self._max_age)
        else:
            await self.refresh()

    async def refresh(self, max_age: float | None = None) -> None:
        """Read the list, unless it is newer than ``max_age`` seconds; None: that of the list."""
        async with self._refresh_lock:
            if time.monotonic() - self._refreshed_at < (self._max_age if max_age is None else max_age):
                return
            self._services = tuple(await self._live())
            lengths = (self._max_model_len, *(service.context_length for service in self._services))
            self.context_length = min(filter(None, lengths), default=None)
            self.foreign = {
                service.id: self._why_foreign(service)
                for service in self._services
                if None not in (service.tokenizer, self._tokenizer) and service.tokenizer != self._tokenizer
            }
            adapters = [service.adapter for service in self.usable() if service.adapter is not None]
            self.oldest_adapter = min(adapters, key=adapter_version, default=self.oldest_adapter)
            self.had_engine = self.had_engine or bool(self.usable())
            if self.is_lent():
                self.lent_at = time.monotonic()
            self._refreshed_at = time.monotonic()

    def _start_refresh(self, max_age: float) -> None:
        """Start a refresh if the list is older than ``max_age`` and none runs."""
        is_running = self._refresh_task is not None and not self._refresh_task.done()
        if time.monotonic() - self._refreshed_at >= max_age and not is_running:
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_quietly(max_age))

    async def _refresh_quietly(self, max_age: float) -> None:
        with log_store_errors(log, "the engines cannot be listed", outages=True):
            await self.refresh(max_age)

    def _lent(self) -> list[InferenceService]:
        """Return the engines whose device the trainer has."""
        return [s for s in self._services if s.status is ServiceStatus.LENT and s.id not in self.foreign]

    def _why_foreign(self, service: InferenceService) -> str:
        why = (
            f"engine {service.url} serves {service.model} with another tokenizer ({service.tokenizer}) than"
            f" this sampler ({self._tokenizer}); it gets no calls"
        )
        if service.id not in self.foreign:
            log.error(why)
        return why
