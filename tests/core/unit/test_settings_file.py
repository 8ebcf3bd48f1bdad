"""Files that people write: what is wrong is named with the file, the line, the key and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.validation import (
    BesideFile,
    PositiveWhole,
    SettingsFile,
    SettingsModel,
    Text,
    read_settings,
)
from agentrl.errors import ConfigError, dotted


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
