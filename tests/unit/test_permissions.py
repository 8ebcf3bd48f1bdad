"""Permissions: which code, servers and files data may name in a process that restricts them."""

from contextvars import copy_context

import pytest

from agentrl.errors import ConfigError
from agentrl.permissions import (
    allow,
    call_name,
    file_name,
    flags_allowing,
    is_allowed,
    names_outside,
    require_allowed,
    server_name,
)


def is_allowed_by(allowed: tuple[str, ...], name: str) -> bool:
    def check() -> bool:
        allow(allowed)
        return is_allowed(name)

    return copy_context().run(check)


@pytest.mark.parametrize("name", ["json:dumps", "//host:80", "/etc/passwd", "./a.yml", 'a({"x": 1})'])
def test_everything_is_allowed_until_a_process_names_what_is(name: str) -> None:
    assert is_allowed(name)
    assert not is_allowed_by((), name)
    assert is_allowed_by((name,), name)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("allowed", "name", "expected"),
    [
        ((), "exact", True),
        (("json",), "json:dumps", True),
        (("json",), "json.decoder:scanstring", True),
        (("json.decoder",), "json:dumps", False),
        (("json:dumps",), "json:loads", False),
        (("jso",), "json:dumps", False),
        (("package",), call_name("package", "{}"), True),
        (("package",), call_name("package.games:Chess", "{ }"), False),
        (("package",), call_name("package.games:Chess", "{}"), True),
        (("package",), call_name("package", '{"runtime": "host"}'), False),
        (("package",), call_name("subprocess:Popen", '{"args": "id"}'), False),
        (("package",), call_name("package.x/os", "{}"), False),
        (("package",), call_name("package:x/../os", "{}"), False),
        (("owner/package",), call_name("owner/package", "{}"), True),
        (("package",), "package:os.system", False),
        ((call_name("package", '{"level": 1}'),), call_name("package", '{"level": 1}'), True),
        ((call_name("package", '{"level": 1}'),), call_name("package", '{"level": 2}'), False),
        ((call_name("package", '{"level": 1}'),), call_name("package", "{}"), False),
        (("//games",), server_name("http://games:8000"), True),
        (("//games:8000",), server_name("http://games:8000/reset"), True),
        (("//games:8000",), server_name("http://games:8001"), False),
        (("//games:80",), server_name("http://games"), True),
        (("//games:443",), server_name("wss://GAMES/ws"), True),
        (("//games",), server_name("http://games@evil:80"), False),
        (("//games",), server_name("http://evil\\@games:80"), False),
        (("//games",), server_name("http://games:99999"), False),
        (("//games",), server_name("http://games.evil"), False),
        (("//games",), server_name("games:80@evil"), False),
        (("//games",), server_name("games:x"), False),
        (("//[::1]",), server_name("http://[::1]:8000"), True),
        (("/tasks",), file_name("/tasks/a/b"), True),
        (("/tasks",), file_name("/tasks/../home"), False),
        (("/tasks",), file_name("//tasks/a"), True),
        (("/tasks",), file_name("/tasks2"), False),
        (("./configs",), file_name("configs/agent.yml"), True),
        (("./configs",), file_name("configs/../secret.yml"), False),
        (("./configs",), file_name("../configs/agent.yml"), False),
    ],
)
def test_a_name_is_allowed_where_it_or_what_holds_it_is_listed(
    allowed: tuple[str, ...], name: str, expected: bool
) -> None:
    assert is_allowed_by(allowed, name) is expected


def test_a_relative_file_is_below_the_folder_in_which_the_process_was_started() -> None:
    import os

    assert is_allowed_by((os.getcwd(),), file_name("configs/agent.yml"))
    assert not is_allowed_by((f"{os.getcwd()}/configs",), file_name("other/agent.yml"))


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("os:system", "--allowed_modules os"),
        ("package()", "--allowed_modules package"),
        ("//10.0.0.1:80", "--allowed_hosts 10.0.0.1:80"),
        ("/home/user", "--allowed_folders /home/user"),
        ('package({"x": 1})', "agentrl tasks load"),
    ],
)
def test_what_is_refused_is_named_with_the_flag_that_allows_it(name: str, flag: str) -> None:
    def use() -> None:
        allow(())
        with pytest.raises(ConfigError) as refused:
            require_allowed(name, "thing")
        assert name in refused.value.message
        assert flag in str(refused.value.hint)
        assert flag in flags_allowing([name]) or "load" in flag

    copy_context().run(use)


def test_only_names_outside_need_a_permission() -> None:
    assert names_outside(["exact", "math", "a.b:c", "//h:1", "./f", "p()"]) == {
        "a.b:c",
        "//h:1",
        "./f",
        "p()",
    }
