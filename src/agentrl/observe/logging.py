"""Log to stderr and to a file from every process: one line format, secrets redacted, long records cut.

A rule of redaction finds a secret by its name (``password=…``), its place (``://user:password@host``) or its
published prefix (``AKIA…``, ``glpat-…``). To stay linear, a rule whose end may be missing limits every
repetition before it, or begins with a literal that the repetition cannot contain.

A background thread formats and writes, so that a long record or a slow disk never blocks an event loop.

A module logs through ``logging.getLogger(__name__)``; structured fields go into ``extra`` and are printed as
``key=value`` after the message::

    12:03:44 INFO    demo/sampler-node1-4711  claimed  task=train/0/17 traj_id=3

The file gets every record. Without ``--verbose``, stderr gets a summary a minute of those about single
trajectories and groups.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, cast

from agentrl.base.user_code import describe
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError

HIDDEN = "***"

_ASSIGNED = r"""\\{0,4}["']?\]?\s{0,8}(?:=>|[:=]|%3D)\s{0,8}\\{0,4}["']?"""
"""What stands between a name and its value in shells, YAML, JSON (also inside a string), Python and URLs."""
_VALUE = r"""[^\s"',;&}]+"""
_QUOTED_OR_VALUE = r"""(?:(?<=")[^"\n]+|(?<=')[^'\n]+|[^\s"',;&}]+)"""
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""The start of a word, also after an escaped line break or a percent-encoded character."""

_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    r".*?(?:(-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)|\Z)",
    re.DOTALL,
)
_USER_INFO = re.compile(r"""(?<=://)[^\s/'"<>]+@""")
_AUTHORIZATION = re.compile(
    rf"(authorization{_ASSIGNED})(?:(?:bearer|basic|digest|negotiate|token|apikey)\s{{1,8}})?{_VALUE}",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s{1,8})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:(?:api|access|account|auth|encryption|private|secret|signing|subscription)[_-]?key"
    r"|secret[_-]?access[_-]?key|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:access|api|auth|bearer|id|personal|private|refresh|security|session)[_-]?token)"
    rf"{_ASSIGNED}){_QUOTED_OR_VALUE}",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"((?:(?<![A-Za-z])|(?<=%[0-9A-F]{2}))(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!per_)token\\{0,4}[\"']?\s{0,8}(?:=|%3D)\s{0,8}\\{0,4}[\"']?"
    r"|[\"']token\\{0,4}[\"']\s{0,8}:\s{0,8}\\{0,4}[\"'])"
    r"(?!\d{1,9}(?![A-Za-z0-9_-]))" + _QUOTED_OR_VALUE,
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"""((?<!-)--(?!-)[a-z0-9_-]{0,40}(?:key|token|secret|password|passphrase)["']?[\s,]{1,4}["']?)[^\s"',;-][^\s"',;]*""",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"([?&](?:key|sig|signature|code|auth|pat|x-amz-(?:signature|credential|security-token))=)[^\s\"'&#<>]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    rf"{_START}(?:"
    r"sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI, Anthropic, Stripe
    r"|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[A-Za-z0-9_.-]{20,}|GR1348941[A-Za-z0-9_-]{20,}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"  # Slack
    r"|(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}"  # AWS: a key's id, and the secret beside it
    r"(?:[\s\"',:;/=|]{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?"
    r"|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})"  # Google
)
_SLACK_HOOK = re.compile(r"(?<=hooks\.slack\.com/services/)[A-Za-z0-9_/]+")
_JWT = re.compile(r"eyJ[A-Za-z0-9_.-]{16,}")
_JWT_PARTS = re.compile(r"[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}")

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def _web_token(match: re.Match[str]) -> str:
    return HIDDEN if _JWT_PARTS.match(match.group()) else match.group()


def _private_key(match: re.Match[str]) -> str:
    return f"{match.group(1)}{HIDDEN}{match.group(2) or ''}"


_RULES: tuple[Rule, ...] = (
    (_PRIVATE_KEY, _private_key),
    (_USER_INFO, f"{HIDDEN}@"),
    (_AUTHORIZATION, rf"\1{HIDDEN}"),
    (_BEARER, rf"\1{HIDDEN}"),
    (_NAMED, rf"\1{HIDDEN}"),
    (_TOKEN, rf"\1{HIDDEN}"),
    (_OPTION, rf"\1{HIDDEN}"),
    (_QUERY, rf"\1{HIDDEN}"),
    (_SHAPES, HIDDEN),
    (_SLACK_HOOK, HIDDEN),
    (_JWT, _web_token),
)


def redact(text: str) -> str:
    """Return ``text`` with each secret that a rule finds replaced by ``***``."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_and_cut(text: str, limit: int) -> str:
    """Return ``text`` redacted and cut to ``limit`` characters, with a notice of how many are missing.

    At most ``2 * limit`` characters are scanned, so the cost does not depend on the length of ``text``. If
    only a part is scanned, its end is not shown, because a secret may be cut there.
    """
    scanned = redact(text[: 2 * limit])
    complete = len(text) <= 2 * limit
    if complete and len(scanned) <= limit:
        return scanned
    shown = scanned[:limit] if complete else scanned[: min(limit, len(scanned) - limit // 16)]
    return f"{shown}\n[cut: {max(len(text), len(scanned)) - len(shown)} more characters]"


MESSAGE_CHARS = 8 * 1024
"""Longest stored failure message, in characters; a notice gives the number of characters left out."""


def failure_text(error: BaseException | str) -> str:
    """Return the text of a failure as it is stored: secrets hidden, storable, at most ``MESSAGE_CHARS``.

    Errors of other packages are prefixed with the name of their class. Never raises.
    """
    if isinstance(error, str):
        text = error
    else:
        text = str(error) if isinstance(error, AgentRLError) else describe(error)
    shown = redact_and_cut(text, MESSAGE_CHARS)
    # Replace lone surrogates: BSON refuses the whole document for one.
    return shown.encode("utf-8", "replace").decode("utf-8")


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


TEXT_LIMIT = 128 * 1024
"""Maximum number of characters of a message, a field or a traceback in the queue; fewer are written."""

FLUSH_SECONDS = 5.0
"""Maximum time that ``flush`` waits for the thread."""

_TICK_SECONDS = 1.0
"""How often the thread looks whether a summary is due."""

_QUEUE_LIMIT = 10_000
"""Maximum length of the queue; further records are counted and dropped until the thread catches up."""

STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message", "asctime", "taskName", "color_message",
}  # fmt: skip
"""Attributes of a record that do not come from ``extra``."""

Item = logging.LogRecord | threading.Event | None

_FILE_BYTES = 64 * 2**20
_FILES_KEPT = 3
_QUIET = {
    "alembic": logging.WARNING,
    "asyncio": logging.WARNING,
    "filelock": logging.WARNING,
    "httpcore": logging.WARNING,
    "httpcore2": logging.WARNING,
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "matplotlib": logging.WARNING,
    "mcp": logging.WARNING,
    "openai": logging.WARNING,
    "pymongo": logging.WARNING,
    "torch": logging.WARNING,
    "transformers": logging.WARNING,
    "urllib3": logging.WARNING,
    "uvicorn.access": logging.WARNING,
}
_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_RESET = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHOWN = 64 * 1024
"""Maximum number of characters written per record."""

_installed: list[logging.Handler] = []


def describe_process_id() -> str:
    """Return ``host-pid``, the name of this process in claims, log lines and log files."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"


def setup(run: RunConfig, role: str, id: str | None = None, *, console_level: int = logging.NOTSET) -> None:
    """Send every log record of this process to stderr and to ``{log_dir}/{run_name}_{role}_{id}.log``.

    ``id`` defaults to ``describe_process_id()``. Records below ``console_level`` go to the file only. Another
    call replaces the handlers of the one before. Warnings and uncaught exceptions are logged too. Raises
    ConfigError if ``log_dir`` cannot be written.
    """
    id = id or describe_process_id()
    name = f"{run.run_name}/{role}-{id}"
    file_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{run.run_name}_{role}_{id}") + ".log"
    file = _open_file(Path(run.log_dir) / file_name)
    file.setFormatter(LineFormatter(name, date_format="%Y-%m-%d %H:%M:%S"))
    console = logging.StreamHandler(sys.stderr)
    is_colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    console.setFormatter(LineFormatter(name, date_format="%H:%M:%S", color=is_colored))
    console.addFilter(lambda record: record.levelno >= console_level)
    root = logging.getLogger()
    for handler in _installed:
        root.removeHandler(handler)
        handler.close()
    _installed[:] = [LogWriter([console if run.verbose else ConsoleDigest(console), file])]
    root.addHandler(_installed[0])
    root.setLevel(run.log_level)
    for logger, level in _QUIET.items():
        logging.getLogger(logger).setLevel(max(level, logging.getLevelName(run.log_level)))
    quiet_transformers()
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def flush() -> None:
    """Wait until every record so far is written, ``FLUSH_SECONDS`` at most; this also happens at exit."""
    for handler in _installed:
        handler.flush()


def quiet_transformers() -> None:
    """Turn off the progress bars of transformers and send its log records to this process's handlers."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    library = sys.modules.get("transformers.utils.logging")
    if library is not None:
        library.disable_progress_bar()
        library.disable_default_handler()
        library.enable_propagation()


class LineFormatter(logging.Formatter):
    """Formats ``time LEVEL run/role-id  message  key=value``, without control characters and secrets."""

    def __init__(self, name: str, *, date_format: str, color: bool = False) -> None:
        super().__init__(datefmt=date_format)
        self._name = name
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; indent the lines after the first, such as a traceback."""
        extras = "".join(
            f" {key}={_value(value)}"
            for key, value in record.__dict__.items()
            if key not in STANDARD_ATTRIBUTES
        )
        text = record.getMessage() + (f" {extras}" if extras else "")
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        elif record.exc_text:
            text += "\n" + record.exc_text
        if record.stack_info:
            text += "\n" + self.formatStack(record.stack_info)
        body = _CONTROL.sub("�", redact_and_cut(text.rstrip(), _SHOWN)).replace("\n", "\n    ")
        level = f"{record.levelname:<7}"
        if self._color and record.levelno in _COLORS:
            level = f"{_COLORS[record.levelno]}{level}{_RESET}"
        return f"{self.formatTime(record, self.datefmt)} {level} {self._name}  {body}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if not text or re.search(r"[\s=\"']", text) else text


def _open_file(path: Path) -> RotatingFileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the log file {path} cannot be written: {error.strerror}",
            hint="give --log_dir a folder that this user can write",
        ) from error


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger("agentrl").critical(
        "the process ends with an error that nothing caught", exc_info=(kind, error, traceback)
    )


class LogWriter(QueueHandler):
    """A handler that passes every record to ``handlers`` in a background thread.

    The message, the fields and the traceback are rendered when the record is logged, because they may change
    later. CRITICAL records and ``flush`` wait until the thread has written.
    """

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._queue: SimpleQueue[Item] = SimpleQueue()
        super().__init__(self._queue)
        self._handlers = handlers
        self._left_out = 0
        self._process = os.getpid()
        self._listener = _Listener(self._queue, *handlers)
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy of the record with rendered texts of limited length."""
        values = dict(record.__dict__)
        values.update(msg=_bounded(record.getMessage()), args=None, exc_info=None)
        if record.exc_info and not record.exc_text:
            values["exc_text"] = _bounded("".join(traceback.format_exception(*record.exc_info)).rstrip())
        for name, value in record.__dict__.items():
            if name not in STANDARD_ATTRIBUTES and not isinstance(value, (int, float)):
                values[name] = _bounded(str(value))
        return logging.makeLogRecord(values)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put the record into the queue; return after it is written if it is CRITICAL.

        A forked child has no thread and writes its records itself.
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
        """Wait until every record so far is written, ``FLUSH_SECONDS`` at most."""
        if self._listener.runs:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Write the queued records, end the thread and close the handlers; idempotent."""
        if self._listener.runs:
            self.flush()
            self._listener.end()
            for handler in self._handlers:
                handler.close()
        super().close()


class _Listener(QueueListener):
    """The background thread; it sets an event of the queue once all records before it are written."""

    def __init__(self, queue: SimpleQueue[Item], *handlers: logging.Handler) -> None:
        super().__init__(queue, *handlers, respect_handler_level=True)

    @property
    def runs(self) -> bool:
        """Return whether the thread is alive in this process."""
        return self._thread is not None and self._thread.is_alive()

    def dequeue(self, block: bool) -> Any:
        """Return the next item; while there is none, let due summaries be written."""
        while True:
            try:
                return cast("SimpleQueue[Item]", self.queue).get(block, _TICK_SECONDS)
            except Empty:
                if not block:
                    raise
                for handler in self.handlers:
                    if isinstance(handler, ConsoleDigest):
                        handler.tick()

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        """Write a record or set an event."""
        if isinstance(record, threading.Event):
            record.set()
        else:
            super().handle(record)

    def end(self) -> None:
        """Stop after the queued records, or after ``FLUSH_SECONDS`` if a handler is blocked."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(FLUSH_SECONDS)
        self._thread = None


def _bounded(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}\n[cut: {len(text) - TEXT_LIMIT} more characters]"
