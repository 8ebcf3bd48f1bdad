"""Choose and prove chat formats: templates that lose, rename, refuse or reorder messages, and renderers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_models as models
import pytest
from chat_models import FAMILIES, of_family, opened

from agentrl.calls.prompts import Conversation
from agentrl.chat.chat_format import (
    ChatFormat,
    Message,
    unseen_problem,
    unseen_tools,
    without_cycle,
    without_thought,
)
from agentrl.chat.open_format import _TOKENS, open_chat_format
from agentrl.chat.renderer import in_call_order, with_kimi_ids
from agentrl.chat.validate_format import CONVERSATION, ENDS, TOOLS, generated
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, ModelError


def played(chat_format: ChatFormat) -> tuple[Conversation, list[str], list[bool]]:
    """Play the conversation; return it with the text of each prompt, and whether it starts a branch."""
    conversation = Conversation(chat_format, CONVERSATION[: ENDS[0]], TOOLS)
    prompts, branches = [], []
    for place in range(ENDS[0], len(CONVERSATION) + 1):
        if place in ENDS:
            prompts.append(chat_format.decode(conversation.prompt.ids))
            branches.append(conversation.starts_branch)
        if place in ENDS[:-1]:
            _, output = generated(chat_format, CONVERSATION[: place + 1], TOOLS)
            conversation.append_generation(output, CONVERSATION[place])
        elif place < len(CONVERSATION):
            conversation.append_messages([CONVERSATION[place]])
    return conversation, prompts, branches


@pytest.mark.parametrize("name", FAMILIES)
def test_every_result_stands_in_the_next_prompt_once_and_under_its_name(tmp_path: Path, name: str) -> None:
    _, prompts, _ = played(of_family(tmp_path, name))
    last = prompts[2]
    assert [last.count(result) for result in ("tagus", "eighteen", "granite", "pelican")] == [1, 1, 1, 1]
    assert last.index("tagus") < last.index("eighteen")
    assert prompts[-1].count("danube") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_a_client_changed_is_rendered_behind_the_sampled_ids(
    tmp_path: Path, name: str
) -> None:
    chat_format = of_family(tmp_path, name)
    spoken = list(map(without_thought, CONVERSATION))
    before, output = generated(chat_format, spoken[:6], TOOLS)
    added = chat_format.next_prompt(before, output, spoken[:6], spoken[6:11], TOOLS)
    assert added is not None
    assert chat_format.render(spoken[:11], TOOLS)[-len(added) :] == added
    if chat_format.keeps != "all":  # the question behind it drops its thought
        assert added == chat_format.next_prompt(before, output, spoken[:6], CONVERSATION[6:11], TOOLS)


def test_a_result_without_a_call_reaches_gemma(tmp_path: Path) -> None:
    chat_format = of_family(tmp_path, "gemma4")
    conversation = Conversation(chat_format, CONVERSATION[:2], TOOLS)
    conversation.append_generation([*chat_format.stop_ids][-1:], {"role": "assistant", "content": "call:"})
    conversation.append_messages([{"role": "tool", "content": "Error: cobalt"}])
    assert chat_format.decode(conversation.prompt.ids).count("Error: cobalt") == 1


def test_a_template_that_finds_results_behind_calls_is_refused_for_tools(tmp_path: Path) -> None:
    folder = models.write_model(tmp_path / "model", models.RESULTS_BEHIND_CALLS)
    assert "without tools" in open_chat_format(folder, ModelConfig()).description
    with pytest.raises(ModelError, match="loses a tool result"):
        open_chat_format(folder, ModelConfig(), with_tools=True)


def test_a_result_is_attributed_to_its_call_and_never_to_f(tmp_path: Path) -> None:
    base = opened(tmp_path, models.RESULTS_OF_F).renderer
    after = base.extend([], [], CONVERSATION[:8], CONVERSATION[8:9], TOOLS)
    assert after is not None
    assert "functions.count_bridges danube" in base.decode(after)
    with pytest.raises(ModelError, match="attributes the result of find_river to count_bridges"):
        open_chat_format(tmp_path / "model", ModelConfig(), with_tools=True)


@pytest.mark.parametrize("template", [models.ONE_CALL, None], ids=["template", "renderer"])
def test_parallel_calls_of_a_model_for_single_calls_stay_in_the_history(
    tmp_path: Path, template: str | None
) -> None:
    chat_format = opened(tmp_path, template) if template else of_family(tmp_path, "llama-3")
    assert chat_format.adaptation.one_call_each
    text = chat_format.decode(chat_format.render(CONVERSATION, TOOLS))
    order = [text.index(word) for word in ("Lisbon", "tagus", "Prague", "eighteen", "Vienna", "danube")]
    assert order == sorted(order)
    beside = [*CONVERSATION[:2], {**CONVERSATION[2], "content": "saffron"}, *CONVERSATION[3:5]]
    assert "saffron" in chat_format.decode(chat_format.render(beside, TOOLS))


def test_arguments_are_written_as_text_where_a_template_joins_them_to_text(tmp_path: Path) -> None:
    chat_format = opened(tmp_path, models.TEXT_ARGUMENTS)
    assert chat_format.adaptation.arguments_as_text
    assert '"arguments": {"city": "Vienna"' in chat_format.decode(chat_format.render(CONVERSATION, TOOLS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_renderer_parses_the_calls_and_thoughts_that_it_writes(tmp_path: Path, name: str) -> None:
    chat_format = of_family(tmp_path, name)
    (asked,) = (call["function"] for call in CONVERSATION[7]["tool_calls"])
    spoken = list(map(without_thought, CONVERSATION[:8])) if name == "llama-3" else CONVERSATION[:8]
    prompt, output = generated(chat_format, spoken, TOOLS)
    parsed = chat_format.parse(output, TOOLS, prompt)
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments) == (asked["name"], asked["arguments"])
    assert "Vienna" not in parsed.content
    assert ("thistle" in parsed.reasoning) is (name != "llama-3")
    assert parsed.error is None


def test_a_broken_call_is_named(tmp_path: Path) -> None:
    chat_format = of_family(tmp_path, "qwen3")
    broken = chat_format.parse(
        chat_format.tokens.encode('<tool_call>\n{"name": "find_river", \n</tool_call><|im_end|>'), TOOLS
    )
    assert broken.tool_calls == ()
    assert "cannot be read (invalid json)" in (broken.error or "")
    assert "find_river" in broken.content


@pytest.mark.parametrize(
    ("template", "keeps", "branches"),
    [
        (models.KEEPS_ALL, "all", [True, False, False, False, False]),
        (models.KEEPS_CYCLE, "tool_cycle", [True, False, True, False, True]),
        (models.KEEPS_NONE, "none", [True, True, True, True, False]),
    ],
    ids=["all", "tool_cycle", "none"],
)
def test_a_dropped_thought_makes_the_next_prompt_a_branch(
    tmp_path: Path, template: str, keeps: str, branches: list[bool]
) -> None:
    chat_format = opened(tmp_path, template)
    assert chat_format.template_keeps == keeps
    _, prompts, found = played(chat_format)
    assert found == branches
    for place, end in enumerate(ENDS):
        written = chat_format.decode(chat_format.render(CONVERSATION[:end], TOOLS))
        assert prompts[place] == written


@pytest.mark.parametrize("retention", ["all", "tool_cycle"])
def test_thinking_retention_overrides_the_template(tmp_path: Path, retention: str) -> None:
    template = models.KEEPS_CYCLE if retention == "all" else models.KEEPS_ALL
    chat_format = opened(tmp_path, template, thinking_retention=retention)
    _, prompts, _ = played(chat_format)
    kept = ["juniper" in prompt for prompt in prompts[1:]]
    assert kept == ([True] * 4 if retention == "all" else [True, False, False, False])
    assert "in the template they stay" in chat_format.description


def test_template_arguments_reach_templates_and_renderers(tmp_path: Path) -> None:
    kwargs = '{"enable_thinking": false}'
    renderer = of_family(tmp_path, "qwen3", chat_template_kwargs=kwargs)
    assert renderer.decode(renderer.render(CONVERSATION[:2], None)).endswith("<think>\n\n</think>\n\n")
    end = "assistant\\n' }}{% endif"
    template = models.KEEPS_ALL.replace(end, end.replace("{%", "{{ enable_thinking }}{%"))
    by_template = opened(tmp_path, template, name="template", chat_template_kwargs=kwargs)
    assert by_template.decode(by_template.render(CONVERSATION[:2], None)).endswith("assistant\nFalse")
    assert by_template.agreed_settings != opened(tmp_path, template, name="template").agreed_settings
    for wrong in ("{", "[1]"):
        with pytest.raises(ConfigError, match="--chat_template_kwargs is"):
            opened(tmp_path, template, chat_template_kwargs=wrong)


def test_the_format_is_chosen_by_the_ids_of_the_template_and_not_by_name(tmp_path: Path) -> None:
    assert opened(tmp_path, models.KEEPS_ALL, model_type="qwen3").name == "template"
    with pytest.raises(ConfigError, match="unknown chat format 'qwen'"):
        opened(tmp_path, models.KEEPS_ALL, name="qwen")
    with pytest.raises(ConfigError, match=r"its tokenizer has no <\|turn>"):
        opened(tmp_path, models.KEEPS_ALL, name="gemma4")


def test_a_familys_renderer_begins_as_the_template_does(tmp_path: Path) -> None:
    begin, _, user, assistant = models.DEEPSEEK[:4]
    template = (
        f"{begin}{{%- for m in messages if m.role != 'tool' %}}{{{{ '{user}' if m.role == 'user' else"
        f" '{assistant}' if m.role == 'assistant' else '' }}}}{{{{ m.content }}}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ '{assistant}' }}}}OPEN{{% endif %}}"
    )
    files = FAMILIES["deepseek-v3"]
    assert opened(tmp_path, template.replace("OPEN", ""), **files).name == "deepseek-v3"
    assert opened(tmp_path, template.replace("OPEN", "<think>"), **files).name == "deepseek-r1"
    own = opened(tmp_path, template.replace("OPEN", "<think>Well,"), **files)
    assert own.name == "template"
    assert "without tools" in own.description


def test_a_template_that_loses_a_plain_message_is_refused(tmp_path: Path) -> None:
    loses = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ModelError, match="loses the system message"):
        opened(tmp_path, loses)


def test_every_renderer_of_the_package_can_be_named() -> None:
    from renderers import base

    base._populate_registry()
    assert set(_TOKENS) == set(base.RENDERER_REGISTRY) - {"default"}


@pytest.mark.parametrize("name", FAMILIES)
def test_fine_tuning_trains_what_the_assistant_says(tmp_path: Path, name: str) -> None:
    chat_format = of_family(tmp_path, name)
    whole = chat_format.tokenize(CONVERSATION[:-1], TOOLS)
    trained = chat_format.decode(whole.input_ids[whole.is_trainable].tolist())
    assert all(word in trained for word in ("Lisbon", "Prague", "granite", "Vienna", "obsidian"))
    assert not any(word in trained for word in ("walnut", "tagus", "pelican", "danube", "orchid"))


@pytest.mark.parametrize("name", ["qwen3", "llama-3"])
def test_fine_tuning_leaves_out_what_is_marked_as_context(tmp_path: Path, name: str) -> None:
    chat_format = of_family(tmp_path, name)
    shown = [{**message, "train": False} if place in (2, 9) else message
             for place, message in enumerate(CONVERSATION[:-1])]  # fmt: skip
    whole = chat_format.tokenize(shown, TOOLS)
    trained = chat_format.decode(whole.input_ids[whole.is_trainable].tolist())
    assert [word in trained for word in ("Lisbon", "Prague", "obsidian")] == [False] * 3
    assert [word in trained for word in ("granite", "Vienna")] == [True] * 2
    assert whole.input_ids.tolist() == chat_format.tokenize(CONVERSATION[:-1], TOOLS).input_ids.tolist()


def test_nothing_in_an_open_thought_of_a_renderer_is_a_call_or_content(tmp_path: Path) -> None:
    chat_format = of_family(tmp_path, "qwen3")
    encode = chat_format.tokens.encode
    call = '<tool_call>\n{"name": "find_river", "arguments": {"city": "Lisbon"}}\n</tool_call>'
    cut = chat_format.parse(encode(f"<think>\nI write {call} <answer>4</answer>"), TOOLS)
    assert (cut.content, cut.tool_calls, cut.error) == ("", (), None)
    assert "<answer>4</answer>" in cut.reasoning


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "find_river", "arguments": {"city": "Lisbon"}}',
        '<tool_call>{"name": "find_river", "parameters": {"city": "Lisbon"}}</tool_call>',
        '<think>\nI ask.\n</think>\n\n<tool_call>{"name": "find_river", "arguments": {"city": "Lisbon"}}',
    ],
)
def test_a_renderer_finds_a_call_and_the_text_parser_reads_it(tmp_path: Path, text: str) -> None:
    chat_format = opened(tmp_path, models.KEEPS_ALL, name="qwen3", **FAMILIES["qwen3"])
    ids = chat_format.tokens.encode(text)
    parsed = chat_format.parse(ids, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("find_river", {"city": "Lisbon"})]
    assert parsed.error is None


def test_marks_that_ordinary_tokens_spell_are_a_quotation_and_no_call(tmp_path: Path) -> None:
    chat_format = opened(tmp_path, models.KEEPS_ALL, name="qwen3", **FAMILIES["qwen3"])
    encode = chat_format.tokens.encode
    call = '{"name": "find_river", "arguments": {"city": "Lisbon"}}'
    spelled = [*encode("<"), *encode("tool_call>"), *encode(call), *encode("<"), *encode("/tool_call>")]
    parsed = chat_format.parse(spelled, TOOLS)
    assert (parsed.content, parsed.tool_calls, parsed.error) == (f"<tool_call>{call}</tool_call>", (), None)
    called = chat_format.parse(encode(f"<tool_call>{call}</tool_call>"), TOOLS)
    assert [item.name for item in called.tool_calls] == ["find_river"]


def test_tools_that_a_prompt_does_not_name_are_found_as_whole_words(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "find-it", "add_all")]
    chat_format = opened(tmp_path, models.KEEPS_ALL.replace("{%- if tools %}", "{%- if false %}"))
    prompt = chat_format.render([{"role": "user", "content": "An address of add_all; find-it."}], tools)
    assert unseen_tools(chat_format, prompt, tools) == ["add"]
    problem = unseen_problem(chat_format, prompt, tools)
    assert problem is not None
    assert "does not name the tools add: " in problem
    assert "--chat_template FILE" in problem
    assert unseen_problem(chat_format, prompt, []) is None


INDEPENDENT = {"keeps all thoughts": models.KEEPS_ALL, "keeps the thoughts of a cycle": models.KEEPS_CYCLE}
PROMPT = "{{ '<|im_start|>assistant\\n' }}"
DEPENDENT = {
    "attributes results to the last call": models.RESULTS_OF_F,
    "counts messages": models.KEEPS_ALL.replace(PROMPT, PROMPT + "{{ messages | length }}"),
    "remembers the first result": models.KEEPS_ALL.replace(
        PROMPT,
        PROMPT + "{{ messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | first"
        " | default('') }}",
    ),
    "obeys a switch in a result": models.KEEPS_ALL.replace(
        PROMPT,
        PROMPT + "{% for m in messages if m.role == 'tool' and '/no_think' in m.content %}"
        "{{ '<think></think>' }}{% endfor %}",
    ),
}
CYCLES = [*CONVERSATION[:2], *CONVERSATION[2:5] * 6]


def extended(chat_format: ChatFormat, new: list[Message]) -> list[int] | None:
    return chat_format.next_prompt([], [min(chat_format.stop_ids)], [*CYCLES, CONVERSATION[7]], new, TOOLS)


def always_whole(chat_format: ChatFormat) -> ChatFormat:
    return replace(chat_format, skips_cycles=False)


@pytest.mark.parametrize("template", INDEPENDENT.values(), ids=INDEPENDENT)
def test_a_template_that_ignores_the_cycle_gets_the_same_ids_without_it(
    tmp_path: Path, template: str
) -> None:
    chat_format = models.opened(tmp_path, template, name="template")
    assert chat_format.skips_cycles
    for new in ([CONVERSATION[8]], [{"role": "tool", "content": "an error"}], [CONVERSATION[10]]):
        assert extended(chat_format, new) == extended(always_whole(chat_format), new)


@pytest.mark.parametrize("template", DEPENDENT.values(), ids=DEPENDENT)
def test_a_template_that_reads_the_cycle_gets_it_whole(tmp_path: Path, template: str) -> None:
    chat_format = models.opened(tmp_path, template, name="template")
    assert not chat_format.skips_cycles
    assert extended(chat_format, [CONVERSATION[8]]) == extended(always_whole(chat_format), [CONVERSATION[8]])


@pytest.mark.parametrize("lists_again", [False, True])
def test_tools_are_rendered_again_only_where_a_template_lists_them_behind_a_generation(
    tmp_path: Path, lists_again: bool
) -> None:
    listed = "{{ tools | tojson if tools }}" if lists_again else ""
    chat_format = models.opened(tmp_path, models.KEEPS_ALL.replace(PROMPT, listed + PROMPT), name="template")
    assert chat_format.skips_tools is not lists_again
    for new in ([CONVERSATION[8]], [CONVERSATION[10]]):
        assert extended(chat_format, new) == extended(replace(chat_format, skips_tools=False), new)


def test_a_long_cycle_is_not_rendered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = models.opened(tmp_path, models.KEEPS_ALL, name="template")
    rendered: list[int] = []
    render = chat_format.renderer.template.render  # type: ignore[attr-defined]

    def counted(messages: list[Message], *arguments: object, **options: object) -> str:
        rendered.append(len(messages))
        return str(render(messages, *arguments, **options))

    monkeypatch.setattr(chat_format.renderer.template, "render", counted)  # type: ignore[attr-defined]
    extended(chat_format, [CONVERSATION[8]])
    assert rendered == [4]


def test_only_assistant_and_tool_messages_after_the_question_are_left_out() -> None:
    question = CONVERSATION[:2]
    assert list(without_cycle(CYCLES)) == question
    assert list(without_cycle(CONVERSATION[:9])) == CONVERSATION[:7]
    reminder: Message = {"role": "system", "content": "reminder"}
    assert list(without_cycle([*CYCLES, reminder])) == [*CYCLES, reminder]
    assert list(without_cycle([reminder, *CYCLES[2:]])) == [reminder, *CYCLES[2:]]
    assert list(without_cycle([])) == []


RESULTS = "{{- m.content or '' }}"

BY_PLACE = models.KEEPS_ALL.replace(
    RESULTS,
    "{%- if m.tool_calls %}{% set ns.calls = m.tool_calls %}{% set ns.place = 0 %}{% endif %}"
    "{%- if m.role == 'tool' and m.tool_call_id %}{{ ns.calls[ns.place].function.name + ' gave ' }}"
    f"{{%- set ns.place = ns.place + 1 %}}{{% endif %}}{RESULTS}",
).replace("{%- for m in messages %}", "{%- set ns = namespace(calls=[], place=0) %}{%- for m in messages %}")
"""The n-th result is that of the n-th call."""

BY_NAME = (
    "{%- for m in messages if m.role != 'tool' or not m.tool_call_id %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"
    "{%- set ns = namespace(end=false) %}"
    "{%- for r in messages[messages.index(m) + 1:] %}"
    "{%- if r.role != 'tool' %}{% set ns.end = true %}{% endif %}"
    "{%- if not ns.end and r.name == call.function.name %}{{ '<r>' + r.content }}{% endif %}{% endfor %}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Results stand behind each call of their tool."""


def call(place: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"city": "Lisbon"}}
    return {"id": f"call{place:05d}", "type": "function", "function": function}


def result(place: int, name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call{place:05d}", "content": text}


CALLS = [call(1, "find_river"), call(2, "count_bridges"), call(3, "find_river")]
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}
SWAPPED = [
    result(3, "find_river", "vltava"), result(2, "count_bridges", "eighteen"),
    result(1, "find_river", "tagus"),
]  # fmt: skip
IN_ORDER = ["find_river gave tagus", "count_bridges gave eighteen", "find_river gave vltava"]


def test_results_in_another_order_are_rendered_in_the_order_of_their_calls(tmp_path: Path) -> None:
    chat_format = models.opened(tmp_path, BY_PLACE, name="template")
    assert chat_format.tool_problems == ()
    question = CONVERSATION[1:2]
    rendered = chat_format.decode(chat_format.render([*question, CALLED, *SWAPPED], TOOLS))
    output = [min(chat_format.stop_ids)]
    added = chat_format.next_prompt([], output, [*question, CALLED], SWAPPED, TOOLS)
    assert added is not None
    places = [rendered.index(text) for text in IN_ORDER]
    assert places == sorted(places)
    words = [chat_format.decode(added).index(word) for word in ("tagus", "eighteen", "vltava")]
    assert words == sorted(words)


def test_a_result_without_an_id_stays_behind_those_of_its_calls() -> None:
    orphan: Message = {"role": "tool", "content": "an error"}
    question: Message = {"role": "user", "content": "?"}
    messages = [CALLED, orphan, *SWAPPED, question, *SWAPPED]
    assert in_call_order(messages) == [CALLED, *reversed(SWAPPED), orphan, question, *SWAPPED]


@pytest.mark.parametrize("text", [False, True], ids=["arguments", "arguments as text"])
def test_the_next_prompt_names_the_call_that_was_generated_and_no_earlier_one(
    tmp_path: Path, text: bool
) -> None:
    template = models.RESULTS_OF_F
    if text:
        template = template.replace(
            "'\\n<tool_call>\\n' + call.function | tojson", "'\\n<tool_call>\\n' + call.function.arguments"
        )
    base = models.opened(tmp_path, template, name="template").renderer
    calls = [call(1, "find_river"), call(2, "count_bridges")]
    for item in calls if text else ():
        item["function"]["arguments"] = '{"city": "Lisbon"}'
    history = [
        CONVERSATION[1],
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        result(1, "find_river", "tagus"),
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
    ]
    added = base.extend([], [], history, [result(2, "count_bridges", "eighteen")], TOOLS)
    assert added is not None
    assert "functions.count_bridges eighteen" in base.decode(added)
    assert "find_river" not in base.decode(added)


def test_a_template_that_cannot_tell_two_calls_of_one_tool_apart_is_refused_for_tools(tmp_path: Path) -> None:
    folder = models.write_model(tmp_path / "model", BY_NAME)
    with pytest.raises(ModelError, match=r"(repeats|loses) a tool result|cannot"):
        open_chat_format(folder, ModelConfig(chat_format="template"), with_tools=True)


def test_kimis_results_name_the_calls_by_the_ids_that_the_model_writes() -> None:
    again = {**CALLED, "tool_calls": CALLED["tool_calls"][:1]}
    messages = with_kimi_ids([CONVERSATION[1], CALLED, *SWAPPED, again, SWAPPED[2], {"role": "tool"}])
    assert [item["id"] for item in messages[1]["tool_calls"]] == [
        "functions.find_river:0", "functions.count_bridges:1", "functions.find_river:2",
    ]  # fmt: skip
    assert [message.get("tool_call_id") for message in messages[2:]] == [
        "functions.find_river:2", "functions.count_bridges:1", "functions.find_river:0",
        None, "functions.find_river:3", None,
    ]  # fmt: skip
    assert CALLED["tool_calls"][0]["id"] == "call00001"


def test_an_extension_counts_the_calls_of_the_whole_conversation(tmp_path: Path) -> None:
    shows_ids = models.KEEPS_ALL.replace(RESULTS, "{{- m.tool_call_id or '' }}" + RESULTS)
    plain = models.opened(tmp_path, shows_ids, name="template")
    adaptation = replace(plain.adaptation, kimi_ids=True)
    chat_format = ChatFormat(plain.renderer, adaptation, "all", "all", skips_cycles=True)
    last = {**CALLED, "tool_calls": [call(9, "find_river")]}
    history = [CONVERSATION[1], CALLED, *SWAPPED, last]
    added = chat_format.next_prompt([], [], history, [result(9, "find_river", "elbe")], TOOLS)
    assert added is not None
    assert "functions.find_river:3elbe" in chat_format.decode(added)
