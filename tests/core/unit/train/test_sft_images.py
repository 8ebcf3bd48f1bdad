"""``agentrl sft`` on conversations that show images, for a tiny Qwen-VL model."""

from __future__ import annotations

import base64
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vision import IDS, drawn, drawn_image, save_vision_model

from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import parse
from agentrl.config.schema import ModelConfig
from agentrl.config.training import SFTConfig
from agentrl.errors import TaskFileError
from agentrl.train.sft import fine_tune, from_conversations, read_conversations

DATA_URL = "data:image/png;base64," + base64.b64encode(drawn("red")).decode()
SAID = {"role": "assistant", "content": "one"}
FORMS: dict[str, Any] = {
    "marker": ("<image>How many?", ["red.png"]),
    "placeholder": ([{"type": "image"}, {"type": "text", "text": "How many?"}], ["red.png"]),
    "own path": ([{"type": "image", "image": "red.png"}, {"type": "text", "text": "How many?"}], None),
    "image_url": (
        [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": "How many?"}], None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


def write(folder: Path, *lines: tuple[Any, Any]) -> Path:
    (folder / "red.png").write_bytes(drawn("red"))
    file = folder / "c.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": content}, SAID], **({"images": images} if images else {})}
        for content, images in lines
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize("form", FORMS)
def test_every_form_shows_the_same_image(base: Path, tmp_path: Path, form: str) -> None:
    chat_format = open_chat_format(base, ModelConfig())
    messages = [
        {"role": "user", "content": [drawn_image("red").ref.part(), {"type": "text", "text": "How many?"}]}
    ]
    prompt = chat_format.render(messages, None)
    [chain], images = from_conversations(write(tmp_path, FORMS[form]), chat_format)
    [conversation], _ = read_conversations(tmp_path / "c.jsonl", chat_format)
    assert conversation.input_ids[: len(prompt)].tolist() == prompt
    assert {key: image.data for key, image in images.items()} == {drawn_image("red").id: drawn("red")}
    (span,) = chain.images
    shown = conversation.input_ids == IDS["<|image_pad|>"]
    assert np.flatnonzero(shown).tolist() == list(range(span.start, span.start + span.tokens))
    assert span.tokens > 1
    assert not (conversation.is_trainable & shown).any()
    assert chain.trainable_tokens == int(conversation.is_trainable.sum()) > 0


@pytest.mark.parametrize(
    ("content", "images", "said"),
    [
        ("<image><image>", ["red.png"], "shows more images"),
        ("How many?", ["red.png"], "has more images"),
        ([{"type": "image"}], None, "shows more images"),
        ("<image>", ["none.png"], "cannot be read"),
        ([{"type": "image", "image": "http://host/a.png"}], None, "not fetched"),
        ([{"type": "video", "video": "a.mp4"}, {"type": "image", "image": "red.png"}], None, "type 'video'"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_shown_names_its_line(
    base: Path, tmp_path: Path, content: Any, images: Any, said: str
) -> None:
    with pytest.raises(TaskFileError, match=rf"c\.jsonl:1: .*{said}"):
        read_conversations(write(tmp_path, (content, images)), open_chat_format(base, ModelConfig()))


def test_a_model_of_text_refuses_the_line(base: Path, tmp_path: Path) -> None:
    text_only = replace(open_chat_format(base, ModelConfig()), vision=None)
    with pytest.raises(TaskFileError, match=r"c\.jsonl:1: .*reads text only"):
        read_conversations(write(tmp_path, FORMS["marker"]), text_only)


def test_the_command_learns_what_only_the_image_tells(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, ("<image>?", ["red.png"]), ("<image>?", ["blue.png"]))
    (tmp_path / "blue.png").write_bytes(drawn("blue"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, answer in zip(rows, ("r", "b"), strict=True):
        row["messages"][1]["content"] = answer
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = [
        "--model_name_or_path", str(base), "--train_file", str(file), "--output_dir", "out",
        "--max_steps", "40", "--batch_size", "2", "--learning_rate", "1e-2",
    ]  # fmt: skip
    configs = parse(flags, command="agentrl sft", description="", shown=(), extra=(SFTConfig,))
    with caplog.at_level(logging.INFO, "agentrl.train.sft"):
        fine_tune(configs)
    losses = [float(found[1]) for found in re.finditer(r"loss (\S+)", caplog.text)]
    # Without the image, an answer of two equally frequent letters costs ln 2 = 0.69 of its tokens.
    assert losses[-1] < 0.1 < losses[0]
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
