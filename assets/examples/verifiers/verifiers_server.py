"""Serve one environment of verifiers: a JSON request a line on stdin, a JSON answer a line on stdout.

    .venv-verifiers/bin/python verifiers_server.py NAME ARGUMENTS [SPLIT N]

It runs in the venv of verifiers and imports nothing of AgentRL. With SPLIT and N it prints rows of the
environment's dataset, and ends.
"""

import asyncio
import importlib
import json
import os
import sys

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


def load(name, arguments):
    """Return the environment: an installed package as ``vf.load_environment`` knows it, or module:Class."""
    module, _, kind = name.partition(":")
    if kind:
        return getattr(importlib.import_module(module), kind)(**arguments)
    return vf.load_environment(name, **arguments)


async def play(environment, request):
    """Run one rollout against the URL in the request; return its reward and the rubric's metrics."""
    client = AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"], max_retries=2)
    async with client:
        done = await environment.run_rollout(
            request["row"], OpenAIChatCompletionsClient(client), request["model"], {}
        )
    return {"reward": done["reward"], "metrics": done["metrics"], "error": done.get("error")}


async def answer(environment, request, out):
    """Write the answer to one request; an exception is an answer too."""
    try:
        found = await play(environment, request)
    except Exception as error:  # noqa: BLE001  the sampler gets it, as the failure of one trajectory
        found = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps({"id": request["id"], **found}, default=str) + "\n")
    out.flush()


async def serve(environment, out):
    """Answer requests, many at a time, until stdin ends."""
    async with asyncio.TaskGroup() as tasks:
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.create_task(answer(environment, json.loads(line), out))


def main():
    """Print rows of the dataset, or serve."""
    name, arguments, *asked = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints goes to stderr
    environment = load(name, json.loads(arguments))
    if not asked:
        asyncio.run(serve(environment, out))
        return
    split, count = asked[0], int(asked[1])
    rows = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    for row in rows.select(range(min(count, len(rows)))).to_list():
        out.write(json.dumps(row, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
