"""Send ended spans from a thread, through a bounded queue: a collector that is away delays nothing."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span

logger = logging.getLogger(__name__)

_BATCH = 256
_SEND_SECONDS = 1.0
"""Interval at which spans are sent."""
_LIBRARIES = ("opentelemetry.exporter", "opentelemetry.sdk")


class Sender(SpanProcessor):
    """Queues ended spans and sends them in batches. A span that does not fit into the queue is dropped.

    A collector that is away is logged once, and once more when it is back. Its spans are lost.
    """

    def __init__(self, exporter: SpanExporter, where: str, limit: int) -> None:
        """Send to ``exporter``; ``where`` names it in messages, ``limit`` is the length of the queue."""
        self._exporter = exporter
        self._where = where
        self._limit = limit
        self._queue: deque[ReadableSpan] = deque()
        self._woken = threading.Event()
        self._ending = False
        self._gives_up = False
        self._is_away = False
        self._reason = _LastMessage()
        self.sent = self.lost = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Do nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span. Never blocks."""
        if len(self._queue) >= self._limit or self._ending:
            self.lost += 1
            return
        self._queue.append(span)
        if len(self._queue) >= _BATCH:
            self._woken.set()

    def close(self, seconds: float) -> None:
        """Send what is queued within ``seconds``, or one second if nobody answered last time.

        Logs how many spans are lost.
        """
        self._ending = True
        seconds = min(seconds, 1.0) if self._is_away else seconds
        self._woken.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._gives_up = True
        self._exporter.shutdown()
        self._thread.join(1.0)
        self.lost += len(self._queue)
        self._queue.clear()
        if self.lost:
            logger.warning("%d spans were lost, %d were sent to %s", self.lost, self.sent, self._where)

    def _run(self) -> None:
        with _captured(self._reason):
            while not self._ending:
                self._woken.wait(_SEND_SECONDS)
                self._woken.clear()
                self._send_all()
            self._send_all()

    def _send_all(self) -> None:
        while self._queue and not self._gives_up:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            try:
                done = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception as error:  # noqa: BLE001  a fault of the library must not end the thread
                self._reason.text = f"{type(error).__name__}: {error}"
                done = False
            self._count(len(batch), done)

    def _count(self, spans: int, done: bool) -> None:
        if done:
            self.sent += spans
            if self._is_away:
                logger.info("spans are sent to %s again; %d were lost", self._where, self.lost)
        else:
            self.lost += spans
            if not self._is_away:
                logger.warning(
                    "spans cannot be sent to %s, and are lost until it answers; nothing waits for them: %s",
                    self._where, self._reason.text or "no reason is known",
                )  # fmt: skip
        self._is_away = not done


class _LastMessage(logging.Handler):
    """Keeps the last message of the exporting libraries, which would log each failure."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text = record.getMessage()[:300]


@contextmanager
def _captured(handler: logging.Handler) -> Iterator[None]:
    """Send the messages of the exporting libraries to ``handler`` only."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
            each.propagate = True
