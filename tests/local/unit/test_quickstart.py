"""The quickstart: its run, what it says that it waits for, its time limit, its dashboard and its report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from model_calls import model_call, record
from waiting import wait_until

from agentrl.config.run import QuickstartFlags
from agentrl.config.schema import EngineConfig, RunConfig, TrainConfig
from agentrl.documents.document import now
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.status import RecordStatus
from agentrl.errors import ConfigError, TimeLimitError
from agentrl.local import quickstart
from agentrl.local.quickstart import (
    HeldOut,
    QuickstartOutcome,
    WorthReading,
    choose_worth_reading,
    dashboard,
    excerpt_lines,
    held_out_lines,
    own_command,
    run_quickstart,
    wait_for_signal,
    worth_reading_lines,
)
from agentrl.local.quickstart_progress import (
    LINE_SECONDS,
    LONGEST_MINUTES,
    Pace,
    Start,
    StartLines,
    shown,
)
from agentrl.screens.views.pipelines import TrajectoryRow
from agentrl.screens.views.read import WholeTrajectory


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


METRICS = {
    "seconds_pack": 1.0, "seconds_forward_backward": 28.0, "seconds_optimizer": 1.0,
    "seconds_data": 12.0, "seconds_publish": 3.0, "tokens_per_second": 45.0,
}  # fmt: skip


class Clock:
    """A clock that moves when a test sets it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace(clock: Clock, minutes: float | None = None) -> Pace:
    return Pace(12, minutes=minutes, least_minutes=10.0, clock=clock)


def test_the_first_step_tells_the_rest_and_a_fast_machine_keeps_the_least_limit(clock: Clock) -> None:
    run = pace(clock)
    clock.now += 60
    line = run.step(1, METRICS, sampling=20.0)
    assert line == (
        "step 1 of 12 after 60 s; the other 11 take about 6 min on this machine (33 s each);"
        " the time limit is 13 min"
    )
    quick = pace(clock)
    quick.step(1, {**METRICS, "seconds_forward_backward": 5.0}, sampling=8.0)
    assert quick.deadline() == clock.now + 600


def test_the_slower_of_training_and_sampling_is_the_first_estimate(clock: Clock) -> None:
    line = pace(clock).step(1, METRICS, sampling=50.0)
    assert "(53 s each)" in line


def test_the_default_limit_follows_the_measured_speed_up_to_the_longest(clock: Clock) -> None:
    run = pace(clock)
    clock.now += 100
    run.step(1, METRICS, sampling=100.0)
    assert run.deadline() == pytest.approx(clock.now + 2 * 11 * 103.0)
    clock.now += 1000
    line = run.step(2, METRICS, sampling=0.0)
    assert run.deadline() == 1000.0 + 60 * LONGEST_MINUTES
    assert line.endswith("the time limit of 60 min leaves time for about 2 of them: --minutes 278 trains all")


def test_minutes_that_a_user_gives_stay(clock: Clock) -> None:
    run = pace(clock, minutes=2.0)
    clock.now += 90
    line = run.step(1, METRICS, sampling=0.0)
    assert "the time limit of 2 min leaves time for about 0 of them" in line
    assert run.deadline() == 1000.0 + 120
    assert not run.is_over
    clock.now += 30
    assert run.is_over
    assert run.step(2, METRICS, sampling=0.0) is None


def test_the_rest_is_told_again_only_if_it_changes(clock: Clock) -> None:
    run = pace(clock)
    clock.now += 60
    run.step(1, METRICS, sampling=0.0)
    for done in (2, 3, 4):
        clock.now += 33
        assert run.step(done, METRICS, sampling=0.0) is None
    clock.now += 300
    line = run.step(5, METRICS, sampling=0.0)
    assert "the other 7 take about 12 min on this machine (100 s each)" in line
    assert run.step(12, METRICS, sampling=0.0) is None


def test_steps_that_no_poll_saw_count_in_the_mean(clock: Clock) -> None:
    run = pace(clock)
    run.step(1, METRICS, sampling=0.0)
    clock.now += 600
    line = run.step(4, METRICS, sampling=0.0)
    assert "(200 s each)" in line


def test_a_run_that_its_limit_ends_names_the_slow_part(clock: Clock) -> None:
    run = pace(clock)
    for done in (1, 2, 3, 4):
        run.step(done, METRICS, sampling=70.0)
    clock.now += 600
    error = run.ended(4)
    assert isinstance(error, TimeLimitError)
    assert error.exit_code == 4
    assert error.message == (
        "4 of 12 steps in 10 min: a step takes 45 s: 30 s of training (45 tokens/s), 12 s of waiting for"
        " samples, 3 s of publishing; training is the slowest part"
    )
    assert error.hint.startswith("the same command trains the rest: give it --minutes 11;")


def test_a_run_ends_when_the_reward_of_three_steps_in_a_row_solves_it(clock: Clock) -> None:
    run = Pace(12, minutes=None, least_minutes=10.0, ends_when_solved=True, clock=clock)
    for done, reward in enumerate([0.1, 1.0, 1.0, 0.8, 1.0, 0.94], 1):
        clock.now += 10
        run.step(done, {**METRICS, "reward": reward}, sampling=5.0)
        assert not run.is_solved
        assert run.deadline() > clock.now
    clock.now += 10
    line = run.step(7, {**METRICS, "reward": 1.0}, sampling=5.0)
    assert line == "solved at step 7 of 12: the reward of 3 steps in a row is 0.98"
    assert run.is_solved
    assert run.deadline() == clock.now


def test_a_step_that_was_not_seen_is_not_taken_for_right(clock: Clock) -> None:
    run = Pace(12, minutes=None, least_minutes=10.0, ends_when_solved=True, clock=clock)
    for done in (1, 2, 4, 5):
        run.step(done, {**METRICS, "reward": 1.0}, sampling=5.0)
        assert not run.is_solved
    run.step(6, {**METRICS, "reward": 1.0}, sampling=5.0)
    assert run.is_solved


def test_a_run_with_given_steps_trains_all_of_them(clock: Clock) -> None:
    run = pace(clock)
    for done in range(1, 5):
        run.step(done, {**METRICS, "reward": 1.0}, sampling=5.0)
    assert not run.is_solved
    assert run.deadline() > clock.now


def test_a_run_without_a_step_says_what_it_waited_for(clock: Clock) -> None:
    run = pace(clock)
    run.waiting = "waiting for the engine, which loads the model (590 s)"
    clock.now += 600
    error = run.ended(0)
    assert error.message == f"0 of 12 steps in 10 min: {run.waiting}"
    assert "--minutes 61" in error.hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(44.6, "45 s"), (90, "1.5 min"), (600, "10 min"), (3600, "60 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert shown(seconds) == text


def test_a_start_is_told_by_changes_and_counts_at_most_every_few_seconds():
    lines = StartLines(groups_per_step=4)
    loading, serving = Start(False, 0, 0, 0), Start(True, 0, 0, 0)
    assert lines.line(loading, 0.0) == "waiting for the engine, which loads the model (0 s)"
    assert lines.line(loading, 5.0) is None
    assert lines.line(serving, 8.0) == "the engine is ready after 8 s; the samplers begin"
    assert lines.line(Start(True, 3, 1, 0), 9.0) is None
    late = lines.line(Start(True, 12, 3, 1), 8.0 + LINE_SECONDS)
    assert "12 trajectories have a score, 3 of them are right; 1 of 4 groups are ready" in late
    loads = lines.line(Start(True, 38, 9, 4, "starting"), 9.0 + LINE_SECONDS)
    assert loads.startswith("the trainer is starting: 38 trajectories")
    trained = lines.line(Start(True, 40, 9, 5, "training step 1"), 10.0 + LINE_SECONDS)
    assert trained.startswith("the trainer is training step 1: 40 trajectories")
    assert lines.line(Start(True, 41, 9, 5, "training step 1"), 11.0 + LINE_SECONDS) is None
    assert lines.line(Start(True, 40, 9, 5, "training step 1"), 8.0 + 4 * LINE_SECONDS) is None


def row(number: int, score: float | None, tokens: int) -> TrajectoryRow:
    return TrajectoryRow(
        id=f"train/0/calc-{number:04d}/0/1", split="train", epoch=0, task="train/0/calc", traj_id=0,
        attempt=1, status=RecordStatus.READY, query="What is 2 + 2?", score=score, generated_tokens=tokens,
        created_at=now(),
    )  # fmt: skip


def test_the_first_wrong_the_first_right_and_the_longest_of_the_others_are_chosen():
    rows = [row(0, None, 99), row(1, 0.0, 50), row(2, 0.0, 20), row(3, 1.0, 10), row(4, 1.0, 40)]
    chosen = choose_worth_reading(list(reversed(rows)))
    assert [(title, item.id[-8:-4]) for title, item in chosen] == [
        ("first wrong", "0001"), ("first right", "0003"), ("longest", "0004"),
    ]  # fmt: skip


def test_held_out_tasks_are_shown_before_and_after_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    ends = [
        {"tasks": 64, "pass_at": {"1": {"value": v, "low": v - 0.05, "high": v + 0.04}}} for v in (0.1, 0.9)
    ]
    sides = (("question  [b]What[/b] is 2 + 2?", "model     5"), ("question  [b]What[/b] is 2 + 2?",))
    *shown, last = held_out_lines(HeldOut(*ends, sides))
    assert last == "held out pass@1 0.100 [0.050, 0.140] -> 0.900 [0.850, 0.940] of 64 tasks [95 %]"
    assert max(map(len, shown)) <= 90
    assert sum("[b]What[/b]" in line for line in shown) == 1  # both in one line, and no markup
    assert held_out_lines(HeldOut(*ends, ())) == [last]


@pytest.mark.parametrize("scores", [[], [None], [1.0], [0.0]])
def test_few_trajectories_are_no_error(scores):
    chosen = choose_worth_reading([row(number, score, 5) for number, score in enumerate(scores)])
    assert len(chosen) == sum(score is not None for score in scores)


def test_an_excerpt_shows_calls_results_and_what_was_expected_without_control_characters():
    asked = record(query="What is 2 + 2?", answer="4", final_answer="5")
    tool = ToolExecution(
        name="calculate", arguments={"expression": "2 + 3"}, result="5", error=False, seconds=0.1
    )
    call = model_call(asked.id, 0, response={"content": ""}, tool_executions=(tool,))
    answer = model_call(asked.id, 1, 0, response={"content": "<answer>5</answer>\x1b[31m\n"})
    assert excerpt_lines(WholeTrajectory(record=asked, calls=[call, answer])) == (
        "question  What is 2 + 2?",
        'model     calculate({"expression": "2 + 3"}) = 5',
        "model     <answer>5</answer>",
        "expected  4",
    )


def test_each_trajectory_is_followed_by_the_command_that_shows_it():
    item = WorthReading("longest", "train/0/calc-0001/0/1", 0.0, 3, 61, ("question  What is 2 + 2?",))
    lines = worth_reading_lines([item], "agentrl audit record", "quickstart")
    assert lines[1] == "  longest: score 0, policy version 3, 61 generated tokens"
    assert lines[3] == "      agentrl audit record train/0/calc-0001/0/1 --run_name quickstart"
    assert worth_reading_lines([], "agentrl audit record", "quickstart") == []


def test_the_command_is_a_name_on_the_path_and_else_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "agentrl").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert own_command() == ".venv/bin/agentrl"
    monkeypatch.chdir("/")
    assert own_command() == str(folder / "agentrl").removeprefix("/")
    monkeypatch.chdir(folder.parent / "bin")
    monkeypatch.setenv("PATH", str(folder))
    assert own_command() == "agentrl"


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ([0.25], "reward 0.250 in 1 step"),
        ([0.0, 0.5], "reward 0.000 -> 0.500 over 2 steps"),
        ([0.0, 0.25, 0.5], "reward 0.000 -> 0.500 over 3 steps"),
        ([0.0, 0.2, 0.4, 0.6, 0.8], "reward 0.100 -> 0.700 over 5 steps"),
        ([0.0, 0.0, 0.3, 0.5, 1.0, 1.0, 1.0], "reward 0.100 -> 1.000 over 7 steps"),
    ],
)
def test_no_step_is_both_at_the_beginning_and_at_the_end(rewards: list[float], line: str) -> None:
    outcome = QuickstartOutcome(
        rewards=rewards, seconds=1.0, tokens=1.0, call_tokens=1.0, sampled=1, abandoned=0, worth_reading=[],
        plot=Path("curve.png"),
    )  # fmt: skip
    assert outcome.reward == line


def test_a_second_quickstart_in_a_folder_says_at_once_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(quickstart, "_run", lambda run, *_: started.append(run.name) or second())

    def second() -> int:
        code = "import sys; from agentrl.cli.main import main; sys.exit(main(['quickstart', '--tiny']))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1, done.stderr
        assert f"runs in this folder already: process {os.getpid()}, run mine" in done.stderr
        assert f"kill {os.getpid()}" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        return 0

    flags = QuickstartFlags(run_name="mine", tiny=True)
    for _ in range(2):  # the folder is free again after the first
        assert run_quickstart(flags, RunConfig(), TrainConfig(), EngineConfig()) == 0
    assert started == ["mine", "mine"]
    assert {path.name for path in quickstart.STATE_DIR.iterdir()} == {"mine", "holder"}
