"""The ``agentrl`` command: help without heavy imports, exit codes, and errors as a person reads them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl import __version__
from agentrl.cli import main as cli
from agentrl.errors import AgentRLError, ConfigError, LeaseLostError

HEAVY = ("torch", "matplotlib", "fastapi", "transformers.models.auto")

HERE = [
    name for name, (place, _) in cli.COMMANDS.items() if find_spec(".".join(place.split(".")[:2])) is not None
]
"""The commands whose wing is there."""

_PROBE = f"""
import sys
from agentrl.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def _probe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROBE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_installed_command_finds_modules_of_the_working_folder(tmp_path: Path) -> None:
    own, programs = tmp_path / "own", tmp_path / "bin"
    own.mkdir()
    programs.mkdir()
    (own / "my_scorer.py").write_text("print('found')\n")
    lines = "import sys", "from agentrl.cli.main import main", "main()", "import my_scorer"
    (programs / "agentrl").write_text("\n".join(lines))
    for flags, found in (((), True), (("-P",), False)):
        command = [sys.executable, *flags, str(programs / "agentrl"), "--version"]
        result = subprocess.run(command, cwd=own, capture_output=True, text=True, timeout=60, check=False)
        assert ("found" in result.stdout) == found, result.stderr


@pytest.mark.parametrize("command", [None, *HERE])
def test_help_ends_well_and_imports_nothing_heavy(command: str | None) -> None:
    words = ["--help"] if command is None else [command, "--help"]
    result = _probe(*words)
    assert result.returncode == 0, result.stderr
    assert "usage: agentrl" in result.stdout
    assert command is None or result.stdout.count(f"\n  agentrl {command}") >= 1
    assert command is None or "\nexamples:\n" in result.stdout
    assert result.stderr.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("command", [name for name in ("serve", "sample", "eval", "try") if name in HERE])
def test_help_of_a_command_that_calls_engines_says_how_it_finds_them(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--router_url" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train", "--no_such_flag", "1"], ["sample", "--seed", "many"]])
def test_a_wrong_flag_ends_with_2_and_imports_nothing_heavy(words: list[str]) -> None:
    result = _probe(*words)
    assert result.returncode == 2, result.stderr
    assert f"agentrl {words[0]}: error:" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "heavy: []"


def test_no_words_print_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"agentrl {__version__}"


def test_an_unknown_command_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    err = capsys.readouterr().err
    assert "  train " in err
    assert err.endswith("agentrl: error: unknown command 'trian'\n  → did you mean 'train'?\n")
    assert cli.main(["qqqq"]) == 2
    assert capsys.readouterr().err.endswith("agentrl: error: unknown command 'qqqq'\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tasks", "laod", "x.jsonl"], "did you mean 'load'?"),
        (["tasks", "chekc"], "did you mean 'check'?"),
        (["tasks", "qqqq"], "see: agentrl tasks --help"),
        (["samplers", "drian"], "did you mean 'drain'?"),
        (["eval", "compre", "a", "b"], "did you mean 'compare'?"),
        (["tasks", "check", "x", "--eval_fiel", "y"], "did you mean --eval_file?"),
    ],
)
def test_a_misspelt_word_or_flag_is_answered_with_the_nearest(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith(f"\n  → {hint}\n")


def test_no_help_calls_a_command_read_only_that_deletes() -> None:
    assert not [name for name, (_, purpose) in cli.COMMANDS.items() if "only" in purpose]


def test_a_command_whose_wing_is_not_there_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "gone", ("agentrl.no_wing.cli.gone", "does nothing"))
    assert cli.main(["gone"]) == 2
    assert "agentrl gone is a command of agentrl.no_wing, which is not installed" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "wrong", ("agentrl.cli.misspelled", "does nothing"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["wrong"])


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--seed is wrong", hint="give a number"), 2),
        (LeaseLostError("the lease ran out"), 1),
        (AgentRLError("it broke"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(lambda: _raise(error), "agentrl x") == code
    if isinstance(error, AgentRLError):
        assert capsys.readouterr().err == f"agentrl x: error: {error}\n"


def test_an_unforeseen_error_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda: _raise(ZeroDivisionError("a bug")), "agentrl x")


def test_nothing_returned_is_success() -> None:
    assert cli.run(lambda: None, "agentrl x") == 0


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "agentrl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


NAMED = (
    "launch", "serve", "sample", "gateway", "score", "teach --self", "train", "eval", "eval report",
    "samplers", "samplers drain a",
)  # fmt: skip


@pytest.mark.parametrize("words", [each for each in NAMED if each.split()[0] in HERE])
def test_no_run_begins_or_is_joined_without_a_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A default name would mix a demonstration's trajectories with those of the next model."""
    assert cli.main(words.split()) == 2
    assert "needs --run_name, the name of the run" in capsys.readouterr().err
