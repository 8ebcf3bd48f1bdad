"""Train from Python: ``agentrl.run`` starts a recipe's processes and returns a handle.

The processes are those of ``agentrl launch train``; what it starts in a terminal, this starts from Python.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl.base.atomic_folder import replace_file
from agentrl.base.installation import require, shipped_files
from agentrl.base.processes import signal_session, start_child, stop_child, tail
from agentrl.base.validation import read_settings
from agentrl.config.flags import flag_words
from agentrl.config.load import Configs, parse
from agentrl.config.schema import RunConfig
from agentrl.documents.status import StepStatus
from agentrl.errors import AgentRLError, ConfigError, RunMissingError, StoreUnavailableError
from agentrl.local.launch import agentrl_command, demo_model
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
    recipe: str = "grpo",
    **flags: Any,
) -> StartedRun:
    """Start training ``steps`` optimizer steps in processes of their own, and return at once.

    ``tasks`` are a task file or rows of one: mappings with ``query`` and ``answer``; a row without ``id``
    gets its number, one without ``scorer`` the given ``scorer``, and one without ``tools`` all ``tools``. A
    scorer is a name, ``module:name``, or a function ``(model_answer, ground_truth) -> float`` or of a
    ``ScorerContext``; a tool is a name or a function. ``model`` is a folder; None is SmolLM2-135M-Instruct,
    which is made here, with the recipe's limits for it. ``flags`` are those of `agentrl launch train`, such
    as ``learning_rate=1e-6``.

    The same ``name`` resumes a run. Raises ConfigError before anything is started; what the processes refuse
    is raised by the handle's methods.
    """
    name = f"run-{datetime.now():%Y%m%d-%H%M%S}" if name is None else name
    folder = FOLDER / RunConfig(run_name=name).run_name
    code = Code(folder, f"agentrl_{name.replace('-', '_')}")
    tool_names = [code.path_of(tool) for tool in tools]
    defaults: dict[str, Any] = {} if scorer is None else {"scorer": code.path_of(scorer)}
    if tools:
        defaults["tools"] = [path.rpartition(":")[2] for path in tool_names]
        flags["tools"] = ",".join(path for path in tool_names if ":" in path)
    if model is None:
        model = demo_model()
        flags = {**_demo_limits(recipe), **flags}
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


def _demo_limits(recipe: str) -> dict[str, Any]:
    """Return the flags of the recipe's section ``demo``, whose tasks are not these."""
    file = Path(recipe) if Path(recipe).suffix else shipped_files() / "configs" / f"{recipe}.yml"
    section = (read_settings(file, hint="write one 'flag: value' per line").content or {}).get("demo", {})
    return {flag: value for flag, value in section.items() if flag != "train_file"}


def _task_file(tasks: Tasks, path: Path, defaults: Mapping[str, Any]) -> str:
    """Return a task file's name; write rows, with ``defaults``, to ``path``. Raises ConfigError."""
    if isinstance(tasks, (str, Path)):
        if defaults:
            raise ConfigError(
                f"tasks is the file {tasks}, and {' and '.join(defaults)} would be those of its rows",
                hint="name them in the file, or give the rows: a list of mappings",
            )
        return str(tasks)
    rows = [{"id": f"task-{number:05d}", **defaults, **row} for number, row in enumerate(tasks)]
    if not rows:
        raise ConfigError("tasks is empty", hint='give rows such as {"query": "2 + 2?", "answer": "4"}')
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode())
    return str(path)


class Code:
    """Functions of a notebook, written as a module that the run's processes import."""

    def __init__(self, folder: Path, module: str) -> None:
        """``folder`` will hold the file ``module``.py."""
        self._file = folder / f"{module}.py"
        self._pickled: dict[str, bytes] = {}

    def path_of(self, given: str | Function) -> str:
        """Return the name by which processes find ``given``: itself, or ``module:name`` of a function.

        Raises ConfigError for a function that another process cannot have.
        """
        if isinstance(given, str):
            return given
        module, name = getattr(given, "__module__", None), getattr(given, "__name__", "")
        if module != "__main__" and module is not None and name.isidentifier():
            return f"{module}:{name}"
        require("cloudpickle", "a function of a notebook", extra="notebook")
        import cloudpickle

        name = name if name.isidentifier() else f"function_{len(self._pickled)}"
        try:
            self._pickled[name] = cloudpickle.dumps(given)
        except Exception as error:  # what an object's own pickling raises
            raise ConfigError(
                f"{name} uses what other processes cannot have: {type(error).__name__}: {error}",
                hint="make it inside the function; or save the function in a file, and give 'file:name'"
                " (docs/your_own)",
            ) from error
        return f"{self._file.stem}:{name}"

    def write(self) -> None:
        """Write the module, if it has a function. Functions belong to it, as if they were defined there."""
        if not self._pickled:
            return
        lines = ["import base64", "", "import cloudpickle", ""]
        for name, pickled in self._pickled.items():
            text = base64.b64encode(pickled).decode()
            lines += [
                f"{name} = cloudpickle.loads(base64.b64decode({text!r}))",
                f"{name}.__module__ = __name__",
            ]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, ("\n".join(lines) + "\n").encode())


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
        self.log = folder / "launch.out"
        """What ``agentrl launch`` prints."""
        self._run, self._flags, self._defaults, self._folder = configs[RunConfig], flags, defaults, folder
        self._store: Store | None = None
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
            bar = progress.add_task(self.name, total=int(self._flags["max_steps"]))
            while True:
                is_running = self.is_running  # before the look: the last steps are seen after the end
                done = self._rewards()
                last = f", reward {done[-1]:.3f}" if done else ": waiting for the first step"
                progress.update(bar, completed=len(done), description=f"{self.name}{last}")
                if not is_running or time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_SECONDS)
        self._require_no_failure()
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
        """The run's database, for reading. Raises RunMissingError before the run has begun."""
        self._require_no_failure()
        if self._store is None:
            run = self._run
            if run.db_connection_string is None and not EmbeddedMongo(run.mongo_dir).status().running:
                EmbeddedMongo(run.mongo_dir).up()  # a run's end stops the server that it started
            self._store = Store.open(
                self.name, db_connection_string=run.db_connection_string, mongo_dir=run.mongo_dir
            )
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
        found = [each for each in self.store.evaluations() if each.file == file and each.total]
        estimate = found[-1].total["pass_at"]["1"]
        return Estimate(estimate["value"], estimate["low"], estimate["high"])

    def _start(
        self, command: str, flags: Mapping[str, Any], log: Path, *passed: int
    ) -> subprocess.Popen[bytes]:
        paths = filter(None, [str(self._folder.resolve()), os.environ.get("PYTHONPATH")])
        return start_child(
            agentrl_command("launch", [command, *flag_words(flags)]), log=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, pass_fds=passed,
        )  # fmt: skip

    def _require_no_failure(self) -> None:
        if self._process.poll():
            raise self._failure("train", self._process, self.log)

    def _failure(self, command: str, process: subprocess.Popen[bytes], log: Path) -> AgentRLError:
        said = "\n  ".join(tail(log, _LINES).splitlines())
        return AgentRLError(
            f"agentrl launch {command} of run {self.name} ended with exit code {process.returncode}:\n"
            f"  {said}",
            hint=f"see {log}, and the logs in {self._run.log_dir}",
        )

    def _rewards(self) -> list[float]:
        try:
            steps = self.store.steps(status=StepStatus.COMMITTED)
        except (RunMissingError, StoreUnavailableError):  # it has not begun
            return []
        return [step.reward for step in steps if step.reward is not None]


_STARTED: list[StartedRun] = []
"""Those of this process: a cell that is executed again would leave its first run training unseen."""


def _table(rows: Sequence[Any]) -> pandas.DataFrame:
    require("pandas", "a table of a run", extra="notebook")
    import pandas

    return pandas.DataFrame([{item.name: getattr(row, item.name) for item in fields(row)} for row in rows])
