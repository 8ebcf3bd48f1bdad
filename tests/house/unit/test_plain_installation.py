"""A plain installation lacks what extras bring: no module that every command imports may need it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "plain_imports.py"
# Without trackers: Accelerate imports each that it finds installed.
EXTRAS = (
    "gcsfs", "langchain_core", "langgraph", "math_verify", "matplotlib", "opentelemetry.exporter",
    "opentelemetry.sdk", "pyarrow", "reasoning_gym", "s3fs", "textarena",
)  # fmt: skip
NEEDS_ONE = {
    "agentrl.observe.span_exporters": "opentelemetry.exporter",
    "agentrl.worlds.langgraph": "langchain_core",
}


def test_all_modules_but_those_of_an_extra_are_imported_without_it() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *EXTRAS], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == NEEDS_ONE
