"""Logging of every process: one line format on stderr and in a file, secrets redacted, long records cut.

A thread formats and writes (``log_writer``): neither a long record nor a slow disk stops an event loop.

A module logs through ``logging.getLogger(__name__)``; facts go into ``extra`` and are printed as
``key=value`` behind the message::

    12:03:44 INFO    demo/sampler-node1-4711  claimed  task=train/0/17 traj_id=3
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.log_writer import STANDARD_ATTRIBUTES, LogWriter
from agentrl.observe.redact import redact_and_cut

_FILE_BYTES = 64 * 2**20
_FILES_KEPT = 3
_QUIET = {
    "asyncio": logging.WARNING,
    "filelock": logging.WARNING,
    "httpcore": logging.WARNING,
    "httpx": logging.WARNING,
    "matplotlib": logging.WARNING,
    "mcp": logging.WARNING,
    "openai": logging.WARNING,
    "pymongo": logging.WARNING,
    "torch": logging.WARNING,
    "transformers": logging.WARNING,
    "urllib3": logging.WARNING,
    "uvicorn.access": logging.WARNING,
}
_COLOURS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_RESET = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHOWN = 64 * 1024
"""Characters of a record that are written."""

_installed: list[logging.Handler] = []


def describe_process_id() -> str:
    """``host-pid`` of this process: its name in claims, log lines and log files."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"


def setup(run: RunConfig, role: str, id: str | None = None) -> None:
    """Send every log record of this process to stderr and to ``{log_dir}/{run_name}_{role}_{id}.log``.

    ``id`` defaults to ``describe_process_id()``. Calling it again replaces the handlers of the call before.
    Warnings and uncaught exceptions are logged too. Raises ConfigError when ``log_dir`` cannot be written.
    """
    id = id or describe_process_id()
    name = f"{run.run_name}/{role}-{id}"
    file_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{run.run_name}_{role}_{id}") + ".log"
    file = _open_file(Path(run.log_dir) / file_name)
    file.setFormatter(LineFormatter(name, date_format="%Y-%m-%d %H:%M:%S"))
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(LineFormatter(name, date_format="%H:%M:%S", color=_wants_color()))
    _install(LogWriter([console, file]))
    logging.getLogger().setLevel(run.log_level)
    for logger, level in _QUIET.items():
        logging.getLogger(logger).setLevel(max(level, logging.getLevelName(run.log_level)))
    quiet_transformers()
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def flush() -> None:
    """Wait until every record so far is written; bounded. At exit this happens by itself."""
    for handler in _installed:
        handler.flush()


def quiet_transformers() -> None:
    """No progress bars from transformers, and its log records go the way of all others."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    library = sys.modules.get("transformers.utils.logging")
    if library is not None:
        library.disable_progress_bar()
        library.disable_default_handler()
        library.enable_propagation()


class LineFormatter(logging.Formatter):
    """``time LEVEL run/role-id  message  key=value``; control characters out, secrets hidden."""

    def __init__(self, name: str, *, date_format: str, color: bool = False) -> None:
        super().__init__(datefmt=date_format)
        self._name = name
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; lines after the first (a traceback) are indented."""
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
        if self._color and record.levelno in _COLOURS:
            level = f"{_COLOURS[record.levelno]}{level}{_RESET}"
        return f"{self.formatTime(record, self.datefmt)} {level} {self._name}  {body}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if not text or re.search(r"[\s=\"']", text) else text


def _wants_color() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _open_file(path: Path) -> RotatingFileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the log file {path} cannot be written: {error.strerror}",
            hint="give --log_dir a folder that this user can write",
        ) from error


def _install(writer: LogWriter) -> None:
    root = logging.getLogger()
    for handler in _installed:
        root.removeHandler(handler)
        handler.close()
    _installed[:] = [writer]
    root.addHandler(writer)


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger("agentrl").critical(
        "the process ends with an error that nothing caught", exc_info=(kind, error, traceback)
    )
