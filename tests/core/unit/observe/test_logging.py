"""One line format on stderr and in the file; secrets hidden; no handler twice; a digest on the console."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe import logging as run_logging
from agentrl.observe.logging import ConsoleDigest, LineFormatter, LogWriter, describe_process_id, flush, setup


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    """A run that logs below ``tmp_path``; the logging of the process is restored afterwards."""
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, sys.excepthook
    yield RunConfig(run_name="demo", log_dir=str(tmp_path / "logs"))
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    sys.excepthook = hook
    logging.captureWarnings(False)


def log_text(run: RunConfig, name: str) -> str:
    return (Path(run.log_dir) / name).read_text(encoding="utf-8")


def test_a_record_reaches_stderr_and_the_file(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    setup(replace(run, verbose=True), "sampler", "s1")
    logging.getLogger("agentrl.x").info(
        "claimed", extra={"task": "train/0/7", "seconds": 1.23456789, "q": "a b"}
    )
    flush()
    line = "INFO    demo/sampler-s1  claimed  task=train/0/7 seconds=1.23457 q='a b'\n"
    console = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d " + re.escape(line), console)
    assert log_text(run, "demo_sampler_s1.log").endswith(line)


def test_records_of_single_trajectories_go_to_the_file_alone(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    setup(run, "sampler", "s2")
    for score in (0.0, 1.0):
        logging.getLogger("agentrl.x").info("scored", extra={"record": "train/0/7/0/1", "score": score})
    flush()
    assert capsys.readouterr().err == ""
    assert log_text(run, "demo_sampler_s2.log").count("  scored  record=train/0/7/0/1 score=") == 2
    setup(run, "sampler", "s2")
    assert "2 × scored (mean 0.500)" in capsys.readouterr().err


def test_calling_it_again_replaces_the_handlers(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(logging.getLogger().handlers)
    for _ in range(3):
        setup(run, "trainer", "t")
    logging.getLogger("agentrl").warning("once")
    flush()
    assert len(logging.getLogger().handlers) == before + 1
    assert capsys.readouterr().err.count("once") == 1
    assert log_text(run, "demo_trainer_t.log").count("once") == 1


def test_the_default_id_is_the_process(run: RunConfig) -> None:
    setup(run, "trainer")
    assert (Path(run.log_dir) / f"demo_trainer_{describe_process_id()}.log").exists()


def test_an_id_with_slashes_stays_in_the_folder(run: RunConfig) -> None:
    setup(run, "engine", "../../etc/x")
    assert [path.name for path in Path(run.log_dir).iterdir()] == ["demo_engine_..-..-etc-x.log"]


def test_the_level_is_the_runs_and_libraries_are_quiet(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    setup(RunConfig(run_name="demo", log_dir=run.log_dir, log_level="WARNING"), "x", "y")
    logging.getLogger("agentrl").info("chatter")
    setup(run, "x", "y")
    logging.getLogger("httpx2").info("HTTP Request")
    logging.getLogger("agentrl").debug("detail")
    flush()
    assert capsys.readouterr().err == ""


def test_warnings_are_logged(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    setup(run, "x", "y")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
    flush()
    assert "UserWarning: careful" in capsys.readouterr().err


def test_an_uncaught_error_is_logged_with_its_traceback(run: RunConfig) -> None:
    setup(run, "x", "y")
    try:
        raise ValueError("mongodb://user:secret@host")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    text = log_text(run, "demo_x_y.log")
    assert "CRITICAL" in text
    assert "ValueError: mongodb://***@host" in text


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="log file"):
        setup(RunConfig(log_dir=str(tmp_path / "file" / "logs")), "x", "y")


def _format(message: str, color: bool = False, level: int = logging.WARNING) -> str:
    record = logging.LogRecord("n", level, "p", 1, message, None, None)
    return LineFormatter("demo/x-y", date_format="%H:%M:%S", color=color).format(record)


def test_a_message_cannot_forge_a_line_or_color_the_terminal() -> None:
    text = _format("first\n12:00:00 INFO    demo/x-y  forged \x1b[31mred\x07")
    first, second = text.split("\n")
    assert first.endswith("first")
    assert second.startswith("    12:00:00")
    assert "\x1b" not in text
    assert "\x07" not in text


def test_color_is_on_the_level_alone() -> None:
    assert "\x1b[33mWARNING\x1b[0m demo/x-y" in _format("m", color=True)
    assert "\x1b" not in _format("m", color=True, level=logging.INFO)


def test_a_record_is_rendered_as_it_was_when_it_was_logged(run: RunConfig) -> None:
    setup(run, "x", "y")
    counts = {"scored": 1}
    logging.getLogger("agentrl").info("counts %s", counts, extra={"also": counts})
    counts["scored"] = 2
    flush()
    assert "counts {'scored': 1}  also=\"{'scored': 1}\"" in log_text(run, "demo_x_y.log")


def test_a_long_record_is_cut_with_a_notice(run: RunConfig) -> None:
    setup(run, "x", "y")
    logging.getLogger("agentrl").info("z" * 10**6)
    flush()
    text = log_text(run, "demo_x_y.log")
    assert len(text) < 100_000
    assert re.search(r"\[cut: \d+ more characters\]", text)


class Blocked(logging.Handler):
    """A handler that blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.threads: set[int] = set()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.may_write.wait(60)
        self.threads.add(threading.get_ident())
        self.messages.append(record.getMessage())


def test_a_blocked_handler_does_not_block_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logging, "_QUEUE_LIMIT", 10)
    slow = Blocked()
    writer = LogWriter([slow])
    for number in range(30):
        writer.handle(logging.makeLogRecord({"msg": str(number), "levelno": logging.INFO}))
    slow.may_write.set()
    writer.flush()
    last = writer.prepare(logging.makeLogRecord({"msg": "after", "levelno": logging.INFO}))
    writer.enqueue(last)
    writer.close()
    assert slow.messages[:10] == [str(number) for number in range(10)]
    assert slow.messages[-1] == "after"
    assert last.__dict__["records_left_out"] == 30 - len(slow.messages[:-1])
    assert slow.threads == slow.threads - {threading.get_ident()}


def test_the_last_records_are_written_at_exit(run: RunConfig) -> None:
    script = (
        "import logging, sys\nfrom agentrl.config.schema import RunConfig\n"
        "from agentrl.observe.logging import setup\n"
        f"setup(RunConfig(run_name='demo', log_dir={run.log_dir!r}), 'x', 'y')\n"
        "[logging.getLogger('agentrl').info('line %d', n) for n in range(1000)]\n"
        "raise ValueError('the end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    text = log_text(run, "demo_x_y.log")
    assert text.count("  line ") == 1000
    assert "ValueError: the end" in text
    assert "ValueError: the end" in ended.stderr


class _Console(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Setting:
    def __init__(self) -> None:
        self.now = 0.0
        self.console = _Console()
        self.digest = ConsoleDigest(self.console, seconds=60.0, clock=lambda: self.now)

    def log(self, level: int, message: str, **fields: Any) -> None:
        self.digest.handle(
            logging.makeLogRecord(
                {"msg": message, "levelno": level, "levelname": logging.getLevelName(level), **fields}
            )
        )


@pytest.fixture
def setting() -> _Setting:
    return _Setting()


def test_trajectories_and_groups_are_summed_up(setting: _Setting) -> None:
    setting.log(logging.INFO, "the sampler begins")
    for score in (0.0, 1.0, 1.0):
        setting.log(logging.INFO, "sampled", record="train/0/a/0/1")
        setting.log(logging.INFO, "scored", record="train/0/a/0/1", score=score)
    setting.log(logging.INFO, "group finalized", task="train/0/a")
    assert setting.console.lines == ["the sampler begins"]
    setting.now = 61.0
    setting.digest.tick()
    setting.digest.tick()
    assert setting.console.lines[1:] == [
        "last 61 s: 3 × sampled, 3 × scored (mean 0.667), 1 × group finalized"
    ]


def test_a_repeated_warning_is_shown_once_a_minute_and_an_error_always(setting: _Setting) -> None:
    for kind in ("tool", "tool", "engine", "tool"):
        setting.log(logging.WARNING, "trajectory failed", record="x", kind=kind)
    for _ in range(2):
        setting.log(logging.ERROR, "a failure cannot be stored", record="x")
    assert setting.console.lines == ["trajectory failed"] * 2 + ["a failure cannot be stored"] * 2
    setting.now = 60.0
    setting.log(logging.WARNING, "trajectory failed", record="x", kind="tool")
    assert setting.console.lines[4:] == ["last 60 s: 3 × trajectory failed (tool 3)"]
    setting.log(logging.WARNING, "trajectory failed", record="x", kind="tool")
    assert setting.console.lines[5:] == ["trajectory failed"]


def test_a_warning_without_fields_passes_each_time(setting: _Setting) -> None:
    for _ in range(2):
        setting.log(logging.WARNING, "the disk is nearly full")
    assert len(setting.console.lines) == 2


def test_the_rest_is_logged_at_the_end(setting: _Setting) -> None:
    setting.log(logging.INFO, "scored", record="x", score=0.5)
    setting.now = 3.0
    setting.digest.close()
    assert setting.console.lines == ["last 3 s: 1 × scored (mean 0.500)"]
