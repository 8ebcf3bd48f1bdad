from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import write_tiny_policy
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from written_adapter import write_adapter

from agentrl.config.schema import AdapterConfig, ModelConfig
from agentrl.errors import ModelError
from agentrl.model.load import load_policy
from agentrl.weights.folder import architecture, base_folder, complete_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "model")


def config(folder: Path | None, **more: object) -> ModelConfig:
    return ModelConfig(model_name_or_path=None if folder is None else str(folder), **more)  # type: ignore[arg-type]


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_model_is_loaded_with_its_tokenizer_and_without_dropout(folder: Path) -> None:
    edit_config(folder, attention_dropout=0.5)
    policy = load_policy(config(folder))
    assert policy.tokenizer.chat_template
    assert all(module.p == 0.0 for module in policy.model.modules() if isinstance(module, nn.Dropout))
    dropouts = [m.attention_dropout for m in policy.model.modules() if hasattr(m, "attention_dropout")]
    assert dropouts == [0.0, 0.0]


def test_threads_that_load_at_once_leave_tied_weights_tied(folder: Path) -> None:
    def load(_: int) -> bool:
        model: Any = load_policy(config(folder)).model
        return model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(load, range(24)))
    built: Any = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder))
    assert built.lm_head.weight is built.model.embed_tokens.weight


def test_the_runs_own_chat_template_wins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own")
    policy = load_policy(config(folder, chat_template=str(tmp_path / "own.jinja")))
    assert policy.tokenizer.chat_template == policy.chat_template == "own"


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model is given"):
        base_folder(config(None))
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        base_folder(config(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"own\.jinja cannot be read"):
        load_policy(config(folder, chat_template="own.jinja"))


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove("config.json"), r"has no config\.json"),
        (remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
        (remove("chat_template.jinja"), "has no chat template"),
        (remove("model.safetensors"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), r"tokenizer of .* cannot be loaded"),
        (lambda folder: edit_config(folder, model_type="unheard_of"), "unheard_of"),
        (lambda folder: edit_config(folder, vocab_size=100), "cannot be loaded"),
    ],
    ids=["config", "tokenizer", "template", "weights", "broken tokenizer", "architecture", "other tokenizer"],
)
def test_a_folder_that_is_not_whole_is_refused(
    folder: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=says):
        load_policy(config(folder))


def test_the_architecture_is_told_by_type_and_sizes(folder: Path) -> None:
    told = architecture(folder)
    assert told["model_type"] == "qwen3"
    assert told["hidden_size"] == 32


def test_an_adapter_folder_is_no_model_and_no_whole_weights(tmp_path: Path) -> None:
    base = write_tiny_policy(tmp_path / "base")
    config = ModelConfig(model_name_or_path=str(base))
    policy = load_policy(config, adapter=AdapterConfig(lora_rank=2))
    assert policy.adapter is not None
    sizes = [
        sum(part.bytes for part in source.parts())
        for source in (policy.adapter, policy.published, load_policy(config).published)
    ]
    assert sizes[0] < sizes[1] == sizes[2]
    saved = tmp_path / "saved"
    saved.mkdir()
    write_adapter(policy.adapter, saved)
    complete_folder(base, saved)
    assert load_policy(config, saved, AdapterConfig(lora_rank=2)).adapter is not None
    with pytest.raises(ModelError, match="holds an adapter"):
        load_policy(config, saved)
    with pytest.raises(ModelError, match="holds an adapter, not a model"):
        load_policy(ModelConfig(model_name_or_path=str(saved)))
