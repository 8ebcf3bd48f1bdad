"""The chat template keeps prefixes, marks the assistant's tokens, and lists tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo.tasks import CALCULATOR_TOOLS, call_text, worked_examples
from demo.tiny import build_tiny_model
from transformers import AutoTokenizer

from agentrl.chat.open_format import open_chat_format
from agentrl.chat.renderer import TemplateRenderer
from agentrl.config.schema import ModelConfig
from agentrl.tools.tool import function_schema

ROOT = Path(__file__).parents[4]
TEMPLATE = ROOT / "assets/chat_templates/smollm2_tools.jinja"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0, template=TEMPLATE)


@pytest.fixture(params=["tiny", "smollm2"])
def folder(request: pytest.FixtureRequest, tiny_folder: Path) -> Path:
    if request.param == "tiny":
        return tiny_folder
    smollm = ROOT / ".agentrl/models/SmolLM2-135M-Instruct"
    if not (smollm / "chat_template.jinja").is_file():
        pytest.skip(f"{smollm} is not there: the quickstart makes it")
    return smollm


def opened(folder: Path) -> TemplateRenderer:
    base = open_chat_format(folder, ModelConfig(), with_tools=True).renderer
    assert isinstance(base, TemplateRenderer)
    return base


def call(expression: Any, name: str = "calculate") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": expression}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one call": [
        {"role": "user", "content": "What is 37 * 48?"},
        {"role": "assistant", "content": "", "tool_calls": [call({"expression": "37 * 48"})]},
        {"role": "tool", "content": "1776"},
        {"role": "assistant", "content": "<answer>1776</answer>"},
    ],
    "system, thought, two calls, an error, a further question": [
        {"role": "system", "content": "  Use the tool. "},
        {"role": "user", "content": "What is 1 + 2, and 3 / 0?\n"},
        {
            "role": "assistant",
            "content": "\n\n  I call it twice. ",
            "tool_calls": [call({"expression": "1 + 2"}), call('{"expression": "3 / 0"}')],
        },
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "division by zero\n\n"},
        {"role": "assistant", "content": None, "tool_calls": [call({})]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "\tThe first is 3.\n"},
        {"role": "user", "content": "Größe? 数 🙂"},
        {"role": "assistant", "content": " <answer>3</answer>"},
    ],
    "worked examples": [
        *worked_examples(),
        {"role": "user", "content": "What is 19 + 74?"},
        {"role": "assistant", "content": call_text("19 + 74")},
        {"role": "tool", "content": "93"},
        {"role": "assistant", "content": "<answer>93</answer>"},
    ],
}


@pytest.mark.parametrize("tools", [None, CALCULATOR_TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_a_prefix_renders_as_a_token_prefix(
    folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    chat_format = opened(folder)
    render, encode = chat_format.template.render, chat_format.tokens.encode
    whole = encode(render(messages, tools, add_generation_prompt=False))
    for end in range(1, len(messages) + 1):
        speaks_next = end < len(messages) and messages[end]["role"] == "assistant"
        part = encode(render(messages[:end], tools, add_generation_prompt=speaks_next))
        assert whole[: len(part)] == part, f"after {end} messages"


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_generation_marks_cover_the_assistants_tokens(folder: Path, messages: list[dict[str, Any]]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        messages, tools=CALCULATOR_TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    chat_format = opened(folder)
    render, encode = chat_format.template.render, chat_format.tokens.encode
    expected = [0] * len(rendered["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:index], CALCULATOR_TOOLS, add_generation_prompt=True)
            after = render(messages[: index + 1], CALCULATOR_TOOLS, add_generation_prompt=False)
            start, end = len(encode(before)), len(encode(after.removesuffix("\n")))
            expected[start:end] = [1] * (end - start)
    assert rendered["assistant_masks"] == expected


def test_both_readers_of_the_template_agree(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat_format = opened(folder)
    for messages in CONVERSATIONS.values():
        text = chat_format.template.render(messages, CALCULATOR_TOOLS, add_generation_prompt=False)
        assert tokenizer.apply_chat_template(messages, tools=CALCULATOR_TOOLS, tokenize=False) == text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat_format.tokens.encode(text)


def test_tools_are_listed_as_the_calls_that_invoke_them(tiny_folder: Path) -> None:
    properties = {
        "city": {"type": "string", "title": "City"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}},
    }
    tool = function_schema("weather", " Says. ", {"properties": properties, "required": ["city"]})
    text = opened(tiny_folder).template.render(
        [{"role": "user", "content": "Hi"}], [tool, *CALCULATOR_TOOLS], add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nTools:\n"
        '<tool_call>{"name": "weather", "arguments": {"city": string, "unit"?: "C" | "F", "days"?: '
        '{"type": "array", "items": {"type": "integer"}}}}</tool_call> Says.\n'
        '<tool_call>{"name": "calculate", "arguments": {"expression": string}}</tool_call>'
        " Evaluates arithmetic.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_are_written_in_the_hermes_form(tiny_folder: Path) -> None:
    messages = CONVERSATIONS["one call"]
    text = opened(tiny_folder).template.render(messages, None, add_generation_prompt=False)
    assert f"<|im_start|>assistant\n{call_text('37 * 48')}<|im_end|>\n" in text


def test_digits_are_tokens_of_their_own(folder: Path) -> None:
    chat_format = opened(folder)
    assert len(chat_format.tokens.encode("1776")) == 4


def test_an_engine_stops_at_the_end_of_a_turn(folder: Path) -> None:
    chat_format = opened(folder)
    assert [chat_format.tokens.token_text(token) for token in chat_format.stop_ids] == ["<|im_end|>"]
