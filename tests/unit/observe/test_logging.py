"""One line format on stderr and in the file; secrets hidden; no handler twice."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.logging import LineFormatter, describe_process_id, setup
from agentrl.observe.redact import redact


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    """A run that logs below ``tmp_path``; the process's logging is put back afterwards."""
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
    setup(run, "sampler", "s1")
    logging.getLogger("agentrl.x").info(
        "claimed", extra={"task": "train/0/7", "seconds": 1.23456789, "q": "a b"}
    )
    line = "INFO    demo/sampler-s1  claimed  task=train/0/7 seconds=1.23457 q='a b'\n"
    console = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d " + re.escape(line), console)
    assert log_text(run, "demo_sampler_s1.log").endswith(line)


def test_calling_it_again_replaces_the_handlers(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(logging.getLogger().handlers)
    for _ in range(3):
        setup(run, "trainer", "t")
    logging.getLogger("agentrl").warning("once")
    assert len(logging.getLogger().handlers) == before + 2
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
    logging.getLogger("httpx").info("HTTP Request")
    logging.getLogger("agentrl").debug("detail")
    assert capsys.readouterr().err == ""


def test_warnings_are_logged(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    setup(run, "x", "y")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
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


def _format(message: str, colour: bool = False, level: int = logging.WARNING) -> str:
    record = logging.LogRecord("n", level, "p", 1, message, None, None)
    return LineFormatter("demo/x-y", date_format="%H:%M:%S", colour=colour).format(record)


def test_a_message_cannot_forge_a_line_or_colour_the_terminal() -> None:
    text = _format("first\n12:00:00 INFO    demo/x-y  forged \x1b[31mred\x07")
    first, second = text.split("\n")
    assert first.endswith("first")
    assert second.startswith("    12:00:00")
    assert "\x1b" not in text
    assert "\x07" not in text


def test_colour_is_on_the_level_alone() -> None:
    assert "\x1b[33mWARNING\x1b[0m demo/x-y" in _format("m", colour=True)
    assert "\x1b" not in _format("m", colour=True, level=logging.INFO)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mongodb://user:pa%40ss@h1:1,h2:2/db?x=1", "mongodb://***@h1:1,h2:2/db?x=1"),
        ("mongodb+srv://user:p@ss@host/db", "mongodb+srv://***@host/db"),
        ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': '***'}"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: ***"),
        ("sent Bearer abcdefgh12345", "sent Bearer ***"),
        ("OPENAI_API_KEY=abc123 x", "OPENAI_API_KEY=*** x"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "***", "n": 1}'),
        ("http://h/p?token=abc&n=1", "http://h/p?token=***&n=1"),
        ("key sk-proj-abcdefghij0123456789 used", "key *** used"),
    ],
)
def test_secrets_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text", ["mongodb://127.0.0.1:27017/demo", "tokens=12 token_level_loss=True", "mail a@b.org", "a://b c@d"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
