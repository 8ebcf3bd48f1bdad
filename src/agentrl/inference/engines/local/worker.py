"""The thread that owns the local engine's scheduler: it runs its steps, and calls between them."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from agentrl.errors import ModelError
from agentrl.inference.engines.local.scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """Owns a scheduler in a thread, which runs its steps, and calls between them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        """Other threads read it; they change it by ``call``."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._swap: tuple[Callable[[Scheduler], None], Future[None]] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its current step; abort all requests."""
        self._calls.put(None)
        self._thread.join(timeout)

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Return at once, with a future of what ``function`` returns in the thread."""
        done: Future[T] = Future()
        self._calls.put(lambda: self._settle(done, function))
        return done

    async def run(self, function: Callable[[Scheduler], T]) -> T:
        """Return what ``function`` returns between two steps of the scheduler."""
        return await asyncio.wrap_future(self.call(function))

    async def swap(self, change: Callable[[Scheduler], None]) -> None:
        """Change the served weights: at once while paused, else when the running requests have ended."""
        done: Future[None] = Future()

        def schedule() -> None:
            if self._swap is not None:
                done.set_exception(ModelError("another weight update is in progress"))
                return
            self.scheduler.draining = True
            self._swap = (change, done)

        self._calls.put(schedule)
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            calls = [] if scheduler.has_work else [self._calls.get()]
            while not self._calls.empty():
                calls.append(self._calls.get())
            for call in calls:
                if call is None:
                    scheduler.abort(None)
                    return
                call()
            if self._swap is not None and (scheduler.paused or not scheduler.running):
                function, done = self._swap
                self._swap, scheduler.draining = None, False
                self._settle(done, function)
            if scheduler.has_work:
                try:
                    scheduler.step()
                except Exception as error:
                    log.exception("a forward pass failed; its requests end")
                    scheduler.fail_all(error)

    def _settle(self, done: Future[T], function: Callable[[Scheduler], T]) -> None:
        try:
            done.set_result(function(self.scheduler))
        except Exception as error:  # noqa: BLE001 - passed to the caller
            done.set_exception(error)
