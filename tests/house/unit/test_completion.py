"""``agentrl completion``: which parser completes a line, and what it offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import completion
from agentrl.cli.main import main
from agentrl.config.commands import COMMANDS


def _flags(*words: str) -> set[str]:
    parser, _ = completion.parser_of(list(words))
    return set(parser._option_string_actions)


def test_the_first_word_is_a_command() -> None:
    parser, skipped = completion.parser_of([])
    assert skipped == 0
    assert list(parser._actions[0].choices or ()) == list(COMMANDS)


@pytest.mark.parametrize(
    ("words", "flag", "skipped"),
    [
        (("train",), "--loss_calculater", 1),
        (("sample",), "--run_name", 1),
        (("audit", "records"), "--failure", 2),
        (("audit", "record"), "--json", 2),
        (("eval",), "--eval_file", 1),
        (("eval", "report"), "--markdown", 2),
        (("status",), "--interval_seconds", 1),
        (("mongo",), "--mongo_dir", 1),
        (("doctor",), "--json", 1),
    ],
)
def test_the_parser_of_a_command_has_its_flags(words: tuple[str, ...], flag: str, skipped: int) -> None:
    parser, found = completion.parser_of(list(words))
    assert found == skipped
    assert flag in parser._option_string_actions


def test_flags_have_choices_and_run_names_a_completer() -> None:
    parser, _ = completion.parser_of(["serve"])
    actions = parser._option_string_actions
    assert tuple(actions["--engine"].choices or ()) == ("local", "sglang", "vllm")
    assert getattr(actions["--run_name"], "completer") is completion._runs  # noqa: B009 - not declared


def test_a_word_that_is_no_command_offers_the_commands() -> None:
    assert completion.parser_of(["trian"])[1] == 0
    assert "--help" in _flags("sample")


def test_a_database_that_is_down_offers_no_runs(tmp_path: Path) -> None:
    parser, _ = completion.parser_of(["sample"])
    words = parser.parse_args(["--mongo_dir", str(tmp_path)])
    assert completion._runs(words) == []
    assert completion._metrics(words) == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_has_its_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell]) == 0
    assert "agentrl" in capsys.readouterr().out


def test_the_shell_gets_the_choices_of_a_flag(tmp_path: Path) -> None:
    line, answer = "agentrl audit records --status sco", tmp_path / "answer"
    variables = {
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "agentrl"], env=os.environ | variables, timeout=60, check=True,
        capture_output=True,
    )  # fmt: skip
    assert answer.read_text().split() == ["scoring", "scored"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["runs", "rn", "a", "b"], "rename"),
        (["runs", "reanme", "a", "b"], "rename"),
        (["db", "chekc"], "check"),
        (["mongo", "stat"], "status"),
        (["audit", "rcords"], "records"),
        (["tools", "mngr"], "manager"),
        (["launch", "trian"], "train"),
    ],
)
def test_a_misspelt_word_of_a_wing_is_answered_with_the_nearest(
    words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"\n  → did you mean '{nearest}'?\n")
