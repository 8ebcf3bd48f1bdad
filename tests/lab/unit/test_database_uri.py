"""Where the URI of the database comes from: the flag, MONGO_URI, or the file that MONGO_URI_FILE names."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsed_flags import parsed

from agentrl.config.run import RunConfig, uri_of_variables, without_uri
from agentrl.errors import ConfigError
from agentrl.lab.cli.db import parser as db_parser
from agentrl.local.cli import flags_of_variables

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
