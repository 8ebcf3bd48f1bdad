"""Writes log records from a thread of its own: formatting, redaction and files never block the caller.

A record is put into a bounded queue as it is logged; its message, its facts and its traceback are rendered at
that moment, because they may change. CRITICAL records, and ``flush``, wait until the thread has written.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

TEXT_LIMIT = 128 * 1024
"""Characters of a message, a fact or a traceback that are kept for the thread; the formatter shows fewer."""

FLUSH_SECONDS = 5.0
"""How long ``flush`` waits for the thread."""

_QUEUE_LIMIT = 10_000
"""Records that wait at most; further ones are counted and left out until the thread has caught up."""

STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message", "asctime", "taskName", "color_message",
}  # fmt: skip
"""Attributes of a record that are not facts given by ``extra``."""

Item = logging.LogRecord | threading.Event | None


class LogWriter(QueueHandler):
    """A handler that passes every record to ``handlers`` in a thread."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._queue: SimpleQueue[Item] = SimpleQueue()
        super().__init__(self._queue)
        self._handlers = handlers
        self._left_out = 0
        self._process = os.getpid()
        self._listener = _Listener(self._queue, *handlers)
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy whose texts are rendered and bounded; what it refers to may change or be freed."""
        values = dict(record.__dict__)
        values.update(msg=_bounded(record.getMessage()), args=None, exc_info=None)
        if record.exc_info and not record.exc_text:
            values["exc_text"] = _bounded("".join(traceback.format_exception(*record.exc_info)).rstrip())
        for name, value in record.__dict__.items():
            if name not in STANDARD_ATTRIBUTES and not isinstance(value, (int, float)):
                values[name] = _bounded(str(value))
        return logging.makeLogRecord(values)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Pass the record on; a CRITICAL one is written when this returns.

        A forked child has no thread: it writes its records itself.
        """
        if os.getpid() != self._process:
            self._listener.handle(record)
            return
        if self._queue.qsize() >= _QUEUE_LIMIT and record.levelno < logging.CRITICAL:
            self._left_out += 1
            return
        if self._left_out:
            record.records_left_out, self._left_out = self._left_out, 0
        self._queue.put(record)
        if record.levelno >= logging.CRITICAL:
            self.flush()

    def flush(self) -> None:
        """Wait until every record so far is written, for ``FLUSH_SECONDS`` at most."""
        if self._listener.runs:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what waits, end the thread and close the handlers; closing again does nothing."""
        if self._listener.runs:
            self.flush()
            self._listener.end()
            for handler in self._handlers:
                handler.close()
        super().close()


class _Listener(QueueListener):
    """The thread. An event in the queue is set when everything before it is written."""

    def __init__(self, queue: SimpleQueue[Item], *handlers: logging.Handler) -> None:
        super().__init__(queue, *handlers, respect_handler_level=True)

    @property
    def runs(self) -> bool:
        """Whether the thread is alive, in this process."""
        return self._thread is not None and self._thread.is_alive()

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        """Write a record, or set an event."""
        if isinstance(record, threading.Event):
            record.set()
        else:
            super().handle(record)

    def end(self) -> None:
        """Stop after what is in the queue; bounded, because a handler may be blocked."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(FLUSH_SECONDS)
        self._thread = None


def _bounded(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}\n[cut: {len(text) - TEXT_LIMIT} more characters]"
