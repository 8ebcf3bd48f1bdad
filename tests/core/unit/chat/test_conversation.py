"""Tokens in, tokens out: no template changes generated ids, and streamed text is certain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import END, END_OF_TEXT, byte_tokenizer, format_of

from agentrl.calls.prompts import LARGE_TEXT, Conversation
from agentrl.chat.chat_format import ChatFormat, TextStream
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import ModelConfig
from agentrl.errors import ModelError, TrajectoryError
from agentrl.tools.tool import function_schema

PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

DROPS_THOUGHTS = """\
{%- for m in messages %}
{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ADDS_EMPTY_THOUGHT = """\
{%- for m in messages %}
{%- set thought = '<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and loop.last else '' %}
{{- '<|im_start|>' + m.role + '\\n' + thought + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"""

CALLS_BEFORE_RESULTS = """\
{%- for m in messages %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result needs a call') }}
{%- endif %}
{%- set calls = '[CALLS]' + (m.tool_calls | tojson) if m.tool_calls else '' %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + calls + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {
    "plain": PLAIN, "drops thoughts": DROPS_THOUGHTS, "adds an empty thought": ADDS_EMPTY_THOUGHT,
    "calls before results": CALLS_BEFORE_RESULTS,
}  # fmt: skip


TURN = st.tuples(
    st.lists(st.integers(0, 255), max_size=12),
    st.sampled_from([(), (END,), (END_OF_TEXT,)]),
    st.sampled_from(["", "4", "<|im_end|>x", "é\n"]),
)
"""What is generated, what ends it, and the result of the tool behind it."""


def start(template: str) -> tuple[ChatFormat, Conversation]:
    chat_format = format_of(template)
    return chat_format, Conversation(chat_format, [{"role": "user", "content": "1+1?"}])


def written(chat_format: ChatFormat, ids: Sequence[int]) -> str:
    return chat_format.tokens.decode(list(ids))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=4))
def test_a_prompt_extends_the_one_before(template: str, turns: list[Any]) -> None:
    chat_format, conversation = start(template)
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    for body, closing, result in turns:
        before = conversation.prompt.ids
        generated = [*body, *closing]
        message = {"role": "assistant", "content": chat_format.decode(generated), "tool_calls": [call]}
        conversation.append_generation(generated, message)
        conversation.append_messages([{"role": "tool", "content": result}])
        after = conversation.prompt.ids
        assert after[: len(before)] == before
        assert after[len(before) : len(before) + len(generated)] == generated
        context = conversation.prompt.context_ids
        assert after == [*before, *generated, *context]
        assert (context[0] == END) is not bool(closing)
        opening = [] if closing else [END]
        assert written(chat_format, context[len(opening) :]).startswith("\n<|im_start|>tool\n" + result)


def test_without_rewriting_the_prompt_is_the_rendering() -> None:
    chat_format, conversation = start(PLAIN)
    message = {"role": "assistant", "content": "let me"}
    conversation.append_generation(chat_format.tokens.encode("let me<|im_end|>"), message)
    conversation.append_messages([{"role": "tool", "content": "2"}, {"role": "user", "content": "go on"}])
    whole = chat_format.renderer.template.render(conversation.messages, None, add_generation_prompt=True)
    assert conversation.prompt.ids == chat_format.tokens.encode(whole)


def test_a_turn_may_follow_a_turn() -> None:
    chat_format, conversation = start(PLAIN)
    conversation.append_generation(chat_format.tokens.encode("hm"), {"role": "assistant", "content": "hm"})
    assert written(chat_format, conversation.prompt.context_ids) == "<|im_end|>\n<|im_start|>assistant\n"


def test_thoughts_stay_in_the_prompt_although_the_template_drops_them() -> None:
    chat_format, conversation = start(DROPS_THOUGHTS)
    generated = chat_format.tokens.encode("<think>two</think>I ask<|im_end|>")
    conversation.append_generation(generated, {"role": "assistant", "content": "<think>two</think>I ask"})
    conversation.append_messages([{"role": "tool", "content": "2"}])
    prompt = written(chat_format, conversation.prompt.ids)
    assert "<think>two</think>I ask<|im_end|>\n<|im_start|>tool\n2" in prompt


def test_new_messages_are_those_since_the_last_generation() -> None:
    chat_format, conversation = start(PLAIN)
    assert [m["content"] for m in conversation.prompt.new_messages] == ["1+1?"]
    conversation.append_generation(chat_format.tokens.encode("2"), {"role": "assistant", "content": "2"})
    assert conversation.prompt.new_messages == []
    conversation.append_messages([{"role": "user", "content": "and?"}])
    assert [m["content"] for m in conversation.prompt.new_messages] == ["and?"]


def test_a_template_that_refuses_or_repeats_is_a_trajectory_error() -> None:
    refuses = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}x"
    _, conversation = start(refuses)
    conversation.append_generation([1], {"role": "assistant", "content": "a"})
    conversation.append_messages([{"role": "tool", "content": "2"}])
    with pytest.raises(TrajectoryError, match=r"\[user assistant tool\]: no tools here"):
        _ = conversation.prompt
    _, twice = start("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    twice.append_generation([1], {"role": "assistant", "content": "a"})
    with pytest.raises(TrajectoryError, match="2 times"):
        _ = twice.prompt


def test_tools_reach_the_template() -> None:
    shows_tools = "{% for t in tools %}{{ t | tojson }}{% endfor %}{% generation %}g{% endgeneration %}"
    chat_format = format_of(shows_tools)
    tool = {"type": "function", "function": {"name": "é<b>"}}
    prompt = Conversation(chat_format, [{"role": "user", "content": "q"}], [tool]).prompt.ids
    assert written(chat_format, prompt).startswith('{"type": "function", "function": {"name": "é<b>"}}g')


def test_decoding_drops_what_closes_the_turn_and_nothing_else() -> None:
    chat_format = format_of(PLAIN)
    ids = chat_format.tokens.encode("a<|im_start|>b<|im_end|><|endoftext|>")
    assert chat_format.decode(ids) == "a<|im_start|>b"


def test_a_folder_without_tokenizer_or_template_says_what_mends_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        open_chat_format(tmp_path / "none", ModelConfig())
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        open_chat_format(tmp_path, ModelConfig())
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="no chat template") as caught:
        open_chat_format(tmp_path, ModelConfig())
    assert caught.value.hint is not None
    assert "--chat_template FILE" in caught.value.hint
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        open_chat_format(tmp_path, ModelConfig(chat_template=str(broken)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        open_chat_format(tmp_path, ModelConfig(chat_template=str(broken)))


def test_a_folder_gives_template_special_tokens_and_stops(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "chat_template": [{"name": "default", "template": "d"},'
        ' {"name": "tool_use", "template": "{{ eos_token }}"}]}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258]}')
    files = read_chat_files(tmp_path)
    assert files.stop_ids == {END, END_OF_TEXT}
    assert files.template == "{{ eos_token }}"
    assert files.special_tokens == {"eos_token": "<|im_end|>"}


def test_the_template_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    template = Path("assets/chat_templates/smollm2_tools.jinja").read_text(encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    tool = function_schema("add", "Adds.", {"properties": {"a": {"type": "integer"}}})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é <b>"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert Conversation(open_chat_format(tmp_path, ModelConfig()), messages, [tool]).prompt.ids == theirs


def test_a_sampler_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import agentrl.rollout.worker, agentrl.rollout.sampler, agentrl.rollout.agents\n"
        "import agentrl.rollout.setup, agentrl.rollout.setup, agentrl.evaluation.evaluate"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_prompt_is_rendered_again_if_a_message_was_changed_in_place() -> None:
    chat_format, _ = start(PLAIN)
    messages: list[Any] = [{"role": "user", "content": "1+1?", "extra": {"x": 1}}]
    first = chat_format.render(messages, None)
    assert chat_format.render(messages, None) == first
    first.append(0)
    assert chat_format.render(messages, None) == first[:-1]
    messages[0]["content"] = "1+2?"
    again = written(chat_format, chat_format.render(messages, None))
    assert again == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_reads_the_clock_is_rendered_each_time() -> None:
    chat_format, _ = start("{{ strftime_now('%f') }}")
    texts = {written(chat_format, chat_format.render([], None)) for _ in range(50)}
    assert len(texts) > 1


FORMAT = format_of()
MARKS = ("<tool_call>",)


def released(text: str, marks: tuple[str, ...] | None = MARKS, stops: tuple[str, ...] = ()) -> str:
    """The content that is sent before the answer's end, one byte at a time."""
    stream = TextStream(FORMAT, (), stops, marks)
    ids = FORMAT.tokens.encode(text)
    deltas = [delta for place, token in enumerate(ids) for delta in stream.add(place, [token])]
    assert all(delta.kind == "content" for delta in deltas)
    assert END not in ids
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("if a < b and d[0] == {1: `x`}.", "if a < b and d[0] == {1: `x`}."),
        ("a <tool> b", "a <tool> b"),
        ("I add. <tool_call>{}</tool_call> more", "I add."),
        ("so <tool_cal", "so"),
        ("one <think>two</think> three", "one"),
        ("é ü", "é ü"),
    ],
)
def test_text_is_held_only_while_it_may_begin_a_call(text: str, sent: str) -> None:
    assert released(text) == sent


def test_any_bracket_is_held_where_the_format_of_calls_is_not_known() -> None:
    assert released("if a < b", None) == "if a"


def test_a_stop_string_is_held() -> None:
    assert released("a, b STO c STOP d", stops=("STOP",)) == "a, b STO c"


def test_the_end_of_an_answer_completes_what_was_sent() -> None:
    stream = TextStream(FORMAT, (), (), MARKS)
    (first,) = stream.add(0, FORMAT.tokens.encode("I add. <tool_call>{}</tool_call> more"))
    rest = stream.finish("", "I add.  more")
    assert rest is not None
    assert first.text + "".join(delta.text for delta in rest) == "I add.  more"
    assert stream.finish("", "another answer") is None


@pytest.mark.parametrize("size", [10, LARGE_TEXT + 1])
async def test_much_new_text_is_rendered_beside_the_event_loop(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_format, conversation = start(PLAIN)
    expected = Conversation(chat_format, [{"role": "user", "content": "1+1?" + "x" * size}]).prompt.ids
    conversation.messages[-1]["content"] += "x" * size
    threads, render = [], ChatFormat.render

    def watched(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return render(*arguments)

    monkeypatch.setattr(ChatFormat, "render", watched)
    await conversation.render()
    assert conversation.prompt.ids == expected
    assert len(threads) == 1
    assert (threads[0] is threading.main_thread()) == (size == 10)


async def test_a_prompt_that_a_thread_makes_has_the_messages_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if its caller was cancelled: the thread goes on, and what it makes is of no use any more."""
    chat_format, conversation = start(PLAIN)
    conversation.append_messages([{"role": "user", "content": "x" * (LARGE_TEXT + 1)}])
    begun, may_end, render = threading.Event(), threading.Event(), ChatFormat.render

    def slow(*arguments: Any) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert may_end.wait(10)
        return render(*arguments)

    monkeypatch.setattr(ChatFormat, "render", slow)
    rendering = [asyncio.create_task(conversation.render()) for _ in range(2)]
    assert await asyncio.to_thread(begun.wait, 10)
    rendering[0].cancel()
    conversation.append_messages([{"role": "user", "content": "and 2+2?"}])
    may_end.set()
    await asyncio.wait(rendering)
    assert conversation.prompt.ids == Conversation(chat_format, conversation.messages).prompt.ids
