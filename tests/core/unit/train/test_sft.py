from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_policy import MARKED_TEMPLATE, TEMPLATE, tiny_format, write_tiny_policy

from agentrl.cli.services import sft as main
from agentrl.config.schema import ModelConfig
from agentrl.data.forest import forest_from_data
from agentrl.errors import AgentRLError, ConfigError
from agentrl.model.load import load_policy
from agentrl.train.sft import from_conversations, read_conversations


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of six steps on forty conversations, logging below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    base = write_tiny_policy(tmp_path / "base")
    lines = []
    for number in range(40):
        question = {"role": "user", "content": str(number)}
        answer = {"role": "assistant", "content": "odd" if number % 2 else "even"}
        lines.append(json.dumps({"messages": [question, answer]}))
    (tmp_path / "conversations.jsonl").write_text("\n".join(lines))
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


def losses(text: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in text.splitlines() if "  loss " in line]


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
