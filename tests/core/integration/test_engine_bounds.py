"""Every wait for an engine or a router has a bound, and an answer of another shape has a name."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted_engine import VOCAB, Answer, Call, ScriptedEngine
from tcp_server import TcpServer

import agentrl.inference.http as http_module
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineAnswerError, EngineInterruptedError, Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.http import EngineHttp
from agentrl.inference.served_engine import FrontRouter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

PARAMS = SamplingParams(max_new_tokens=8)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"


class Server(TcpServer):
    """Answers a path with its JSON in ``known``; sends ``piece`` without an end for any other."""

    def __init__(self, known: dict[str, Any], piece: bytes = b" ") -> None:
        super().__init__()
        self._known, self._piece = known, piece
        self.paths: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().partition("?")[0]
            self.paths.append(path)
            writer.write(HEAD)
            if path in self._known:
                writer.write(json.dumps(self._known[path]).encode())
                await writer.drain()
                return
            while True:
                writer.write(self._piece)
                await writer.drain()
                await asyncio.sleep(0.001)


@asynccontextmanager
async def http_to(server: Server) -> AsyncIterator[EngineHttp]:
    async with server.serving():
        http = EngineHttp(server.url)
        yield http
        await http.close()


async def test_an_answer_that_never_ends_is_bounded_in_time() -> None:
    async with http_to(Server({})) as http:
        with pytest.raises(EngineError, match=r"/x did not answer within 0\.3 s") as raised:
            await http.call("GET", "/x", timeout=0.3)
    assert raised.value.outage == ENGINES


async def test_an_answer_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "LARGEST_ANSWER", 2**23)
    async with http_to(Server({}, b" " * 2**22)) as http:
        with pytest.raises(EngineAnswerError, match=r"/x answered with more than 8388608 bytes"):
            await http.call("GET", "/x")


async def only_empty_events(call: Call) -> None:
    await call.head()
    await call.tokens([1, 2], 2, version="5")
    while True:
        await call.tokens([], 2)
        await asyncio.sleep(0.01)


async def sends_on_after_its_end(call: Call) -> None:
    await call.head()
    await call.tokens([1, 2], 2, "stop")
    await call.done()
    while True:
        await call.write(b"data: {}\n\n")
        await asyncio.sleep(0.01)


async def generate(answer: Answer, timeout: float) -> Generation:
    async with ScriptedEngine(answer).serving() as engine, EngineClient(engine.url, timeout) as client:
        return await client.generate([4, 5], PARAMS, "one")


async def test_events_without_tokens_do_not_extend_the_wait_for_one() -> None:
    with pytest.raises(EngineInterruptedError, match=r"sent no token for 0\.4 s") as raised:
        await generate(only_empty_events, 0.4)
    assert raised.value.partial is not None
    assert raised.value.partial.output_ids == (1, 2)


async def test_a_generation_ends_with_its_stream_whatever_the_server_sends_after_it() -> None:
    made = await generate(sends_on_after_its_end, 30.0)
    assert (made.output_ids, made.finish_reason) == ((1, 2), "stop")


Use = Callable[[EngineClient], Awaitable[object]]

SHAPES: dict[str, tuple[str, dict[str, Any], Use]] = {
    "sglang-load": ("sglang", {"/v1/loads": {"loads": ["a"]}}, lambda client: client.load()),
    "sglang-load-null": (
        "sglang",
        {"/v1/loads": {"loads": [{"num_running_reqs": None, "num_waiting_reqs": 1}]}},
        lambda client: client.load(),
    ),
    "vllm-health": ("vllm", {"/health": {}, "/is_paused": {}}, lambda client: client.health()),
    "vllm-models": ("vllm", {"/v1/models": {"data": []}}, lambda client: client.model_info()),
    "vllm-names": ("vllm", {"/v1/models": {"data": [1]}}, lambda client: client.instance()),
    "vllm-version": (
        "vllm", {"/weight_info": []}, lambda client: client.generate([4], PARAMS, "one"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
async def test_a_control_answer_of_another_shape_is_named(name: str) -> None:
    engine, known, use = SHAPES[name]
    async with Server(known).serving() as server:
        client = engine_client(engine, server.url, 5.0, vocab_size=VOCAB)
        with pytest.raises(EngineAnswerError, match="in an unknown format") as raised:
            await use(client)
        await client.close()
    assert raised.value.outage == ENGINES


@pytest.mark.parametrize("workers", [["x"], [{"url": "http://e"}], 3])
async def test_a_router_of_another_shape_does_not_end_the_engine(
    workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """``keep`` logs it and goes on trying; ``leave`` returns."""
    async with Server({"/workers": {"workers": workers}}).serving() as server:
        front = FrontRouter(server.url)
        keeping = asyncio.create_task(front.keep("http://e"))
        async with asyncio.timeout(20):
            while "not registered at the router" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "in an unknown format" in caplog.text
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await front.leave("http://e")
