"""Recipes: what wins over them, what is stored, a file of one's own, and what in it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parsed_flags import parsed

from agentrl.cli import recipes
from agentrl.config.agreement import public_flags
from agentrl.config.load import read_recipe, recipe_names
from agentrl.config.schema import GroupConfig, LossConfig, RunConfig, TrainConfig
from agentrl.errors import ConfigError


def recipe_file(folder: Path, text: str) -> str:
    path = folder / "mine.yml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_win_over_a_file_of_flags_and_both_over_the_recipe(tmp_path: Path) -> None:
    flags = tmp_path / "run.yaml"
    flags.write_text("recipe: dapo\nepsilon_higher: 0.1\nadvantage: dr_grpo\n")
    configs = parsed("--config", str(flags), "--advantage", "reward", command="agentrl sample")
    loss = configs[LossConfig]
    assert (loss.token_level_loss, loss.epsilon_higher) == (True, 0.1)
    assert configs[GroupConfig].advantage == "reward"
    stored = public_flags(configs)
    assert (stored["recipe"], stored["overlong_buffer"]) == ("dapo", 4096)
    assert configs.given == {"recipe", *read_recipe("dapo").flags}


def test_batches_in_the_originals_words_win_over_those_of_a_recipe() -> None:
    configs = parsed("--recipe", "original-grpo", "--gradient_accumulation_steps", "16")
    assert configs[TrainConfig].groups_per_step == 2


def test_a_file_of_ones_own_may_have_sections(tmp_path: Path) -> None:
    own = recipe_file(tmp_path, "source: ours\nflags:\n  loss: {loss_calculater: CISPO}\n  seed: 3\n")
    configs = parsed("--recipe", own)
    assert (configs[LossConfig].loss_calculater, configs[RunConfig].seed) == ("CISPO", 3)
    assert configs[RunConfig].recipe == own


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("epsilon_hihger: 0.1", ":3: unknown key epsilon_hihger\n  → did you mean epsilon_higher?"),
        ("loss: {epsilon: 0.1, advantage: grpo}", ":3: advantage is not a flag of section loss"),
        ("epsilon: 1e-3", ":3: epsilon is '1e-3' (str), and it takes float or null"),
        ("epsilon: 2.0", "--epsilon is 2.0"),
        ("recipe: dapo", ":3: a recipe names no other recipe"),
    ],
)
def test_a_wrong_flag_is_refused_by_its_name(tmp_path: Path, flags: str, said: str) -> None:
    own = recipe_file(tmp_path, f"source: ours\nflags:\n  {flags}\n")
    with pytest.raises(ConfigError) as refused:
        parsed("--recipe", own)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss_calculater: GRPO\n", "loss_calculater"),
        ("source: ours\n", "flags"),
        ("flags: {seed: 1}\n", "source"),
        ("source: ours\nflags: [seed]\n", "flags"),
        ("", "mine.yml"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_recipe(recipe_file(tmp_path, text))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("--recipe", "dapoo")
    assert "choose one of areal, " in refused.value.message
    assert "dapo" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"--recipe none\.yml cannot be read"):
        parsed("--recipe", "none.yml")


def test_every_recipe_is_listed_and_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    recipes.main(["--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in listed] == recipe_names()
    assert all(item["source"] and item["flags"] for item in listed)
    recipes.main(["dapo"])
    shown = capsys.readouterr().out
    assert shown.startswith("dapo, golden value -0.1875\n  arXiv 2503.14476")
    assert " --dual_clip inf " in shown
