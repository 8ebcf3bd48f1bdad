"""The file of ``agentrl sweep``, and the race of its settings."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agentrl.base.validation import validate
from agentrl.errors import ConfigError
from agentrl.lab.sweep import Key, Sweep, SweepChild, SweepSetting, race, read_sweep, standings
from agentrl.scoring.evaluation import EvaluatedTask

EXAMPLE = Path(__file__).parents[3] / "assets/examples/sweep.yml"
HELD_OUT = {"file": "held_out"}


def sweep(seeds: Sequence[int] = (0, 1, 2), **more: object) -> Sweep:
    settings = ({"learning_rate": "1e-3"}, {"learning_rate": "1e-4"}, {})
    given = {"name": "s", "run": "math", "settings": settings, "seeds": tuple(seeds), **more}
    return validate(Sweep, given)


def test_the_example_is_a_grid_over_three_orders() -> None:
    found = read_sweep(EXAMPLE)
    assert found.run == "quickstart"
    assert Path(found.eval.file).is_file()
    assert [setting.flags["loss_calculater"] for setting in found.all] == ["GRPO", "GRPO", "GSPO", "GSPO"]
    names = {found.child(setting, seed) for setting in found.all for seed in found.seeds}
    assert len(names) == 4 * len(found.seeds)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("name: s\nrun: math\n", 0, "names no setting"),
        ("name: s\nrun: math\ngrid:\n  learning_rat: [1]\n", 4, "--learning_rat"),
        ("name: s\nrun: math\ngrid:\n  loss_calculater: [GRPO, GPSO]\n", 4, "GPSO"),
        ("name: s\nrun: math\nsettings:\n- {}\n- lora_rank: 4\n", 5, "--lora_rank cannot differ"),
        ("name: s\nrun: math\nsettings:\n- learning_rate: 1\n- learning_rate: 1\n", 0, "twice"),
        ("name: s\nrun: math\nsettings:\n- order_seed: 1\n", 4, "--order_seed is given by the sweep"),
        ("name: s\nrun: math\nsteps: 9-3\nsettings: [{}]\n", 3, "--steps is 9-3"),
        ("name: s\nrun: math\nsettings: [{}]\nseeds: [1, 1]\n", 4, "seeds is [1, 1]; seeds must differ"),
        ("name: s\nrun: math\nsettings: [{}]\nseed: [1]\n", 4, "unknown key 'seed'"),
        ("name: s\nrun: math\nsettings: [{}]\nmin_seeds: 0\n", 4, "min_seeds is 0; it must be above 0"),
        ("name: s p\nrun: math\nsettings: [{}]\n", 1, "name is 's p'"),
        ("name: s\nrun: math\nsettings: [{}]\neval:\n  file: gone.jsonl\n", 5, "gone.jsonl"),
        ("name: s\nrun: math\nsettings: [{}]\neval:\n  file: e\n  flags:\n    max_turn: 1\n", 7, "max_turn"),
    ],
)
def test_errors_name_the_line_the_value_and_the_fix(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "sweep.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    where = f"{path}:{line}: " if line else f"{path}: "
    assert caught.value.message.startswith(where), caught.value.message
    assert said in caught.value.message
    assert caught.value.hint


def tasks(mean: float, seed: int, count: int = 40) -> list[EvaluatedTask]:
    """Tasks of the same difficulties for each setting."""
    level, noise = random.Random(0), random.Random(seed)
    return [
        EvaluatedTask(
            task_id=str(n), digest="d", scorer="exact", agent="a",
            scores=(mean + level.uniform(-0.3, 0.3) + noise.uniform(-0.05, 0.05),),
        ) for n in range(count)
    ]  # fmt: skip


def children(
    found: Sweep, means: Mapping[str, float | Sequence[float]], done: int = 3, trained: bool = True
) -> dict[Key, SweepChild]:
    """Children of which the first ``done`` seeds are evaluated; ``means`` by the setting's text."""
    made = {}
    for place, setting in enumerate(found.all):
        mean = means[setting.shown]
        for index, seed in enumerate(found.seeds):
            value = mean if isinstance(mean, float) else mean[index]
            result = tasks(value, 10 * place + seed) if index < done else None
            made[setting.id, seed] = SweepChild(
                name=found.child(setting, seed), setting=setting, seed=seed, is_trained=trained, tasks=result
            )
    return made


FAST, SLOW, SAME = "learning_rate 1e-3", "learning_rate 1e-4", "as the parent"


def missing(found: Sweep, **arguments: object) -> set[tuple[str, int]]:
    return {(child.setting.shown, child.seed) for child in race(found, **arguments).missing}  # type: ignore[arg-type]


def test_a_setting_is_stopped_when_the_interval_against_the_best_excludes_zero() -> None:
    found = sweep(eval=HELD_OUT)
    means = {FAST: 0.6, SLOW: 0.6, SAME: 0.3}
    assert missing(found, children=children(found, means, done=1)) == {(FAST, 1), (SLOW, 1), (SAME, 1)}
    two = children(found, means, done=2)
    assert missing(found, children=two) == {(FAST, 2), (SLOW, 2)}
    [worst] = [item for item in standings(found, two, race(found, two)) if item.stopped_after]
    assert (worst.setting, worst.stopped_after) == (SweepSetting({}), 2)
    assert worst.against_best.effect.low > 0.2
    assert race(found, children(found, means)).missing == ()


def test_a_setting_that_was_ahead_in_one_seed_races_on() -> None:
    found = sweep(eval=HELD_OUT)
    means = {FAST: 0.6, SLOW: 0.6, SAME: [0.65, 0.2, 0.6]}
    assert (SAME, 2) in missing(found, children=children(found, means, done=2))


def test_more_rounds_before_the_first_stop() -> None:
    found = sweep(eval=HELD_OUT, min_seeds=3)
    assert len(missing(found, children=children(found, {FAST: 0.6, SLOW: 0.5, SAME: 0.1}, done=2))) == 3


def test_without_an_evaluation_nothing_is_stopped() -> None:
    found = sweep()
    done = children(found, {FAST: 0.6, SLOW: 0.5, SAME: 0.1}, done=0)
    assert race(found, done).missing == ()
    assert not race(found, done).stopped


def test_a_failed_setting_takes_no_further_part() -> None:
    found = sweep(eval=HELD_OUT)
    new = children(found, {FAST: 0.6, SLOW: 0.5, SAME: 0.1}, done=0, trained=False)
    assert missing(found, children=new, failed={SweepSetting({}).id}) == {(FAST, 0), (SLOW, 0)}
