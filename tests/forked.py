"""Run agentrl programs as forks of a process that has imported torch and the trainer once for all of them.

A program still has a process of its own, which may be killed; it starts in 0.1 s instead of the seconds that
the imports take. Tests of the command as a person enters it start Python.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["agentrl.train.start", "transformers.models.qwen3.modeling_qwen3"]
_THREADS = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}


def run_forked(
    program: Sequence[str], arguments: Sequence[str], log: Path, seconds: float, **environment: str
) -> tuple[int, str]:
    """Run ``-m MODULE`` or ``-c CODE`` with ``arguments``; return the exit code and the output.

    ``log`` receives the output; the program finds ``environment`` in its own. Raises TimeoutError after
    ``seconds``, and kills the process.
    """
    os.environ.update(_THREADS)
    _SERVER.set_forkserver_preload(_PRELOADED)
    process = _SERVER.Process(target=_run, args=(tuple(program), tuple(arguments), str(log), environment))
    process.start()
    process.join(seconds)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join(10)
    process.close()
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if code is None:
        raise TimeoutError(f"{' '.join(arguments)} has not ended after {seconds:g} s:\n{output[-4000:]}")
    return code, output


def _run(program: Sequence[str], arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Do in the fork what ``python`` does with ``program`` and ``arguments``."""
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    kind, what = program
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
