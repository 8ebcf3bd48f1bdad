"""Render hostile text in every place of a request: it holds the same control tokens as harmless text."""

from __future__ import annotations

import json
import time
from typing import Any

import chat_models as models
import pytest
from tokenizers import normalizers, pre_tokenizers

from agentrl.chat.chat_format import ChatFormat, Message
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
