"""Hostile text of a request makes no control token, and that of a model no call, in linear time."""

from __future__ import annotations

import json
import time
from typing import Any

import chat_models as models
import pytest
from tokenizers import normalizers, pre_tokenizers

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers import arguments
from agentrl.chat.parsers.arguments import read_literal, validate_call
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import PARSERS, ToolCall, get_parser, parse_text, split_reasoning
from agentrl.chat.renderer import ControlTokens
from agentrl.tools.tool import function_schema

PLACES = ["system", "question", "result", "argument", "argument name", "description", "choice", "parameter"]


@pytest.fixture(scope="module", params=["template", *models.FAMILIES])
def chat_format(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A template, or the renderer of a family."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "template":
        return models.opened(folder, models.KEEPS_ALL, name="template")
    return models.of_family(folder, request.param)


def request(place: str, text: str) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a conversation and its tools with ``text`` in one place."""

    def at(name: str) -> str:
        return text if name == place else "walnut"

    city = {"type": "string", "description": at("description"), "enum": [at("choice"), "x"]}
    schema = {"type": "object", "properties": {"city": city, at("parameter"): {"type": "string"}}}
    tool = function_schema("find_river", at("description"), schema)
    arguments = {"city": at("argument"), at("argument name"): 1}
    call = {"id": "call00001", "type": "function", "function": {"name": "find_river", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "system", "content": at("system")},
        {"role": "user", "content": at("question")},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "find_river", "tool_call_id": "call00001", "content": at("result")},
    ]
    return messages, [tool]


def special(chat_format: ChatFormat, ids: list[int] | None) -> list[int]:
    return [token for token in ids or () if token in chat_format.tokens.special_ids]


def control_ids(chat_format: ChatFormat, place: str, text: str) -> list[int]:
    return special(chat_format, chat_format.render(*request(place, text)))


def attacks(chat_format: ChatFormat, place: str) -> list[str]:
    tokens = chat_format.tokens
    spoken = tokens._spoken if place in ("system", "argument", "argument name") else frozenset()
    texts = [text for text in tokens.texts() if text not in spoken]
    return [
        " ".join(texts),
        "".join(texts),
        *(text[:place] + text + text[place:] for text in texts[:6] for place in (1, 2, len(text) - 1)),
        "\0".join(texts),
        "\u200b".join(texts),
        "<" + texts[0] + ">" + "[" + texts[-1] + "]",
    ]


@pytest.mark.parametrize("place", PLACES)
def test_text_makes_no_control_token_wherever_it_stands(chat_format: ChatFormat, place: str) -> None:
    expected = control_ids(chat_format, place, "walnut")
    for attack in attacks(chat_format, place):
        assert control_ids(chat_format, place, attack) == expected, attack


def test_parts_of_a_control_token_do_not_meet_over_messages(chat_format: ChatFormat) -> None:
    for text in chat_format.tokens.texts():
        for cut in (1, len(text) // 2, len(text) - 1):
            messages, tools = request("question", text[cut:])
            messages[0]["content"] = messages[3]["content"] = text[:cut]
            found = special(chat_format, chat_format.render(messages, tools))
            assert found == control_ids(chat_format, "question", "walnut")
            output = [min(chat_format.stop_ids)]
            results: list[Message] = [{**messages[3], "content": part} for part in (text[:cut], "walnut")]
            hostile, harmless = (
                special(chat_format, chat_format.next_prompt([], output, messages[:3], [result], tools))
                for result in results
            )
            assert hostile == harmless


def test_characters_that_look_alike_stay_what_they_are(chat_format: ChatFormat) -> None:
    alike = ("＜|im_end|＞", "<|im_end❘>", "<\u200d|im_end|>", "<|ｉm_end|>", "<|IM_END|>", "< |im_end|>")
    for text in alike:
        messages, tools = request("question", text)
        assert text in chat_format.decode(chat_format.render(messages, tools))
        assert control_ids(chat_format, "question", text) == control_ids(chat_format, "question", "walnut")


@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufffd" * 40, "x" * 50_000])
def test_odd_text_stays_as_it_is_or_is_escaped(chat_format: ChatFormat, text: str) -> None:
    rendered = chat_format.decode(chat_format.render(*request("result", text)))
    assert text in rendered or json.dumps(text)[1:-1] in rendered


def test_a_lone_surrogate_is_replaced(chat_format: ChatFormat) -> None:
    for text in ("\ud800", "a\udfffb<|im_end|>"):
        rendered = chat_format.render(*request("result", text))
        assert chat_format.decode(rendered)
        assert control_ids(chat_format, "result", text) == control_ids(chat_format, "result", "walnut")


def test_many_control_tokens_cost_linear_time(chat_format: ChatFormat) -> None:
    """CPU time, which other processes do not lengthen; a piece between two marks once cost 0.1 ms."""
    tokens = chat_format.tokens
    text = max(tokens.texts(), key=len) * 10_000
    begun = time.process_time()
    [message] = tokens.protect([{"role": "user", "content": text}])
    ids = tokens.encode(message["content"])
    assert time.process_time() - begun < 1
    assert tokens.decode(ids) == text


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_the_fewest_tokens_are_at_most_the_tokens(normalizer: normalizers.Normalizer | None) -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(["a" * 40])
    tokens = ControlTokens(tokenizer)
    for text in ("a b 1 2", "a" * 999, "one two\nthree", "\u03b1\u0313\u0300\u0345" * 500, "", " " * 99):
        assert tokens.fewest_tokens(text) <= len(tokens.encode(text))
    assert tokens.fewest_tokens("a b " * 500) == 1000
    assert tokens.fewest_tokens("a" * 4000) == (100 if normalizer is None else 25)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert ControlTokens(tokenizer).fewest_tokens("a" * 4000) == 0, "white space is dropped: unknown"


PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "object"}, "note": {"type": "string"}}
TOOL = function_schema("add", "Adds.", {"type": "object", "properties": PROPERTIES})
LENGTH = 40_000

HEADS = {
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n", "<｜tool▁call▁begin｜>"],
    "deepseek_v32": [
        '<｜DSML｜invoke name="add">',
        '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a">',
    ],
    "minimax_m2": ['<invoke name="add">', '<invoke name="add"><parameter name="a">', '<invoke name="'],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"],
    "gemma4": ["call:", "call:add{", "call:add{a:", 'call:add{a:<|"|>'],
    "glm45": ["add", "add<arg_key>", "add<arg_key>a</arg_key><arg_value>"],
    "qwen3_coder": ["<function=", "<function=add>", "<function=add><parameter=a>"],
    "mistral": ["add", "add[ARGS]"],
    "minicpm": ["add(", "add(a="],
    "hermes": ['{"name": "add", "arguments": ', '{"name": "PythonInterpreter"}<code>'],
}
"""What leads into a call, behind the opening mark."""

LOOSE = {
    "pythonic": ["[add(", "[add(a=", "["],
    "llama": ["<|python_tag|>", '{"name": "add", "parameters": '],
    "gpt_oss": ["<|channel|>commentary to=functions.add<|message|>", "<|channel|>", "<|start|>"],
}
"""The openings of formats without one."""

FILLERS = (
    "[", "{", "(", '"', "\\", " ", "\n", "\\n", '{"a":', "[1,", "x", "<", "=", ",", "a:", "x=", "\0", "'",
)  # fmt: skip
"""What a model that degenerates repeats."""

KINDS = {type(get_parser(name)): name for name in PARSERS.names()}


def openings(name: str) -> list[str]:
    parser = get_parser(name)
    marks = list(parser.opens) if isinstance(parser, MarkedParser) else [""]
    heads = next((HEADS[kind] for kind in HEADS if isinstance(parser, type(get_parser(kind)))), [])
    loose = next((LOOSE[kind] for kind in LOOSE if isinstance(parser, type(get_parser(kind)))), [])
    return [marks[0], *(marks[0] + head for head in heads), *loose]


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_a_text_that_repeats_anything_takes_linear_time(name: str) -> None:
    parser = get_parser(name)
    for opening in openings(name):
        units = [opening] if opening else []
        for filler in (*FILLERS, *units):
            for text in (opening + filler * (LENGTH // len(filler)), (opening + filler) * 300):
                parse_text(parser, text, [TOOL])


@pytest.mark.parametrize(
    "unit", ["<think></think>", "a<think>b</think>", "<think>", "</think>", "<tool_call>"]
)
def test_megabytes_of_thoughts_take_linear_time(unit: str) -> None:
    text = unit * (10_000_000 // len(unit))
    split = split_reasoning(text)
    assert len(split.rest) <= len(text)


@pytest.mark.parametrize(
    "name", ["hermes", "llama", "mistral", "deepseek_v3", "kimi_k2", "gemma4", "minicpm"]
)
def test_ten_megabytes_of_text_and_a_call_are_read(name: str) -> None:
    calls = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"note": TEXT}}</tool_call>',
        "llama": '<|python_tag|>{"name": "add", "parameters": {"note": TEXT}}',
        "mistral": '[TOOL_CALLS]add[ARGS]{"note": TEXT}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"note": TEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"note": TEXT}<|tool_call_end|><|tool_calls_section_end|>',
        "gemma4": '<|tool_call>call:add{note:<|"|>BODY<|"|>}<tool_call|>',
        "minicpm": "<|tool_call_start|>add(note=TEXT)<|tool_call_end|>",
    }
    size = 500_000 if name == "minicpm" else 10_000_000
    body = "ab <x> {[( " * (size // 11)
    text = calls[name].replace("TEXT", json.dumps(body)).replace("BODY", body)
    (call,) = get_parser(name).parse(text, [TOOL]).tool_calls
    assert call.arguments == {"note": body}


@pytest.mark.parametrize("brackets", ["[]", "{}", "()"])
def test_a_hundred_thousand_brackets_are_an_error_and_no_crash(brackets: str) -> None:
    deep = brackets[0] * 100_000 + brackets[1] * 100_000
    nested = '{"a":' * LENGTH + "1" + "}" * LENGTH
    for name in sorted(KINDS.values()):
        for opening in openings(name):
            for text in (opening + deep, opening + nested):
                assert parse_text(get_parser(name), text, [TOOL]).tool_calls == ()
    with pytest.raises(ValueError, match="not a literal"):
        read_literal(deep)


@pytest.mark.parametrize("odd", ["\0", "\ud800", "\udfff\ud800", "\u202e", "\x1b[2J", "ｔool"])
def test_odd_characters_are_part_of_a_text(odd: str) -> None:
    written = f'<tool_call>{{"name": "add", "arguments": {{"note": "a{odd}b"}}}}</tool_call>'
    parsed = parse_text(get_parser("hermes"), f"{odd}{written}{odd}", [TOOL])
    (call,) = parsed.tool_calls
    assert call.arguments == {"note": f"a{odd}b"}
    assert validate_call(call, [TOOL]) is None
    for name in sorted(KINDS.values()):
        for opening in openings(name):
            parse_text(get_parser(name), opening + odd + opening + odd, [TOOL])
            assert parse_text(get_parser(name), f"a{odd}b", [TOOL]).content == f"a{odd}b"


def test_escaped_surrogates_in_arguments_do_not_stop_the_check_of_a_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"note": "\\ud800", "a": "\\udfff"}}</tool_call>'
    (call,) = get_parser("hermes").parse(text, [TOOL]).tool_calls
    assert call.arguments["note"] == "\ud800"
    assert "is not of type" in (validate_call(call, [TOOL]) or "")


DOUBLING = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)} | {"60": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a+)+$": {}}},
        {"$ref": "#/$defs/0", "$defs": DOUBLING},
    ],
    ids=["pattern", "names", "references"],
)
@pytest.mark.attack
def test_a_tool_server_cannot_hold_a_sampler_by_its_schema(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking these calls by their schema would take years."""
    monkeypatch.setattr(arguments, "CHECK_SECONDS", 0.1)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", **schema}}}
    text = "a" * 60 + "!"
    assert validate_call(ToolCall("add", {"a": text, text: 1}), [tool]) is None


@pytest.mark.attack
@pytest.mark.parametrize("fence", ["", "```"])
def test_spaces_behind_the_arguments_are_read_once(fence: str) -> None:
    # Quadratic, it would take half an hour.
    spaces = " " * 500_000
    head = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}"
    parsed = parse_text(get_parser("deepseek_v31"), f"{head}{spaces}{fence}{spaces}x", ())
    assert not parsed.tool_calls
    assert "text behind the arguments" in str(parsed.error)
