"""Flags and YAML → configuration: types, precedence, and errors that name the nearest."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    GROUPS,
    EngineConfig,
    GroupConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
    flag,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OwnFlags:
    """Flags of one command alone."""

    out: str = flag(..., "where to write")
    limit: int = flag(20, "how many")


def load(*argv: str, extra: tuple[type, ...] = ()) -> Configs:
    return parse(argv, command="agentrl x", description="A command.", shown=[RunConfig], extra=extra)


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def assert_refused(argv: list[str], parts: list[str]) -> None:
    """The error names each of ``parts``, and says how to fix it."""
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_without_arguments_every_group_has_its_defaults() -> None:
    configs = load()
    for group in GROUPS:
        assert configs[group] == group()


@pytest.mark.parametrize("argv", [["--seed", "7"], ["--seed=7"]])
def test_a_flag_is_set_in_both_spellings(argv: list[str]) -> None:
    assert load(*argv)[RunConfig].seed == 7


@pytest.mark.parametrize("word", ["--no_drop_zero_advantage", "--drop-zero-advantage=false"])
def test_a_flag_counts_as_given_in_every_spelling(word: str) -> None:
    configs = load(word)
    assert configs[GroupConfig].drop_zero_advantage is False
    assert configs.given == {"drop_zero_advantage"}


def test_every_group_is_parsed_whatever_the_command_shows() -> None:
    configs = load("--learning_rate", "2e-5", "--num_generations", "4")
    assert configs[OptimConfig].learning_rate == 2e-5
    assert configs[TaskConfig].num_generations == 4


def test_optional_values_keep_their_type() -> None:
    configs = load("--out_of_date_decay", "0.5", "--loss_seq_chunk_size", "64", "--output_dir", "here")
    assert configs[LossConfig].out_of_date_decay == 0.5
    assert configs[TrainConfig].loss_seq_chunk_size == 64
    assert configs[RunConfig].output == "here"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--token_level_loss"], True),
        (["--token_level_loss", "false"], False),
        (["--token_level_loss", "True"], True),
        (["--token_level_loss=0"], False),
        (["--no_token_level_loss"], False),
    ],
)
def test_bools_take_a_value_or_none(argv: list[str], expected: bool | None) -> None:
    assert load(*argv)[LossConfig].token_level_loss is expected


def test_a_negative_number_is_a_value_and_no_flag() -> None:
    assert load("--max_steps", "-1")[TrainConfig].max_steps == -1


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--lerning_rate", "1"], ["--lerning_rate", "--learning_rate"]),
        (["--lerning_rate=1"], ["unknown flag --lerning_rate\n", "--learning_rate"]),
        (["--learning"], ["--learning"]),
        (["--zzzzzz", "1"], ["--zzzzzz", "--help"]),
        (["train_file.jsonl"], ["unknown argument train_file.jsonl"]),
        (["--seed", "1.5"], ["--seed", "1.5"]),
        (["--learning_rate", "fast"], ["--learning_rate", "fast"]),
        (["--log_level", "LOUD"], ["--log_level", "LOUD", "WARNING"]),
        (["--token_level_loss", "maybe"], ["--token_level_loss", "maybe"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["--config"], ["--config"]),
    ],
)
def test_a_wrong_flag_is_named_with_what_mends_it(argv: list[str], parts: list[str]) -> None:
    assert_refused(argv, parts)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num_generations", "0"], "--num_generations"),
        (["--learning_rate", "nan"], "--learning_rate"),
        (["--run_name", "../etc"], "--run_name"),
        (["--run_name", "admin"], "MongoDB's own databases"),
        (["--run_name", "Config"], "MongoDB's own databases"),
        (["--run_name", "LOCAL"], "MongoDB's own databases"),
        (["--max_prompt_tokens", "10", "--prompt_reserve_tokens", "10"], "--max_prompt_tokens"),
        (["--max_staleness", "-1"], "--max_staleness"),
    ],
)
def test_a_value_out_of_range_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(*argv)


def test_yaml_supplies_values_and_flags_win(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "seed: 5\nrun_name: from-yaml\ntoken_level_loss: false\n")
    configs = load("--seed", "9", "--config", config, "--token_level_loss")
    assert configs[RunConfig].run_name == "from-yaml"
    assert configs[RunConfig].seed == 9
    assert configs[LossConfig].token_level_loss is True


def test_yaml_keeps_its_types(tmp_path: Path) -> None:
    text = "learning_rate: 1\ndrop_zero_advantage: false\noutput_dir: null\nadvantage: dr_grpo\n"
    configs = load(f"--config={yaml_file(tmp_path, text)}")
    assert configs[OptimConfig].learning_rate == 1
    assert configs[GroupConfig].drop_zero_advantage is False
    assert configs[GroupConfig].advantage == "dr_grpo"
    assert configs[RunConfig].output == "output/default"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lerning_rate: 1.0\n", ["lerning_rate", "learning_rate"]),
        ("learning_rate: 1e-6\n", ["learning_rate", "'1e-6'", "1.0e-6"]),
        ("seed: 'five'\n", ["seed", "'five'", "int"]),
        ("seed: true\n", ["seed", "bool", "int"]),
        ("max_staleness: null\n", ["max_staleness", "None", "it takes int"]),
        ("token_level_loss: 1\n", ["token_level_loss", "bool"]),
        ("engine: tgi\n", ["engine", "tgi", "sglang"]),
        ("dtype: 16\n", ["dtype", "float32, bfloat16"]),
        ("out_of_date_decay: much\n", ["out_of_date_decay", "float or null"]),
        ("run_name: [a, b]\n", ["run_name", "list"]),
        ("- seed\n", ["no mapping"]),
        ("seed: [1\n", ["not YAML"]),
        ("max_staleness: -2\n", ["--max_staleness", "-2"]),
        ("los:\n  epsilon: 0.3\n", ["unknown section", "los", "did you mean loss?"]),
        ("loss:\n  epsilom: 0.3\n", ["unknown key in section loss", "epsilom", "did you mean epsilon?"]),
        ("loss:\n  learning_rate: 0.3\n", ["is not a flag of section loss", "section optimizer"]),
        ("loss:\n  epsilon: 0.3\nepsilon: 0.2\n", ["epsilon is given twice"]),
        ("loss:\n  epsilon: high\n", ["epsilon is 'high'", "float or null"]),
        ("loss: 3\n", ["unknown key", "loss"]),
        ("parallel:\n  max_steps: 3\n", ["not a flag of section parallel", "section training"]),
    ],
)
def test_wrong_yaml_is_named_with_what_mends_it(tmp_path: Path, text: str, parts: list[str]) -> None:
    assert_refused(["--config", yaml_file(tmp_path, text)], parts)


def test_yaml_groups_flags_in_sections(tmp_path: Path) -> None:
    text = "run_name: flat\nloss:\n  epsilon: 0.3\nparallel:\n  tp_size: 2\ntraining:\nengine: vllm\n"
    configs = load("--config", yaml_file(tmp_path, text))
    assert configs[RunConfig].run_name == "flat"
    assert configs[LossConfig].epsilon == 0.3
    assert configs[TrainConfig].tp_size == 2
    assert configs[EngineConfig].engine == "vllm"
    assert configs.given == {"run_name", "epsilon", "tp_size", "engine"}
    own = yaml_file(tmp_path, "command:\n  limit: 3\n  out: b.png\n")
    assert load("--config", own, extra=(OwnFlags,))[OwnFlags].limit == 3


def test_a_flag_without_effect_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load("--pad_to_multiple_of", "4")
    assert "--pad_to_multiple_of has no effect: forests are packed" in caplog.text
    caplog.clear()
    load("--groups_per_step", "4")
    assert not caplog.text


def test_a_config_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load("--config", str(tmp_path / "none.yaml"))
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load("--config", str(binary))


def test_an_empty_config_file_changes_nothing(tmp_path: Path) -> None:
    assert load("--config", yaml_file(tmp_path, "# nothing yet\n"))[RunConfig] == RunConfig()


def test_a_command_has_flags_of_its_own(tmp_path: Path) -> None:
    configs = load("--out", "a.png", extra=(OwnFlags,))
    assert configs[OwnFlags] == OwnFlags(out="a.png", limit=20)
    config = yaml_file(tmp_path, "out: b.png\nlimit: 3\n")
    assert load("--config", config, extra=(OwnFlags,))[OwnFlags] == OwnFlags(out="b.png", limit=3)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_the_groups_of_the_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(word, extra=(OwnFlags,))
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "--limit" in out
    assert "--run_name" in out
    assert "--learning_rate" not in out
    assert "[run]" in out


@pytest.mark.parametrize(("columns", "widest"), [("80", 80), ("300", 110)])
def test_help_fits_the_terminal(
    columns: str, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        load("--help", extra=(OwnFlags,))
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > widest]
    assert [line for line in wide if not line.startswith("  agentrl ")] == []


def test_every_flag_has_a_help_line_and_one_owner() -> None:
    names = [field.name for group in GROUPS for field in fields(group)]
    assert len(names) == len(set(names))
    for group in GROUPS:
        for field in fields(group):
            assert field.metadata["help"], f"{group.__name__}.{field.name}"


def test_every_number_has_a_range() -> None:
    without = {"pad_to_multiple_of"}
    for group in GROUPS:
        hints = get_type_hints(group)
        for field in fields(group):
            kinds = set(get_args(hints[field.name]) or (hints[field.name],))
            if kinds & {int, float}:
                assert field.metadata["within"] or field.name in without, field.name
