"""Run one trajectory of one task by a worker with a database of its own, and print it: ``agentrl try``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.base.concurrency import end_tasks
from agentrl.base.processes import owned_name
from agentrl.base.registry import import_modules
from agentrl.chat.chat_format import unseen_problem
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    ContainerConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration, unpack_ids
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.documents.task import CONTENT, Claim, Slot, Task, scorer_weights, task_key
from agentrl.documents.task_file import HUB, TaskSource, kind_of_name
from agentrl.documents.task_json import BadTaskError, image_sources, make_task, parse, read_images
from agentrl.documents.task_presets import TaskRows
from agentrl.environments.environment import open_environment, use_containers
from agentrl.errors import (
    ConfigError,
    FailureError,
    LeaseLostError,
    RunMissingError,
    StoreError,
    StoreUnavailableError,
    TaskFileError,
    quoted,
)
from agentrl.inference.engine import Generation, Held
from agentrl.local.mongod import EmbeddedMongo
from agentrl.local.parity import started_engine
from agentrl.observe.terminal import clean, stdout_console
from agentrl.rollout.load_tasks import is_address, open_source
from agentrl.rollout.preflight import TaskNames, require_judge
from agentrl.rollout.setup import allow_configured_imports, live_engines, model_folder, open_worker
from agentrl.rollout.worker import Worker
from agentrl.scoring.answers import check_schema, require_readable
from agentrl.scoring.scorers import require_scorer
from agentrl.screens.trajectory_page import render_trajectory
from agentrl.screens.views.read import Views, WholeTrajectory
from agentrl.store.client import Store, open_existing, scratch_store
from agentrl.tools.tool import Schema
from agentrl.weights.folder import require_folder
from agentrl.worlds.harbor.oracle import check_solutions
from agentrl.worlds.harbor.source import is_harbor

_ID = "try"
_PREFIX = "agentrl_try"
_AT_ONCE = 1e-9
"""A wait in seconds that is over at once: flags allow no 0."""
_SPARE_SECONDS = 60.0
"""Time that the claim of the trajectory outlives its time limits; nothing renews it."""
_END_SECONDS = 120.0
"""Time for the end of a trajectory that is cancelled: hooks, and the removal of a container."""


class _TrialWorker(Worker):
    """A worker whose trajectory nobody tries again: an outage is its failure."""

    async def _give_back(self, claim: Claim, error: FailureError) -> None:
        await self._fail(claim, error.kind, error)


class _FirstPrompt:
    """Engines that keep the first prompt and never answer it: for ``--prompt``."""

    context_length: int | None = None
    partial: PartialGeneration | None = None

    def __init__(self) -> None:
        self.ids: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def session(
        self,
        traj_id: str,
        group: str | None = None,
        partial: PartialGeneration | None = None,
        held: Held = nullcontext,
    ) -> AsyncIterator[_FirstPrompt]:
        """Return itself, as router and as engine."""
        yield self

    async def generate(self, input_ids: Sequence[int], *_: Any, **__: Any) -> Generation:
        """Keep the prompt; wait until the trajectory is cancelled."""
        if not self.ids.done():
            self.ids.set_result(list(input_ids))
        never: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        return await never


async def try_task(
    configs: Configs, wanted: str, *, line: int | None, engine_url: str | None, prompt: bool = False
) -> int:
    """Run one trajectory of a task and print it. Returns 1 if it failed, else 0.

    ``prompt``: print the first prompt instead, and call no engine. A warning names tools that it lacks.
    ``wanted`` is a JSON object, the id of a task of the run, or a task file. Raises ConfigError and
    TaskFileError for tasks that cannot be tried. The trial has a database of its own, which is dropped at the
    end; if no server is named, the embedded one is started and left running. Raises StoreError without one.
    If no engine is named and the run has no live one, the local engine serves the model for the trial; raises
    ConfigError if no model is named either.
    """
    use_containers(configs[ContainerConfig])
    async with AsyncExitStack() as stack:
        run = await _run(stack, configs, wanted, engine_url is not None or prompt)
        flags = configs[TaskConfig]
        import_modules(flags.imported_modules)
        rows = TaskRows.parse(flags.task_preset, flags.task_fields)
        task, images = await _task(wanted, line, run, rows)
        _require_usable(configs, task)
        if engine_url is None and not prompt and not await _engines(configs, run, None):
            engine_url = await _own_engine(stack, configs, run)
        configs = _trial_configs(configs, await model_folder(run, configs))
        await asyncio.to_thread(_start_server, configs[RunConfig])
        store = await stack.enter_async_context(scratch_store(configs[RunConfig], _PREFIX))
        claim = await _claim(store, configs, task, images)
        shown = _FirstPrompt() if prompt else None
        worker, router = await stack.enter_async_context(
            open_worker(
                store, configs, live=lambda: _engines(configs, run, engine_url), kind=_TrialWorker,
                wrap=lambda router: shown or router,
            )
        )  # fmt: skip
        if engine_url is not None:
            router.wait_seconds = 0.0  # nobody starts another engine at this address
        for error in worker.tools.down.values():
            raise error
        await _work(worker, claim, shown)
        whole = await Views(store.connection).whole_trajectory(claim.record_id)
        if whole is None:
            raise StoreError(f"the trial has stored no Record {claim.record_id}")
        first, offered = _first_prompt(worker, task, whole, shown)
        if first is not None and (unseen := unseen_problem(worker.chat_format, first, offered)) is not None:
            print(f"warning  {clean(unseen)}", file=sys.stderr)
        if prompt and first is not None:
            print(clean(worker.chat_format.decode(first)))
            return 0
    stdout_console().print(render_trajectory(replace(whole, others=())))
    return 0 if whole.record.score is not None else 1


async def run_solutions(configs: Configs, wanted: str, *, line: int | None) -> int:
    """Check Harbor tasks by their solutions, and print the rewards. Returns 1 if a solution does not help."""
    use_containers(configs[ContainerConfig])
    if not await asyncio.to_thread(is_harbor, wanted):
        raise ConfigError(
            f"--oracle runs the tests of Harbor tasks, and {wanted} has none",
            hint="give the folder of a task, or of tasks (docs/harbor.md)",
        )
    source = await asyncio.to_thread(open_source, wanted, _ID)
    at_once = configs[SamplingConfig].max_concurrent_samples_per_process
    return await check_solutions(source, line, at_once=at_once)


def _start_server(run: RunConfig) -> None:
    """Start the embedded server, unless it runs or ``run`` names another."""
    if run.db_connection_string is None and not EmbeddedMongo(run.mongo_dir).status().running:
        EmbeddedMongo(run.mongo_dir).up()
        stop = f"agentrl mongo down --mongo_dir {quoted(run.mongo_dir)}"
        print(f"MongoDB started (data in {run.mongo_dir}); stop it with: {stop}", file=sys.stderr)


async def _run(stack: AsyncExitStack, configs: Configs, wanted: str, has_engine: bool) -> Store | None:
    """Open the run's store if the task, the engine or the model comes from it."""
    of_run = not _is_json(wanted) and not _is_source(wanted)
    has_model = configs[ModelConfig].model_name_or_path is not None
    if not of_run and has_engine and has_model:
        return None
    try:
        run = await stack.enter_async_context(await open_existing(configs[RunConfig]))
    except (RunMissingError, StoreUnavailableError) as error:
        if of_run:
            raise
        if has_model:
            return None  # it may have an engine of its own
        raise ConfigError(
            f"no model is named, and no run has one for this trial: {error.message}",
            hint="give --model_name_or_path FOLDER, and the local engine serves it for the trial; or"
            " --run_name of a run with a live engine",
        ) from error
    if of_run:  # names in a database that others write do not decide what is imported here
        await allow_configured_imports(run, configs)
    return run


async def _own_engine(stack: AsyncExitStack, configs: Configs, run: Store | None) -> str | None:
    """Start the local engine with ``--model_name_or_path``, and return its URL; None with a router."""
    engine, model = configs[EngineConfig], configs[ModelConfig]
    if engine.router_url is not None:
        return None
    folder = model.model_name_or_path
    why = (
        "no engine is named" if run is None else f"run {run.run_name!r} has no live engine, and none is named"
    )
    if folder is None or engine.engine != "local":
        missing = (
            "no model is named" if folder is None else f"a trial does not start --engine {engine.engine}"
        )
        raise ConfigError(
            f"{why}; {missing}",
            hint="give --engine_url URL of a running engine; or --model_name_or_path FOLDER alone, and the"
            " local engine serves it for the trial; or start one: agentrl serve --run_name"
            f" {configs[RunConfig].run_name}",
        )
    require_folder(model)
    print(f"{why}: the local engine starts with {folder}", file=sys.stderr, flush=True)
    client = await stack.enter_async_context(started_engine(model, engine))
    await client.set_version(0)
    return client.url


async def _task(
    wanted: str, line: int | None, run: Store | None, rows: TaskRows
) -> tuple[Task, Sequence[Image]]:
    """Return the task and its images."""
    if _is_json(wanted):
        try:
            item, _ = rows.read({"id": _ID, **parse(wanted.encode("utf-8", "surrogatepass"))}, 0)
            return make_task(item, _ID, 1), read_images(image_sources(item), None)
        except BadTaskError as error:
            raise TaskFileError(f"this is not a task: {error}", hint="see docs/tasks.md") from error
    if _is_source(wanted):
        return await asyncio.to_thread(lambda: _task_of_file(open_source(wanted, _ID), line, rows))
    if run is None:
        raise ConfigError(f"{wanted!r} is neither JSON nor a file", hint="give one of them")
    for key in (wanted, task_key("train", 0, wanted)):
        task = await run.tasks.get(key)
        if task is not None:
            images = await run.images.get({image.sha256 for image in task.images})
            return task, list(images.values())
    raise ConfigError(
        f"{wanted!r} is neither a task of run {run.run_name!r} nor a file",
        hint="give a task's _id (split/epoch/id), its id in the task file, a task file, or JSON",
    )


def _is_json(wanted: str) -> bool:
    return wanted.lstrip().startswith("{")


def _is_source(wanted: str) -> bool:
    """Return whether this is the path or the address of tasks, rather than the id of one."""
    if is_address(wanted) or wanted.startswith(HUB) or kind_of_name(wanted) is not None:
        return True
    try:
        return Path(wanted).exists() or Path(wanted.rpartition(":")[0] or wanted).is_dir()
    except (OSError, ValueError):
        return False


def _task_of_file(source: TaskSource, line: int | None, rows: TaskRows) -> tuple[Task, Sequence[Image]]:
    for item in source.items():
        if line is not None and item.line != line:
            continue
        try:
            if isinstance(item.value, BadTaskError):
                raise item.value
            value, _ = rows.read(item.value, item.number)
            task = make_task(value, _ID, 1, source.folder)
            return task, read_images(image_sources(value), source.folder)
        except BadTaskError as error:
            raise TaskFileError(f"{source.where(item)}: {error}", hint="correct this line") from error
    where = f"no task begins on line {line}" if line is not None else "it holds no tasks"
    raise TaskFileError(f"{source.path}: {where}", hint="give --line N of a task")


def _require_usable(configs: Configs, task: Task) -> None:
    """Raise ConfigError or TaskFileError for a task that no sampler can run or score."""
    names = TaskNames()
    names.agent(task.agent_name or configs[AgentConfig].agent_name)
    for scorer in scorer_weights(task.scorer):
        names.scorer(scorer)
    require_scorer(task.scorer)
    check_schema(task.answer_schema)
    try:
        require_readable(task)
    except BadTaskError as error:
        raise TaskFileError(f"task {task.task_id}: {error}", hint="see docs/scoring.md") from error
    require_judge(scorer_weights(task.scorer), configs[SamplingConfig].agent_config_path)


def _trial_configs(configs: Configs, folder: str) -> Configs:
    """Return the configuration of a worker that tries once, and has the model in ``folder``."""
    sampling = replace(configs[SamplingConfig], outage_wait_seconds=_AT_ONCE)
    changed: dict[type, object] = {
        ModelConfig: replace(configs[ModelConfig], model_name_or_path=folder),
        SamplingConfig: sampling,
        ClaimConfig: replace(configs[ClaimConfig], max_attempts=1, max_scorings=1),
    }
    return Configs([changed.get(type(each), each) for each in configs], configs.given)


async def _claim(store: Store, configs: Configs, tried: Task, images: Sequence[Image]) -> Claim:
    """Store the task and its images in the empty database, and claim its only slot."""
    content = {name: getattr(tried, name) for name in CONTENT}
    task = Task(
        id=tried.id, task_id=tried.task_id, split=tried.split, epoch=tried.epoch, order=0,
        slots=(Slot(traj_id=0),), **content,
    )  # fmt: skip
    await store.images.put(*images)
    await store.tasks.load([task])
    limits = configs[AgentConfig].trajectory_timeout_seconds + configs[SamplingConfig].scorer_timeout_seconds
    claim = await store.claims.claim(
        split=task.split, owner=owned_name(_ID), lease_seconds=limits + _SPARE_SECONDS
    )
    if claim is None:
        raise LeaseLostError(f"task {task.id} of this trial was claimed by another process")
    return claim


async def _engines(configs: Configs, run: Store | None, url: str | None) -> Sequence[InferenceService]:
    """Return the engine at ``--engine_url``, or the live engines of the run."""
    if url is None:
        return [] if run is None else await live_engines(run, configs[EngineConfig])
    model = str(configs[ModelConfig].model_name_or_path)
    return [
        InferenceService(
            id=url, url=url, engine=configs[EngineConfig].engine, model=model, status=ServiceStatus.READY,
            host="", pid=0,
        )
    ]  # fmt: skip


async def _work(worker: Worker, claim: Claim, shown: _FirstPrompt | None) -> None:
    """Run the trajectory to its end, or to its first prompt if that is to be ``shown``."""
    running = asyncio.create_task(worker.run(claim))
    ends: set[asyncio.Future[Any]] = {running} if shown is None else {running, shown.ids}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        await end_tasks(running, seconds=_END_SECONDS)


def _first_prompt(
    worker: Worker, task: Task, whole: WholeTrajectory, shown: _FirstPrompt | None
) -> tuple[list[int] | None, Sequence[Schema]]:
    """Return the ids of the first prompt, if there was one, and the tools that it offers."""
    if whole.calls and (shown is None or not shown.ids.done()):
        return unpack_ids(whole.calls[0].context_ids).tolist(), whole.calls[0].tools or ()
    environment = open_environment(task, call_timeout=worker.environment_timeout)
    own = () if environment is None else environment.schemas
    ids = shown.ids.result() if shown is not None and shown.ids.done() else None
    return ids, [*worker.tools.list(task.tools), *own]
