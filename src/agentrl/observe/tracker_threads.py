"""Send metrics to the trackers that ``--report_to`` names: seven libraries, or your own.

Each tracker has a thread of its own, which opens it and sends to it. A tracker that fails or hangs delays and
stops nothing.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.flags import names_in
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.redact import redact
from agentrl.observe.trackers import TRACKERS, Tracker

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
CLOSE_SECONDS = 60.0
_REPEAT_SECONDS = 600.0
_QUEUED_STEPS = 1000


def open_trackers(
    report_to: str, run: RunConfig, output: str | Path, parameters: Mapping[str, Any] | None = None
) -> Tracker:
    """Return the trackers named in ``report_to`` (comma-separated, or ``none``) as one.

    Their files go below ``output``. ``parameters`` are shown beside the run if the tracker can, without
    secrets. A library works offline unless its own environment variables name a server or a key
    (docs/metrics.md). Waits at most ``OPEN_SECONDS`` for each; one that fails to open is logged and left out.
    Raises ConfigError for an unknown name and for a library that is not installed.
    """
    names = [name for name in names_in(report_to) if name != "none"]
    factories = [TRACKERS.get(name) for name in names]
    shown = public_parameters(parameters or {})
    return _Several(
        [
            _Sender(name, partial(factory, run, Path(output), shown))
            for name, factory in zip(names, factories, strict=True)
        ]
    )


def public_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parameters`` without secrets, which a rule of ``redact`` finds by name or by shape."""
    return {
        name: value
        if value is None or isinstance(value, bool | int | float)
        else redact(f"{name}={value}").removeprefix(f"{name}=")
        for name, value in parameters.items()
    }


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of ``metrics``, those of nested mappings as ``key/inner``."""
    flat: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[f"{prefix}{key}"] = float(value)
    return flat


class _Several:
    def __init__(self, senders: Sequence[_Sender]) -> None:
        self._senders = senders

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = flatten(metrics)
        for sender in self._senders:
            sender.log(step, numbers)

    def close(self) -> None:
        for sender in self._senders:
            sender.ask_to_close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.wait_closed(deadline)


class _Sender:
    """The thread of one tracker. Raises the ConfigErrors of opening it; logs every other error."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name = name
        self._open_tracker = open_tracker
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUED_STEPS)
        self._opened = threading.Event()
        self._refusal: ConfigError | None = None
        self._failures = 0
        self._logged_at = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPEN_SECONDS):
            logger.warning("--report_to %s has not opened after %.0f s; training goes on", name, OPEN_SECONDS)
        if self._refusal is not None:
            raise self._refusal

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Queue a step; drop it if the tracker is ``_QUEUED_STEPS`` behind or did not open."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._failed("log a step", f"it is {_QUEUED_STEPS} steps behind")

    def ask_to_close(self) -> None:
        """Let the thread end after what is queued."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            logger.warning("--report_to %s is not closed: it hangs", self._name)

    def wait_closed(self, deadline: float) -> None:
        """Wait for the thread until ``deadline`` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("--report_to %s does not end; its last metrics may be missing", self._name)

    def _run(self) -> None:
        try:
            tracker = self._open_tracker()
        except ConfigError as error:
            self._refusal = error
            return
        except Exception as error:  # noqa: BLE001  a fault of the library must not stop the training
            self._failed("open", error)
            return
        finally:
            self._opened.set()
        while (item := self._queue.get()) is not None:
            self._try("log a step", partial(tracker.log, *item))
        self._try("close", tracker.close)

    def _try(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  a fault of the library must not stop the training
            self._failed(doing, error)

    def _failed(self, doing: str, reason: object) -> None:
        """Log a failure: the first one, and then one every ten minutes with the number of failures."""
        self._failures += 1
        now = time.monotonic()
        if now - self._logged_at >= _REPEAT_SECONDS:
            self._logged_at = now
            logger.warning(
                "--report_to %s could not %s (failure %d); training goes on: %s",
                self._name, doing, self._failures, redact(f"{type(reason).__name__}: {reason}")[:500],
            )  # fmt: skip
