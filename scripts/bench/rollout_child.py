"""Run one sampler over tasks of one context length, and print its cost as a line of JSON.

python scripts/bench/rollout_child.py '{"uri": …, "engine_url": …, "model": …, "tokens": 6000, …}'
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from typing import Any

from rollout_engine import WORDS, text_of

from agentrl import tool
from agentrl.config.load import parse
from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.rollout.agents import check_agent
from agentrl.rollout.housekeeping import GroupFinalizer, collect_garbage_less_often
from agentrl.rollout.sampler import Sampler
from agentrl.rollout.setup import open_worker, sampler_config
from agentrl.store.client import Store, open_store

RESULT = " ".join(random.Random(1).choices(WORDS, k=60))
_WATCHING = ("hello", "isMaster", "ping", "serverStatus")


@tool("look")
async def look(query: str) -> str:
    """Look a page up."""
    return f"{query}: {RESULT}"


def make_tasks(options: dict[str, Any]) -> list[Task]:
    """Return tasks whose prompts have about ``tokens`` tokens."""
    text = text_of(options["model"], options["tokens"])
    return [
        Task(
            id=task_key("train", 0, str(number)), task_id=str(number), split="train", epoch=0, order=number,
            query=f"{number} {text}", answer="1", scorer="exact",
            slots=tuple(Slot(traj_id=each) for each in range(options["generations"])),
        )
        for number in range(options["groups"])
    ]  # fmt: skip


async def main(options: dict[str, Any]) -> dict[str, Any]:
    """Sample every task once; return CPU seconds, turns, wall seconds and peak memory."""
    flags = {
        "run_name": options["run"], "db_connection_string": options["uri"],
        "model_name_or_path": options["model"], "tools": "look", "max_turns": options["turns"],
        "max_prompt_tokens": 200_000, "max_model_len": 300_000, "heartbeat_seconds": 600,
        "max_concurrent_samples_per_process": options["concurrency"],
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    configs = parse(words, command="agentrl sample", description="", shown=())
    async with await open_store(configs[RunConfig]) as store:
        await store.tasks.load(make_tasks(options))
        await store.services.register(
            InferenceService(
                id="e",
                url=options["engine_url"],
                engine="sglang",
                model=options["model"],
                host="h",
                pid=1,
                status=ServiceStatus.READY,
                policy_version=0,
            )
        )
        async with open_worker(store, configs) as (worker, _):
            collect_garbage_less_often()
            check_agent("react", None)  # imports its module, as the command does before it samples
            sampler = Sampler(
                store,
                worker,
                GroupFinalizer(store, GroupConfig(min_score_spread=0.0), split="train", seed=0),
                sampler_config(configs, "train", epochs=1),
                _unlimited,
            )
            commands = await _commands(store)
            began, cpu = time.perf_counter(), cpu_seconds()
            await sampler.run(asyncio.Event())
            seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
            commands = await _commands(store) - commands
        trajectories = options["groups"] * options["generations"]
        found = await store.database["Record"].count_documents(
            {"status": {"$in": ["ready", "abandoned"]}, "turns": options["turns"]}
        )
        calls = await store.database["DispatchedSamplingTask"].count_documents({})
        if found != trajectories or calls != trajectories * options["turns"]:
            first = await store.database["Record"].find_one({}, {"stop_reason": 1, "failure": 1})
            raise RuntimeError(
                f"{found} of {trajectories} trajectories are whole, {calls} calls stored: {first}"
            )
        await store.database.client.drop_database(options["run"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "cpu": cpu, "seconds": seconds, "turns": calls, "peak_bytes": peak,
        "commands": commands / trajectories,
    }  # fmt: skip


async def _commands(store: Store) -> int:
    """Return how many commands the server has run, without those by which a driver watches it."""
    status = await store.database.client.admin.command("serverStatus")
    commands = status["metrics"]["commands"]
    # Beside the commands stands the number of unknown ones.
    counted = [name for name in commands if name not in (*_WATCHING, "<UNKNOWN>")]
    return sum(commands[name]["total"] for name in counted)


async def _unlimited() -> int:
    return 1_000_000


def cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if settings.get("profile"):
        import cProfile
        import pstats

        profiler = cProfile.Profile(time.process_time)
        profiler.enable()
        print(json.dumps(asyncio.run(main(settings))), flush=True)
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats(settings["profile"]).print_stats(110)
    else:
        print(json.dumps(asyncio.run(main(settings))), flush=True)
    sys.stdout.flush()
    os._exit(0)
