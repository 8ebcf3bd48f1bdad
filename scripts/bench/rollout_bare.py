"""Send the requests of ``rollout_child.py`` and parse the answers, and nothing else; print the CPU seconds.

python scripts/bench/rollout_bare.py '{"engine_url": …, "model": …, "tokens": 6000, …}'

It is the floor of a sampler: the trajectories' ids as JSON, over the same kept connections, and the answers
as ids and logprobs. It renders, checks and stores nothing, and every trajectory has the same prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import orjson
from rollout_child import RESULT, cpu_seconds
from rollout_engine import text_of

from agentrl.chat.model_folder import read_chat_files
from agentrl.inference.http import EngineHttp

_TIMEOUT = 120.0


async def trajectory(http: EngineHttp, name: int, ids: list[int], turns: int, result: list[int]) -> int:
    """Make the calls of one trajectory; return how many tokens were sampled."""
    sampled = 0
    for turn in range(turns):
        body = {
            "input_ids": ids, "rid": f"bare-{name}", "stream": True, "return_logprob": True,
            "sampling_params": {"max_new_tokens": 512, "temperature": 1.0, "sampling_seed": turn},
        }  # fmt: skip
        async for event in http.stream("/generate", orjson.dumps(body), _TIMEOUT, {}):
            meta = event["meta_info"]
            logprobs = [item[0] for item in meta["output_token_logprobs"]]
            assert len(logprobs) == len(event["output_ids"])
            sampled += len(logprobs)
            ids = [*ids, *event["output_ids"], *result]
    return sampled


async def main(options: dict[str, Any]) -> dict[str, Any]:
    """Run all trajectories, ``concurrency`` at a time; return CPU seconds and turns."""
    tokenizer = read_chat_files(options["model"]).tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    ids, result = encode(text_of(options["model"], options["tokens"])), encode(RESULT)
    http = EngineHttp(options["engine_url"])
    names = iter(range(options["groups"] * options["generations"]))

    async def run() -> None:
        for name in names:
            await trajectory(http, name, ids, options["turns"], result)

    began = cpu_seconds()
    await asyncio.gather(*(run() for _ in range(options["concurrency"])))
    cpu = cpu_seconds() - began
    await http.close()
    return {"cpu": cpu, "turns": options["groups"] * options["generations"] * options["turns"]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))), flush=True)
