"""The ``python`` of a machine with GPUs that are stubs: it answers up for torch, and records processes.

    python -IS tests/stub_gpus.py WORD …    # what this python does with the words of a command
    python -m stub_gpus MODULE WORD …       # runs a module that finds GPUs, and starts others by this python

A process of a run is not started: its command and environment are written into STUB_RECORDS, and it ends once
the trainer is there and STUB_PROCESSES are. The engine at port 7001 crashes once.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

_PROCESSES = ("serve", "sample", "agentrl.train", "train", "eval")
_WAIT_SECONDS = 60


def act(words: list[str]) -> None:
    """Be a stub, or run a module by STUB_WARM."""
    name = next((name for name in _PROCESSES if name in words[:4]), None)
    if any("get_device_properties" in word for word in words):
        print(json.dumps([False, [["NVIDIA H100", 79 * 2**30]] * int(os.environ["STUB_GPUS"])]))
    elif name is not None and "launch" not in words[:3]:
        _record(name, words)
    else:
        assert words[0] == "-m", words
        warm = os.environ["STUB_WARM"]
        os.execv(warm, [warm, "-m", "stub_gpus", *words[1:]])


def _record(name: str, words: list[str]) -> None:
    records = Path(os.environ["STUB_RECORDS"])
    partial = records / f".{os.getpid()}"
    partial.write_text(json.dumps({"name": name, "words": words, "environment": dict(os.environ)}))
    partial.rename(records / f"{os.getpid()}.json")
    if name == "serve" and "7001" in words and not (records / "crashed.json").exists():
        (records / "crashed.json").write_text("{}")
        sys.exit(1)
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until and not (
        "train" in name and len(list(records.glob("*.json"))) >= int(os.environ["STUB_PROCESSES"])
    ):
        time.sleep(0.02)


def run(module: str, words: list[str]) -> None:
    """Run ``module`` as ``python -m`` does, where there are GPUs."""
    from agentrl.base import device_lease

    device_lease.has_gpu.__code__ = (lambda: True).__code__  # wherever it has been imported already
    sys.executable = os.environ["STUB_PYTHON"]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if __spec__ is None:
        act(sys.argv[1:])
    else:
        run(sys.argv[1], sys.argv[2:])
