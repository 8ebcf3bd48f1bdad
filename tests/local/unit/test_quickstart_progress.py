"""What a quickstart says that it waits for, its time limit, and the reason when the limit ends it."""

import pytest

from agentrl.errors import TimeLimitError
from agentrl.local.quickstart import LINE_SECONDS, LONGEST_MINUTES, Pace, Start, StartLines, shown

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
    trained = lines.line(Start(True, 40, 9, 5), 8.0 + 2 * LINE_SECONDS)
    assert trained.startswith("the trainer computes its step")
    assert lines.line(Start(True, 40, 9, 5), 8.0 + 4 * LINE_SECONDS) is None
