"""Names of tasks decide what a process imports only where its own configuration names them too."""

from contextvars import copy_context

import pytest

from agentrl.errors import ConfigError
from agentrl.registry import allow_imports, check_importable, is_importable, paths_among
from agentrl.rollout.agents import get_agent
from agentrl.scoring.registry import get_scorer


def test_every_path_may_be_imported_until_a_process_names_what_may() -> None:
    assert is_importable("json:dumps")


@pytest.mark.parametrize(
    ("allowed", "name", "importable"),
    [
        ((), "sys:exit", False),
        ((), "exact", True),
        (("json",), "json:dumps", True),
        (("json",), "json.decoder:scanstring", True),
        (("json.decoder",), "json:dumps", False),
        (("json:dumps",), "json:dumps", True),
        (("json:dumps",), "json:loads", False),
        (("jso",), "json:dumps", False),
    ],
)
def test_a_path_is_imported_where_it_its_module_or_a_package_is_listed(
    allowed: tuple[str, ...], name: str, importable: bool
) -> None:
    def check() -> bool:
        allow_imports(allowed)
        return is_importable(name)

    assert copy_context().run(check) is importable


@pytest.mark.parametrize("get", [get_scorer, get_agent])
def test_what_is_not_listed_is_refused_before_it_is_imported(get: object) -> None:
    def use() -> None:
        allow_imports(["json"])
        allow_imports(["math"])
        assert callable(get)
        assert get("json:dumps") is not None
        with pytest.raises(ConfigError, match="may not import") as refused:
            get("this.module:exits")
        assert "--allowed_modules this.module" in str(refused.value)

    copy_context().run(use)


def test_only_paths_need_a_permission() -> None:
    assert paths_among(["exact", "a.b:c"]) == {"a.b:c"}
    check_importable("exact")
