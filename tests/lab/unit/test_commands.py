"""The commands of the lab: their examples, the command lines of a fork, where the database is named."""

from __future__ import annotations

import shlex
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
from parsed_flags import parsed

from agentrl.config.commands import EXAMPLES
from agentrl.config.run import RunConfig, uri_of_variables, without_uri
from agentrl.config.schema import GROUPS
from agentrl.config.training import PlanConfig, SFTConfig
from agentrl.documents.run import RunSettings
from agentrl.errors import ConfigError
from agentrl.lab.db_cli import parser as db_parser
from agentrl.lab.flags import BlameConfig, WhatIfConfig
from agentrl.lab.lab_cli import command_of
from agentrl.local.local_cli import flags_of_variables

HAND_PARSED = (
    "agentrl audit", "agentrl dashboard", "agentrl db", "agentrl fork", "agentrl mongo", "agentrl parity",
    "agentrl quickstart", "agentrl retract", "agentrl runs", "agentrl status", "agentrl sweep",
    "agentrl tasks", "agentrl tools",
)  # fmt: skip
"""Commands with a parser of their own."""


def test_the_examples_of_each_command_are_of_that_command() -> None:
    groups = (*GROUPS, SFTConfig, PlanConfig, BlameConfig, WhatIfConfig)
    known = {field.name for group in groups for field in fields(group)}
    known |= {"config", "config_file", "limit", "self", "until_empty", "wait_seconds"}
    for command, examples in EXAMPLES.items():
        for example in examples:
            assert command.split()[-1] in example
            flags = {word.removeprefix("--") for word in example.split() if word.startswith("--")}
            assert command.startswith(HAND_PARSED) or flags <= known, example


@pytest.mark.parametrize("command", sorted(db_parser()._subparsers._group_actions[0].choices))  # type: ignore
def test_the_examples_of_each_database_command_parse_and_are_shown(command: str) -> None:
    for example in EXAMPLES[f"agentrl db {command}"]:
        assert db_parser().parse_args(shlex.split(example)[2:]).subcommand == command
        assert example in db_parser()._subparsers._group_actions[0].choices[command].format_help()  # type: ignore


def flags_of(*given: str) -> RunSettings:
    """The stored flags of a role whose trainer computes in bfloat16."""
    values = {"run_name": "math", "autocast_bf16": "true", "learning_rate": 1e-5, "seed": 3}
    return RunSettings(id="flags/train", values=values, by="b", at=datetime.now(UTC), given=given)


def test_a_trainer_gets_what_the_parents_has_measured_and_a_sampler_does_not() -> None:
    flags = flags_of("run_name", "learning_rate")
    trainer = "agentrl train --run_name child --autocast_bf16 true --learning_rate 1e-05"
    assert command_of(flags, "train", "child") == trainer
    assert command_of(flags_of("seed"), "sample", "child") == "agentrl sample --run_name child --seed 3"


def test_a_precision_that_was_given_is_there_once() -> None:
    command = command_of(flags_of("seed", "autocast_bf16"), "train", "child")
    assert command == "agentrl train --run_name child --autocast_bf16 true --seed 3"


URI = "mongodb://trainer:hunter2@db:27017/?replicaSet=agentrl"
OTHER = "mongodb://other/"


def test_without_variables_there_is_no_uri() -> None:
    assert RunConfig().db_connection_string is None
    assert uri_of_variables({"MONGO_URI": "", "MONGO_URI_FILE": ""}) is None


@pytest.mark.parametrize("name", ["MONGO_URI", "MONGO_URI_FILE"])
def test_the_environment_names_the_database_and_the_flag_wins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "uri"
    file.write_text(URI + "\n", encoding="utf-8")
    monkeypatch.setenv(name, URI if name == "MONGO_URI" else str(file))
    assert RunConfig().db_connection_string == URI
    assert RunConfig(db_connection_string=OTHER).db_connection_string == OTHER
    configs = parsed()
    assert configs[RunConfig].db_connection_string == URI
    assert "hunter2" not in repr(configs[RunConfig])
    assert parsed("--db_connection_string", OTHER)[RunConfig].db_connection_string == OTHER
    assert db_parser().parse_args(["check", "--run_name", "r"]).db_connection_string is None


def test_both_variables_are_refused() -> None:
    with pytest.raises(ConfigError, match="both set"):
        uri_of_variables({"MONGO_URI": URI, "MONGO_URI_FILE": "uri"})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_without_a_uri_is_refused_by_name(content: bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "uri"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as raised:
        uri_of_variables({"MONGO_URI_FILE": str(file)})
    assert str(file) in raised.value.message
    assert raised.value.exit_code == 2


def test_no_command_line_of_a_script_has_the_uri() -> None:
    variables = {"MONGO_URI": URI, "MONGO_URI_FILE": "uri", "MODEL_PATH": "/models/m"}
    assert flags_of_variables(variables, "train_file") == ["--model_name_or_path", "/models/m"]


def test_an_engine_does_not_get_the_uri() -> None:
    assert without_uri({"MONGO_URI": URI, "MONGO_URI_FILE": "uri", "PATH": "/bin"}) == {"PATH": "/bin"}
