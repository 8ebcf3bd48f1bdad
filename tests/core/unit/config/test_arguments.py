"""Arguments of argparse from flags: values, switches, what help says, and what a hand-made parser takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from agentrl.config.flags import Auto, Flags, Switch, choices_of, flag, kind_name
from agentrl.config.load import CommandParser, group_of
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Own(Flags):
    """Flags of a command."""

    section = "own"

    count: int = flag(3, "how many", within="[1, inf)", unit="things")
    name: str | None = flag(None, "what it is called, in 100%")
    kind: Literal["a", "b"] | None = flag(None, "which one")
    fast: bool = flag(True, "whether it hurries")
    loud: Literal["auto", "true", "false"] = flag("auto", "whether it makes noise")


def parser(*names: str, **changes: object) -> CommandParser:
    made = CommandParser(prog="agentrl x")
    made.add_flags(Own, *names, **changes)
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Own()),
        (["--count", "5", "--name", "n", "--kind", "b"], Own(count=5, name="n", kind="b")),
        (["--fast", "no"], Own(fast=False)),
        (["--no_fast"], Own(fast=False)),
        (["--fast"], Own()),
        (["--loud"], Own(loud="true")),
        (["--no_loud"], Own(loud="false")),
        (["--loud", "Auto"], Own()),
    ],
)
def test_a_parser_takes_the_flags_of_a_dataclass(words: list[str], expected: Own) -> None:
    assert group_of(Own, parser().parse_args(words)) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--count", "many"], "--count: invalid int value: 'many'"),
        (["--count", "many"], "agentrl x --help"),
        (["--kind", "c"], "--kind: invalid choice: 'c'"),
        (["--fast", "maybe"], "'maybe' is neither true nor false"),
        (["--cuont", "1"], "--count"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(words)
    assert problem in str(caught.value)


def test_a_value_out_of_range_is_refused_by_the_dataclass() -> None:
    with pytest.raises(ConfigError, match="--count is 0"):
        group_of(Own, parser().parse_args(["--count", "0"]))


def test_some_flags_may_have_another_default_or_be_required() -> None:
    assert parser("count", default=9).parse_args([]).count == 9
    assert "default: 9" in parser("count", default=9).format_help()
    with pytest.raises(ConfigError, match="required: --count"):
        parser("count", required=True).parse_args([])
    assert "default" not in parser("count", required=True).format_help().partition("examples")[0]


def test_help_has_type_range_choices_and_default() -> None:
    text = " ".join(parser().format_help().split())
    assert "--count INT how many (≥ 1 things; default: 3)" in text
    assert "--name TEXT what it is called, in 100%" in text
    assert "--kind NAME which one (a, b)" in text
    assert "--fast [BOOL] whether it hurries (default: True)" in text
    assert "--no_fast" not in text


def test_types_are_named_without_none() -> None:
    assert (kind_name(int | None), kind_name(str), kind_name(Switch)) == ("int", "text", "name")
    assert (choices_of(Literal["a"] | None), choices_of(float)) == (("a",), ())


def test_a_number_that_may_be_found_is_a_number_or_auto() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Found(Flags):
        """Flags of a number that may be found."""

        section = "found"
        many: int | Auto = flag(1, "how many", within="[1, inf)")  # noqa: RUF009

    own = CommandParser(prog="agentrl many")
    own.add_flags(Found)
    assert own.parse_args(["--many", "4"]).many == 4
    assert group_of(Found, own.parse_args(["--many", "auto"])).many == "auto"
    assert "--many INT|auto" in own.format_help()
    with pytest.raises(ConfigError, match="invalid int or auto value: 'some'"):
        own.parse_args(["--many", "some"])
    with pytest.raises(ConfigError, match="--many is 0"):
        group_of(Found, own.parse_args(["--many", "0"]))
