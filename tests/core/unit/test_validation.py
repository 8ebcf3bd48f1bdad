"""Settings files and what is checked of them: errors name the place, the value and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from agentrl.base import validation
from agentrl.base.validation import (
    BesideFile,
    Count,
    Number,
    PlainText,
    Positive,
    PositiveWhole,
    Problem,
    SettingsFile,
    SettingsModel,
    Switch,
    Text,
    broken,
    check,
    problems_of,
    read_config,
    read_settings,
    validate,
    wrong,
)
from agentrl.errors import ConfigError, dotted


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
    stop_token_ids: tuple[Count, ...] = ()
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
        ({"stop_token_ids": [-1]}, "stop_token_ids[0] is -1; it must be at least 0", None),
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
def test_of_many_problems_only_the_first_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Problem] = []
    real = validation._problem

    def write(*item: Any) -> Problem:
        written.append(real(*item))
        return written[-1]

    monkeypatch.setattr(validation, "_problem", write)
    with pytest.raises(ConfigError, match=r"items\[0\] is 0; it must be a mapping"):
        check(Outer, {"name": "n", "items": [0] * 1000}, lambda problem: ConfigError(str(problem)))
    assert len(written) == 1


@pytest.mark.attack
def test_a_value_that_is_nested_too_deeply_is_not_shown() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ConfigError, match="count is nested too deeply; it must be a whole number"):
        check(Outer, {"name": "n", "count": nested}, lambda problem: ConfigError(str(problem)))


@pytest.mark.attack
def test_a_long_key_is_cut() -> None:
    with pytest.raises(ConfigError, match="unknown key 'kkk") as caught:
        check(Outer, {"k" * 9999: 1}, lambda problem: ConfigError(str(problem)))
    assert len(caught.value.message) < 400


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


@dataclass(frozen=True, kw_only=True)
class Server(SettingsModel):
    """A part of a file."""

    name: str
    command: Text
    folder: BesideFile | None = None
    limits: dict[str, PositiveWhole] = field(default_factory=dict)


def write(folder: Path, text: str, name: str = "servers.yml") -> SettingsFile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_settings(path, what="--servers", hint="docs/servers.md")


def test_a_value_becomes_a_dataclass_with_paths_beside_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "a: {command: x, folder: sub, limits:}\n")
    found = file.check(Server, file.content["a"], "a", name="a")
    assert found == Server(name="a", command="x", folder=tmp_path / "sub")


def error_in(file: SettingsFile, part: Any, *place: str | int) -> ConfigError:
    """The error of reading a part of a file as a server."""
    with pytest.raises(ConfigError) as caught:
        file.check(Server, part, *place, name="a")
    return caught.value


def test_one_error_names_its_line_and_its_fix(tmp_path: Path) -> None:
    file = write(tmp_path, "# servers\nlist:\n- command: x\n  limts: {}\n")
    error = error_in(file, file.content["list"][0], "list", 0)
    assert error.message == f"{file.path}:4: unknown key 'list[0].limts'"
    assert error.hint == "did you mean 'limits'?"


def test_a_field_that_no_file_gives_is_an_unknown_key(tmp_path: Path) -> None:
    file = write(tmp_path, "a: {command: x, name: b}\n")
    assert ":1: unknown key 'a.name'" in error_in(file, file.content["a"], "a").message


def test_every_error_is_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "a:\n  command: ''\n  limits:\n    x: 0\n    y: many\n")
    error = error_in(file, file.content["a"], "a")
    assert error.message.splitlines() == [
        f"{file.path}:2: a.command is ''; it must be text that is not empty",
        f"  {file.path}:4: a.limits.x is 0; it must be above 0",
        f"  {file.path}:5: a.limits.y is 'many'; it must be a whole number",
    ]
    assert error.hint == "docs/servers.md"


def test_json_has_lines_too(tmp_path: Path) -> None:
    file = write(tmp_path, '{"a": {\n  "command": 3}}', "servers.json")
    assert "servers.json:2: a.command is 3; it must be text" in error_in(file, file.content["a"], "a").message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yml", "a: 1\nb: [", r"a\.yml:2 is not YAML: "),
        ("a.json", '{"a":\n}', r"a\.json:2 is not JSON: "),
    ],
)
def test_what_cannot_be_parsed_names_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, text, name)


def test_what_cannot_be_read_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--servers .*none\.yml cannot be read: No such file"):
        read_settings(tmp_path / "none.yml", what="--servers", hint="h")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x81")
    with pytest.raises(ConfigError, match=r"binary is not UTF-8"):
        read_settings(tmp_path / "binary", what="--servers", hint="h")


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path, "a: [1]\n")
    first.content["a"].append(2)
    with monkeypatch.context() as patch:
        patch.setattr("yaml.safe_load", lambda _: pytest.fail("it was parsed again"))
        assert read_settings(first.path, hint="docs/servers.md").content == {"a": [1]}
    assert write(tmp_path, "a: 12\n").content == {"a": 12}


def test_variables_are_replaced_and_one_that_is_not_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "h")
    monkeypatch.delenv("NOT_HERE", raising=False)
    file = write(tmp_path, "a: ['${HERE}/x', '${NOT_HERE:-d}', '${workdir}', 3]\nb:\n  c: ${NOT_HERE}\n")
    assert file.expand(file.content["a"], "a", keep="${workdir}") == ["h/x", "d", "${workdir}", 3]
    with pytest.raises(ConfigError) as caught:
        file.expand(file.content)
    assert f"{file.path}:1: a[2] names the environment variable workdir" in caught.value.message
    with pytest.raises(ConfigError, match=r":3: b\.c names the environment variable NOT_HERE, which is not"):
        file.expand(file.content["b"], "b")


def test_a_place_is_written_with_dots_and_brackets() -> None:
    assert dotted(("servers", "calc", "args", 0)) == "servers.calc.args[0]"
    assert dotted(()) == ""
