"""Serve one environment of verifiers: a JSON request a line on stdin, a JSON answer a line on stdout.

    .venv-verifiers/bin/python -P verifiers_worker.py NAME ARGUMENTS                 run rollouts
    .venv-verifiers/bin/python -P verifiers_worker.py NAME ARGUMENTS SPLIT SKIP N    print tasks

It runs in the venv of verifiers and imports nothing of AgentRL; -P, because a file beside it is verifiers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Protocol, TextIO

Json = dict[str, Any]


class Hosted(Protocol):
    """An environment of one of the two APIs of verifiers."""

    def tasks(self, split: str) -> Iterator[Json]:
        """Yield {query, row} for each task."""

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold what rollouts share."""

    async def play(self, request: Json) -> Json:
        """Run one rollout against the URL in the request; return reward, metrics and answer, or an error."""


class Rollouts:
    """The API of verifiers 0.4: a taskset, and agents that play its tasks."""

    def __init__(self, name: str, arguments: Json) -> None:
        """``arguments`` are the fields of ``vf.EnvConfig``: the taskset's, and those of each agent."""
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields

        self._vf = vf
        taskset = {"id": name, **arguments.get("taskset", {})}
        config = vf.resolve_env_config({**arguments, "taskset": taskset})
        agents = agent_config_fields(config)
        policy = [role for role, spec in agents.items() if spec.client is None]
        if len(policy) != 1:
            raise ValueError(
                f"the policy plays one of the agents {', '.join(agents)}; give each other one a client, as in"
                ' args={"judge": {"model": "…", "client": {"base_url": "…"}}}'
            )
        placed = {role: self._placed(spec, config, arguments.get(role, {})) for role, spec in agents.items()}
        self._environment = vf.load_environment(config.model_copy(update=placed))
        self._task_class = vf.task_type(name)
        self._taskset = config.taskset

    def _placed(self, spec: Any, config: Any, given: Mapping[str, Any]) -> Any:
        """Return the agent without the defaults that need an account: a bash tool in a hosted sandbox."""
        vf, update = self._vf, {}
        needs_container = vf.task_type(config.taskset.id).NEEDS_CONTAINER
        if (
            spec.harness is None
            and vf.default_harness_id(config.taskset.id) == "bash"
            and not needs_container
        ):
            update["harness"] = vf.harness_config_type("null")(id="null")
        if "runtime" not in given and spec.runtime == vf.PrimeConfig():
            harness = update.get("harness", spec.harness) or vf.default_agent_harness(config.taskset.id)
            is_chat = not needs_container and not vf.load_harness(harness).EXECUTES_CODE
            update["runtime"] = vf.SubprocessConfig() if is_chat else vf.DockerConfig()
        return spec.model_copy(update=update)

    def tasks(self, split: str) -> Iterator[Json]:
        """Yield the tasks in the taskset's order; a taskset has no splits."""
        for task in self._environment.taskset:
            row = task.data.model_dump(mode="json", exclude_defaults=True)
            query = task.data.prompt_text or task.data.name or task.data.id or f"task {task.data.idx}"
            yield {"query": query, "row": row}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold the tool servers of the taskset."""
        async with self._environment.serving():
            # Each rollout has a URL, and so a client, of its own: a shared interception would keep them all.
            self._environment._interception = None
            yield

    async def play(self, request: Json) -> Json:
        """Run one episode; its trace by the policy has the reward."""
        vf, key = self._vf, f"AGENTRL_API_KEY_{request['id']}"
        os.environ[key] = request["api_key"]  # a client takes its key from a variable; programs do not get it
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=key)
        task = self._task_class(
            self._task_class.data_type().model_validate(request["row"]), self._taskset.task
        )
        try:
            (slot,) = self._environment.slots(task)
            episode = await self._environment.run_slot(
                slot, vf.ModelContext(client=client, model=request["model"])
            )
        finally:
            del os.environ[key]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "it failed"}
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            return {
                "error": f"the policy played {len(trained)} times; --num_generations runs a task many times"
            }
        (trace,) = trained
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {
            "reward": trace.reward,
            "metrics": {**trace.metrics, **scores},
            "answer": trace.last_reply,
            "stop": trace.stop_condition,
        }


class Rows:
    """The API of verifiers before 0.4: ``vf.Environment``, whose dataset has rows."""

    def __init__(self, name: str, arguments: Json) -> None:
        """``name`` is what ``vf.load_environment`` takes, or module:Class; ``arguments`` are its own."""
        import verifiers as vf

        module, _, kind = name.partition(":")
        if kind:
            self._environment = getattr(importlib.import_module(module), kind)(**arguments)
        else:
            self._environment = vf.load_environment(name, **arguments)

    def tasks(self, split: str) -> Iterator[Json]:
        """Yield the rows of the train or the eval dataset."""
        environment = self._environment
        for row in environment.get_dataset() if split == "train" else environment.get_eval_dataset():
            yield {"query": str(row["prompt"][-1]["content"]), "row": row}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold nothing."""
        yield

    async def play(self, request: Json) -> Json:
        """Run one rollout; the rubric scores it."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"]) as client:
            done = await self._environment.run_rollout(
                request["row"], OpenAIChatCompletionsClient(client), request["model"], {}
            )
        if done.get("error"):
            return {"error": str(done["error"])}
        last = done["completion"][-1] if done.get("completion") else {}
        return {
            "reward": done["reward"],
            "metrics": done["metrics"],
            "answer": last.get("content"),
            "stop": done.get("stop_condition"),
        }


def host(name: str, arguments: Json) -> Hosted:
    """Load an environment by the API that is installed."""
    import verifiers

    return Rows(name, arguments) if hasattr(verifiers, "load_environment") else Rollouts(name, arguments)


async def answer(hosted: Hosted, request: Json, out: TextIO) -> None:
    """Write the answer to one request; an exception is an answer too."""
    try:
        found = await hosted.play(request)
    except Exception as error:  # noqa: BLE001  the sampler gets it, as the failure of one trajectory
        found = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps({"id": request["id"], **found}, default=str) + "\n")
    out.flush()


async def serve(hosted: Hosted, out: TextIO) -> None:
    """Answer requests, many at a time, until stdin ends; {"cancel": id} ends a rollout."""
    running: dict[int, asyncio.Task[None]] = {}
    async with hosted.serving():
        out.write('{"ready": true}\n')
        out.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            if "cancel" in request:
                if (found := running.get(request["cancel"])) is not None:
                    found.cancel()
                continue
            number = request["id"]
            running[number] = asyncio.create_task(answer(hosted, request, out))
            running[number].add_done_callback(lambda _, number=number: running.pop(number))  # type: ignore[misc]
        left = list(running.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def main() -> None:
    """Print tasks, or serve."""
    name, arguments, *asked = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints goes to stderr
    hosted = host(name, json.loads(arguments))
    if not asked:
        asyncio.run(serve(hosted, out))
        return
    split, skip, count = asked[0], int(asked[1]), int(asked[2])
    for task in islice(hosted.tasks(split), skip, skip + count):
        out.write(json.dumps(task, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
