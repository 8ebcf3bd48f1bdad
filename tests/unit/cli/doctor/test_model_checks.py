"""``agentrl doctor`` on a model folder: configuration, weights, tokenizer, chat format."""

from __future__ import annotations

import json
from pathlib import Path

from chat_models import KEEPS_ALL, RESULTS_BEHIND_CALLS, write_model

from agentrl.cli.doctor.machine import Check
from agentrl.cli.doctor.model import model_checks
from agentrl.config.schema import ModelConfig


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def model_folder(folder: Path, template: str | None = KEEPS_ALL, vocab_size: int = 1000) -> Path:
    """Write everything that the doctor looks for, and no real weights."""
    write_model(folder, template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    return folder


def failed(folder: Path) -> dict[str, Check]:
    checks = model_checks(ModelConfig(model_name_or_path=str(folder)))
    return {check.name: check for check in checks if check.state == "fail"}


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    checks = list(model_checks(ModelConfig(model_name_or_path=str(folder))))
    assert set(states(checks).values()) == {"ok"}
    assert len(checks) == 4


def test_what_a_model_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=None, vocab_size=1)
    (folder / "model.safetensors").unlink()
    checks = failed(folder)
    assert set(checks) == {"model weights", "tokenizer", "chat format"}
    assert "ids, and the model embeds 1" in checks["tokenizer"].found
    assert "--chat_template" in checks["chat format"].hint


def test_a_missing_shard_and_a_broken_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"0")
    (folder / "tokenizer.json").write_text("{")
    checks = failed(folder)
    assert checks["model weights"].found == "missing: model-2.safetensors"
    assert "is not a tokenizer" in checks["tokenizer"].found


def test_the_chat_format_is_proven(tmp_path: Path) -> None:
    (*_, proven) = model_checks(ModelConfig(model_name_or_path=str(model_folder(tmp_path / "all"))))
    assert (proven.name, proven.state) == ("chat format", "ok")
    assert "earlier thoughts stay in the context" in proven.found
    silent = failed(model_folder(tmp_path / "silent", template="{{ messages[0].content }}"))
    assert "loses the user's text" in silent["chat format"].found
    (*_, toolless) = model_checks(
        ModelConfig(
            model_name_or_path=str(model_folder(tmp_path / "toolless", template=RESULTS_BEHIND_CALLS))
        )
    )
    assert toolless.state == "warn"
    assert "--chat_template" in toolless.hint


def test_a_template_that_ignores_tools_is_named(tmp_path: Path) -> None:
    without = KEEPS_ALL.replace("{%- if tools %}", "{%- if false %}")
    folder = model_folder(tmp_path / "deaf", template=without)
    (*_, proven) = model_checks(ModelConfig(model_name_or_path=str(folder)))
    assert proven.state == "warn"
    assert "does not name the tools" in proven.found
    assert "--chat_template FILE" in proven.hint


def test_no_folder_at_all(tmp_path: Path) -> None:
    (check,) = model_checks(ModelConfig(model_name_or_path=str(tmp_path / "none")))
    assert check.state == "fail"
    (skipped,) = model_checks(ModelConfig())
    assert skipped.state == "ok"
