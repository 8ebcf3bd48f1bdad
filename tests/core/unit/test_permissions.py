"""Permissions: which code, servers and files data may name in a process that restricts them."""

import dataclasses
import os
from contextvars import copy_context

import pytest

import agentrl.config.schema as schema
from agentrl.base.user_code import (
    allow,
    call_name,
    code_of_flags,
    file_name,
    flags_allowing,
    is_allowed,
    names_outside,
    require_allowed,
    server_name,
)
from agentrl.errors import ConfigError


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
        require_allowed(name, "thing")

    with pytest.raises(ConfigError) as refused:
        copy_context().run(use)
    assert name in refused.value.message
    assert flag in str(refused.value.hint)
    assert flag in flags_allowing([name]) or "load" in flag


def test_only_names_outside_need_a_permission() -> None:
    outside = {"a.b:c", "//h:1", "./f", "p()"}
    assert names_outside(["exact", "math", *outside]) == outside


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"loss_calculater": "GRPO", "advantage": None, "output_dir": "a:b"}, set()),
        ({"trust_remote_code": False}, set()),
        ({"loss_calculater": "evil:loss"}, {"loss_calculater evil:loss"}),
        ({"tools": "search,evil:a, b.c:d"}, {"tools evil:a", "tools b.c:d"}),
        ({"report_to": ["evil:Tracker"]}, {"report_to evil:Tracker"}),
        ({"import_modules": "evil"}, {"import_modules evil"}),
        ({"trust_remote_code": True}, {"trust_remote_code True"}),
    ],
)
def test_the_code_that_stored_flags_name_is_found(flags: dict[str, object], named: set[str]) -> None:
    assert code_of_flags(flags) == named


def test_every_flag_that_takes_a_path_of_code_is_known() -> None:
    takes_path = {
        item.name
        for group in schema.GROUPS
        for item in dataclasses.fields(group)
        if "module:" in item.metadata.get("help", "") and "tasks may name" not in item.metadata["help"]
    }
    assert len(takes_path) > 5
    assert {name for name in takes_path if code_of_flags({name: "module:name"})} == takes_path
