"""Offer each tool under one name that chat formats can call, always the same."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentrl.chat.parsers.parser import get_parser
from agentrl.tools.tool import Reply, Schema, ServerSession, ToolNames, ToolSession, function_schema

FORMS = {
    "hermes": '<tool_call>{{"name": "{}", "arguments": {{"q": "x"}}}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={}>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>{}\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:{}{{q:<|"|>x<|"|>}}<tool_call|>',
    "mistral": '[TOOL_CALLS]{}[ARGS]{{"q": "x"}}',
    "gpt_oss": '<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{{"q": "x"}}<|call|>',
    "pythonic": '[{}(q="x")]',
}
NAMES = [
    "search", "get-page", "wiki.search", "Google Drive", "3d view", "a/b", "a:b", "a_b", "a b", "搜索",
    "-x", ".x", "x\ny", 'x"y', "<x>", "[x]", "x" * 64, "x" * 65, "x" * 64 + "y",
    "...", "!!!", "é" * 70, "\ud83c",
]  # fmt: skip


def tool(name: str) -> Schema:
    return function_schema(name, "A tool.", {"type": "object", "properties": {"q": {"type": "string"}}})


def offered(names: ToolNames, tools: dict[str, list[Schema]]) -> dict[tuple[str, str], str]:
    return {
        (server, schema["function"]["name"]): names.renamed(server, schema)["function"]["name"]
        for server, schemas in tools.items()
        for schema in schemas
    }


@pytest.mark.parametrize("parser", FORMS)
def test_every_chat_format_calls_every_offered_name(parser: str) -> None:
    tools = {"Google Drive": [tool(name) for name in NAMES], "wiki": [tool("search"), tool("a.b")]}
    for name in offered(ToolNames(tools), tools).values():
        parsed = get_parser(parser).parse(FORMS[parser].format(name), [tool(name)])
        assert ([call.name for call in parsed.tool_calls], parsed.error) == ([name], None)


def test_names_are_kept_or_safe_and_unique_whatever_the_order() -> None:
    servers = {
        "a": NAMES, "a.b": ["c", "search"], "a b": ["search"], "a_b": ["search"], "z": ["a.search", "b.c"],
    }  # fmt: skip
    tools = {server: [tool(name) for name in names] for server, names in servers.items()}
    first = offered(ToolNames(tools), tools)
    assert len(set(first.values())) == len(first)
    assert all(re.fullmatch(r"[^\W\d][\w.-]{0,63}", name) for name in first.values())
    assert first["a", "get-page"] == "get-page"
    assert first["a_b", "search"] == "a_b.search"
    assert first["a b", "search"].startswith("a_b.search_")
    assert first["a", "Google Drive"] == "Google_Drive"
    for seed in range(5):
        order = list(tools)
        random.Random(seed).shuffle(order)
        again = {server: random.Random(seed).sample(tools[server], len(tools[server])) for server in order}
        assert offered(ToolNames(again), again) == first


def test_a_tool_that_is_added_later_takes_no_other_tools_name() -> None:
    names = ToolNames({"a": [tool("search")], "b": [tool("read")]})
    assert names.offered("b", "write") == "write"
    late = names.offered("b", "search")
    assert late.startswith("search_")
    assert (names.offered("a", "search"), names.offered("b", "search")) == ("search", late)


class Changing(ServerSession):
    """A server whose tools may change."""

    def __init__(self, *names: str) -> None:
        self.names = names

    async def list(self) -> Sequence[Schema]:
        return [tool(name) for name in self.names]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        raise AssertionError(tool)


async def test_a_tool_that_never_was_is_told_from_one_that_is_gone() -> None:
    server = Changing("search", "fetch")
    async with ToolSession({"s": server}, ToolNames({}), max_chars=99, max_parallel=1) as tools:
        text = "there is no tool named 'serch'; did you mean 'search'? The tools are: fetch, search"
        assert (await tools.call("serch", {})).text == text
        server.names = ("fetch",)
        gone = await tools.call("search", {})
        assert gone.text == "there is no tool search any more: its server no longer lists it"
        assert gone.error
