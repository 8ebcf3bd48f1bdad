"""Train from Python: ``agentrl.run`` starts a recipe's processes and returns a handle.

The processes are those of ``agentrl launch train``; what it starts in a terminal, this starts from Python.
"""

from __future__ import annotations

import base64
import fcntl
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_type_hints

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl.base.atomic_folder import replace_file
from agentrl.base.installation import require
from agentrl.base.processes import signal_session, start_child, stop_child, tail
from agentrl.config.flags import flag_words
from agentrl.config.load import Configs, parse
from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.documents.task_json import kind_of
from agentrl.errors import AgentRLError, ConfigError, RunMissingError, StoreUnavailableError
from agentrl.local.launch import DEMO_TRAIN, agentrl_command, demo_model
from agentrl.local.mongod import EmbeddedMongo
from agentrl.screens.notebook import Store

if TYPE_CHECKING:
    import pandas

FOLDER = Path(".agentrl/started")
"""Has a folder for each run: the tasks and functions that were given, and what its processes print."""
_POLL_SECONDS = 1.0
_STOP_SECONDS = 600.0
"""How long ``stop`` waits: a trainer finishes its step and saves."""
_EVALUATION_SECONDS = 24 * 3600.0
_LINES = 12
"""Last lines of the log in an error."""
_ARGUMENTS = {
    "run_name": "name", "max_steps": "steps", "train_file": "tasks", "model_name_or_path": "model",
}  # fmt: skip
"""Flags that arguments of ``run`` give."""

Tasks = str | Path | Iterable[Mapping[str, Any]]
Function = Callable[..., Any]


def run(
    *,
    tasks: Tasks,
    steps: int,
    model: str | Path | None = None,
    scorer: str | Function | None = None,
    tools: Sequence[str | Function] = (),
    name: str | None = None,
    recipe: str = "original-grpo",
    **flags: Any,
) -> StartedRun:
    """Start training ``steps`` optimizer steps in processes of their own, and return at once.

    ``tasks`` are a task file or rows of one: mappings with ``query`` and ``answer``; a row without ``id``
    gets its number, one without ``scorer`` the given ``scorer``, and one without ``tools`` all ``tools``; a
    file names them itself, and ``tools`` are the functions among them. A scorer is a name, ``module:name``,
    or a function ``(model_answer, ground_truth) -> float`` or of a ``ScorerContext``; a tool is a name or a
    function. ``model`` is a folder; None is SmolLM2-135M-Instruct, which is made here, with the recipe's
    limits for it. ``flags`` are those of `agentrl launch train`, such as ``learning_rate=1e-6``.

    The same ``name`` resumes a run. Raises ConfigError before anything is started; what the processes refuse
    is raised by the handle's methods.
    """
    if twice := sorted(flags.keys() & _ARGUMENTS):
        raise ConfigError(f"{twice[0]} is given as a flag", hint=f"give it as {_ARGUMENTS[twice[0]]}=")
    name = f"run-{datetime.now():%Y%m%d-%H%M%S}" if name is None else name
    folder = FOLDER / RunConfig(run_name=name).run_name
    code = Code(folder, f"agentrl_{name.replace('-', '_')}")
    tool_names = [code.path_of(tool) for tool in tools]
    defaults: dict[str, Any] = {} if scorer is None else {"scorer": code.path_of(scorer)}
    if tools:
        functions = [path for path in tool_names if ":" in path]
        flags["tools"] = ",".join(functions)
        if functions != tool_names or not isinstance(tasks, (str, Path)):
            defaults["tools"] = [path.rpartition(":")[2] for path in tool_names]
    if model is None:
        model = demo_model()
        flags = {**DEMO_TRAIN, **flags}
    with _held(folder) as holder:
        flags = {
            "recipe": recipe, "run_name": name, "model_name_or_path": model, "max_steps": steps,
            "train_file": _task_file(tasks, folder / "tasks.jsonl", defaults), **flags,
        }  # fmt: skip
        configs = parse(flag_words(flags), command="agentrl.run", description="", shown=(), needs_run=True)
        code.write()
        return StartedRun(configs, flags, defaults, folder, holder.fileno())


def _held(folder: Path) -> TextIO:
    """Lock the folder of a run's tasks and functions. Its launcher inherits the lock until it ends.

    Raises ConfigError if another one holds it: its processes still read these files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = (folder / "holder").open("a", encoding="utf-8")
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder.close()
        raise ConfigError(
            f"run {folder.name} trains already, started in this folder",
            hint="stop() of its handle ends it; or give another name",
        ) from None
    return holder


def _task_file(tasks: Tasks, path: Path, defaults: Mapping[str, Any]) -> str:
    """Return a task file's name; write rows, with ``defaults``, to ``path``. Raises ConfigError."""
    if isinstance(tasks, (str, Path)):
        if defaults:
            raise ConfigError(
                f"tasks is the file {tasks}, and {' and '.join(defaults)} would be those of its rows",
                hint="name them in the file, or give the rows: a list of mappings",
            )
        return str(tasks)
    hint = 'give rows such as {"query": "2 + 2?", "answer": "4"}; of a DataFrame: table.to_dict("records")'
    lines = []
    for number, row in enumerate(tasks):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} of tasks is {kind_of(row)}: {row!r:.80}", hint=hint)
        named = {"id": f"task-{number:05d}", **defaults, **row}
        try:
            lines.append(f"{json.dumps(named, ensure_ascii=False, allow_nan=False)}\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"row {number} of tasks is not JSON: {error}", hint=hint) from error
    if not lines:
        raise ConfigError("tasks is empty", hint=hint)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(lines).encode())
    return str(path)


class Code:
    """Functions of a notebook, written as a module that the run's processes import."""

    def __init__(self, folder: Path, module: str) -> None:
        """``folder`` will hold the file ``module``.py."""
        self._file = folder / f"{module}.py"
        self._lines: dict[str, list[str]] = {}
        """The lines that make each function."""

    def path_of(self, given: str | Function) -> str:
        """Return the name by which processes find ``given``: itself, or ``module:name`` of a function.

        Raises ConfigError for a function that another process cannot have, and for a second one of a name.
        """
        if isinstance(given, str):
            return given
        module, name = getattr(given, "__module__", None), getattr(given, "__name__", "")
        if module != "__main__" and getattr(sys.modules.get(module or ""), name, None) is given:
            return f"{module}:{name}"
        require("cloudpickle", "a function of a notebook", extra="notebook")
        import cloudpickle

        name = name if name.isidentifier() else f"function_{len(self._lines)}"
        if name in self._lines:
            raise ConfigError(f"two functions are called {name}", hint="give each a name of its own")
        _resolve_annotations(given)
        try:
            pickled = base64.b64encode(cloudpickle.dumps(given)).decode()
        except Exception as error:  # what an object's own pickling raises
            raise ConfigError(
                f"{name} uses what other processes cannot have: {type(error).__name__}: {error}",
                hint="make it inside the function; or save the function in a file, and give 'file:name'"
                " (docs/your_own)",
            ) from error
        # Functions and classes belong to the module, as if they were defined there: a pool pickles them.
        has_module = inspect.isfunction(given) or inspect.isclass(given)
        self._lines[name] = [
            f"{name} = _loads(_decode({pickled!r}))",
            *([f"{name}.__module__ = __name__"] if has_module else []),
        ]
        return f"{self._file.stem}:{name}"

    def write(self) -> None:
        """Write the module, if it has a function."""
        if not self._lines:
            return
        lines = ["from base64 import b64decode as _decode", "", "from cloudpickle import loads as _loads", ""]
        lines += [line for own in self._lines.values() for line in own]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, ("\n".join(lines) + "\n").encode())


def _resolve_annotations(given: Function) -> None:
    """Replace annotations that are text by types: what only they name is not pickled with a function."""
    for function in filter(inspect.isfunction, vars(given).values() if inspect.isclass(given) else (given,)):
        with suppress(NameError):
            function.__annotations__ = get_type_hints(function, include_extras=True)


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval: bootstrap over tasks."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return it as ``agentrl eval`` prints it."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class StartedRun:
    """A run whose processes this one has started. They end with this process, or by ``stop``."""

    def __init__(
        self,
        configs: Configs,
        flags: Mapping[str, Any],
        defaults: Mapping[str, Any],
        folder: Path,
        lock: int,
    ) -> None:
        """Start the processes. ``folder`` has what they read and print, ``defaults`` are fields of tasks.

        ``lock`` is the file descriptor that holds ``folder``.
        """
        self.name = configs[RunConfig].run_name
        # This process may change its folder, as %cd does; the run stays where it is.
        self._place, self._folder = Path.cwd(), folder.resolve()
        self.log = self._folder / "launch.out"
        """What ``agentrl launch`` prints."""
        self._run, self._flags, self._defaults = configs[RunConfig], flags, defaults
        self._mongo_dir = self._place / self._run.mongo_dir
        self._python_path = os.pathsep.join([str(self._folder), *_own_paths()])
        self._store: Store | None = None
        self._is_stopped = False
        for other in filter(lambda each: each.is_running, _STARTED):
            warnings.warn(f"run {other.name} still trains beside this one; stop() ends it", stacklevel=3)
        self._process = self._start("train", flags, self.log, lock)
        _STARTED.append(self)

    @property
    def is_running(self) -> bool:
        """Whether the run's processes run."""
        return self._process.poll() is None

    def wait(self, seconds: float | None = None) -> StartedRun:
        """Show the progress until the run has its steps, at most ``seconds``; interrupting stops nothing.

        Raises AgentRLError, with the last lines of the log, if the run has failed.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=False) as progress:
            asked = int(self._flags["max_steps"])
            bar = progress.add_task(self.name, total=asked)
            while True:
                is_running = self.is_running  # before the look: the last steps are seen after the end
                step, reward = self._last_step()
                said = ": waiting for the first step" if not step else ""
                said = f": it had more steps than the {asked} asked for" if step > asked else said
                said += "" if reward is None else f", reward {reward:.3f}"
                total = max(asked, step)
                progress.update(bar, completed=step, total=total, description=f"{self.name}{said}")
                if not is_running or time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_SECONDS)
        if self._has_failed:
            raise self._failure("train", self._process, self.log)
        return self

    def stop(self) -> None:
        """End the processes: the trainer finishes its step and saves. The same ``run`` resumes.

        Raises AgentRLError if they have not ended after ten minutes, and ends them at once.
        """
        if self._store is not None:
            self._store.close()
            self._store = None
        if not self.is_running:
            return
        self._is_stopped = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            signal_session(self._process, signal.SIGKILL)
            raise AgentRLError(
                f"the processes of run {self.name} were killed: they did not end in {_STOP_SECONDS:g} s",
                hint=f"their logs are in {self._run.log_dir}",
            ) from error

    @property
    def store(self) -> Store:
        """The run's database, for reading, also after the run's end.

        Raises RunMissingError before the run has begun, and AgentRLError, with the last lines of the log, if
        it failed before that.
        """
        if self._store is None:
            uri, mongo = self._run.db_connection_string, EmbeddedMongo(self._mongo_dir)
            try:
                if uri is None and not mongo.status().running:
                    if self._has_failed and not self._mongo_dir.is_dir():
                        raise RunMissingError(f"there is no database in {self._mongo_dir}")
                    mongo.up()  # it may have been stopped since
                self._store = Store.open(self.name, db_connection_string=uri, mongo_dir=str(self._mongo_dir))
            except AgentRLError as error:
                if self._has_failed:
                    raise self._failure("train", self._process, self.log) from error
                raise
        return self._store

    def steps(self) -> pandas.DataFrame:
        """Return the committed optimizer steps: reward, loss, sizes, seconds, all metrics."""
        return _table(self.store.steps(status=StepStatus.COMMITTED))

    def trajectories(self, **where: Any) -> pandas.DataFrame:
        """Return trajectories with messages and tokens, newest first; ``where`` is as in ``Store``."""
        return _table(self.store.trajectories(**where))

    def evaluate(self, tasks: Tasks, *, samples: int = 1, version: int | None = None) -> Estimate:
        """Return pass@1 on ``tasks``, given as to ``run``, of the newest policy version or ``version``.

        Samples ``samples`` trajectories a task by `agentrl eval`: of the newest version on the run's engine
        while it trains, else on an engine of its own. Raises AgentRLError if it fails.
        """
        stem = self._folder / f"eval-{time.time_ns()}"
        file = _task_file(tasks, stem.with_suffix(".jsonl"), self._defaults)
        file = str(Path(file).resolve()) if Path(file).exists() else file
        kept = {flag: value for flag, value in self._flags.items() if flag not in ("train_file", "max_steps")}
        engine = "auto" if self.is_running and version is None else "own"
        flags = {
            **kept, "recipe": "eval", "eval_file": file, "eval_samples": samples, "eval_engine": engine,
            **({} if version is None else {"eval_version": version}),
        }  # fmt: skip
        log = stem.with_suffix(".out")
        process = self._start("eval", flags, log)
        try:
            if process.wait(_EVALUATION_SECONDS) != 0:
                raise self._failure("eval", process, log)
        finally:
            stop_child(process)
        # The same tasks and version are one evaluation, whatever file had them first: the log has its id.
        made = _EVALUATION.findall(log.read_text(encoding="utf-8", errors="replace"))[-1]
        total = next(each.total for each in self.store.evaluations() if each.id == made)
        estimate = total["pass_at"]["1"]
        return Estimate(estimate["value"], estimate["low"], estimate["high"])

    def _start(
        self, command: str, flags: Mapping[str, Any], log: Path, *passed: int
    ) -> subprocess.Popen[bytes]:
        # A thread that outlives this call: the kernel ends a child with the thread that has started it.
        return _STARTER.submit(
            start_child, agentrl_command("launch", [command, *flag_words(flags)]), log=log,
            env={**os.environ, "PYTHONPATH": self._python_path}, pass_fds=passed, cwd=self._place,
        ).result()  # fmt: skip

    @property
    def _has_failed(self) -> bool:
        """Whether the processes ended with an error, and not by ``stop``."""
        return bool(self._process.poll()) and not self._is_stopped

    def _failure(self, command: str, process: subprocess.Popen[bytes], log: Path) -> AgentRLError:
        said = "\n  ".join(tail(log, _LINES).splitlines())
        return AgentRLError(
            f"agentrl launch {command} of run {self.name} ended with exit code {process.returncode}:\n"
            f"  {said}",
            hint=f"see {log}, and the logs in {self._run.log_dir}",
        )

    def _last_step(self) -> tuple[int, float | None]:
        """Return the last committed step and its reward; 0 before the first one."""
        try:
            steps = self.store.steps(status=StepStatus.COMMITTED)
        except (RunMissingError, StoreUnavailableError):  # it has not begun
            return 0, None
        return (steps[-1].step, steps[-1].reward) if steps else (0, None)


def _own_paths() -> list[str]:
    """Return where this process finds modules outside of its installation, as its children shall."""
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    added = [
        path for path in sys.path
        if path and Path(path).is_dir() and not any(map(Path(path).is_relative_to, installed))
    ]  # fmt: skip
    return list(dict.fromkeys([*(str(Path(path).resolve()) for path in added), *inherited]))


_STARTER = ThreadPoolExecutor(1, "agentrl-starter")
_EVALUATION = re.compile(r"^evaluation +(\S+)$", re.MULTILINE)
"""The id of an evaluation, as ``agentrl eval`` prints it."""
_STARTED: list[StartedRun] = []
"""Those of this process: a cell that is executed again would leave its first run training unseen."""


def _table(rows: Sequence[Any]) -> pandas.DataFrame:
    require("pandas", "a table of a run", extra="notebook")
    import pandas

    return pandas.DataFrame([{item.name: getattr(row, item.name) for item in fields(row)} for row in rows])
