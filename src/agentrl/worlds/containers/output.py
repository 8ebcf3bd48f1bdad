"""Keep an output of a program up to a limit. Only the standard library: the sandbox's launcher imports it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Output:
    """The output of a program, up to a limit; the first and the last bytes of it are kept."""

    limit: int
    first: int
    last: int
    total: int = 0
    _begin: bytearray = field(default_factory=bytearray)
    _end: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, limit: int, shown_bytes: int | None) -> Output:
        """Return one that shows its two ends as ``shown_bytes``; None shows all up to the limit."""
        half = None if shown_bytes is None else shown_bytes // 2
        return cls(limit, limit, 0) if half is None else cls(limit, half, half)

    def add(self, chunk: bytes) -> bool:
        """Take more of it; return False if the limit is exceeded."""
        self.total += len(chunk)
        free = self.first - len(self._begin)
        self._begin += chunk[:free]
        self._end += chunk[free:]
        del self._end[: max(0, len(self._end) - self.last)]
        return self.total <= self.limit

    @property
    def text(self) -> str:
        """Return what is shown of the output."""
        left_out = self.total - len(self._begin) - len(self._end)
        notice = f"\n[{left_out:,} bytes left out]\n".encode() if left_out and self.last else b""
        return (self._begin + notice + self._end).decode("utf-8", "replace")
