"""Play random conversations with every context manager: each generated token is trained once, exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import chat_models as models
import numpy as np
import pytest
from numpy.typing import NDArray
from trajectories import Trajectory, converted

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.documents.model_call import ExpertShape, pack_routing, unpack_ids, unpack_routing
from agentrl.documents.status import StopReason
from agentrl.documents.training import DBRecordData
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import ContextManager, Rollout

TEMPLATES = {"all": models.KEEPS_ALL, "tool_cycle": models.KEEPS_CYCLE, "none": models.KEEPS_NONE}
MANAGERS = ("disabled", "discard_all_tools", "discard_all", "summarize", "custom")
SEEDS = range(3)
EXPERTS = ExpertShape(layers=1, top_k=2, experts=1000)


@pytest.fixture(scope="module", params=TEMPLATES)
def chat_format(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A template that keeps all thoughts, those of a tool cycle, or none."""
    folder = tmp_path_factory.mktemp("model")
    chat_format = models.opened(folder, TEMPLATES[request.param], name="template")
    assert chat_format.keeps == request.param
    return chat_format


async def keep_latest(rollout: Rollout) -> list[Message] | None:
    """A context manager that keeps the latest messages, so also results without their calls."""
    return [*rollout.first_messages, *rollout.messages[len(rollout.first_messages) :][-2:]]


def lines(chance: random.Random) -> Iterator[str]:
    """Turns with and without thoughts, text and parallel calls; no two are equal."""
    number = 0
    while True:
        number += 1
        thought = f"<think>\nthought {number} {'x' * chance.randrange(60)}\n</think>\n\n"
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}, "b": 2}}}}\n</tool_call>'
        parts = [
            thought if chance.random() < 0.6 else "",
            f"text {number} " if chance.random() < 0.6 else "",
            call * chance.randrange(3),
        ]
        yield "".join(parts) or f"text {number}"


async def play(seed: int, chat_format: ChatFormat, manager: str) -> Trajectory:
    chance = random.Random(seed)
    said = lines(chance)

    async def wander(rollout: Rollout) -> Outcome:
        for number in range(8):
            turn = await rollout.generate()
            if turn.tool_calls or turn.error:
                await rollout.call_tools(turn)
            if chance.random() < 0.4 or not turn.tool_calls:
                rollout.append_messages([{"role": "user", "content": f"question {number}"}])
            if chance.random() < 0.15 and not await rollout.reset_context():
                return Outcome(StopReason.LENGTH_LIMIT)
        return Outcome(StopReason.TURNS_LIMIT)

    named = "disabled" if manager == "custom" else manager
    limits = {"max_prompt_tokens": 2400, "prompt_reserve_tokens": 900}
    trajectory = Trajectory(lambda _: next(said), new_context=named, **limits)
    trajectory.engine.chat_format = chat_format  # type: ignore[assignment]
    trajectory.engine.experts_of = lambda ids: pack_routing(experts_of(ids))
    trajectory.tools.text = "x" * chance.randrange(1, 200)
    if manager == "custom":
        custom: ContextManager = keep_latest
        trajectory.manager = custom
    await trajectory.run(wander)
    return trajectory


def experts_of(ids: Sequence[int]) -> NDArray[np.int64]:
    """Experts that say which id they belong to."""
    return np.array(ids)[:, None, None] + np.arange(EXPERTS.top_k)


def check_routing(data: DBRecordData) -> None:
    """Check that each token has the experts of its own call, except the last one of each branch."""
    found = unpack_routing(data.routing, EXPERTS)
    wanted = experts_of(unpack_ids(data.input_ids).tolist())
    parents = {node.parent for node in data.nodes}
    wanted[[node.end - 1 for place, node in enumerate(data.nodes) if place not in parents]] = -1
    assert (found == wanted).all()


def contexts(data: DBRecordData) -> dict[int, list[list[int]]]:
    """Return {model call: the ids from the root to the end of each of its spans}."""
    ids = unpack_ids(data.input_ids).tolist()
    found: dict[int, list[list[int]]] = {}
    for span in data.spans:
        place = next(i for i, node in enumerate(data.nodes) if node.start <= span.start < node.end)
        path = ids[data.nodes[place].start : span.end]
        while (place := data.nodes[place].parent) >= 0:
            path = ids[data.nodes[place].start : data.nodes[place].end] + path
        found.setdefault(span.call, []).append(path)
    return found


@pytest.mark.parametrize("manager", MANAGERS)
async def test_each_generated_token_is_trained_once_in_the_context_it_was_sampled_in(
    chat_format: ChatFormat, manager: str
) -> None:
    branches = resets = 0
    for seed in SEEDS:
        trajectory = await play(seed, chat_format, manager)
        engine, calls = trajectory.engine, trajectory.calls
        assert len(calls) == len(engine.outputs)
        data = converted(trajectory)
        assert contexts(data) == {
            index: [prompt + output]
            for index, (prompt, output) in enumerate(zip(engine.prompts, engine.outputs, strict=True))
        }
        assert data.trainable_tokens == sum(map(len, engine.outputs))
        check_routing(data)
        assert [call.index for call in calls if call.parent is None] == [
            call.index for call in calls if call.index == 0 or call.drops_thoughts or call.is_context_reset
        ]
        counted = sum(call.is_context_reset for call in calls)
        assert trajectory.rollout.context_resets - counted in (0, 1)  # a last one may have no call
        resets += counted
        branches += sum(call.drops_thoughts for call in calls)
    assert (branches > 0) is (chat_format.keeps != "all")
    assert (resets > 0) is (manager != "disabled")
