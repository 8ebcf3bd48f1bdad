"""``--tool_call_parser NAME`` → parser."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from agentrl.chat.parsers.base import ToolCallParser
from agentrl.chat.parsers.hermes import HermesParser
from agentrl.chat.parsers.llama import LlamaParser
from agentrl.chat.parsers.minicpm import MiniCPMParser
from agentrl.chat.parsers.mistral import MistralParser
from agentrl.chat.parsers.qwen import QwenCoderParser, QwenParser
from agentrl.errors import ConfigError

PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": QwenParser,
    "qwen25": QwenParser,
    "qwen3_coder": QwenCoderParser,
    "llama": LlamaParser,
    "llama3": LlamaParser,
    "minicpm": MiniCPMParser,
    "mistral": MistralParser,
}
"""Names as inference servers spell them too."""


def get_parser(name: str) -> ToolCallParser:
    """The parser of that name; ConfigError with the nearest one otherwise."""
    factory = PARSERS.get(name)
    if factory is None:
        nearest = difflib.get_close_matches(name, PARSERS, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"--tool_call_parser is {name!r}, and no parser has that name",
            hint=f"{hint}known: {', '.join(parser_names())}",
        )
    return factory()


def parser_names() -> list[str]:
    """Every name that ``--tool_call_parser`` takes."""
    return sorted(PARSERS)
