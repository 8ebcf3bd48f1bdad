"""Check the folder of a model: configuration, weights, tokenizer, chat format, context length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.cli.doctor.machine import Check
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, ModelConfig, SamplingConfig
from agentrl.errors import AgentRLError

_WEIGHTS_INDEX = "model.safetensors.index.json"


def model_checks(config: ModelConfig, parser: str | None = None) -> Iterator[Check]:
    """Check a model folder: config, weights, tokenizer, chat format. Loads no weights.

    ``parser`` is ``--tool_call_parser``.
    """
    if config.model_name_or_path is None:
        yield Check("model", "ok", "not checked: give --model_name_or_path FOLDER")
        return
    folder = Path(config.model_name_or_path)
    settings = _json(folder / "config.json")
    if settings is None:
        yield Check(
            "model config", "fail", f"{folder} has no readable config.json",
            "give a local Hugging Face folder; `hf download NAME --local-dir FOLDER` fetches one",
        )  # fmt: skip
        return
    yield Check("model config", "ok", f"{settings.get('model_type', 'unknown type')} in {folder}")
    yield _check_weights(folder)
    yield _check_tokenizer(folder, settings)
    yield _check_chat_format(folder, config, parser)


def _check_weights(folder: Path) -> Check:
    index = _json(folder / _WEIGHTS_INDEX)
    names = sorted(set(index.get("weight_map", {}).values())) if index else ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return Check("model weights", "fail", f"missing: {', '.join(missing)}", "download the folder again")
    size = sum((folder / name).stat().st_size for name in names)
    return Check("model weights", "ok", f"{size / 2**30:.2f} GiB in {len(names)} safetensors")


def _check_tokenizer(folder: Path, settings: dict[str, Any]) -> Check:
    from agentrl.chat.model_folder import read_tokenizer_file

    name, path = "tokenizer", folder / "tokenizer.json"
    hint = "copy the tokenizer's files into the folder"
    if not path.is_file():
        return Check(name, "fail", f"{path} is missing", hint)
    try:
        size = read_tokenizer_file(path).get_vocab_size(with_added_tokens=True)
    except AgentRLError as error:
        return Check(name, "fail", error.message, hint)
    embedded = settings.get("vocab_size", settings.get("text_config", {}).get("vocab_size"))
    if isinstance(embedded, int) and size > embedded:
        found = f"{size} ids, and the model embeds {embedded}"
        return Check(name, "fail", found, "use the tokenizer that belongs to the model")
    return Check(name, "ok", f"{size} ids")


def _check_chat_format(folder: Path, config: ModelConfig, parser: str | None) -> Check:
    """Validate the chat format, as every sampler does before its first task."""
    from agentrl.chat.chat_format import UNSEEN_HINT, unseen_tools
    from agentrl.chat.open_format import open_chat_format
    from agentrl.chat.probe import CONVERSATION, TOOLS

    name = "chat format"
    try:
        opened = open_chat_format(folder, config, parser)
    except AgentRLError as error:
        return Check(name, "fail", error.message, error.hint or "")
    if opened.tool_problems:
        hint = "for tools, give another --chat_format, or a template for tools by --chat_template FILE"
        return Check(name, "warn", f"{opened.description}: it {opened.tool_problems[0]}", hint)
    if unseen_tools(opened, opened.render(CONVERSATION[:2], TOOLS), TOOLS):
        return Check(name, "warn", f"{opened.description}: a prompt does not name the tools", UNSEEN_HINT)
    return Check(name, "ok", opened.description)


def check_context(configs: Configs) -> Check:
    """Check that the longest prompt and its continuation fit the context of the model."""
    from agentrl.chat.model_folder import model_context_length
    from agentrl.rollout.prompts import context_problem

    name, model = "context", configs[ModelConfig]
    own = None if model.model_name_or_path is None else model_context_length(model.model_name_or_path)
    length = model.max_model_len or own
    if length is None:
        return Check(name, "ok", "not checked: the model's configuration names no length")
    if own is not None and length > own:
        found = f"--max_model_len {length} is more than the {own} tokens of the model's configuration"
        return Check(name, "fail", found, f"set --max_model_len {own} or less, or extend the rotary scaling")
    problem = context_problem(configs[AgentConfig], configs[SamplingConfig], length)
    if problem is None:
        return Check(name, "ok", f"{length} tokens hold --max_prompt_tokens + --max_new_tokens")
    return Check(name, "warn", problem, "lower --max_prompt_tokens or --max_new_tokens")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
