"""Thread of the local engine: it runs the scheduler's steps, and commands between them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from agentrl.errors import ModelError
from agentrl.inference.engines.local.scheduler import GenerationRequest, Model, PauseMode, Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """Owns a Scheduler in a thread. Methods return at once, with a future that the thread completes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._swap: tuple[Callable[[], None], Future[None]] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its current step; abort all requests."""
        self._commands.put(None)
        self._thread.join(timeout)

    @property
    def paused(self) -> bool:
        """Return whether generation is paused."""
        return self._scheduler.paused

    @property
    def version(self) -> str:
        """The version of the served weights."""
        return self._scheduler.version

    @property
    def loads(self) -> tuple[int, int]:
        """The numbers of running and waiting requests."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    @property
    def tokens(self) -> int:
        """The number of tokens in the running and waiting requests."""
        return sum(r.length for r in (*self._scheduler.running, *self._scheduler.waiting))

    def submit(self, request: GenerationRequest) -> Future[None]:
        """Queue a request; its ``finish`` is called when it is done."""
        return self._call(lambda: self._scheduler.submit(request))

    def abort(self, rid: str | None) -> Future[int]:
        """End request ``rid``, or all if it is None."""
        return self._call(lambda: self._scheduler.abort(rid))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Pause generation."""
        return self._call(lambda: self._scheduler.pause(mode))

    def resume(self) -> Future[None]:
        """Continue generation."""
        return self._call(self._resume)

    def flush(self) -> Future[bool]:
        """Drop cached prefixes; do nothing and return False while requests are running."""
        return self._call(self._flush)

    def rename(self, version: str) -> Future[None]:
        """Set the version of the served weights."""
        return self._call(lambda: setattr(self._scheduler, "version", version))

    def swap(self, model: Model, version: str, *, flush: bool) -> Future[None]:
        """Serve ``model``: at once while paused, else when the running requests have ended.

        The future raises ModelError if ``flush`` is set and requests paused ``in_place`` still use the cache.
        """
        done: Future[None] = Future()

        def apply() -> None:
            if flush and self._scheduler.running:
                raise ModelError(
                    "the cache cannot be flushed: requests that are paused in place use it",
                    hint="pause with mode retract, or send flush_cache false",
                )
            self._scheduler.replace_model(model, version)
            if flush:
                self._scheduler.cache.drop_idle()

        def schedule() -> None:
            if self._swap is not None:
                done.set_exception(ModelError("another weight update is in progress"))
                return
            self._scheduler.draining = True
            self._swap = (apply, done)

        self._commands.put(schedule)
        return done

    def _call(self, function: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._commands.put(lambda: _settle(done, function))
        return done

    def _resume(self) -> None:
        self._scheduler.paused = False

    def _flush(self) -> bool:
        if self._scheduler.running:
            return False
        self._scheduler.cache.drop_idle()
        return True

    def _run(self) -> None:
        while True:
            idle = not self._scheduler.has_work
            for command in self._take(block=idle):
                if command is None:
                    self._scheduler.abort(None)
                    return
                command()
            self._swap_if_due()
            if self._scheduler.has_work:
                self._step()

    def _take(self, *, block: bool) -> list[Callable[[], None] | None]:
        taken = [self._commands.get()] if block else []
        while not self._commands.empty():
            taken.append(self._commands.get())
        return taken

    def _swap_if_due(self) -> None:
        if self._swap is None or (self._scheduler.running and not self._scheduler.paused):
            return
        apply, done = self._swap
        self._swap, self._scheduler.draining = None, False
        _settle(done, apply)

    def _step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:
            log.exception("a forward pass failed; its requests end")
            self._scheduler.fail_all(error)


def _settle(done: Future[Any], function: Callable[[], Any]) -> None:
    try:
        done.set_result(function())
    except Exception as error:  # noqa: BLE001 - passed to the caller
        done.set_exception(error)
