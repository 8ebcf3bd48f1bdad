"""A base model, as the files of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder whose files hold their own names."""
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "a.gguf", ".x"):
        (folder / name).write_text(f"base {name}")
    return folder
