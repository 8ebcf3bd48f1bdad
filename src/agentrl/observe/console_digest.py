"""Sum up on the console, once a minute, the log records about single trajectories and groups."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

SECONDS = 60.0
"""Time between two summaries."""

_DETAIL = ("record", "task")
"""A record below WARNING with one of these fields concerns one trajectory or one group."""

_REPEATED = (*_DETAIL, "why")
"""A warning with one of these fields may come once per trajectory or call."""


class ConsoleDigest(logging.Handler):
    """Passes records to ``console``, except those about one trajectory or group.

    It counts these and logs one summary after ``seconds``. Of warnings with the same message and kind, the
    first one in that time passes and the others are counted. Errors always pass.
    """

    def __init__(
        self,
        console: logging.Handler,
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._console = console
        self._seconds = seconds
        self._clock = clock
        self._began: float | None = None
        self._counts: Counter[str] = Counter()
        self._kinds: dict[str, Counter[str]] = {}
        self._scores: list[float] = []
        self._passed: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record, or pass it to the console; then log the summary if it is due."""
        if self._passes(record):
            self._console.handle(record)
        self.tick()

    def tick(self) -> None:
        """Log the summary if the first counted record is ``seconds`` old."""
        if self._began is not None and self._clock() - self._began >= self._seconds:
            self.summarize()

    def summarize(self) -> None:
        """Log what was counted, if anything, and begin again."""
        if self._counts:
            elapsed = self._clock() - (self._began or 0.0)
            text = f"last {elapsed:.0f} s: {', '.join(self._parts())}"
            self._console.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO,
                                                        "levelname": "INFO"}))  # fmt: skip
        self._began = None
        self._counts.clear()
        self._kinds.clear()
        self._scores.clear()
        self._passed.clear()

    def close(self) -> None:
        """Log what was counted and close the console."""
        self.summarize()
        self._console.close()
        super().close()

    def flush(self) -> None:
        """Flush the console."""
        self._console.flush()

    def _passes(self, record: logging.LogRecord) -> bool:
        fields = record.__dict__
        if record.levelno >= logging.ERROR:
            return True
        if record.levelno >= logging.WARNING:
            key = (record.getMessage(), str(fields.get("kind", "")))
            if key not in self._passed or not _has(fields, _REPEATED):
                self._begin()
                self._passed.add(key)
                return True
        elif not _has(fields, _DETAIL):
            return True
        self._count(record)
        return False

    def _begin(self) -> None:
        if self._began is None:
            self._began = self._clock()

    def _count(self, record: logging.LogRecord) -> None:
        self._begin()
        message, fields = record.getMessage(), record.__dict__
        self._counts[message] += 1
        if "kind" in fields:
            self._kinds.setdefault(message, Counter())[str(fields["kind"])] += 1
        score = fields.get("score")
        if isinstance(score, int | float):
            self._scores.append(float(score))

    def _parts(self) -> Iterable[str]:
        for message, count in self._counts.items():
            part = f"{count} × {message}"
            kinds = self._kinds.get(message)
            if kinds:
                part += f" ({', '.join(f'{kind} {number}' for kind, number in kinds.items())})"
            if message == "scored" and self._scores:
                part += f" (mean {sum(self._scores) / len(self._scores):.3f})"
            yield part


def _has(fields: dict[str, object], names: Iterable[str]) -> bool:
    return any(name in fields for name in names)
