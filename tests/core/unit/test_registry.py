"""Registries: names, paths, conversion."""

import json
from collections.abc import Callable
from contextvars import copy_context
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import agentrl
from agentrl.base.registry import Registry
from agentrl.base.user_code import allow
from agentrl.chat.parsers.parser import get_parser
from agentrl.errors import ConfigError
from agentrl.rollout.agents import AGENTS
from agentrl.scoring.groups import ESTIMATORS, GROUP_FILTERS
from agentrl.scoring.scorers import SCORERS


def test_an_extension_is_registered_under_each_of_its_names() -> None:
    things: Registry[object] = Registry("thing", group="agentrl.no_group")

    @things.register("one", "eins")
    def function() -> None:
        return None

    things.add(3, "three")
    assert things.names() == ["eins", "one", "three"]
    assert things.get("one") is things.get("eins") is function
    assert things.get("three") == 3


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    things: Registry[int] = Registry("thing", group="agentrl.no_group")
    with pytest.raises(ConfigError, match=r"^unknown thing 'one'\n"):
        things.get("one")
    things.add(1, "ONE", "TWO")
    with pytest.raises(ConfigError, match="unknown thing 'ome'; choose one of ONE, TWO") as refused:
        things.get("ome")
    assert "did you mean 'ONE'?" in str(refused.value)


def test_an_entry_point_is_imported_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(name, value, "agentrl.things")
        for name, value in {"dumps": "json:dumps", "gone": "no_such_module:f"}.items()
    )
    monkeypatch.setattr("agentrl.base.registry.entry_points", lambda **query: points.select(**query))
    things: Registry[object] = Registry("thing", group="agentrl.things")
    assert things.names() == ["dumps", "gone"]
    assert things.get("dumps") is json.dumps
    with pytest.raises(ConfigError, match="the thing 'gone' cannot be imported: ModuleNotFoundError"):
        things.get("gone")
    assert Registry[object]("thing", group="agentrl.others").names() == []


def test_all_that_can_be_imported_is_known_and_what_is_registered_here_comes_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"dumps": "json:dumps", "loads": "json:loads", "gone": "no_such_module:f"}
    points = EntryPoints(EntryPoint(name, value, "agentrl.things") for name, value in values.items())
    monkeypatch.setattr("agentrl.base.registry.entry_points", lambda **query: points.select(**query))
    things: Registry[object] = Registry("thing", group="agentrl.things")
    things.add(print, "loads")
    assert things.known() == {"loads": print, "dumps": json.dumps}
    assert things.registered() == {"loads": print}
    assert "the thing 'gone' cannot be imported" in caplog.text


def test_what_a_path_names_is_converted() -> None:
    def convert(found: object) -> str:
        if not isinstance(found, str):
            raise TypeError("it is not a text")
        return found

    things = Registry("thing", group="agentrl.no_group", convert=convert)
    assert things.get("json.decoder:__name__") == "json.decoder"
    with pytest.raises(ConfigError, match="'json:dumps' cannot be used as thing: it is not a text"):
        things.get("json:dumps")
    with pytest.raises(ConfigError, match="of type str, not a function or class"):
        Registry[object]("thing", group="agentrl.no_group").get("json.decoder:__name__")


def test_modules_of_a_wing_that_is_not_there_are_left_out() -> None:
    built_in = ["agentrl.no_such_wing.views.things", "agentrl.no_such_wing"]
    things: Registry[object] = Registry("thing", group="agentrl.no_group", built_in=built_in)
    assert things.names() == []
    with pytest.raises(ConfigError, match=r"unknown thing 'one'\n.*agentrl\.no_such_wing, .*installed"):
        things.get("one")


@pytest.mark.parametrize("built_in", ["agentrl.base.no_such_module", "no_such_package.things"])
def test_a_misspelled_module_of_a_package_that_is_there_is_an_error(built_in: str) -> None:
    things: Registry[object] = Registry("thing", group="agentrl.no_group", built_in=[built_in])
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        things.names()


def test_what_a_module_of_a_wing_lacks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_wing").mkdir()
    (tmp_path / "a_wing/things.py").write_text("import no_such_package")
    monkeypatch.setattr("agentrl.__path__", [*agentrl.__path__, str(tmp_path)])
    things: Registry[object] = Registry("thing", group="agentrl.no_group", built_in=["agentrl.a_wing.things"])
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        things.names()


@pytest.mark.parametrize(
    ("get", "wrong", "nearest"),
    [
        (AGENTS.get, "reakt", "react"),
        (SCORERS.get, "exac", "exact"),
        (ESTIMATORS.get, "drgrpo", "dr_grpo"),
        (get_parser, "hermess", "hermes"),
    ],
)
def test_an_unknown_name_of_a_kind_of_extension_is_refused_with_the_nearest(
    get: Callable[[str], object], wrong: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=rf"unknown .*'{wrong}'") as refused:
        get(wrong)
    assert f"did you mean '{nearest}'?" in str(refused.value)


@pytest.mark.parametrize("get", [SCORERS.get, AGENTS.get, GROUP_FILTERS.get])
def test_what_is_not_listed_is_refused_before_it_is_imported(get: object) -> None:
    def use() -> None:
        allow(["json"])
        allow(["math"])
        assert callable(get)
        assert get("json:dumps") is not None
        with pytest.raises(ConfigError, match="may not import") as refused:
            get("this.module:exits")
        assert "--allowed_modules this.module" in str(refused.value)

    copy_context().run(use)


@pytest.mark.parametrize(
    "decorator",
    [
        "advantage", "agent", "context_manager", "environment", "group_filter", "loss", "scorer", "tool",
        "tool_call_parser", "tracker",
    ],
)  # fmt: skip
def test_a_decorator_without_parentheses_is_refused_by_name(decorator: str) -> None:
    def own() -> None:
        return None

    with pytest.raises(ConfigError, match=f"@{decorator} has no name") as caught:
        getattr(agentrl, decorator)(own)
    assert caught.value.hint == f'write @{decorator}("own")'
