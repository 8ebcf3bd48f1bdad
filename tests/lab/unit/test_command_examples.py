"""The examples that ``--help`` shows: of every command, with the flags of the lab, and of ``agentrl db``."""

from __future__ import annotations

import shlex
from dataclasses import fields

import pytest

from agentrl.config.commands import EXAMPLES
from agentrl.config.schema import GROUPS
from agentrl.config.training import PlanConfig, SFTConfig
from agentrl.lab.cli_db import parser
from agentrl.lab.flags import BlameConfig, WhatIfConfig

HAND_PARSED = (
    "agentrl audit", "agentrl dashboard", "agentrl db", "agentrl fork", "agentrl mongo", "agentrl parity",
    "agentrl quickstart", "agentrl retract", "agentrl runs", "agentrl status", "agentrl sweep",
    "agentrl tasks", "agentrl tools",
)  # fmt: skip
"""Commands with a parser of their own."""


def test_the_examples_of_each_command_are_of_that_command() -> None:
    groups = (*GROUPS, SFTConfig, PlanConfig, BlameConfig, WhatIfConfig)
    known = {field.name for group in groups for field in fields(group)}
    known |= {"config", "config_file", "limit", "until_empty"}
    for command, examples in EXAMPLES.items():
        for example in examples:
            assert command.split()[-1] in example
            flags = {word.removeprefix("--") for word in example.split() if word.startswith("--")}
            assert command.startswith(HAND_PARSED) or flags <= known, example


@pytest.mark.parametrize("command", sorted(parser()._subparsers._group_actions[0].choices))  # type: ignore
def test_the_examples_of_each_database_command_parse_and_are_shown(command: str) -> None:
    for example in EXAMPLES[f"agentrl db {command}"]:
        assert parser().parse_args(shlex.split(example)[2:]).subcommand == command
        assert example in parser()._subparsers._group_actions[0].choices[command].format_help()  # type: ignore
