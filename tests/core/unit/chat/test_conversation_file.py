"""Test the ids and masks of conversation files, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from json_rows import write_rows
from tiny_policy import MARKED_TEMPLATE, TEMPLATE, tiny_format, tiny_tokenizer

from agentrl.errors import TaskFileError
from agentrl.train.sft import read_conversations

MESSAGES = [
    {"role": role, "content": content}
    for role, content in (("user", "2+2?"), ("assistant", "call"), ("tool", "4"), ("assistant", "four"))
]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE])
def test_what_the_assistant_says_is_trained_with_its_end(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    path = write_rows(tmp_path / "c.jsonl", {"messages": MESSAGES})
    [conversation], _ = read_conversations(path, tiny_format(template))
    trained = conversation.input_ids[conversation.is_trainable].tolist()
    assert tokenizer.decode(trained) == "call<|im_end|>four<|im_end|>"
    whole = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.decode(conversation.input_ids.tolist()) == whole


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE])
@pytest.mark.parametrize("field", [{"train": False}, {"weight": 0}])
def test_a_message_that_is_not_trained_is_context(
    tmp_path: Path, template: str, field: dict[str, object]
) -> None:
    shown = [{**MESSAGES[1], **field} if place == 1 else m for place, m in enumerate(MESSAGES)]
    said = {"train": True, "weight": 1}
    shown[3] = {**shown[3], **said}
    path = write_rows(tmp_path / "c.jsonl", {"messages": shown}, {"messages": MESSAGES})
    chat_format = tiny_format(template)
    (conversation, whole), _ = read_conversations(path, chat_format)
    assert conversation.input_ids.tolist() == whole.input_ids.tolist()
    trained = conversation.input_ids[conversation.is_trainable].tolist()
    assert tiny_tokenizer(template).decode(trained) == "four<|im_end|>"


def test_a_template_whose_marks_hold_several_messages_cannot_leave_one_out(tmp_path: Path) -> None:
    template = "{% generation %}" + TEMPLATE + "{% endgeneration %}"
    path = write_rows(tmp_path / "c.jsonl", {"messages": [*MESSAGES[:3], {**MESSAGES[3], "train": False}]})
    with pytest.raises(TaskFileError, match="1 parts of 2 assistant messages"):
        read_conversations(path, tiny_format(template))


def test_ids_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    said = "Grüße, 你好 👋\n\n"
    messages = [*MESSAGES, {"role": "user", "content": said}, {"role": "assistant", "content": said}]
    path = write_rows(tmp_path / "c.jsonl", {"messages": messages})
    [conversation], _ = read_conversations(path, tiny_format(MARKED_TEMPLATE))
    expected = tiny_tokenizer(MARKED_TEMPLATE).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert conversation.input_ids.tolist() == expected["input_ids"]
    assert conversation.is_trainable.astype(int).tolist() == expected["assistant_masks"]
    [by_prefixes], _ = read_conversations(path, tiny_format())
    assert by_prefixes.input_ids.tolist() == expected["input_ids"]
    assert by_prefixes.is_trainable.tolist() == conversation.is_trainable.tolist()


def test_an_empty_assistant_block_marks_nothing(tmp_path: Path) -> None:
    template = "{% generation %}{% endgeneration %}" + MARKED_TEMPLATE
    path = write_rows(tmp_path / "c.jsonl", {"messages": MESSAGES})
    [marked], _ = read_conversations(path, tiny_format(MARKED_TEMPLATE))
    [conversation], _ = read_conversations(path, tiny_format(template))
    assert conversation.is_trainable.tolist() == marked.is_trainable.tolist()


def test_a_template_that_refuses_a_conversation_names_the_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c.jsonl", {"messages": MESSAGES})
    with pytest.raises(TaskFileError, match=r"c\.jsonl:1: .*no tools here"):
        read_conversations(path, tiny_format("{{ raise_exception('no tools here') }}"))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_name_in_templates(tmp_path: Path, key: str) -> None:
    content = "{{ message.reasoning_content }}{{ message.content }}"
    template = TEMPLATE.replace("{{ message['content'] }}", content)
    messages = [{"role": "assistant", "content": "four", key: "two and two"}]
    chat_format = tiny_format(template)
    path = write_rows(tmp_path / "c.jsonl", {"messages": messages})
    [conversation], _ = read_conversations(path, chat_format)
    assert "two and twofour" in chat_format.decode(conversation.input_ids.tolist())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "c.jsonl:2: "),
        ([1], "no list of messages"),
        ({"messages": "x"}, "no list of messages"),
        ({"messages": [{"content": "x"}]}, "no list of messages"),
        ({"messages": MESSAGES[:1]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "x", "train": False}]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "x", "train": "no"}]}, "train is 'no'"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "weight is 0.5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, says: str) -> None:
    path = write_rows(tmp_path / "c.jsonl", {"messages": MESSAGES}, line)
    with pytest.raises(TaskFileError, match=says) as caught:
        read_conversations(path, tiny_format())
    assert "c.jsonl:2" in str(caught.value)


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path) -> None:
    rewriting = "{% for m in messages %}{{ m['role'] if loop.last else 'x' }}{{ m['content'] }}{% endfor %}"
    path = write_rows(tmp_path / "c.jsonl", {"messages": MESSAGES})
    with pytest.raises(TaskFileError, match="as a prefix"):
        read_conversations(path, tiny_format(rewriting))


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_conversations(tmp_path / "none.jsonl", tiny_format())
    with pytest.raises(TaskFileError, match="holds no conversation"):
        read_conversations(write_rows(tmp_path / "c.jsonl", ""), tiny_format())
