"""Run agentrl programs as forks of a process that has imported torch and the trainer once for all of them.

A program still has a process of its own, which may be killed; it starts in 0.1 s instead of the seconds that
the imports take. Tests of the command as a person enters it start Python.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["agentrl.train.start", "transformers.models.qwen3.modeling_qwen3"]
_THREADS = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True)
class Forked:
    """A program that may still run."""

    process: BaseProcess
    log: Path

    @property
    def pid(self) -> int:
        """Of the program."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        """What the program has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.is_alive()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> tuple[int, str]:
        """Return its exit code and its output. Raises TimeoutError after ``seconds``."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            raise TimeoutError(f"it has not ended after {seconds:g} s:\n{self.output[-4000:]}")
        return code, self.output


@contextlib.contextmanager
def forked(
    program: Sequence[str], arguments: Sequence[str], log: Path, **environment: str
) -> Iterator[Forked]:
    """Start ``-m MODULE`` or ``-c CODE`` with ``arguments``; kill it at the end of the block.

    ``log`` receives the output; the program finds ``environment`` in its own.
    """
    os.environ.update(_THREADS)
    _SERVER.set_forkserver_preload(_PRELOADED)
    log.unlink(missing_ok=True)
    process = _SERVER.Process(target=_run, args=(tuple(program), tuple(arguments), str(log), environment))
    process.start()
    try:
        yield Forked(process, log)
    finally:
        process.kill()
        process.join(10)
        process.close()


def run_forked(
    program: Sequence[str], arguments: Sequence[str], log: Path, seconds: float, **environment: str
) -> tuple[int, str]:
    """Run as ``forked`` does to the end; return the exit code and the output."""
    with forked(program, arguments, log, **environment) as process:
        return process.wait(seconds)


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
