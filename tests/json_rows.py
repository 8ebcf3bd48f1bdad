"""Write rows as a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: Any) -> Path:
    """Write a line for each row, as JSON or, if it is text, as it is; return the path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
