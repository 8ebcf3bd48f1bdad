"""What ``agentrl audit`` shows of a trajectory whose agent is a client of a gateway, and of evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from gateway_run import GatewayRun, gateway_task
from snapshots import printed

from agentrl.documents.run import Evaluation
from agentrl.screens.run_screens import render_tables
from agentrl.screens.snapshot import SnapshotReader
from agentrl.screens.trajectory_page import render_trajectory
from agentrl.screens.views.counts import Details
from agentrl.screens.views.read import Views
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def test_the_page_of_a_client_shows_its_branches_and_its_reward(store: Store) -> None:
    run = GatewayRun(store, "One.", "Two.", "A title", "Edited.", "Three.")
    question = {"role": "user", "content": "1+2?"}
    async with (
        run.open(train="main") as end,
        openai.AsyncOpenAI(base_url=end.base_url, api_key=end.api_key) as api,
        httpx2.AsyncClient(timeout=60, headers={"authorization": f"Bearer {end.reward_key}"}) as client,
    ):

        async def ask(*messages: Any) -> Any:
            answer = await api.chat.completions.create(model="policy", messages=list(messages))
            said.append({"role": "assistant", "content": answer.choices[0].message.content})
            return answer

        said: list[dict[str, Any]] = []
        first = await ask(question)
        await ask(question, said[0], {"role": "user", "content": "more"})
        await ask({"role": "system", "content": "Make a title."}, question)
        await ask(question, said[0], {"role": "user", "content": "edited"})
        await ask(question, said[0], {"role": "user", "content": "more"}, said[1], question)
        reward = {"score": 0.75, "call_rewards": {first.id: 0.5}}
        assert (await client.post(f"{end.root_url}/reward", json=reward)).is_success
    trajectory = await Views(store.connection).whole_trajectory(run.claim.record_id)
    assert trajectory is not None
    page = printed(render_trajectory(trajectory), 200)
    assert "train rule main: it chooses 3 of 5 model calls" in page
    assert "left out by train rule main (train: agent would train " in page
    for branch in ("1 2 5", "3", "1 4"):
        assert f" {branch} " in page
    assert "stop · not trained" in page
    assert "stop · continues turn 1 · not trained" in page
    assert "stop · continues turn 2" in page
    assert "a new branch: this is the whole prompt" in page
    assert "context was reset" not in page
    assert "0 context resets" in page
    assert "reported   score 0.750 by the agent, turn 1 +0.5" in page


async def test_the_state_of_a_run_shows_environments_and_evaluations(store: Store) -> None:
    await store.tasks.load([replace(gateway_task(), environment="number_game"), gateway_task("other")])
    evaluation = Evaluation(
        id="eval-held_out", version=3, step=30, model=None, file="held_out.jsonl", tasks_digest="t",
        settings_digest="s", samples=2, right_threshold=0.5,
    )  # fmt: skip
    await store.evaluations.begin(evaluation)
    reader = SnapshotReader(store)
    page = printed(render_tables(await reader.read(10.0), await Details(store.connection).read()), 200)
    (environment,) = (line.split() for line in page.splitlines() if "number_game" in line)
    assert environment == ["train", "number_game", "1", "0", "0", "–", "–"]
    (shown,) = (line.split() for line in page.splitlines() if "eval-held_out" in line)
    assert shown[:6] == ["eval-held_out", "version", "3", "30", "waiting", "held_out.jsonl"]
