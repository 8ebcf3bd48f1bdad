"""Test well-formed and malformed tool calls of every format, and how templates choose one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.chat.parsers import parser
from agentrl.chat.parsers.arguments import convert_arguments, validate_call
from agentrl.chat.parsers.parser import PARSERS, ToolCall, get_parser, parse_text, parser_of_template
from agentrl.tools.tool import function_schema

NUMBER = {"type": "integer"}
PROPERTIES = {"a": NUMBER, "b": NUMBER, "note": {"type": "string"}}
ADD = function_schema("add", "", {"type": "object", "properties": PROPERTIES, "required": ["a", "b"]})

GOOD = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen": '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "minicpm": "<|tool_call_start|>\n```python\nadd(a=1, b=2)\n```\n<|tool_call_end|>",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abc"}]',
}


@pytest.mark.parametrize("name", GOOD)
def test_one_call_behind_text(name: str) -> None:
    text = "<think>I call <tool_call></think>Let me see. " + GOOD[name]
    parsed = parse_text(get_parser(name), text, [ADD])
    assert parsed.error is None
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    assert (parsed.reasoning, parsed.content) == ("I call <tool_call>", "Let me see.")
    assert validate_call(call, [ADD]) is None


@pytest.mark.parametrize("name", PARSERS.names())
def test_plain_text_is_content(name: str) -> None:
    parsed = get_parser(name).parse("  The answer is 3.  ", [ADD])
    assert (parsed.content, parsed.tool_calls, parsed.error) == ("The answer is 3.", (), None)


@pytest.mark.parametrize("name", PARSERS.names())
@settings(deadline=None, max_examples=20)
@given(text=st.text(alphabet=st.sampled_from('<tool_call>/{}[]"name:,|python_tag\n ;=()1')))
def test_any_text_is_read_without_raising(name: str, text: str) -> None:
    for opening in ("", "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call_start|>"):
        get_parser(name).parse(opening + text, [ADD])
        get_parser(name).parse(opening + text + "</tool_call><|tool_call_end|>", [ADD])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "<tool_call>{name: add}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>["add"]</tool_call>', "not a JSON object but str"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object but list"),
        ("hermes", '<tool_call>{"name": "add"} junk</tool_call>', "text behind"),
        ("hermes", 'so {"name": "add"}</tool_call>', "without <tool_call>"),
        ("hermes", '<tool_call>{"name": "add"}<code>1</code></tool_call>', "only for PythonInterpreter"),
        ("qwen3_coder", "<tool_call><function=add>1</function></tool_call>", "outside <parameter"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "no name"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "not of the form"),
        ("llama", "<|python_tag|>add(1)", "no tool call behind"),
        ("llama", "<|python_tag|>", "no tool call behind"),
        ("llama", '{"name": "add", "parameters": 3}', "not a JSON object but int"),
        ("minicpm", "<|tool_call_start|>add(", "not closed"),
        ("minicpm", "<|tool_call_start|>add(a b)<|tool_call_end|>", "not a Python call"),
        ("minicpm", "<|tool_call_start|>add(1, 2)<|tool_call_end|>", "key=value"),
        ("minicpm", "<|tool_call_start|>add(a=b)<|tool_call_end|>", "not a literal"),
        ("minicpm", "<|tool_call_start|>x = 1<|tool_call_end|>", "not a function call"),
        ("mistral", "[TOOL_CALLS] [{]", "not JSON"),
        ("mistral", "[TOOL_CALLS]add", "no arguments"),
        ("mistral", '[TOOL_CALLS] {"a": 1}', 'no "name"'),
    ],
)
def test_a_malformed_call_is_named(name: str, text: str, problem: str) -> None:
    parsed = get_parser(name).parse(text, [ADD])
    assert parsed.error is not None
    assert problem in parsed.error


def test_several_calls_keep_their_order_and_a_bad_one_is_told() -> None:
    calls = [f"<tool_call>{call}</tool_call>" for call in ('{"name": "a"}', "x", '{"name": "b"}')]
    parsed = get_parser("hermes").parse("\n".join(calls), [ADD])
    assert [call.name for call in parsed.tool_calls] == ["a", "b"]
    assert parsed.error is not None


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("llama", '{"name": "a", "parameters": {}};'
         ' {"type": "function", "function": {"name": "b", "arguments": {"x": 1}}}',
         "", [("a", {}), ("b", {"x": 1})]),
        ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub{"b": 2}',
         "Well.", [("add", {"a": 1}), ("sub", {"b": 2})]),
        ("hermes", '<tool_call>{"name": "execute_code", "arguments": {"timeout": 3}}\n'
         '<code>\nprint("</a>\\n")\n</code></tool_call>',
         "", [("execute_code", {"timeout": 3, "code": 'print("</a>\\n")'})]),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"html": "<code>x</code>"}}</tool_call>',
         "", [("write", {"html": "<code>x</code>"})]),
    ],
    ids=["joined by semicolons", "names before arguments", "code as it stands", "code inside JSON"],
)  # fmt: skip
def test_other_forms_of_calls_are_read(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    parsed = get_parser(name).parse(text, [ADD])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.content == content


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (ToolCall("ad", {}), "did you mean 'add'"),
        (ToolCall("zzz", {}), "The tools are: add"),
        (ToolCall("add", {"a": 1}), "'b' is a required property. Arguments: a (integer), b (integer), note?"),
        (ToolCall("add", {"a": 1, "b": "2"}), "argument b: '2' is not of type 'integer'"),
    ],
)
def test_a_call_that_does_not_fit_is_explained(call: ToolCall, problem: str) -> None:
    told = validate_call(call, [ADD])
    assert told is not None
    assert problem in told


def test_no_tools_are_offered() -> None:
    assert validate_call(ToolCall("add", {}), []) == "there is no tool named 'add'; no tools are offered"


def test_untyped_values_take_the_schema_type_and_text_stays_text() -> None:
    texts = {"a": "1", "b": "two", "note": "3"}
    assert convert_arguments("add", texts, [ADD]) == {"a": 1, "b": "two", "note": "3"}


@pytest.mark.parametrize(
    "parameters",
    [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x"}, {"properties": {"a": {"pattern": "("}}}],
)
def test_a_wrong_schema_is_not_the_models_fault(parameters: dict[str, object]) -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert validate_call(ToolCall("f", {"a": "b"}), [schema]) is None


def test_a_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check_schema = Draft202012Validator.check_schema
    monkeypatch.setattr(
        Draft202012Validator, "check_schema", lambda schema: (checked.append(schema), check_schema(schema))
    )
    parameters = {"type": "object", "properties": {"once": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for value in range(50):
        assert validate_call(ToolCall("f", {"once": value}), json.loads(json.dumps(tools))) is None
    assert validate_call(ToolCall("f", {"once": "1"}), tools) is not None
    assert len(checked) == 1


def test_the_example_parser_reads_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    text = 'I add.\nCALL add a=1 b=2 note="two words"\nCALL add \'\n'
    parsed = get_parser("custom_parser:LineParser").parse(text, [ADD])
    assert parsed.tool_calls == (ToolCall("add", {"a": 1, "b": 2, "note": "two words"}),)
    assert parsed.content == "I add."
    assert parsed.error is not None


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + call.name + '<arg_key>' }}", "glm45"),
        ("{{ '<|start|>assistant to=functions.f<|channel|>commentary' }}", "gpt_oss"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "deepseek_v3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}.', "llama"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_marks_of_a_template_choose_the_parser(template: str, parser: str) -> None:
    assert parser_of_template(template) == parser


def test_every_mark_names_a_parser_that_there_is() -> None:
    assert {name for _, name in parser._MARKS} <= set(PARSERS.names())
