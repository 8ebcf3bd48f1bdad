"""The dashboard's pages about runs and their children, on a small run; the command as a process."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import small_run as run
from child_run import forked_small_run
from dashboard_client import opened
from snapshots import printed

from agentrl.config.schema import RunConfig
from agentrl.documents.run import Evaluation, PolicyVersion
from agentrl.documents.status import EvaluationStatus, TrainerEnd
from agentrl.documents.task import task_key
from agentrl.lab.database_server import Users
from agentrl.lab.deletion import Retractions
from agentrl.lab.manage_runs import RunAdmin
from agentrl.observe.metric_definitions import definition_of
from agentrl.screens.dashboard import stores
from agentrl.screens.run_screens import render_run_list, render_run_status
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store, open_store
from agentrl.store.run_list import Runs

pytestmark = pytest.mark.integration

SCRIPT = "<script>alert(1)</script>"
METRICS = {"loss": 0.1, "reward": 0.5, "pass_rate": 0.5, "kl_k3": 0.7, "seconds_data": 1.0, "ratio_max": 3.0,
           "staleness_histogram": {"0": 12.0, "1": 4.0}, "version_fractions": {"0": 1.0}}  # fmt: skip
PROCESS_SECONDS = 60.0


@pytest.fixture
async def client(store: Store, run_config: RunConfig, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the dashboard of a small run whose texts are hostile."""
    await run.build(store, tmp_path / "weights")
    await store.database["TrainStep"].update_one({"_id": run.STEP}, {"$set": {"metrics": METRICS}})
    failed = {"$set": {"failure.message": f"{SCRIPT}\x1b[31m\u202e"}}
    await store.database["Record"].update_many({"status": "failed"}, failed)
    await store.database["Task"].update_many({}, {"$set": {"query": SCRIPT}})
    await run.add_task(store, task_key("train", 0, "<img src=x>"), 9)
    flags = {"max_steps": 40, "heartbeat_seconds": 2.0, "agent_cfg_path": SCRIPT}
    await store.settings.join("train", flags, given=["max_steps"], packages={"torch": "2"})
    await store.evaluations.begin(
        Evaluation(
            id="eval-one",
            status=EvaluationStatus.RUNNING,
            version=1,
            step=1,
            model=None,
            file=SCRIPT,
            tasks_digest="d",
            settings_digest="s",
            samples=1,
            right_threshold=0.5,
        )
    )
    await store.evaluations.end("eval-one", {"total": {"score": {"value": 0.75, "low": 0.5, "high": 0.9}}})
    async with opened(run_config) as (_, client):
        yield client


async def page(client: httpx2.AsyncClient, path: str, status: int = 200) -> str:
    """The HTML of a page, in which no stored text is HTML or an unseen character."""
    answer = await client.get(path)
    assert answer.status_code == status, answer.text[:2000]
    for hidden in (SCRIPT, "\x1b", "\u202e"):
        assert hidden not in answer.text
    return answer.text


async def test_every_page_of_a_run(client: httpx2.AsyncClient, store: Store) -> None:
    at = f"/runs/{store.run_name}"
    await RunAdmin(store.connection).tag(["v2.1"], [])
    await RunAdmin(store.connection).note(f"{SCRIPT} twice the rate")
    runs = await page(client, "/")
    assert all(text in runs for text in (f'href="{at}"', ">v2.1</span>", "twice the rate"))
    overview = await page(client, at)
    assert "sampling, no trainer" in overview
    assert "no inference engine is alive" in overview
    assert "KL(μ‖π) is 0.700" in overview
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in overview
    assert r">\u202e</span>" in overview
    assert "of 40" in overview
    definition = html.escape(definition_of("reward"))
    assert f'title="{definition}"' in overview.replace("&#39;", "&#x27;")
    assert "0.750" in overview
    for chart in ("reward", "kl", "seconds", "evaluations"):
        assert f'data-chart="{chart}"' in overview

    steps = await page(client, f"{at}/steps")
    assert f'href="{at}/steps/1"' in steps
    step = await page(client, f"{at}/steps/1")
    assert "Lowest score" in step
    assert f"{at}/trajectories/{run.TRAINED}/1/1" in step
    assert 'data-chart="staleness"' in step
    weights = (await page(client, at)).partition('id="weights"')[2]
    assert '<td class="number">1</td><td class="number">1</td><td>full</td>' in weights

    tasks = await page(client, f"{at}/tasks")
    assert "never agrees" in tasks
    assert "1 of 1 mixed" in tasks
    assert "No task matches" in await page(client, f"{at}/tasks?q=%3Cscript%3E&kind=all+right")
    assert "version 1, step 1" in await page(client, f"{at}/compare?a=0&b=1")
    newest = PolicyVersion(id=2, step=2, location="w", files=(), train_step=None)
    await store.database["PolicyVersion"].insert_one(newest.to_document())
    versions = await page(client, f"{at}/compare")
    assert "version 1, step 1" in versions, "nobody has sampled version 2"
    assert "version 2, step 2" not in versions
    assert "Choose two runs" in await page(client, "/compare")


async def test_more_than_two_runs_are_overlaid_and_smoothed(
    client: httpx2.AsyncClient, store: Store, run_config: RunConfig, drop_later: Callable[[str], object]
) -> None:
    names = [store.run_name]
    for letter, reward in (("b", 0.2), ("c", 0.9), ("d", None)):
        other = replace(run_config, run_name=f"{run_config.run_name}_{letter}")
        drop_later(other.run_name)
        names.append(other.run_name)
        async with await open_store(other) as opened_store:
            flags = {"max_steps": 50, "agent_cfg_path": letter}
            await opened_store.settings.join("train", flags, given=["max_steps"], packages={})
            first = await store.database["TrainStep"].find_one({"_id": run.STEP})
            assert first is not None
            for number, value in ((1, 0.0), (2, reward)) if reward else ():
                step = {**first, "_id": f"1/{number}", "step": number, "metrics": {"reward": value}}
                await opened_store.database["TrainStep"].insert_one(step)
    text = await page(client, f"/compare?run={names[1]}&run={names.pop()}")
    assert f"{names[1]}, step 2" in text, "the run without a step has none in common"
    query = "&".join(f"run={name}" for name in names)
    text = await page(client, f"/compare?{query}")
    figure = re.search(r'data-chart="reward">(.+?)</script>', text)
    drawn = json.loads(figure[1])
    both = zip(drawn["series"], drawn["data"], strict=True)
    rewards = [(str(series["dash"]), y) for series, (_, y) in both if series["name"].endswith(": reward")]
    assert [y for _, y in rewards] == [[0.5], [0.0, 0.2], [0.0, 0.9]]
    assert len({dash for dash, _ in rewards}) == 3
    values = "".join(f'<td class="text">{value}</td>' for value in (40, 50, 50))
    assert f"<td>--max_steps</td>{values}" in text
    smoothed = await page(client, f"/compare?{query}&smoothing=0.5")
    assert "0.133333" in smoothed
    assert "0.133333" not in text


async def test_the_curves_are_downloaded(
    client: httpx2.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"/runs/{store.run_name}"
    overview = await page(client, f"{at}?smoothing=0.9")
    assert "<option selected>0.9</option>" in overview
    assert "The chart is loading" in overview
    assert f'href="{at}/curves.csv"' in overview
    answer = await client.get(f"{at}/curves.csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="{store.run_name}.csv"'
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["step"], row["reward"], row["kl_k3"]) == ("1", "0.5", "0.7")
    assert "staleness_histogram" not in row
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "requirements/parquet.txt" in await page(client, f"{at}/curves.parquet", 501)


BAD_ADDRESSES = [
    ("/runs/no_such_run", 404, "there is no run"),
    ("/runs/a%20b%00", 404, "--run_name"),
    ("/runs/admin/steps", 404, "MongoDB&#39;s own"),
    ("/runs/{run}/steps/99", 404, "has no step 99"),
    ("/runs/{run}/steps/9999999999999999999999", 404, "not the number of a step"),
    ("/runs/{run}/steps/x", 404, "not the number of a step"),
    ("/runs/{run}/steps?page=0", 400, "page is"),
    ("/runs/{run}/tasks?kind=%3Cscript%3Ealert(1)%3C/script%3E", 400, "kind is"),
    ("/runs/{run}/compare?a=7&b=1", 404, "no policy version 7"),
    ("/runs/{run}/compare?a=-1", 400, "a is"),
    ("/compare?run={run}&run={run}", 400, "choose 2 to 8"),
    ("/compare?run={run}", 400, "choose 2 to 8"),
    ("/runs/{run}?smoothing=2", 400, "smoothing is"),
    ("/runs/no_such_run/curves.csv", 404, "there is no run"),
    ("/compare?run={run}&run=no_such_run", 404, "there is no run"),
    ("/runs/no_such_run/events", 404, "there is no run"),
    ("/no/such/page", 404, "has no page /no/such/page"),
]


async def test_bad_addresses(client: httpx2.AsyncClient, store: Store) -> None:
    for path, status, says in BAD_ADDRESSES:
        assert says in await page(client, path.format(run=store.run_name), status), path


async def test_a_step_that_was_undone_leaves_the_curves(client: httpx2.AsyncClient, store: Store) -> None:
    at = f"/runs/{store.run_name}"
    steps = store.database["TrainStep"]
    first = await steps.find_one({"_id": run.STEP})
    assert first is not None
    (begun,) = await store.settings.starts()
    await store.settings.start(replace(begun, values={**begun.values, "max_steps": 80}), 2)
    await steps.insert_one({**first, "_id": "1/2", "step": 2, "metrics": {"reward": 0.123}})
    before = await page(client, at)
    assert "0.123" in before
    assert "of 80" in before, "the newest flags"
    assert "Flags of the trainer that changed" not in before
    await steps.update_one({"_id": "1/2"}, {"$set": {"status": "reverted"}})
    await steps.insert_one({**first, "_id": "2/2", "step": 2, "metrics": {"reward": 0.877}})
    await asyncio.sleep(1.1)
    again = await page(client, at)
    assert "0.877" in again
    assert "0.123" not in again
    assert "from step 2 on <code>--max_steps 40 → 80</code>." in again
    assert '"marks":[[2,"--max_steps 40 → 80"]]' in again


async def test_the_list_of_runs_draws_the_reward_of_committed_steps(
    client: httpx2.AsyncClient, store: Store, run_config: RunConfig
) -> None:
    steps = store.database["TrainStep"]
    first = await steps.find_one({"_id": run.STEP})
    assert first is not None
    row = (await page(client, "/")).partition(f'href="/runs/{store.run_name}"')[2].partition("</tr>")[0]
    assert "<polyline" not in row, "one step is no curve"
    later = {"1/2": ("reverted", 9.0), "1/3": ("committed", 0.25), "1/4": ("planned", 9.0)}
    for key, (status, reward) in later.items():
        number = int(key.partition("/")[2])
        await steps.insert_one(
            {**first, "_id": key, "step": number, "status": status, "metrics": {"reward": reward}}
        )
    (listed,) = [each for each in await Runs(store.connection).all(10.0, 8) if each.name == store.run_name]
    assert listed.rewards == (0.5, 0.25)
    (newest,) = [each for each in await Runs(store.connection).all(10.0) if each.name == store.run_name]
    assert newest.rewards == (0.25,)
    async with opened(run_config) as (_, other):
        assert "the last 2 steps: 0.500 to 0.250" in await page(other, "/")


async def test_what_was_withdrawn_is_shown_without_its_content(
    client: httpx2.AsyncClient, store: Store
) -> None:
    retractions = Retractions(store.connection)
    chosen = await retractions.select(records=[f"{run.TRAINED}/1/1"])
    await retractions.begin(chosen, f"{SCRIPT} a licence", "ann@host")
    overview = await page(client, f"/runs/{store.run_name}")
    shown = overview.partition('id="retractions"')[2].partition("</section>")[0]
    for text in (f"<code>{run.TRAINED}/1/1</code>", "a licence", "ann@host", "unfinished", "from step 1 on"):
        assert text in shown


async def test_a_finished_run_says_so(client: httpx2.AsyncClient, store: Store) -> None:
    attempt = await store.trainer_lease.acquire("t", "h", 1, 60.0)
    await store.trainer_lease.release(attempt, TrainerEnd.FINISHED)
    running = {"$set": {"slots.$[].status": "open"}}
    await store.database["Task"].update_many({"status": "running"}, running)
    overview = await page(client, f"/runs/{store.run_name}")
    assert "<strong>Finished.</strong> The trainer ended by itself after step 1 of 40" in overview
    assert "unfinished" not in overview
    assert ">finished</span>" in await page(client, "/")


async def test_an_auditor_sees_its_run_alone(
    store: Store, run_config: RunConfig, tmp_path: Path, drop_later: Callable[[str], object]
) -> None:
    await run.build(store, tmp_path / "weights")
    other = replace(run_config, run_name=f"{run_config.run_name}_b")
    async with await open_store(other):
        pass
    users = await Users(store.connection).create()
    uri = next(user.uri for user in users if user.name == "agentrl_auditor")
    async with opened(replace(run_config, db_connection_string=uri)) as (_, client):
        for path in ("", "/tasks", "/steps", "/steps/1", "/compare"):
            await page(client, f"/runs/{store.run_name}{path}")
        runs = await page(client, "/")
        assert f'href="/runs/{store.run_name}"' in runs
        assert other.run_name not in runs
        assert "refuse" in await page(client, f"/runs/{other.run_name}", 403)
    drop_later(other.run_name)


async def test_a_newer_schema_is_named(store: Store, run_config: RunConfig) -> None:
    await store.database["Run"].update_one({"_id": "schema"}, {"$set": {"version": 99}})
    async with opened(run_config) as (_, client):
        assert "schema version 99" in await page(client, f"/runs/{store.run_name}", 409)
        assert "schema version 99" in await page(client, "/")


async def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    uri = "mongodb://127.0.0.1:1/?replicaSet=none"
    away = RunConfig(db_connection_string=uri, db_timeout_seconds=0.3)
    for config, name in ((away, "127.0.0.1:1"), (RunConfig(mongo_dir=str(tmp_path)), "agentrl mongo up")):
        async with opened(config) as (_, client):
            for path in ("/", "/compare", "/runs/any", "/runs/any/steps/1", "/runs/any/events"):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert "The database does not answer" in answer.text
                assert name in answer.text
                assert answer.headers["retry-after"]


async def test_clients_of_a_run_share_one_feed(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_CLIENTS", 3)
    async with opened(run_config) as (app, client):
        updates: stores.LiveUpdates = app.state.updates
        streams = [updates.events(store.run_name) for _ in range(3)]
        for stream in streams:
            assert (await anext(stream)).startswith("retry:")
        following = [task for task in asyncio.all_tasks() if task.get_name().startswith("dashboard-test")]
        assert len(following) == 1
        for stream in streams:
            async with asyncio.timeout(20):
                assert "event: change" in await anext(stream)
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(1.2)
        await run.add_task(store, task_key("train", 0, "new"), 0)
        async with asyncio.timeout(20):
            assert all("event: change" in event for event in await asyncio.gather(*waiting))
        refused = await client.get(f"/runs/{store.run_name}/events")
        assert refused.status_code == 503
        assert "open pages already" in refused.text
        for stream in streams:
            await stream.aclose()
        assert updates.clients == 0


async def test_the_command_serves_until_it_is_interrupted(run_config: RunConfig, store: Store) -> None:
    command = [sys.executable, "-m", "agentrl", "dashboard", "--port", "0"]
    uri = ["--db_connection_string", str(run_config.db_connection_string)]
    process = await asyncio.create_subprocess_exec(
        *command, *uri, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        async with asyncio.timeout(PROCESS_SECONDS):
            line = (await process.stdout.readline()).decode()
            found = re.search(r"(http://127\.0\.0\.1:\d+/)\?token=(\S+)", line)
            assert found is not None, line
            address, login = found[1], {"Authorization": f"Bearer {found[2]}"}
            async with (
                httpx2.AsyncClient(timeout=30) as client,
                client.stream("GET", f"{address}runs/{store.run_name}/events", headers=login) as events,
            ):
                assert events.status_code == 200
                assert (await anext(events.aiter_lines())).startswith("retry:")
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_screens_show_the_family(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    """Each run names the others, and what the parent holds is shown by the parent's pages."""
    async with forked_small_run(store, tmp_path) as (child, _), opened(run_config) as (_, client):
        name, fork = child.run_name, "fork at step 1"
        runs = await Runs(store.connection).all(10.0)
        assert f"{store.run_name}, {fork}" in printed(render_run_list("host", runs), 200)
        for each, other in ((child, store.run_name), (store, name)):
            await each.database["TrainStep"].update_one({"_id": run.STEP}, {"$set": {"metrics.reward": 0.5}})
            status = printed(render_run_status(await SnapshotReader(each).read()), 200)
            assert f"{other}, {fork}" in status
            overview = await page(client, f"/runs/{each.run_name}")
            assert f'<a href="/runs/{other}">{other}, {fork}</a>' in overview
            assert f"/compare?run={each.run_name}&amp;run={other}" in overview
        assert 'data-chart="reward"' in await page(client, f"/compare?run={name}&run={store.run_name}")
        for path in ("steps/1", f"trajectories/{run.TRAINED}/1/1"):
            answer = await client.get(f"/runs/{name}/{path}")
            assert answer.headers["location"] == f"/runs/{store.run_name}/{path}"
