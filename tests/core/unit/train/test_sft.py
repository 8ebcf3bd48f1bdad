"""``agentrl sft``: what is trained, on text and on images, and what is refused."""

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
from safetensors.torch import load_file
from sft_run import losses, write_conversations
from tiny_policy import MARKED_TEMPLATE, TEMPLATE, tiny_format, write_tiny_policy
from tiny_vision import IDS, drawn, drawn_image, save_vision_model

from agentrl.chat.open_format import open_chat_format
from agentrl.cli.services import sft as main
from agentrl.config.load import parse
from agentrl.config.schema import ModelConfig
from agentrl.config.training import SFTConfig
from agentrl.data.forest import chain, forest_from_data
from agentrl.errors import AgentRLError, ConfigError, TaskFileError
from agentrl.model.load import load_policy
from agentrl.train.sft import fine_tune, from_conversations, read_conversations, trainable


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of six steps on forty conversations, logging below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    base = write_tiny_policy(tmp_path / "base")
    write_conversations(tmp_path / "conversations.jsonl")
    return [
        "--model_name_or_path", str(base), "--train_file", "conversations.jsonl", "--batch_size", "8",
        "--learning_rate", "1e-2", "--max_tokens", "200", "--log_steps", "1",
    ]  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE])
def test_what_the_assistant_says_becomes_spans_of_one_chain(tmp_path: Path, template: str) -> None:
    said = [("user", "2+2?"), ("assistant", "call"), ("tool", "4"), ("assistant", "four")]
    messages = [{"role": role, "content": content} for role, content in said]
    chat_format, path = tiny_format(template), tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"messages": part}) for part in (messages, messages[:2])))
    data, _ = from_conversations(path, chat_format)
    assert [(item.id, len(item.spans)) for item in data] == [("c.jsonl:1", 2), ("c.jsonl:2", 1)]
    forest = forest_from_data(data, vocab_size=259)
    expected, _ = read_conversations(path, chat_format)
    assert np.array_equal(forest.input_ids, np.concatenate([item.input_ids for item in expected]))
    assert np.array_equal(forest.target, np.flatnonzero(np.concatenate([c.is_trainable for c in expected])))
    assert forest.trajectories == 2


def test_the_loss_falls_and_the_same_seed_gives_the_same_model(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--max_steps", "6", "--output_dir", "one"]) == 0
    first = losses(capfd.readouterr().err)
    assert len(first) == 6
    assert first[-1] < first[0]
    assert main([*flags, "--max_steps", "6", "--output_dir", "two"]) == 0
    assert losses(capfd.readouterr().err) == first
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(bool((one[key] == two[key]).all()) for key in one)
    assert load_policy(ModelConfig(model_name_or_path="one")).tokenizer.chat_template


def test_epochs_decide_how_long_where_steps_do_not(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--num_train_epochs", "2", "--output_dir", "one"]) == 0
    assert "step 10/10" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--batch_size", "0"], "--batch_size is 0"),
        (["--max_tokens", "10"], "longer than a micro-batch"),
        (["--train_file", "none.jsonl"], "cannot be read"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], change: list[str], says: str) -> None:
    with pytest.raises(AgentRLError, match=says):
        main([*flags, "--output_dir", "one", *change])


def test_a_conversation_that_is_too_long_is_left_out_by_name_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = ModelConfig(model_name_or_path=str(write_tiny_policy(tmp_path / "base")))
    data = [
        chain(name, np.ones(tokens, np.int64), np.arange(tokens) > 0)
        for name, tokens in (("a", 9), ("b", 11), ("c", 10))
    ]
    assert [item.id for item in trainable(data, base, 10)] == ["a", "c"]
    assert "b is not trained: a sequence of 11 tokens is longer than a micro-batch" in caplog.text
    assert trainable(data, base, 4096) == data
    with pytest.raises(ConfigError, match="the model's context of 8"):
        trainable(data, replace(base, max_model_len=8), 4096)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("base", "would overwrite the model"),
        ("base/tuned", "would overwrite the model"),
        (".", "would overwrite"),
        ("data", "would overwrite --train_file"),
        ("notes", "has other content than a model"),
        ("conversations.jsonl", "would overwrite --train_file|is a file"),
    ],
)
def test_no_input_is_overwritten(flags: list[str], tmp_path: Path, output: str, says: str) -> None:
    for folder in ("data", "notes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kept.jsonl").write_text((tmp_path / "conversations.jsonl").read_text())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    file = ["--train_file", "data/kept.jsonl"] if output == "data" else []
    with pytest.raises(ConfigError, match=says):
        main([*flags, *file, "--output_dir", output, "--log_dir", str(tmp_path.parent / "logs")])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_for_the_model_is_needed(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="no folder for the trained model"):
        main(flags)


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
