"""The quickstart resumes an unfinished run or starts a new one; its dashboard's token stays secret."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml
from waiting import wait_until

from agentrl.errors import ConfigError
from agentrl.local import quickstart
from agentrl.local.quickstart import dashboard, wait_for_signal


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def open_run(name: str | None = None, *, steps: int | None = None, seed: int = 0) -> quickstart.QuickstartRun:
    return quickstart.open_run(name, tiny=True, steps=steps, seed=seed)


def test_a_new_run_takes_the_base_name_and_the_default_steps() -> None:
    run = open_run()
    assert (run.name, run.steps, run.resumed) == ("quickstart-tiny", quickstart.TINY.steps, False)


def test_an_unfinished_run_resumes_to_its_own_target() -> None:
    open_run(steps=7)
    again = open_run()
    assert (again.name, again.steps, again.resumed) == ("quickstart-tiny", 7, True)


def test_a_finished_run_is_kept_and_the_next_gets_a_number() -> None:
    quickstart.close_run(open_run())
    assert open_run().name == "quickstart-tiny-2"


def test_another_seed_is_another_run() -> None:
    open_run(seed=0)
    assert open_run(seed=1).name == "quickstart-tiny-2"


def test_a_finished_run_cannot_be_named_again() -> None:
    quickstart.close_run(open_run("mine"))
    with pytest.raises(ConfigError, match="the run mine is finished"):
        open_run("mine")


def test_its_files_are_found_from_any_folder() -> None:
    run = open_run()
    assert yaml.safe_load(run.recipe.read_text())["train_file"] == f"assets/tasks/{run.tasks.name}"
    assert run.tasks.is_file()


_PROGRAM = """#!/bin/sh
echo "$@" > arguments
env > environment
echo log
cat > token.new
mv token.new token
"""


def test_the_token_goes_by_a_pipe_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "logs" / "dashboard.out"
    with dashboard("mine", log) as link:
        address, _, token = link.partition("?token=")
        wait_until(lambda: (tmp_path / "token").exists(), 10)
    assert address.endswith("/runs/mine")
    assert len(token) > 40
    assert (tmp_path / "token").read_text() == token
    arguments = (tmp_path / "arguments").read_text()
    assert "--token_file /dev/stdin" in arguments
    for text in (arguments, (tmp_path / "environment").read_text(), log.read_text()):
        assert token not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_wait_ends_with_a_signal_and_restores_its_handler(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    wait_for_signal()
    assert signal.getsignal(number) is before
