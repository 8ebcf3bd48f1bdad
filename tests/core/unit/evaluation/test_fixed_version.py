"""Tokens of other versions stay out of an evaluation, and progress names what it waits for."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.documents.model_call import VersionSpan
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import EngineError
from agentrl.evaluation.policy import FixedVersionRouter
from agentrl.inference.engine import Generation
from agentrl.observe import progress as progress_module
from agentrl.observe.progress import Parts, StoppedError


def generation(*versions: int) -> Generation:
    spans = tuple(VersionSpan(version=each, start=at, end=at + 1) for at, each in enumerate(versions))
    return Generation(
        output_ids=tuple(range(len(versions))), logprobs=(0.0,) * len(versions), versions=spans,
        finish_reason="stop", prompt_tokens=1, cached_tokens=0, seconds=0.1, engine_url="u",
    )  # fmt: skip


class Engine:
    """Gives the generations of a script, and is its own router."""

    def __init__(self, *script: Generation) -> None:
        self.script = list(script)

    async def generate(self, *arguments: Any, **options: Any) -> Generation:
        return self.script.pop(0)

    @asynccontextmanager
    async def session(self, *arguments: Any) -> AsyncIterator[Engine]:
        yield self


async def test_a_call_with_tokens_of_another_version_is_repeated() -> None:
    engine = Engine(generation(7, 8), generation(8), generation(7, 7), generation(8))
    async with FixedVersionRouter(engine, 7).session("t") as session:
        found = await session.generate([1], SamplingParams())
    assert found.versions == generation(7, 7).versions
    assert len(engine.script) == 1


async def test_an_engine_that_never_stays_at_the_version_is_an_error() -> None:
    async with FixedVersionRouter(Engine(*[generation(8)] * 5), 7).session("t") as session:
        with pytest.raises(EngineError, match="5 model calls in a row had tokens of another version than 7"):
            await session.generate([1], SamplingParams())


class Output(io.StringIO):
    """Sets ``said`` once a line about the engine is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.said = asyncio.Event()

    def write(self, text: str) -> int:
        if "engine 3" in text:
            self.said.set()
        return super().write(text)


async def test_a_stop_ends_a_wait_and_cancels_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "WORD_SECONDS", 0.01)
    stop, out, ended = asyncio.Event(), Output(), asyncio.Event()

    async def work(told: Parts) -> None:
        told.tell("engine 3 is\nstarting \x1b[31m" + "x" * 100)
        try:
            await out.said.wait()
            stop.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    waiting = Parts("eval r", stop, out)
    async with waiting.lines():
        assert await waiting.until("adding", asyncio.sleep(0, 3)) == 3
        with pytest.raises(StoppedError, match="waiting for an engine"):
            await waiting.until("waiting for an engine", work(waiting))
    assert ended.is_set()
    lines = out.getvalue().splitlines()
    assert any(line.startswith("eval r: waiting for an engine (") for line in lines)
    assert any("s): engine 3 is starting x" in line for line in lines)
    assert max(map(len, lines)) <= 80
