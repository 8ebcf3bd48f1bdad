"""Run the children of a sweep, round after round, and judge them: which settings race on, which are worse.

A sweep is a race (Maron and Moore, 1993): round k trains and evaluates seed k of each setting that is
left. After ``min_seeds`` rounds a setting is stopped if the best one beats it on the same tasks: the interval
of the paired difference is above 0, and the best is ahead in every seed alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import END_SECONDS, end_tasks, wait_for_any
from agentrl.base.processes import STOPPED, exit_reason, start_child, stop_child, stop_on_signals
from agentrl.base.validation import (
    Count,
    PlainText,
    PositiveWhole,
    SettingsFile,
    SettingsModel,
    Text,
    broken,
    read_settings,
)
from agentrl.config.flags import flag_words
from agentrl.config.load import parse
from agentrl.config.run import DATABASE_FLAGS, RunConfig
from agentrl.documents.status import TrainerEnd
from agentrl.errors import AgentRLError, ConfigError, Place
from agentrl.evaluation.evaluate import read_file
from agentrl.lab.flags import WhatIfConfig, check_flags
from agentrl.losses.settings import LossSettings
from agentrl.observe.terminal import finite
from agentrl.scoring.evaluation import Difference, Estimate, EvaluatedTask, difference, estimates
from agentrl.store.client import Store

if TYPE_CHECKING:
    from agentrl.store.client import Store

_HINT = "a sweep has name, run, settings or grid, and may have steps, seeds, eval, min_seeds and launch"
_OF_SWEEP = frozenset({
    "steps", "order_seed", "compare", "out", "run_name", "output_dir", "log_dir", "config", "eval_file",
    "eval_samples", "eval_version", "eval_model", "eval_steps", "eval_label", *DATABASE_FLAGS,
})  # fmt: skip
"""Flags that the sweep gives to its commands."""
_FILES = frozenset({".json", ".jsonl", ".parquet", ".csv"})
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class HeldOut(SettingsModel):
    """What judges the settings: ``agentrl eval`` of each child's last weights."""

    file: Text
    samples: PositiveWhole = 1
    """Trajectories per task."""
    flags: dict[str, PlainText] = field(default_factory=dict)
    """Flags of ``agentrl eval``; the others are those of the parent's engines and samplers."""

    @property
    def label(self) -> str:
        """Return the label of the evaluations of this file with these flags."""
        path = Path(self.file)
        content = path.read_bytes() if path.is_file() else self.file.encode()
        return f"sweep-{_digest(content + _text({**self.flags, 'samples': str(self.samples)}))}"


@dataclass(frozen=True)
class SweepSetting:
    """Flags of ``agentrl whatif`` that differ from the parent's."""

    flags: Mapping[str, str]

    @property
    def id(self) -> str:
        """Return a hash of the flags."""
        return _digest(_text(self.flags))

    @property
    def shown(self) -> str:
        """``loss_calculater GSPO, learning_rate 1e-06``."""
        return ", ".join(f"{name} {value}" for name, value in self.flags.items()) or "as the parent"


@dataclass(frozen=True, kw_only=True)
class Sweep(SettingsModel):
    """The content of the file."""

    name: Text
    run: Text
    """The parent."""
    steps: PlainText | None = None
    """The parent's steps that are trained again, such as 40-60; None: all that it has at the beginning."""
    seeds: tuple[Count, ...] = (0,)
    """Of the order of the steps; 0 is the parent's order."""
    settings: tuple[dict[str, PlainText], ...] = ()
    grid: dict[str, tuple[PlainText, ...]] = field(default_factory=dict)
    """Flag → values: every combination is a setting."""
    eval: HeldOut | None = None
    min_seeds: PositiveWhole = 2
    """Rounds before a setting may be stopped."""
    launch: Text | None = None
    """Command line that stands for ``agentrl`` in what-ifs: accelerate launch … -m agentrl."""

    def __post_init__(self) -> None:
        """Raise an error for rules that concern several values."""
        if not self.all:
            raise broken("names no setting", hint="give settings: a list of flags; or grid: flag: [values]")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise broken(f"is {list(self.seeds)}; seeds must differ", "seeds", hint="such as [0, 1, 2]")
        for name, values in self.grid.items():
            if not values:
                raise broken("has no value", "grid", name, hint="give at least one")
        found: dict[str, SweepSetting] = {}
        for setting in self.all:
            if setting.id in found:
                raise broken(f"has the setting '{setting.shown}' twice", hint="leave one out")
            found[setting.id] = setting

    @property
    def all(self) -> list[SweepSetting]:
        """The settings: those of the list, then every combination of the grid."""
        combined = itertools.product(*self.grid.values()) if self.grid else ()
        grid = [SweepSetting(dict(zip(self.grid, values, strict=True))) for values in combined]
        return [*map(SweepSetting, self.settings), *grid]

    def child(self, setting: SweepSetting, seed: int) -> str:
        """Return the name of the run of a setting and a seed."""
        trained = _digest(_text({**setting.flags, "steps": self.steps or ""}))
        return f"{self.run}_{self.name}_{trained}_{seed}"


def read_sweep(path: Path) -> Sweep:
    """Read and check a file: every flag of every setting, and the names of the children.

    A path in ``eval.file`` is relative to the file. Raises ConfigError, which names the line.
    """
    file = read_settings(path, hint=_HINT)
    content = file.content
    held_out = content.get("eval") if isinstance(content, dict) else None
    if isinstance(held_out, dict) and isinstance(held_out.get("file"), str):
        beside = path.parent / held_out["file"]
        if beside.is_file():
            held_out["file"] = str(beside)
        elif Path(held_out["file"]).suffix in _FILES and not Path(held_out["file"]).is_file():
            raise file.error(
                f"eval.file names no file: {held_out['file']!r}", "eval", "file",
                hint=f"give a task file, relative to {path.parent} or to here",
            )  # fmt: skip
    sweep = file.check(Sweep, content)
    _check_name(file, sweep)
    _check(file, {} if sweep.steps is None else {"steps": sweep.steps}, is_own=True)
    for place, setting in _places(sweep):
        _check(file, setting.flags, *place)
    if sweep.eval is not None:
        _check(file, sweep.eval.flags, "eval", "flags", command="agentrl eval")
    return sweep


def _places(sweep: Sweep) -> Iterator[tuple[Place, SweepSetting]]:
    listed = len(sweep.settings)
    for index, setting in enumerate(sweep.all):
        yield ("settings", index) if index < listed else ("grid",), setting


def _check_name(file: SettingsFile, sweep: Sweep) -> None:
    for setting, seed in itertools.product(sweep.all, sweep.seeds):
        try:
            RunConfig(run_name=sweep.child(setting, seed))
        except ConfigError as error:
            raise file.error(
                f"name is {sweep.name!r}, and a child would be {sweep.child(setting, seed)!r}: run names have"
                " at most 48 letters, digits, _ and -",
                "name", hint="give a shorter name",
            ) from error  # fmt: skip


def _check(
    file: SettingsFile, flags: Mapping[str, str], *place: str | int,
    command: str = "agentrl whatif", is_own: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError for a flag or a value that ``command`` refuses."""
    for name in flags if not is_own else ():
        if name in _OF_SWEEP:
            raise file.error(f"--{name} is given by the sweep", *place, name, hint="leave it out")
    is_whatif = command == "agentrl whatif"
    try:
        found = parse(
            flag_words(flags), command=command, description="", shown=(),
            extra=(WhatIfConfig,) if is_whatif else (),
        )  # fmt: skip
        if is_whatif:
            check_flags(found)
            _ = LossSettings.of_run(found).loss
    except ConfigError as error:
        said = f"{error.message} "
        named = next(
            (name for name, value in flags.items() if f"--{name} " in said or repr(value) in said), None
        )
        where = place if named is None else (*place, named)
        raise file.error(error.message, *where, hint=error.hint) from error


def _text(flags: Mapping[str, str]) -> bytes:
    return json.dumps(flags, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


MEANS = ("kl_k3", "grad_norm", "entropy", "clipped_fraction")
"""Metrics that mean the same under every loss: how a setting moves the policy, not how good it is."""

Key = tuple[str, int]
"""A setting's id and a seed."""


@dataclass(frozen=True, kw_only=True)
class SweepChild:
    """The run of one setting and one seed."""

    name: str
    setting: SweepSetting
    seed: int
    steps: int = 0
    """Steps that it has trained with its own flags."""
    range: tuple[int, ...] = ()
    """The first and the last step of the parent that it trains; empty before it is begun."""
    is_trained: bool = False
    tasks: Sequence[EvaluatedTask] | None = None
    """Of its evaluation; None before it is finished."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Of ``MEANS`` over its steps."""

    @property
    def score(self) -> float | None:
        """The mean score over the tasks; None without one."""
        found = [statistics.fmean(task.scores) for task in self.tasks or () if task.scores]
        return statistics.fmean(found) if found else None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one setting stands."""

    setting: SweepSetting
    children: Sequence[SweepChild]
    """One a seed."""
    score: Estimate | None
    """Over tasks, all seeds together; None before an evaluation."""
    against_best: Difference | None
    """The best setting's score minus this one's, over the tasks and seeds of both; None of the best one."""
    stopped_after: int | None
    """Rounds after which it was stopped; None: it was not."""

    @property
    def means(self) -> dict[str, float]:
        """Return the means of ``MEANS`` over the seeds."""
        columns = {
            name: [child.means[name] for child in self.children if name in child.means] for name in MEANS
        }
        return {name: statistics.fmean(values) for name, values in columns.items() if values}

    def to_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "flags": dict(self.setting.flags),
            "score": None if self.score is None else asdict(self.score),
            "best_minus_this": None if self.against_best is None else asdict(self.against_best),
            "stopped_after": self.stopped_after,
            "means": self.means,
            "runs": [
                {"run": child.name, "seed": child.seed, "steps": child.steps, "is_trained": child.is_trained,
                 "score": child.score} for child in self.children
            ],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Race:
    """Which settings were stopped, and what is to be done now."""

    stopped: Mapping[str, int]
    """Setting's id → rounds after which it was stopped."""
    missing: Sequence[SweepChild]
    """The children of the present round that are not done; empty at the end."""


async def read_children(
    source: Store, sweep: Sweep, known: Mapping[Key, SweepChild] | None = None
) -> dict[Key, SweepChild]:
    """Return where each child is; ``source`` is the parent's store.

    ``known`` are children as they were: those that are done are not read again.
    """
    label = None if sweep.eval is None else sweep.eval.label
    children: dict[Key, SweepChild] = {}
    for setting, seed in product(sweep.all, sweep.seeds):
        old = (known or {}).get((setting.id, seed))
        if old is None or not is_done(sweep, old):
            child = SweepChild(name=sweep.child(setting, seed), setting=setting, seed=seed)
            old = await _read(source, child, label)
        children[setting.id, seed] = old
    return children


async def _read(source: Store, child: SweepChild, label: str | None) -> SweepChild:
    store = source.beside(child.name)
    relative = await store.ancestry.parent()
    if relative is None:
        return child
    steps = [
        step for step in await store.steps.find()
        if step.recorded is not None and step.recorded.step >= relative.since
    ]  # fmt: skip
    # The lease of a trainer that ended is of the lead-in as long as no step of the child's own is trained.
    ended = (await store.trainer_lease.read()).ended
    is_trained = bool(steps) and ended is TrainerEnd.FINISHED
    tasks = None
    for evaluation in await store.evaluations.all() if is_trained and label is not None else ():
        if evaluation.label == label and evaluation.results is not None:
            agent = str(evaluation.settings.get("agent_name", ""))
            tasks = await store.evaluations.tasks(evaluation.id, agent, evaluation.right_threshold)
    columns = {
        name: [value for step in steps if (value := finite(step.metrics.get(name))) is not None]
        for name in MEANS
    }
    means = {name: statistics.fmean(values) for name, values in columns.items() if values}
    return replace(
        child, steps=len(steps), range=relative.steps, is_trained=is_trained, tasks=tasks, means=means
    )


def is_done(sweep: Sweep, child: SweepChild) -> bool:
    """Return whether a child is trained and, if the sweep evaluates, evaluated."""
    return child.is_trained and (sweep.eval is None or child.tasks is not None)


def race(sweep: Sweep, children: Mapping[Key, SweepChild], failed: Iterable[str] = ()) -> Race:
    """Replay the race from what is done; ``failed`` are ids of settings that take no further part.

    Without an evaluation nothing is stopped: a what-if cannot change the reward of stored trajectories.
    """
    out = set(failed)
    alive = [setting for setting in sweep.all if setting.id not in out]
    stopped: dict[str, int] = {}
    for number, seed in enumerate(sweep.seeds, 1):
        round_ = [children[setting.id, seed] for setting in alive]
        missing = [child for child in round_ if not is_done(sweep, child)]
        if missing:
            return Race(stopped=stopped, missing=missing)
        if sweep.eval is not None and sweep.min_seeds <= number < len(sweep.seeds):
            worse = _clearly_worse(alive, children, sweep.seeds[:number])
            stopped |= dict.fromkeys(worse, number)
            alive = [setting for setting in alive if setting.id not in worse]
    return Race(stopped=stopped, missing=())


def standings(sweep: Sweep, children: Mapping[Key, SweepChild], found: Race) -> list[Standing]:
    """Return the settings, the best first; those without a score keep their order at the end."""
    own = {setting.id: [children[setting.id, seed] for seed in sweep.seeds] for setting in sweep.all}
    best = _best([setting for setting in sweep.all if setting.id not in found.stopped], own)
    listed = []
    for setting in sweep.all:
        means = list(_means(own[setting.id]).values())
        is_compared = best is not None and means and setting.id != best.id
        listed.append(
            Standing(
                setting=setting,
                children=own[setting.id],
                score=estimates([means])[0] if means else None,
                against_best=_difference(own[setting.id], own[best.id]) if best and is_compared else None,
                stopped_after=found.stopped.get(setting.id),
            )
        )
    return sorted(listed, key=lambda item: math.inf if item.score is None else -item.score.value)


def _means(children: Sequence[SweepChild]) -> dict[tuple[str, str], float]:
    """Return (task's id, digest) → its mean score over all children."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for child in children:
        for task in child.tasks or ():
            scores[task.task_id, task.digest] += task.scores
    return {key: statistics.fmean(values) for key, values in scores.items() if values}


def _clearly_worse(
    alive: Sequence[SweepSetting], children: Mapping[Key, SweepChild], seeds: Sequence[int]
) -> set[str]:
    own = {setting.id: [children[setting.id, seed] for seed in seeds] for setting in alive}
    best = _best(alive, own)
    worse = set()
    for setting in alive if best is not None else ():
        pairs = list(zip(own[setting.id], own[best.id], strict=True)) if best is not None else []
        is_behind = all((one.score or 0.0) < (other.score or 0.0) for one, other in pairs)
        if not is_behind:
            continue
        found = _difference(own[setting.id], [other for _, other in pairs])
        if found is not None and found.effect.low > 0:
            worse.add(setting.id)
    return worse


def _best(settings: Sequence[SweepSetting], own: Mapping[str, Sequence[SweepChild]]) -> SweepSetting | None:
    """Return the setting with the highest mean score over its seeds; None without a score."""
    scores: dict[str, list[float]] = defaultdict(list)
    for setting in settings:
        scores[setting.id] += [child.score for child in own[setting.id] if child.score is not None]
    known = [setting for setting in settings if scores[setting.id]]
    return max(known, key=lambda setting: statistics.fmean(scores[setting.id]), default=None)


def _difference(one: Sequence[SweepChild], best: Sequence[SweepChild]) -> Difference | None:
    """Return the best's score minus the other's, over the seeds and the tasks that both have evaluated."""
    pairs = [(a, b) for a, b in zip(one, best, strict=True) if a.tasks is not None and b.tasks is not None]
    a, b = _means([a for a, _ in pairs]), _means([b for _, b in pairs])
    common = sorted(a.keys() & b.keys())
    return _paired(tuple((a[key], b[key]) for key in common)) if common else None


@lru_cache(maxsize=1024)
def _paired(pairs: tuple[tuple[float, float], ...]) -> Difference:
    """Keep differences: the table is drawn every few seconds, and a bootstrap takes a good part of one."""
    return difference(pairs)


_READ_SECONDS = 2.0
_GRACE_SECONDS = 120.0
"""How long a child may finish its step and its checkpoint after a signal."""
_SAMPLING_ROLES = ("serve", "sample")
_NOT_OF_EVAL = frozenset({
    "run_name", "output_dir", "log_dir", "colocate", "num_generations", "train_file", "eval_file",
    "engine_url", "host", "port", "recipe", *DATABASE_FLAGS,
})  # fmt: skip
"""Flags of the parent's engines and samplers that an evaluation of a child does not take over."""

Show = Callable[[Mapping[Key, SweepChild], Race, Mapping[str, str]], None]
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
        self.children: dict[Key, SweepChild] = {}
        self.failed: dict[str, str] = {}
        """Setting's id → why one of its children failed; the setting takes no further part."""

    async def run(self) -> int:
        """Run what is missing; return 0, 1 if a child failed, 130 if a signal stopped it."""
        if self._sweep.eval is not None:
            self._of_eval = await _eval_flags(self._source, self._sweep.eval)
            # Read the tasks now: an evaluation of a bad file would fail after the training.
            words = ["--num_generations", "1", *flag_words(self._of_eval)]
            await read_file(parse(words, command="agentrl eval", description="", shown=()), "eval")
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

    async def _complete(self, child: SweepChild, share: Mapping[str, str]) -> None:
        """Train and evaluate a child under ``share``, then free it. Raises AgentRLError, which says why."""
        try:
            await self._train_and_evaluate(child, {**self._environment, **share})
        finally:
            self._free.append(share)

    async def _train_and_evaluate(self, child: SweepChild, environment: Mapping[str, str]) -> None:
        sweep, agentrl = self._sweep, [sys.executable, "-m", "agentrl"]
        here = [
            "--output_dir", str(self._output / child.name), "--log_dir", str(self._output / "logs"),
            *self._database,
        ]  # fmt: skip
        if not child.is_trained:
            order = {"order_seed": child.seed, "steps": self._steps, **child.setting.flags}
            launch = agentrl if sweep.launch is None else shlex.split(sweep.launch)
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
