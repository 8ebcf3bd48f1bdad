"""Send the requests of ``rollout_child.py`` and parse the answers; print the CPU seconds.

    python scripts/bench/rollout_bare.py '{"engine_url": …, "model": …, "tokens": 6000, …}'

It is the floor of a sampler: the trajectories' ids as JSON, over the same kept connections, and the answers
as ids and logprobs. It renders, checks and stores nothing, and every trajectory has the same prompt. With
``"stores": true`` it also does once a turn what a sampler cannot leave out: decode the answer, read its tool
call, render and tokenize the result, and insert one document.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import bson
import orjson
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from rollout_child import RESULT, cpu_seconds
from rollout_engine import text_of

from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import ModelConfig
from agentrl.inference.http import EngineHttp

_TIMEOUT = 120.0
Answer = Callable[[str, list[int], list[float]], Awaitable[list[int]]]
"""Returns the ids behind an answer, by the id of its document, its ids and their logprobs."""


async def trajectory(http: EngineHttp, name: int, ids: list[int], turns: int, answer: Answer) -> None:
    """Make the calls of one trajectory."""
    for turn in range(turns):
        body = {
            "input_ids": ids, "rid": f"bare-{name}", "stream": True, "return_logprob": True,
            "sampling_params": {"max_new_tokens": 512, "temperature": 1.0, "sampling_seed": turn},
        }  # fmt: skip
        async for event in http.stream("/generate", orjson.dumps(body), _TIMEOUT, {}):
            logprobs = [item[0] for item in event["meta_info"]["output_token_logprobs"]]
            assert len(logprobs) == len(event["output_ids"])
            ids = [*ids, *event["output_ids"], *await answer(f"{name}/{turn}", event["output_ids"], logprobs)]


def storing(options: dict[str, Any], client: AsyncMongoClient[dict[str, Any]]) -> Answer:
    """Return what reads, renders, tokenizes and stores one turn."""
    model = options["model"]
    renderer: Any = open_chat_format(model, ModelConfig(model_name_or_path=model), with_tools=True).renderer
    tokenizer = read_chat_files(model).tokenizer
    calls = client[options["run"]]["DispatchedSamplingTask"]

    async def answer(name: str, ids: list[int], logprobs: list[float]) -> list[int]:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        content, _, call = text.partition("<tool_call>")
        query = orjson.loads(call.partition("</tool_call>")[0])["arguments"]["query"] if call else ""
        spoken, told = (
            {"role": "assistant", "content": "\0"},
            {"role": "tool", "content": f"{query}: {RESULT}"},
        )
        messages = [{"role": "user", "content": ""}, spoken, told]
        added = renderer.template.render(messages, None, add_generation_prompt=True).partition("\0")[2]
        context = tokenizer.encode_batch_fast([added], add_special_tokens=False)[0].ids
        document = {
            "_id": name, "response": content, "query": query, "result": told["content"],
            "output_ids": array("i", ids).tobytes(), "logprobs": array("f", logprobs).tobytes(),
            "context_ids": array("i", context).tobytes(),
        }  # fmt: skip
        await calls.insert_one(RawBSONDocument(bson.encode(document)))
        return list(context)

    return answer


async def main(options: dict[str, Any]) -> dict[str, Any]:
    """Run all trajectories, ``concurrency`` at a time; return CPU seconds and turns."""
    tokenizer = read_chat_files(options["model"]).tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def known(*_: object) -> list[int]:
        return result

    ids, result = encode(text_of(options["model"], options["tokens"])), encode(RESULT)
    http = EngineHttp(options["engine_url"])
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(options["uri"], w="majority", journal=True)
    answer = known
    if options["stores"]:
        answer = storing(options, client)
        await client.admin.command("ping")  # connect before the clock starts
    names = iter(range(options["groups"] * options["generations"]))

    async def run() -> None:
        for name in names:
            await trajectory(http, name, ids, options["turns"], answer)

    began = cpu_seconds()
    await asyncio.gather(*(run() for _ in range(options["concurrency"])))
    cpu = cpu_seconds() - began
    if options["stores"]:
        await client.drop_database(options["run"])
    await client.close()
    await http.close()
    return {"cpu": cpu, "turns": options["groups"] * options["generations"] * options["turns"]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))), flush=True)
