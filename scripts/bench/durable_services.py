"""Serve an engine and a tool that take time, and count what they do, for the benchmark of killed samplers.

    python scripts/bench/durable_services.py MODEL TURNS GENERATE_SECONDS TOOL_SECONDS

The engine speaks SGLang's HTTP API, the tool ``look`` is behind an MCP manager's. Turns 1 to TURNS - 1 of a
trajectory call the tool, the last one answers. The prompt alone decides what is generated, so that any
process may continue a conversation. Prints its port; GET /counts returns the counts as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import orjson
from rollout_engine import requests_of, write_info, write_json

from agentrl.chat.model_folder import read_chat_files

CHUNKS = 5
"""Events of one answer: an engine that loses its client generates no further one."""

RESULT = "The page is open."
_QUESTION = "the author of the tower by the river, and the year in which the museum was built"


class Services:
    """The engine and the manager of one run, which outlive its samplers."""

    def __init__(self, model: str, turns: int, generate_seconds: float, tool_seconds: float) -> None:
        files = read_chat_files(model)
        self._tokenizer = files.tokenizer
        self._eos = min(files.stop_ids)
        self._generate_seconds = generate_seconds
        self._tool_seconds = tool_seconds
        self._answers = [self._ids(turn, turns) for turn in range(1, turns + 1)]
        self.counts = {"model_calls": 0, "tokens": 0, "tool_calls": 0, "tool_seconds": 0.0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        async for path, body in requests_of(reader, writer):
            if path == b"/generate":
                await self._generate(orjson.loads(body), reader, writer)
            elif path == b"/counts":
                write_json(writer, self.counts)
            elif path.startswith(b"/mcpapi/"):
                write_json(writer, await self._manage(path))
            else:
                write_info(writer)

    async def _generate(
        self, request: dict[str, list[int]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Stream the rest of this turn's answer; count each chunk when it is made."""
        self.counts["model_calls"] += 1
        prompt = request["input_ids"]
        whole = self._answers[self._tokenizer.decode(prompt, skip_special_tokens=True).count(RESULT)]
        begun = next(n for n in range(len(whole), -1, -1) if prompt[len(prompt) - n :] == whole[:n])
        ids = whole[begun:]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        ends = [len(ids) * (number + 1) // CHUNKS for number in range(CHUNKS)]
        for start, end in zip([0, *ends], ends, strict=False):
            await asyncio.sleep(self._generate_seconds * (end - start) / len(whole))
            if reader.at_eof() or writer.is_closing():
                return
            self.counts["tokens"] += end - start
            _write_event(writer, self._event(prompt, ids[start:end], end, is_last=end == len(ids)))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _event(self, prompt: Sequence[int], new: Sequence[int], total: int, *, is_last: bool) -> bytes:
        meta = {
            "finish_reason": {"type": "stop", "matched": self._eos} if is_last else None,
            "output_token_logprobs": [[-0.5 - token / 1e6, token, None] for token in new],
            "prompt_tokens": len(prompt), "completion_tokens": total, "cached_tokens": len(prompt),
            "weight_version": "0",
        }  # fmt: skip
        return orjson.dumps({"text": "", "output_ids": new, "meta_info": meta})

    async def _manage(self, path: bytes) -> dict[str, object]:
        """Return the servers, the tools, or the result of a call, which outlives its client."""
        if path.endswith(b"/servers"):
            return {"servers": ["pages"]}
        if path.endswith(b"/tools"):
            parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
            function = {"name": "look", "description": "Looks a page up.", "parameters": parameters}
            return {"tools": [{"type": "function", "function": function, "state": "stateless"}]}
        began = time.perf_counter()
        await asyncio.sleep(self._tool_seconds)
        self.counts["tool_calls"] += 1
        self.counts["tool_seconds"] += time.perf_counter() - began
        return {"status": "success", "content": RESULT}

    def _ids(self, turn: int, turns: int) -> list[int]:
        call = {"name": "look", "arguments": {"query": f"page {turn}: {_QUESTION}"}}
        text = "<answer>1</answer>" if turn == turns else f"<tool_call>{json.dumps(call)}</tool_call>"
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._eos]


def _write_event(writer: asyncio.StreamWriter, body: bytes) -> None:
    event = b"data: " + body + b"\n\n"
    writer.write(b"%x\r\n" % len(event) + event + b"\r\n")


async def main(model: str, turns: int, generate_seconds: float, tool_seconds: float) -> None:
    """Serve until stdin is closed."""
    services = Services(model, turns, generate_seconds, tool_seconds)
    server = await asyncio.start_server(services.serve, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
