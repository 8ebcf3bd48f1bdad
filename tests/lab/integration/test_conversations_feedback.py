"""Conversations that no task asked for: stored through the gateway, scored by feedback, abandoned without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from db_command import Db, violations
from example_training import train_steps
from gateway_run import answerer_of
from ready_data import statuses
from rollout_fakes import ScriptedEngine, format_of
from test_sampling import Setting, quick, task, until
from tiny_policy import write_tiny_policy

from agentrl.columns import pool as pool_module
from agentrl.columns.outages import Outages
from agentrl.columns.scores import Scoring, score_queued
from agentrl.config.load import parse
from agentrl.config.sampling import AgentConfig, GatewayConfig
from agentrl.config.schema import ClaimConfig, GroupConfig, RunConfig, SamplingConfig
from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import CONVERSATIONS, Slot
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError, RunMissingError, StoreUnavailableError
from agentrl.gateway.app import GatewayApp, GatewayServer
from agentrl.gateway.feedback import give_feedback
from agentrl.gateway.request import GatewayError
from agentrl.gateway.serve import ProductConversations, require_key
from agentrl.lab.manage_runs import RunAdmin, rename_run
from agentrl.observe.begin_run import begin_run
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store, open_connection

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]
__all__ = ["quick"]
KEY = "secret"
EXAMPLE = Path(__file__).parents[3] / "assets" / "examples" / "chat_feedback"
HEADERS = {"authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def gateway(
    store: Store, *script: str, idle_minutes: float = 10.0, hours: float = 1.0, key: str | None = KEY
) -> AsyncIterator[httpx2.AsyncClient]:
    """A gateway process with conversations; yield a product's client of it."""
    engine = ScriptedEngine(format_of(), *script)
    engine.version = 0
    config = GatewayConfig(gateway_port=0, gateway_train="feedback", gateway_idle_minutes=idle_minutes)
    sampling, outages = SamplingConfig(feedback_hours=hours), Outages()
    conversations = ProductConversations(
        store=store, config=config, agent=AgentConfig(), key=key,
        scoring=Scoring(store=store, outages=outages, sampling=sampling, claims=ClaimConfig()),
        finalizer=GroupFinalizer(store, GroupConfig(), split="train", seed=0),
    )  # fmt: skip
    app = GatewayApp(answerer_of(store, engine), config, conversations.routes())
    server, stop = GatewayServer(app, config), asyncio.Event()
    await server.start()
    running = asyncio.create_task(conversations.run(stop))
    try:
        headers = HEADERS if key else {}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60.0) as client:
            yield client
    finally:
        stop.set()
        await running
        outages.close()
        await app.close()
        await server.close()


async def opened(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/conversations", json=body)
    assert response.status_code == 201, response.text
    return dict(response.json())


async def said(conversation: dict[str, Any], *messages: str) -> str:
    """Send the user's messages one after the other; return the id of the last answer."""
    history: list[Any] = []
    async with openai.AsyncOpenAI(
        base_url=conversation["base_url"], api_key=conversation["api_key"], max_retries=0
    ) as client:
        for message in messages:
            history.append({"role": "user", "content": message})
            answer = await client.chat.completions.create(model=conversation["model"], messages=history)
            history.append({"role": "assistant", "content": answer.choices[0].message.content})
    return answer.id


async def feedback(client: httpx2.AsyncClient, conversation: dict[str, Any], **body: Any) -> httpx2.Response:
    return await client.post("/feedback", json={"id": conversation["id"], **body})


async def record_of(store: Store, conversation: dict[str, Any]) -> Record:
    record = await store.records.get(f"train/-1/{conversation['id']}/0/1")
    assert record is not None
    return record


async def until_status(store: Store, conversation: dict[str, Any], status: RecordStatus) -> Record:
    async def reached() -> bool:
        return (await record_of(store, conversation)).status is status

    await until(reached)
    return await record_of(store, conversation)


async def data_of(store: Store, record: Record) -> DBRecordData:
    document = await store.database["DBRecordData"].find_one({"_id": record.id})
    assert document is not None
    return DBRecordData.from_document(document)


async def test_the_stored_feedback_is_the_one_that_was_scored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feedback that comes while an earlier one is turned into the score is refused, or counts."""
    answers: list[int] = []
    async with gateway(store, "Hello.") as client:
        conversation = await opened(client)
        await said(conversation, "hello")
        get = store.records.get

        async def give_more(record_id: str) -> Record | None:
            record = await get(record_id)
            answers.append((await feedback(client, conversation, score=len(answers) + 2)).status_code)
            return record

        monkeypatch.setattr(store.records, "get", give_more)
        await feedback(client, conversation, score=1, end=True)
        monkeypatch.setattr(store.records, "get", get)
        record = await until_status(store, conversation, RecordStatus.READY)
    assert answers == [200, 200, 400], "only the last one came too late"
    assert record.score == record.reported_reward.score == 3


async def test_feedback_by_id_becomes_training_data_and_a_check_finds_nothing(store: Store) -> None:
    async with gateway(store, "Hello.", "I do not know.", "4") as client:
        liked, disliked = await opened(client, query="hello", meta={"user": 7}), await opened(client)
        last = await said(liked, "hello", "why?")
        await said(disliked, "2+2?")
        thumb = await feedback(
            client, liked, score=1, call_rewards={last: -0.5}, end=True, details={"by": "thumb"}
        )
        assert thumb.json() == {"status": "stored"}
        assert (await feedback(client, disliked, score=0)).status_code == 200
        corrected = {"corrected": "It is 4.", "by": "ann"}
        assert (await feedback(client, disliked, score=-1, **corrected, end=True)).status_code == 200
        one, other = [await until_status(store, each, RecordStatus.READY) for each in (liked, disliked)]
        with pytest.raises(openai.AuthenticationError):
            await said(liked, "more")
        late = await feedback(client, liked, score=0)
        assert (late.status_code, late.json()["error"]["code"]) == (400, "too_late")
    assert (one.score, one.score_details["scorer"], one.score_details["by"]) == (1.0, "feedback", "thumb")
    assert (one.final_answer, one.turns, one.turn_rewards) == ("I do not know.", 2, (0.0, -0.5))
    assert (other.score, other.advantage) == (-1.0, -1.0)
    found = await store.tasks.get(one.task)
    assert (found.query, found.meta, found.epoch) == ("hello", {"user": 7}, CONVERSATIONS)
    data = await data_of(store, one)
    assert (data.status, data.advantage, data.turns) == (DataStatus.READY, 1.0, 2)
    (label,) = (await store.labels.of_records([other.id]))[other.id]
    assert (label.label, label.note, label.by, label.score) == ("corrected", "It is 4.", "ann", -1.0)
    assert all("published version" in problem for problem in await violations(store))


async def test_a_conversation_outlives_its_gateway_and_waits_for_feedback_that_comes_later(
    store: Store,
) -> None:
    async with gateway(store, "Hello.") as client:
        conversation = await opened(client)
        await said(conversation, "hello")
    assert await store.expired_leases.reap("train") == 0
    assert await store.claims.claim(split="train", owner="sampler", lease_seconds=60) is None
    await store.database["Task"].update_one(
        {}, [{"$set": {"slots": {"$map": {"input": "$slots", "as": "slot", "in": {"$mergeObjects": [
            "$$slot", {"lease_expires_at": {"$subtract": ["$$NOW", 1]}}]}}},
            "lease_deadline": {"$subtract": ["$$NOW", 1]}}}]
    )  # fmt: skip
    assert await store.expired_leases.reap("train") == 0
    assert await store.claims.claim(split="train", owner="sampler", lease_seconds=60) is None
    async with gateway(store) as client:
        waiting = await until_status(store, conversation, RecordStatus.COMPLETED)

        async def slot() -> Slot:
            found = await store.tasks.get(waiting.task)
            return found.slots[0]

        async def waits() -> bool:
            return (await slot()).status is SlotStatus.SAMPLED

        await until(waits)
        assert await store.groups.count_open("train") == 0
        not_before = (await slot()).not_before
        assert not_before is not None
        assert waiting.completed_at is not None
        assert not_before - waiting.completed_at == timedelta(hours=1)
        await give_feedback(store, conversation["id"], {"score": 1.0})
        record = await until_status(store, conversation, RecordStatus.READY)
    assert record.score == 1.0


async def test_without_feedback_a_trajectory_fails_by_name_and_is_not_trained(store: Store) -> None:
    async with gateway(store, "Hello.", idle_minutes=0.02, hours=1e-6) as client:
        silent, empty = await opened(client), await opened(client)
        await said(silent, "hello")
        failed = [await until_status(store, each, RecordStatus.FAILED) for each in (silent, empty)]
        with pytest.raises(GatewayError, match="takes no more feedback"):
            await give_feedback(store, silent["id"], {"score": 1.0})
    kinds = [record.failure.kind for record in failed if record.failure is not None]
    assert kinds == ["feedback", "feedback"]
    assert [record.score for record in failed] == [None, None]
    assert await store.database["DBRecordData"].count_documents({}) == 0
    found = await store.tasks.get(failed[0].task)
    assert found.status is TaskStatus.COMPLETED
    assert found.slots[0].status is SlotStatus.FAILED


async def test_a_conversation_that_nobody_rated_waits_again_and_is_never_sampled(
    store: Store, db: Db
) -> None:
    async with gateway(store, "Hello.", idle_minutes=0.02, hours=1e-6) as client:
        unrated, empty = await opened(client), await opened(client)
        await said(unrated, "hello")
        for conversation in (unrated, empty):
            await until_status(store, conversation, RecordStatus.FAILED)
    assert await store.claims.reopen_failed("train") == 0
    for flags, said_of_it in ((["--dry_run"], "would be reopened"), ([], "reopened")):
        output = await db("reopen", "--feedback_hours", "2", *flags)
        assert f"{said_of_it}: 0 slots" in output
        assert f"{said_of_it}: 1 conversations; they wait for feedback again, at most 2 h from now" in output
        assert "left as they are: 1 groups (conversation)" in output
    assert "conversation" not in await db("reopen", "--failure_kind", "tool")
    assert await store.claims.claim(split="train", owner="sampler", lease_seconds=60) is None
    waiting = await record_of(store, unrated)
    found = await store.tasks.get(waiting.task)
    assert (found.status, found.slots[0].status, waiting.failure) == (
        TaskStatus.RUNNING, SlotStatus.SAMPLED, None,
    )  # fmt: skip
    await give_feedback(store, unrated["id"], {"score": 1.0})
    work = score_queued(store, SamplingConfig(), ClaimConfig(), "train", asyncio.Event(), until_empty=True)
    assert await asyncio.wait_for(work, 20) == 1
    assert (await record_of(store, unrated)).score == 1.0
    assert all("published version" in problem for problem in await violations(store))


async def test_a_sampled_trajectory_waits_for_the_feedback_of_its_task(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    await store.tasks.load([task("a", slots=2, scorer="feedback")])
    setting = Setting(store, "<answer>3</answer>")
    for _ in range(2):
        claim = await store.claims.claim(split="train", owner="me", lease_seconds=60)
        assert claim is not None
        assert not await setting.worker.run(claim)
    names = [record.id for record in await store.records.by_task("train/0/a")]
    for name, score in zip(names, (0.2, 0.9), strict=True):
        await give_feedback(store, name, {"score": score})
    work = score_queued(store, SamplingConfig(), ClaimConfig(), "train", asyncio.Event(), until_empty=True)
    assert await asyncio.wait_for(work, 20) == 2
    assert [record.score for record in await store.records.by_task("train/0/a")] == [0.2, 0.9]


BAD_REQUESTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/feedback", {"score": 1}, "invalid_value"),
    ("/feedback", {"id": "conv-1", "score": "good"}, "invalid_value"),
    ("/feedback", {"id": "conv-1", "score": 1, "stars": 5}, "invalid_value"),
    ("/feedback", {"id": "conv-1", "score": 1, "corrected": 5}, "invalid_value"),
    ("/feedback", {"id": "conv-1", "score": 1}, "no_such_trajectory"),
    ("/conversations", {"train": "no_such:rule"}, "invalid_value"),
    ("/conversations", {"meta": [1]}, "invalid_value"),
    ("/conversations", {"model": "gpt"}, "invalid_value"),
)


async def test_a_bad_request_names_what_is_wrong(store: Store) -> None:
    async with gateway(store) as client:
        for path, body, code in BAD_REQUESTS:
            answer = await client.post(path, json=body)
            assert answer.json()["error"]["code"] == code, body
            assert answer.status_code in (400, 404), body
            refused = await client.post(path, json=body, headers={"authorization": "Bearer wrong"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_key")


@pytest.mark.attack
async def test_without_a_gateway_key_feedback_needs_the_key_of_its_conversation(store: Store) -> None:
    async with gateway(store, "Hello.", key=None) as client:
        mine, other = await opened(client), await opened(client)
        await said(mine, "hello")
        for key in ("guess", mine["api_key"], other["feedback_key"], mine["id"]):
            client.headers["authorization"] = f"Bearer {key}"
            ended = await client.post(f"/conversations/{mine['id']}/end")
            for answer in (await feedback(client, mine, score=9), ended):
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "wrong_key")
        url = mine["base_url"].removesuffix("/v1") + "/reward"
        assert (await client.post(url, json={"score": 9})).status_code == 401
        client.headers["authorization"] = f"Bearer {mine['feedback_key']}"
        assert (await feedback(client, mine, score=1, end=True)).status_code == 200
        assert (await until_status(store, mine, RecordStatus.READY)).score == 1.0


@pytest.mark.attack
async def test_feedback_scores_no_trajectory_that_its_task_scores(store: Store) -> None:
    await store.tasks.load([task("a", slots=1, scorer="exact"), task("b", slots=1, scorer="feedback")])
    async with gateway(store) as client:
        for name, status in (("a", 404), ("b", 200)):
            claim = await store.claims.claim(split="train", owner="me", lease_seconds=60)
            assert claim is not None
            await store.records.create(claim)
            await store.records.advance(claim, RecordStatus.RUNNING)
            answer = await client.post("/feedback", json={"id": f"train/0/{name}/0/1", "score": 9})
            assert answer.status_code == status, answer.text


@pytest.mark.attack
async def test_a_client_names_no_python(store: Store) -> None:
    async with gateway(store) as client:
        for train in ("antigravity:fly", "time:sleep", ":x", "..:x", "none", 5, ["main"], None):
            answer = await client.post("/conversations", json={"train": train})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "train"), train


@pytest.mark.attack
async def test_a_page_of_another_site_opens_no_conversation(store: Store) -> None:
    async with gateway(store, key=None) as client:
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            answer = await client.post("/conversations", content="{}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "foreign_site")


@pytest.mark.attack
@pytest.mark.parametrize("poison", ["rule", "reward", "call"])
async def test_a_conversation_that_cannot_be_ended_fails_alone(store: Store, poison: str) -> None:
    async with gateway(store, "Hello.", "Hello.") as client:
        bad, good = await opened(client), await opened(client)
        for each in (bad, good):
            await said(each, "hello")
            assert (await feedback(client, each, score=1)).status_code == 200
        database, key = store.database, f"train/-1/{bad['id']}/0/1"
        if poison == "rule":
            await database["Record"].update_one({"_id": key}, {"$set": {"train_rule": "time:sleep"}})
        elif poison == "reward":
            rewards = {"reported_reward.role_rewards": {"nobody": 1.0}}
            await database["Record"].update_one({"_id": key}, {"$set": rewards})
        else:
            await database["DispatchedSamplingTask"].delete_many({"record": key})
        for each in (bad, good):
            await client.post(f"/conversations/{each['id']}/end")
        assert (await until_status(store, good, RecordStatus.READY)).score == 1.0
        assert (await client.get("/health")).status_code == 200
        record = await record_of(store, bad)
        assert record.status is not RecordStatus.READY


async def test_many_small_requests_at_once_are_all_answered(store: Store) -> None:
    async with gateway(store, *["Hello."] * 40) as client:
        conversation = await opened(client)
        bodies = [{"id": conversation["id"], "score": number} for number in range(60)]
        opening = [client.post("/conversations", json={"query": str(number)}) for number in range(60)]
        answers = await asyncio.gather(*opening, *(client.post("/feedback", json=body) for body in bodies))
        assert {answer.status_code for answer in answers} == {200, 201}
        names = {answer.json()["id"] for answer in answers if answer.status_code == 201}
        stored = {found["task_id"] async for found in store.database["Task"].find({}, {"task_id": 1})}
        assert names <= stored


async def test_who_is_refused_for_now_is_told_when_to_come_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("the database is away")

    async with gateway(store) as client:
        monkeypatch.setattr(store.conversations, "open", down)
        answers = [await client.post("/conversations") for _ in range(8)]
    waits = {int(answer.headers["retry-after"]) for answer in answers}
    assert {answer.status_code for answer in answers} == {503}
    assert 1 <= min(waits) < max(waits) <= 8, "they do not all return at once"


@pytest.mark.parametrize("change", ["rename", "delete"])
async def test_a_gateway_ends_when_its_run_is_renamed_or_deleted(
    store: Store, run_config: RunConfig, change: str
) -> None:
    new = f"{store.run_name}_new"
    admin = await open_connection(run_config)

    async def serve() -> None:
        async with gateway(store, "Hello.") as client:
            conversation = await opened(client)
            await client.post(f"/conversations/{conversation['id']}/end")  # now nobody holds a lease
            if change == "rename":
                await rename_run(run_config, new, 15.0)
            else:
                await RunAdmin(admin).delete(None, 15.0)
            refused = await client.post("/conversations")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_run")

    try:
        with pytest.raises(RunMissingError, match="has been renamed or deleted"):
            await serve()
        assert await admin.database.list_collection_names() == []
    finally:
        await admin.client.drop_database(new)
        await admin.close()


def test_a_gateway_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_GATEWAY_KEY", raising=False)
    assert require_key(GatewayConfig()) is None
    with pytest.raises(ConfigError, match="anybody could"):
        require_key(GatewayConfig(gateway_host="0.0.0.0"))
    monkeypatch.setenv("AGENTRL_GATEWAY_KEY", "k")
    assert require_key(GatewayConfig(gateway_host="0.0.0.0")) == "k"


async def test_the_chat_example_trains_two_steps(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from chat import QUESTIONS, SHORT, Product, chat, main, simulated

    monkeypatch.setattr("sys.argv", ["chat.py", "--gateway", "http://127.0.0.1:9", "--simulated", "1"])
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9 does not answer"):
        main()
    words = ["--config", str(EXAMPLE / "run.yml"), "--run_name", store.run_name]
    configs = parse(words, command="agentrl gateway", description="", shown=[])
    await begin_run(store, configs, "gateway", {})  # as `agentrl gateway` does
    assert (await store.settings.resolved())["gateway"].values["gateway_train"] == "feedback"
    monkeypatch.setattr("builtins.input", lambda _: "")
    answers = ["Short.", "Long. " * SHORT, "Also short.", "Long again. " * SHORT, "Nobody rates this."]

    def talk(url: str) -> None:
        product = Product(url, KEY)
        for question in QUESTIONS:
            chat(product, lambda question=question: question, simulated)
        chat(product, lambda: "hello", lambda _: None)

    async with gateway(store, *answers) as client:
        await asyncio.to_thread(talk, str(client.base_url))

        async def are_ready() -> bool:
            return (await statuses(store, "Record"))[RecordStatus.READY] == len(QUESTIONS)

        await until(are_ready)
    assert sorted(record.score or 0.0 for record in await store.records.scored("train", 0.0)) == [0, 0, 1, 1]
    flags = [
        "--config", str(EXAMPLE / "run.yml"), "--run_name", store.run_name, "--groups_per_step", "2",
        "--max_steps", "2", "--publish_steps", "2", "--data_wait_seconds", "60",
    ]  # fmt: skip
    await train_steps(store, run_config, flags, write_tiny_policy(tmp_path / "model"))
    first, second = await store.steps.find()
    assert first.metrics["loss"] == pytest.approx(0.5, abs=1e-3)
    assert second.metrics["kl_reference"] > 0.0
    assert await violations(store) == []
