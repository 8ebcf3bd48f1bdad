"""Run the children of a sweep, round after round: train each one, evaluate it, go on where they are."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.concurrency import END_SECONDS, end_tasks, wait_for_any
from agentrl.config.arguments import flag_words
from agentrl.config.load import parse
from agentrl.config.run import DATABASE_FLAGS, RunConfig
from agentrl.config.whatif import WhatIfConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.identity import read_file
from agentrl.evaluation.sweep import (
    Child,
    HeldOut,
    Key,
    Race,
    Sweep,
    is_done,
    launch_words,
    race,
    read_children,
)
from agentrl.processes import STOPPED, exit_reason, start_child, stop_child, stop_on_signals
from agentrl.store.client import Store

_READ_SECONDS = 2.0
_GRACE_SECONDS = 120.0
"""How long a child may finish its step and its checkpoint after a signal."""
_SAMPLING_ROLES = ("serve", "sample")
_NOT_OF_EVAL = frozenset({
    "run_name", "output_dir", "log_dir", "colocate", "num_generations", "train_file", "eval_file",
    "engine_url", "host", "port", *DATABASE_FLAGS,
})  # fmt: skip
"""Flags of the parent's engines and samplers that an evaluation of a child does not take over."""

Show = Callable[[Mapping[Key, Child], Race, Mapping[str, str]], None]
"""Receives the children, the race, and setting's id → why it failed."""


class SweepRunner:
    """Runs the children of a sweep, round after round.

    ``run`` names the database of the parent, whose store is ``source``. Each item of ``shares`` is the
    environment of one child at a time: the GPUs that it sees. ``show`` receives the state every few seconds;
    without it, lines on stderr say what begins.
    """

    def __init__(
        self,
        source: Store,
        sweep: Sweep,
        run: RunConfig,
        output: Path,
        shares: Sequence[Mapping[str, str]],
        show: Show | None,
    ) -> None:
        self._source = source
        self._sweep = sweep
        self._output = output
        self._free = list(shares)
        self._show = show
        database = {name: getattr(run, name) for name in DATABASE_FLAGS}
        self._environment = dict(os.environ)
        if (uri := database.pop("db_connection_string")) is not None:  # others can read a command line
            self._environment["MONGO_URI"] = uri
            self._environment.pop("MONGO_URI_FILE", None)
        self._database = flag_words(database)
        if len(shares) > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // len(shares))
            self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._steps = ""
        self._of_eval: Mapping[str, Any] = {}
        self.children: dict[Key, Child] = {}
        self.failed: dict[str, str] = {}
        """Setting's id → why one of its children failed; the setting takes no further part."""

    async def run(self) -> int:
        """Run what is missing; return 0, 1 if a child failed, 130 if a signal stopped it."""
        if self._sweep.eval is not None:
            self._of_eval = await _eval_flags(self._source, self._sweep.eval)
            await _check_tasks(self._of_eval)
        self.children = await read_children(self._source, self._sweep)
        self._steps = await self._steps_to_train()
        stop = stop_on_signals()
        active: dict[Key, asyncio.Task[None]] = {}
        try:
            while not stop.is_set():
                self.children = await read_children(self._source, self._sweep, self.children)
                found = race(self._sweep, self.children, self.failed)
                for child in found.missing:
                    key = child.setting.id, child.seed
                    if key not in active and self._free:
                        active[key] = asyncio.create_task(self._complete(child, self._free.pop(0)))
                if not active:
                    return 1 if self.failed else 0
                if self._show is not None:
                    self._show(self.children, found, self.failed)
                await wait_for_any(stop, tasks=active.values(), timeout=_READ_SECONDS)
                for key in [key for key, task in active.items() if task.done()]:
                    self._end(key, active.pop(key))
            return STOPPED
        finally:
            await end_tasks(*active.values(), seconds=_GRACE_SECONDS + END_SECONDS)

    async def _steps_to_train(self) -> str:
        """Return the file's steps, else those of the children that are begun, else all.

        The parent may go on meanwhile. Raises ConfigError for steps that it does not have.
        """
        given = WhatIfConfig(steps=self._sweep.steps).first_and_last
        steps = await self._source.steps.find()
        if not steps or (given is not None and given[1] > steps[-1].step):
            trained = f"has trained {steps[-1].step} steps" if steps else "has no trained step"
            raise ConfigError(
                f"run {self._sweep.run!r} {trained}"
                + (f", and steps is {self._sweep.steps}" if given else ""),
                hint="agentrl runs lists the runs and their steps",
            )
        if self._sweep.steps is not None:
            return self._sweep.steps
        for child in self.children.values():
            if child.range:
                return f"{child.range[0]}-{child.range[-1]}"
        return f"1-{steps[-1].step}"

    def _end(self, key: Key, task: asyncio.Task[None]) -> None:
        """Take over how a child's commands ended. Raises every error but an AgentRLError."""
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, AgentRLError):
            raise error
        self.failed[key[0]] = error.message
        self._say(f"{self.children[key].name} failed: {error.message}")

    async def _complete(self, child: Child, share: Mapping[str, str]) -> None:
        """Train and evaluate a child under ``share``, then free it. Raises AgentRLError, which says why."""
        try:
            await self._train_and_evaluate(child, {**self._environment, **share})
        finally:
            self._free.append(share)

    async def _train_and_evaluate(self, child: Child, environment: Mapping[str, str]) -> None:
        sweep, agentrl = self._sweep, [sys.executable, "-m", "agentrl"]
        here = [
            "--output_dir", str(self._output / child.name), "--log_dir", str(self._output / "logs"),
            *self._database,
        ]  # fmt: skip
        if not child.is_trained:
            order = {"order_seed": child.seed, "steps": self._steps, **child.setting.flags}
            launch = launch_words(sweep, agentrl)
            self._say(f"{child.name}: training, {child.setting.shown}, seed {child.seed}")
            words = ["whatif", sweep.run, child.name, *here, *flag_words(order)]
            await self._process(child.name, [*launch, *words], environment)
        if sweep.eval is not None:
            self._say(f"{child.name}: evaluating")
            words = [*flag_words(self._of_eval), "--eval_label", sweep.eval.label, "--json"]
            command = [*agentrl, "eval", "--run_name", child.name, *here, *words]
            await self._process(child.name, command, environment)
        key = child.setting.id, child.seed
        found = (await read_children(self._source, sweep, self.children))[key]
        if not is_done(sweep, found):
            what = "its evaluation has no result" if found.is_trained else "it has trained no step to the end"
            raise AgentRLError(f"its commands ended, and {what}", hint=f"see {self._log(child.name)}")

    async def _process(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = start_child(command, log=self._log(name), env=environment, is_guarded=True)
        try:
            await asyncio.to_thread(process.wait)
        finally:
            if process.poll() is None:
                await asyncio.shield(asyncio.to_thread(stop_child, process, _GRACE_SECONDS))
        if process.returncode:
            raise AgentRLError(exit_reason(self._log(name)), hint=f"see {self._log(name)}")

    def _log(self, name: str) -> Path:
        return self._output / "logs" / f"{name}_sweep.log"

    def _say(self, text: str) -> None:
        if self._show is None:
            print(text, file=sys.stderr, flush=True)


async def _eval_flags(source: Store, held_out: HeldOut) -> dict[str, Any]:
    """Return the flags of an evaluation: the file's, and those of the parent's engines and samplers."""
    roles = await source.settings.resolved()
    found: dict[str, Any] = {}
    if "train" in roles:
        found["model_name_or_path"] = roles["train"].values.get("model_name_or_path")
    for role in _SAMPLING_ROLES:
        if role in roles:
            found |= dict(roles[role].given_values)
    shared = {name: value for name, value in found.items() if name not in _NOT_OF_EVAL and value is not None}
    own = {"eval_file": held_out.file, "eval_samples": held_out.samples, "eval_engine": "own"}
    return shared | own | held_out.flags


async def _check_tasks(flags: Mapping[str, Any]) -> None:
    """Raise TaskFileError or ConfigError for an evaluation that would fail after the training."""
    words = ["--num_generations", "1", *flag_words(flags)]
    await read_file(parse(words, command="agentrl eval", description="", shown=()), "eval")
