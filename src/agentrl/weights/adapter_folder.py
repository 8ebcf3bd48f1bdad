"""Recognize a folder that holds an adapter, in peft's files, instead of a model's weights."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter instead of a model's weights."""
    return (folder / CONFIG_FILE).is_file()
