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


# What docs/install.md leaves out on a machine that shows the dashboard alone.
SAMPLER = (
    "PIL", "accelerate", "fsspec", "httptools", "httpx2", "huggingface_hub", "jsonschema", "mcp",
    "opentelemetry", "referencing", "renderers", "safetensors", "tokenizers", "torch", "transformers",
    "websockets", "xxhash", "zstandard",
)  # fmt: skip
SHOWN = (
    "agentrl.documents.", "agentrl.lab.", "agentrl.local.mongod", "agentrl.screens.", "agentrl.store.",
    "agentrl.weights.folder",
)  # fmt: skip
"""Where the commands live that such a machine has: dashboard, status, runs, audit, db and mongo."""
MORE_IS_NEEDED = {
    f"agentrl.lab.{name}" for name in ("blame", "rescore", "retract", "sweep", "whatif", "whatif_run")
}


def missing(*hidden: str) -> dict[str, str]:
    """Return {module: the package it lacks} where packages are hidden."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *hidden], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_modules_but_those_of_an_extra_are_imported_without_it() -> None:
    assert missing(*EXTRAS) == NEEDS_ONE


def test_the_commands_of_the_dashboard_alone_need_neither_tokenizers_nor_clients() -> None:
    assert {name for name in missing(*EXTRAS, *SAMPLER) if name.startswith(SHOWN)} == MORE_IS_NEEDED
