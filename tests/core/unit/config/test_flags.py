"""Ranges of flags: how they are written, printed and checked, and the page about all flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from agentrl.config.flags import Flags, Range, flag, require_writable
from agentrl.config.schema import (
    EngineConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
    TrainConfig,
    flags_page,
)
from agentrl.errors import ConfigError


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "name"), [(TeacherConfig, "teacher"), (EngineConfig, "engine_url"), (EngineConfig, "router_url")]
)
@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@gpu7:30000", "https://hunter2@gpu7", "http://gpu7/v9?api_key=hunter2",
        "http://gpu7#hunter2",
    ],
)  # fmt: skip
def test_a_secret_in_the_url_of_an_engine_is_refused_and_not_repeated(
    kind: type, name: str, url: str
) -> None:
    says = f"--{name} has a user, a password or a query in the URL of gpu7"
    with pytest.raises(ConfigError, match=says) as refused:
        kind(**{name: url})
    assert "hunter2" not in f"{refused.value.message} {refused.value.hint}"
    assert getattr(kind(**{name: "http://gpu7:30000/path"}), name) == "http://gpu7:30000/path"


@pytest.mark.parametrize(
    ("text", "inside", "outside", "shown"),
    [
        ("[0, 1)", [0, 0.5], [1, -0.1, math.nan], "in [0, 1)"),
        ("(0, inf)", [1e-9, 5], [0, math.inf, math.nan], "> 0"),
        ("[1, inf]", [1, math.inf], [0.9], "≥ 1 or inf"),
        ("(-inf, inf)", [-5.0, 0], [math.inf, -math.inf, math.nan], "finite"),
    ],
)
def test_a_range(text: str, inside: list[float], outside: list[float], shown: str) -> None:
    found = Range.parse(text)
    assert all(value in found for value in inside)
    assert not any(value in found for value in outside)
    assert str(found) == shown


@dataclass(frozen=True, kw_only=True)
class Own(Flags):
    seconds: float | None = flag(None, "a timeout", within="(0, inf)", unit="seconds")
    kind: Literal["a", "b"] = flag("a", "a choice")


def test_values_are_checked_when_an_object_is_made() -> None:
    assert Own(seconds=2.0).seconds == 2.0
    with pytest.raises(ConfigError, match="--seconds is 0") as caught:
        Own(seconds=0)
    assert caught.value.hint == "give a value > 0 seconds"
    with pytest.raises(ConfigError, match="--kind is 'c'"):
        Own(kind="c")  # type: ignore[arg-type]


def test_a_file_that_is_written_at_the_end_is_checked_before(tmp_path: Path) -> None:
    require_writable("--out", None)
    require_writable("--out", str(tmp_path / "new" / "ids.txt"))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "a" / "b", "Not a directory")):
        with pytest.raises(ConfigError, match=f"--out {path} cannot be written: {reason}"):
            require_writable("--out", str(path))


@pytest.mark.parametrize(
    ("kind", "flag", "value", "says"),
    [
        (TrainConfig, "groups_per_step", 2**63, "too large"), (TrainConfig, "max_steps", 0, "is 0"),
        (RunConfig, "db_timeout_seconds", 1e300, "too large"), (GroupConfig, "min_turns", 0, "is 0"),
        (SamplingConfig, "feedback_hours", 1e6, "too large"), (RunConfig, "output_dir", "", "is empty"),
        (ModelConfig, "reference_model", "", "is empty"), (RunConfig, "log_dir", "", "is empty"),
    ],
)  # fmt: skip
def test_values_that_nothing_can_hold_are_refused(kind: type, flag: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} .*{says}") as refused:
        kind(**{flag: value})
    assert refused.value.hint


def test_no_limit_and_no_text_are_values_where_they_are_meant() -> None:
    assert RunConfig(db_wait_seconds=math.inf).db_wait_seconds == math.inf
    assert GroupConfig(columns="").columns == ""


def test_the_flags_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[4] / "docs/flags.md").read_text(encoding="utf-8") == flags_page(), (
        "run: python -m agentrl.config.schema > docs/flags.md"
    )
