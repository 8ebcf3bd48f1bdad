"""Flags as a command parses them."""

from __future__ import annotations

from typing import Any

from agentrl.config.load import Configs, parse


def parsed(*words: str, command: str = "agentrl train", **options: Any) -> Configs:
    """Return every group of flags of a command line, and of a file that it names."""
    return parse(words, command=command, description="", shown=(), **options)
