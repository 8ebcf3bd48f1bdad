"""What errors of pydantic say: the place, the value, what it must be, and the nearest known word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from agentrl.base.validation import (
    Count,
    Number,
    PlainText,
    Positive,
    SettingsModel,
    Switch,
    Text,
    broken,
    problems_of,
    read_config,
    validate,
    wrong,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner(SettingsModel):
    """A part."""

    kind: Literal["first", "second"] = "first"
    share: Annotated[Number, Field(le=1)] = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer(SettingsModel):
    """What a person writes."""

    name: Text
    note: PlainText = ""
    count: Count = 0
    limit: Count | None = 7
    seconds: Positive = 1.0
    on: Switch = False
    api_key: Text = "none"
    inner: Inner = field(default_factory=Inner)
    items: tuple[Inner, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise wrong("another name", "name", hint="rename it")
        if self.on and self.count:
            raise broken("excludes count", "on", hint="leave one of them out")


@pytest.mark.parametrize(
    ("change", "text", "hint"),
    [
        ({"nmae": 1}, "unknown key 'nmae'", "did you mean 'name'?"),
        ({"inner": {"x": 1}}, "unknown key 'inner.x'", "choose one of kind, share"),
        ({"name": " "}, "name is ' '; it must be text that is not empty", None),
        ({"name": 3}, "name is 3; it must be text", None),
        ({"note": [1]}, "note is [1]; it must be text", None),
        ({"count": -1}, "count is -1; it must be at least 0", None),
        ({"count": True}, "count is True; it must be a whole number", None),
        ({"count": 2.5}, "count is 2.5; it must be a whole number", None),
        ({"seconds": 0}, "seconds is 0; it must be above 0", None),
        ({"seconds": float("nan")}, "seconds is nan; it must be a finite number", None),
        ({"on": 1}, "on is 1; it must be true or false", None),
        ({"inner": []}, "inner is []; it must be a mapping", None),
        ({"items": {}}, "items is {}; it must be a list", None),
        ({"items": [{}, {"share": 2}]}, "items[1].share is 2; it must be at most 1", None),
        ({"inner": {"kind": "secnod"}}, "inner.kind is 'secnod'; it must be 'first' or 'second'",
         "did you mean 'second'?"),
        ({"name": "bad"}, "name is 'bad'; it must be another name", "rename it"),
        ({"on": True, "count": 1}, "on excludes count", "leave one of them out"),
        ({"api_key": ["sk-123"]}, "api_key is of the kind list; it must be text", None),
    ],
)  # fmt: skip
def test_an_error_says_what_is_wrong_and_what_mends_it(change: Any, text: str, hint: str | None) -> None:
    given = {"name": "n", **change}
    with pytest.raises(ValidationError) as caught:
        validate(Outer, given)
    (problem,) = problems_of(caught.value, given)
    assert (problem.text, problem.hint) == (text, hint)


def test_a_long_value_is_cut_and_the_whole_has_a_name() -> None:
    with pytest.raises(ValidationError) as caught:
        validate(Outer, "x" * 1000)
    (problem,) = problems_of(caught.value, "x" * 1000, whole="the file")
    assert problem.text.startswith("the file is 'xxx")
    assert len(problem.text) < 260
    with pytest.raises(ValidationError) as caught:
        validate(Outer, {})
    assert problems_of(caught.value, {}, "part")[0].text == "'part.name' is missing"


@pytest.mark.attack
def test_a_key_that_utf8_cannot_hold_is_refused() -> None:
    given = {"name": "n", "\ud800": 1}
    with pytest.raises(ValidationError) as caught:
        validate(Outer, given)
    assert problems_of(caught.value, given)[0].text == "it has a key with a lone surrogate, half an emoji"


def test_a_key_without_a_value_has_its_default_and_none_only_where_it_means_something() -> None:
    found = validate(Outer, {"name": "n", "count": None, "inner": None, "limit": None, "note": True})
    assert found == Outer(name="n", limit=None, note="true")


def test_settings_that_are_in_no_file_name_their_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(Inner, {"kind": 3}, "config of the tool", hint="docs/tools.md")
    assert caught.value.message == "config of the tool: kind is 3; it must be 'first' or 'second'"
    assert caught.value.hint == "docs/tools.md"
