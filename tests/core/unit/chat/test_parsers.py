"""Tool calls of every format, well-formed and not: their arguments, the thoughts and answers around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.chat.parsers import parser
from agentrl.chat.parsers.arguments import convert_arguments, convert_text, validate_call
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import (
    MAX_NESTING,
    PARSERS,
    THINK,
    CallSyntaxError,
    ParsedMessage,
    ReasoningTags,
    ToolCall,
    get_parser,
    load_json,
    opens_thought,
    parse_text,
    parser_of_template,
    split_reasoning,
    tags_in,
)
from agentrl.scoring.answers import extract_answer
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


FOLDER = Path(__file__).parent / "parser_cases"
"""The cases of SGLang's and vLLM's own parser tests. Those of templates that neither reads name the template.

A case with ``contradicts`` says where the two projects disagree with each other or with a rule of ours, and
why; its expectation is ours.
"""
FILES = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
CASES = [
    pytest.param(case, content["tools"], id=f"{case['parser']}: {case['source']}")
    for content in FILES
    for case in content["cases"]
]


@pytest.mark.parametrize(("case", "tools"), CASES)
def test_a_case_of_the_upstream_suites(case: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    tools, is_opened = case.get("tools", tools), case.get("opened", False)
    parsed = parse_text(get_parser(case["parser"]), case["text"], tools, opened=is_opened)
    assert [[call.name, call.arguments] for call in parsed.tool_calls] == case["calls"]
    assert json.loads(json.dumps([call.arguments for call in parsed.tool_calls], allow_nan=False)) == [
        arguments for _, arguments in case["calls"]
    ]
    assert (parsed.error is not None) == case.get("error", False), parsed.error
    assert parsed.reasoning == case.get("reasoning", "")
    if "content" in case and parsed.error is None:
        assert parsed.content == case["content"]


CALL = '<tool_call>{"name": "f", "arguments": {"html": "<think>x"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "rest", "is_open"),
    [
        ("plain", "", "plain", False),
        ("<think>a</think>b", "a", "b", False),
        ("<think>\na\n</think>\n\nb", "a", "\n\nb", False),
        ("a</think>b", "a", "b", False),
        ("<think>a", "a", "", True),
        ("<think></think>b", "", "b", False),
        ("a<think>b</think>c<think>d</think>e", "b\n\nd", "ace", False),
        ("<think>a</think>b<think>c", "a\n\nc", "b", True),
        ("a</think>b<think>c", "a\n\nc", "b", True),
        (CALL, "", CALL, False),
        (f"<think>{CALL}</think>{CALL}<think>{CALL}", f"{CALL}\n\n{CALL}", CALL, True),
    ],
)
def test_thoughts_are_split_from_the_rest(text: str, reasoning: str, rest: str, is_open: bool) -> None:
    split = split_reasoning(text)
    assert (split.reasoning, split.rest, split.is_open) == (reasoning, rest, is_open)


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [("a", "a", ""), ("a</think>b", "a", "b"), ("<think>a</think>b", "a", "b"), ("<think>a", "a", "")],
)
def test_the_prompt_may_open_the_thought(text: str, reasoning: str, rest: str) -> None:
    split = split_reasoning(text, opened=True)
    assert (split.reasoning, split.rest) == (reasoning, rest)


def test_a_prompt_opens_a_thought_only_at_its_end() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thought("<think> is a tag. assistant\n")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ '<think>' }}", THINK),
        ("no thought", THINK),
        ("{{ m.split('[/THINK]') }}", ReasoningTags("[THINK]", "[/THINK]")),
        ("<|thought_start|>", ReasoningTags("<|thought_start|>", "<|thought_end|>")),
    ],
)
def test_tags_are_those_of_the_template(template: str, tags: ReasoningTags) -> None:
    assert tags_in(template) == tags
    assert split_reasoning(f"{tags.open}a{tags.close}b", tags).reasoning == "a"


def test_a_malformed_call_stays_in_the_content_and_out_of_the_reasoning() -> None:
    parsed = parse_text(get_parser("hermes"), "<think>a</think>b <tool_call>{</tool_call>", ())
    assert (parsed.reasoning, parsed.content) == ("a", "b <tool_call>{</tool_call>")
    assert parsed.error is not None


LOSSY = ("02134", "+31205551234", "007", "1e5", "1.10", "-0", "1_000", " 5", "٣", "5.", ".5", "0x10", "1E3")
UNIONS = (
    {"type": ["string", "integer"]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "null"}, {"type": "number"}, {"$ref": "#/$defs/text"}]},
    {"type": ["boolean", "number", "string"]},
    {},
)
ROOT = {"$defs": {"text": {"type": "string"}}}


@pytest.mark.parametrize("union", UNIONS)
def test_text_that_a_value_would_write_otherwise_stays_text(union: dict[str, Any]) -> None:
    assert [convert_text(text, union, ROOT) for text in LOSSY] == list(LOSSY)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", ["string", "integer"], 5), ("1.5", ["string", "number"], 1.5),
        ("1", ["boolean", "string"], "1"), ("0", ["boolean", "string"], "0"),
        ("true", ["boolean", "string"], True), ("False", ["boolean", "string"], False),
        ("TRUE", ["boolean", "string"], "TRUE"), ("null", ["string", "null"], None),
        ('"5"', ["string", "integer"], "5"), ('{"a": 1}', ["string", "object"], {"a": 1}),
        ("(1, 2)", ["string", "array"], "(1, 2)"), ("02134", ["integer"], 2134), ("1e5", ["number"], 1e5),
        ("1", ["boolean"], True),
    ],
)  # fmt: skip
def test_a_value_wins_where_nothing_is_lost(text: str, kinds: list[str], value: Any) -> None:
    read = convert_text(text, {"type": kinds})
    assert (read, type(read)) == (value, type(value))


def test_schemas_that_refer_to_themselves_are_walked_once() -> None:
    names = [f"L{level}" for level in range(15)]
    wide = {name: {"anyOf": [{"$ref": f"#/$defs/L{at + 1}"}] * 9} for at, name in enumerate(names[:-1])}
    root = {
        "$ref": "#/$defs/A",
        "$defs": {
            **wide, "L14": {"type": "integer"},
            "A": {"properties": {"x": {"$ref": "#/$defs/L0"}}, "anyOf": [{"$ref": "#/$defs/A"}] * 9},
        },
    }  # fmt: skip
    tools = [{"function": {"name": "f", "parameters": root}}]
    assert convert_arguments("f", {"x": "5", "y": "z"}, tools) == {"x": 5, "y": "z"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
         "properties": {"x": {"$ref": "#/$defs/A"}}},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
    ],
)  # fmt: skip
def test_a_cycle_of_references_validates_nothing(parameters: dict[str, Any]) -> None:
    tool = {"function": {"name": "f", "parameters": parameters}}
    assert validate_call(ToolCall("f", {"x": 1}), [tool]) is None


def test_a_problem_lists_arguments_behind_references() -> None:
    root = {
        "$ref": "#/$defs/Args",
        "$defs": {
            "Args": {
                "allOf": [{"properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}],
                "anyOf": [{"properties": {"m": {"type": ["string", "null"]}}, "required": ["m"]}, {}],
            },
            "N": {"type": "integer"},
        },
    }  # fmt: skip
    problem = validate_call(ToolCall("f", {"n": "x"}), [{"function": {"name": "f", "parameters": root}}])
    assert str(problem).endswith("Arguments: n (integer), m? (string or null).")


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 5000, 200_000])
def test_nesting_is_bounded_in_the_models_words(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth <= MAX_NESTING:
        assert load_json(text)
        return
    with pytest.raises(CallSyntaxError):
        load_json(text)
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {text}}}}}</tool_call>'
    parsed = get_parser("hermes").parse(call, [])
    assert parsed.error
    assert not parsed.tool_calls


ANSWER = "<answer>4</answer>"
"""No answer and no thought is read out of a call, whole or broken; it stands for each text of a case."""
WITH_CALLS = sorted({case["parser"] for content in FILES for case in content["cases"] if case["calls"]})
BARE = {"llama", "pythonic"}
"""Formats without marks: nothing says before its end that a text is a call."""


def calls_with(value: str, parser: str) -> Iterator[tuple[str, list[ToolCall], list[dict[str, Any]]]]:
    """Yield texts in whose calls ``value`` stands for a text of the case, with their calls and tools."""
    for content in FILES:
        for case in content["cases"]:
            if case["parser"] != parser or case.get("error") or case.get("opened") or "tools" in case:
                continue
            for index, (_, arguments) in enumerate(case["calls"]):
                for key, text in arguments.items():
                    if isinstance(text, str) and len(text) > 1 and case["text"].count(text) == 1:
                        calls = [ToolCall(name, dict(given)) for name, given in case["calls"]]
                        calls[index].arguments[key] = value
                        yield case["text"].replace(text, value), calls, content["tools"]


def answer_of(parsed: ParsedMessage) -> str | None:
    return None if parsed.error is not None else extract_answer(parsed.content, "answer")


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_that_is_cut_holds_no_answer(name: str) -> None:
    parser, seen = get_parser(name), 0
    for text, calls, tools in calls_with(ANSWER, name):
        if list(parse_text(parser, text, tools).tool_calls) != calls:
            continue  # the schema has another type for this argument, or allows other values
        seen += 1
        first = text.index(ANSWER) + len(ANSWER)
        for end in range(first, len(text)):
            assert answer_of(parse_text(parser, text[:end], tools)) is None, text[:end]
    assert seen


@pytest.mark.parametrize("name", sorted({*WITH_CALLS} - BARE))
@pytest.mark.parametrize("value", ["a <think>b</think> c", "a </think> b", "a <think> b"])
def test_a_thought_in_a_call_is_an_argument(name: str, value: str) -> None:
    parser = get_parser(name)
    close = parser.close if isinstance(parser, MarkedParser) else ""
    for text, _, tools in calls_with(value, name):
        plain = parser.parse(text, tools)
        if not plain.tool_calls[0].arguments or plain.error is not None:
            continue
        before, _, behind = text.partition(value)
        is_unclosed = close not in behind if close else "<tool_call>" in before
        if "think>" in before or (value == "a </think> b" and is_unclosed):
            continue  # a mark that nothing closes may be a word of a thought
        assert list(parse_text(parser, text, tools).tool_calls) == list(plain.tool_calls), text


OK = '{"name": "add", "arguments": {"a": 1}}'
WITH = '{"name": "add", "arguments": {"note": "<answer>4</answer>"}}'
LLAMA = WITH.replace("arguments", "parameters")
HARMONY = '<|constrain|>json<|message|>{"note": "<answer>4</answer>"}<|call|>'
ANY_ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", f"<toolcall>{WITH}</tool_call><tool_call>{OK}</tool_call>", 1),
        ("qwen", f"{WITH}</tool_call>\n<tool_call>{OK}</tool_call>", 1),
        ("glm45", "<tool>add<arg_key>note</arg_key><arg_value><answer>4</answer></arg_value></tool_call>"
         "<tool_call>add</tool_call>", 1),
        ("internlm", f"<|action_start|>{WITH}<|action_end|><|action_start|><|plugin|>{OK}<|action_end|>", 1),
        ("llama", f"{OK}; {LLAMA[:-1]}", 1),
        ("llama", f'{OK}; {LLAMA.replace("name", "nme")}', 1),
        ("llama", f"So: {LLAMA[:-1]}", 0),
        ("llama", f'<|python_tag|>{LLAMA.replace("name", "nme")}; {OK}', 1),
        ("gpt_oss", f"commentary to=functions.add {HARMONY}", 0),
        ("gpt_oss", f"<|channel|>commentary functions.add {HARMONY}", 0),
        ("gpt_oss", f"<|channel|>commentaryto=functions.add {HARMONY}", 0),
        ("gpt_oss", 'to=functions.add<|message|>{"note": "<answer>4</answer>"}', 0),
    ],
)  # fmt: skip
def test_a_call_without_its_opening_is_malformed(name: str, text: str, calls: int) -> None:
    parsed = parse_text(get_parser(name), text, [ANY_ADD])
    assert parsed.error is not None
    assert len(parsed.tool_calls) == calls


def test_a_mark_that_a_model_repeats_does_not_empty_the_call() -> None:
    text = '<|channel|>commentary to=functions.add<|message|><|message|>{"a": 1}<|call|>'
    assert parse_text(get_parser("gpt_oss"), text, [ANY_ADD]).tool_calls == (ToolCall("add", {"a": 1}),)


def test_a_mark_of_calls_in_a_thought_that_began_before_hides_nothing_behind_it() -> None:
    call = f"<tool_call>{OK}</tool_call>"
    split = split_reasoning(f"I write <tool_call>.</think>{call}")
    assert (split.reasoning, split.rest) == ("I write <tool_call>.", call)
    split = split_reasoning(f"{call} perhaps.</think>Done")
    assert split.rest == "Done"
