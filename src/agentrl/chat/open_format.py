"""Open the chat format of a model's folder."""

from __future__ import annotations

from pathlib import Path

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.parsers import get_parser
from agentrl.chat.template import ChatTemplate
from agentrl.chat.template_format import TemplateFormat
from agentrl.config.schema import ModelConfig
from agentrl.errors import ModelError

_PARSER = "hermes"
"""The parser of a template's tool calls if ``--tool_call_parser`` names none."""


def open_chat_format(folder: str | Path, model: ModelConfig, parser: str | None = None) -> ChatFormat:
    """Open the chat format of the model in ``folder``; ``parser`` is ``--tool_call_parser``.

    Raises ModelError for a folder without a tokenizer or a template.
    """
    files = read_chat_files(folder, model.chat_template)
    if files.template is None:
        raise ModelError(
            f"{folder} has no chat template",
            hint="give one by --chat_template FILE; see assets/chat_templates for examples",
        )
    template = ChatTemplate(files.template, files.special_tokens)
    tokens = ControlTokens(files.tokenizer, files.template)
    return TemplateFormat(template, tokens, get_parser(parser or _PARSER), files.stop_ids)
