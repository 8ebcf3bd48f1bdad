"""The dashboard's pages about trajectories, on a small run with hostile texts, through ASGI."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote_from_bytes

import httpx2
import numpy as np
import pytest
import small_run as run
from dashboard_client import OWN, opened

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import pack_halves
from agentrl.documents.training import TokenSpan, TokenStatistics, statistics_key
from agentrl.screens.dashboard.query import FIELDS
from agentrl.screens.views.counts import Counts
from agentrl.screens.views.read import TrajectorySearch
from agentrl.store.client import Store
from agentrl.store.gateways import Labels

pytestmark = pytest.mark.integration

HOSTILE = f"{run.READY}/1/1"
TRAINED = f"{run.TRAINED}/1/1"
SCRIPT = "<script>alert(1)</script>"
CONTROL = "\x1b[31mred \u202eabc"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
async def client(store: Store, run_config: RunConfig, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the dashboard, whose run has a trajectory with hostile texts."""
    await run.build(store, tmp_path / "weights")
    hostile = f"{SCRIPT} {CONTROL} {'x' * 1_000_000} the end"
    await store.database["Record"].update_one(
        {"_id": HOSTILE},
        {"$set": {"query": SCRIPT + CONTROL, "final_answer": SCRIPT, "owners": [
            {"owner": f"{SCRIPT}-7-0a1b2c", "attempt": 0, "since": LONG_AGO, "ended": SCRIPT},
            {"owner": "b", "attempt": 1, "since": LONG_AGO, "replayed": 1, "tokens": 4, "dropped": 2,
             "diverged_at": 1}], "score_details": {
            "scorer": SCRIPT, "judge": "m", "reply": f"{SCRIPT} Correct"}}},
    )  # fmt: skip
    await store.database["DispatchedSamplingTask"].update_one(
        {"_id": f"{HOSTILE}/0"},
        {"$set": {"response.content": hostile, "response.reasoning_content": SCRIPT,
                  "tool_executions.0.name": SCRIPT, "tool_executions.0.result": hostile, "events": [
            {"name": SCRIPT, "arguments": SCRIPT, "result": {"text": hostile}, "started_at": LONG_AGO,
             "seconds": 0.5, "attempt": 1}]}},
    )  # fmt: skip
    async with opened(run_config, f"/runs/{store.run_name}/") as (_, client):
        yield client


async def page(client: httpx2.AsyncClient, path: str, status: int = 200) -> str:
    """The HTML of a page, in which no text of a model is HTML or an unseen character."""
    answer = await client.get(path)
    assert answer.status_code == status, answer.text[:2000]
    assert SCRIPT not in answer.text
    assert "\x1b" not in answer.text
    assert "\u202e" not in answer.text
    return answer.text


def without_ages(text: str) -> str:
    """The HTML without what a clock changes: "3 s ago"."""
    return re.sub(r">[^<]* ago</time>", "></time>", text)


async def test_trajectories_are_filtered_sorted_and_paged(client: httpx2.AsyncClient) -> None:
    text = await page(client, "trajectories")
    assert text.count("data-row") == 10
    assert "&lt;script&gt;" in text
    assert f'href="{client.base_url.path}trajectories/{HOSTILE}"' in text
    text = await page(client, "trajectories?step=1&order=highest_score&min_score=0.5")
    assert text.count("data-row") == 1
    assert f"trajectories/{TRAINED}" in text
    assert 'value="highest_score" selected' in text
    assert "the end" not in await page(client, "trajectories?text=%3Cscript%3E")
    assert (await page(client, "trajectories?text=(a%2B)%2B%24")).count("data-row") == 0
    for query in (
        "step=x", "status=nothing", "min_score=2&max_score=1", "min_score=nan", "after=x", "order=x",
        f"text={'x' * 300}", f"task={'x' * 600}", "version=-1",
    ):  # fmt: skip
        assert "What to do" not in await page(client, f"trajectories?{query}", 400)


async def test_the_filters_that_are_folded_are_named_when_set(client: httpx2.AsyncClient) -> None:
    shown, folded = re.split("<details>", (await page(client, "trajectories")).partition("</form>")[0])
    assert all(f'name="{name}"' in shown + folded for name in FIELDS)
    for name in FIELDS:
        value = {"status": "ready", "order": "newest"}.get(name, "1")
        text = await page(client, f"trajectories?{name}={value}")
        named = f"{name.replace('_', ' ')} <strong>{value}</strong>"
        assert (named in text.partition("</summary>")[0]) == (f'name="{name}"' in folded), name
        assert text.count("<details>") == 1
    assert 'name="text"' in shown


async def test_trajectories_are_filtered_by_the_tool_that_had_the_answer(
    client: httpx2.AsyncClient, store: Store
) -> None:
    await store.database["Record"].update_one({"_id": TRAINED}, {"$set": {"answer_seen_in": "search"}})
    text = await page(client, "trajectories?answer_seen_in=search")
    assert text.count("data-row") == 1
    assert f"trajectories/{TRAINED}" in text
    assert 'name="answer_seen_in" value="search"' in text
    assert (await page(client, "trajectories?answer_seen_in=sear")).count("data-row") == 0


async def test_more_trajectories_than_are_counted_are_more_than_so_many(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count(*_: object) -> int:
        return 10_001

    monkeypatch.setattr(TrajectorySearch, "count", count)
    assert "\n10,001 trajectories." in await page(client, "trajectories")
    assert "\nmore than 10,000 trajectories." in await page(client, "trajectories?split=train")


async def test_steps_whose_training_data_is_pruned_are_known_by_the_record(
    client: httpx2.AsyncClient, store: Store
) -> None:
    step = f'href="{client.base_url.path}steps/1"'
    listed = without_ages(await page(client, "trajectories"))
    await store.database["DBRecordData"].delete_many({})
    assert step in listed
    assert without_ages(await page(client, "trajectories")) == listed
    assert step in (await page(client, f"trajectories/{TRAINED}")).partition("Trained at steps")[2]
    assert step in await page(client, f"tokens/{TRAINED}")


async def test_a_conversation_comes_before_what_is_known_of_it(client: httpx2.AsyncClient) -> None:
    text = await page(client, f"trajectories/{HOSTILE}")
    found = [
        text.index(f'id="{name}"') for name in ("conversation", "question", "scores", "labels", "timings")
    ]
    assert found == sorted(found)
    top = text[: found[0]]
    assert len(top) < 6000
    assert "score" in top.partition("<h1>")[2]
    failed = await page(client, f"trajectories/{run.TRAINED}/0/1")
    assert "the engine went away" in failed.partition('id="conversation"')[0]


HOSTILE_VALUES = (
    "[" * 20_000, "9" * 311, "1e999", "nan", "$where", '{"$gt": ""}', "a\x00b", "\ud800", "٣", "(" * 400,
    "\\", "../" * 50, base64.urlsafe_b64encode(b"[" * 15_000).decode(),
)  # fmt: skip
PATHS = (
    "rewards?split=", "compare?split=", "compare?a=", "tasks?q=", "tasks?split=", "steps?page=", "steps/",
    f"tokens/{HOSTILE}?call=", f"text/{HOSTILE}?call=0&part=", "pair?a=", "trajectories/", "images/",
    "http://127.0.0.1/compare?run=b&run=",
)  # fmt: skip


@pytest.mark.attack
async def test_no_hostile_address_is_an_error_of_the_server(client: httpx2.AsyncClient) -> None:
    for path in (*(f"trajectories?{field}=" for field in (*FIELDS, "after")), *PATHS):
        for value in HOSTILE_VALUES:
            given = quote_from_bytes(value.encode(errors="surrogatepass"))
            answer = await client.get(path + given)
            assert answer.status_code < 500, (path, given[:80], answer.text[:2000])


async def test_what_a_step_trained_is_called_trained_on_every_screen(
    client: httpx2.AsyncClient, store: Store
) -> None:
    counts = (await Counts(store.connection).records())["train"]
    assert (counts["trained"], counts["ready"]) == (2, 2)
    assert f'status=trained">{counts["trained"]}</a>' in await page(
        client, f"http://127.0.0.1/runs/{store.run_name}"
    )
    assert 'class="badge good">trained<' in await page(client, "trajectories")
    for status, task in (("trained", run.TRAINED), ("ready", run.READY)):
        text = await page(client, f"trajectories?split=train&status={status}")
        assert text.count("data-row") == text.count(f'class="badge good">{status}<') == 2
        assert text.count(f"trajectories/{task}/") == 2


async def test_a_trajectory_is_a_chat_whose_texts_are_text(client: httpx2.AsyncClient) -> None:
    text = await page(client, f"trajectories/{HOSTILE}")
    assert len(text) < 200_000
    assert "the end" not in text
    assert "&lt;script&gt;" in text
    assert 'class="hidden-character"' in text
    assert "once &lt;script&gt;" in text
    for part in ("response", "result-0", "event-0"):
        whole = await page(client, f"text/{HOSTILE}?call=0&part={part}")
        assert "x" * 1_000_000 in whole
        assert "the end" in whole
    assert "wrote:" in text
    assert 'class="waterfall"' in text
    assert "<summary>Result, 1,000," in text
    assert "<details open><summary>Result, 1 characters</summary>" in await page(
        client, f"trajectories/{run.READY}/0/1"
    )
    assert f"pair?a={HOSTILE.replace('/', '%2F')}" in text
    text = await page(client, f"trajectories/{TRAINED}")
    assert 'class="badge good">trained<' in text
    assert "/steps/1" in text
    failed = await page(client, f"trajectories/{run.TRAINED}/0/1")
    assert "the engine went away" in failed


async def test_owners_and_what_they_left_are_shown_and_linked(client: httpx2.AsyncClient) -> None:
    text = await page(client, f"trajectories/{HOSTILE}")
    assert '<h2 id="owners">Owners</h2>' in text
    assert "1 turns, 4 tokens" in text
    assert "diverged at turn 2, 2 turns dropped" in text
    assert f'kept as <a href="{client.base_url.path}trajectories/{HOSTILE}">' in text
    assert "owners" not in await page(client, f"trajectories/{run.READY}/0/1")
    scored = await page(client, f"trajectories/{run.TRAINED}/0/2")
    assert "Other Records of this slot" in scored
    assert f"trajectories/{run.TRAINED}/0/1" in scored
    overview = await page(client, f"http://127.0.0.1{client.base_url.path.rstrip('/')}")
    assert "Went on in another process" in overview


async def test_what_does_not_exist_is_not_found(client: httpx2.AsyncClient) -> None:
    for path in (
        "trajectories/nothing", "trajectories/%3Cscript%3Ealert(1)%3C/script%3E", "tokens/nothing",
        f"tokens/{HOSTILE}?call=99", f"text/{HOSTILE}?call=9&part=response",
        f"text/{HOSTILE}?call=0&part=x", "images/none", f"trajectories/{HOSTILE}?from=40",
        f"pair?a={HOSTILE}&b=nothing",
    ):  # fmt: skip
        await page(client, path, 404)
    for path in (
        f"tokens/{HOSTILE}?call=x",
        f"tokens/{HOSTILE}?colour=x",
        "pair",
        f"pair?a={HOSTILE}&b={HOSTILE}",
    ):
        await page(client, path, 400)


async def test_tokens_show_what_is_stored_of_them(client: httpx2.AsyncClient) -> None:
    text = await page(client, f"tokens/{TRAINED}")
    assert text.count("data-detail=") == 4
    assert "logprob -0.500 (probability 0.607) · policy version 0 · trained, advantage +1.000" in text
    assert 'class="token s2"' in text
    assert "/steps/1" in text
    assert 'class="token p4"' in await page(client, f"tokens/{TRAINED}?colour=advantage&call=1")
    for colour in ("version", "trained", "ratio", "entropy"):
        text = await page(client, f"tokens/{TRAINED}?colour={colour}")
        assert ("No step stored ratios" in text) == (colour in ("ratio", "entropy"))
    assert "Only a step computes" in await page(client, f"tokens/{run.ABANDONED}/1/1?colour=ratio")
    assert "no training data" in await page(client, f"tokens/{run.ABANDONED}/1/1")
    assert "No model call" in await page(client, f"tokens/{run.ABANDONED}/0/1")


async def test_tokens_that_drifted_and_uncertain_ones_are_coloured(
    client: httpx2.AsyncClient, store: Store
) -> None:
    (data,) = await store.training.fetch([TRAINED])
    values = np.asarray([0.0, -0.2, 0.5, 2.0, 0.01, 0.02, 0.03, 0.04], np.float32)
    item = TokenStatistics(
        id=statistics_key(TRAINED, run.STEP), record=TRAINED, train_step=run.STEP, step=1,
        spans=tuple(TokenSpan(start=span.start, end=span.end) for span in data.spans),
        log_ratios=pack_halves(values), entropies=pack_halves(1 + values),
    )  # fmt: skip
    await store.training.put_token_statistics([item])
    text = await page(client, f"tokens/{TRAINED}?colour=ratio")
    box = text.partition('<div class="tokens"')[2].partition("</div>")[0]
    assert re.findall(r'class="token (\w+)"', box) == ["p0", "n2", "p3", "p4"]
    assert "ratio 0.8188 (log-ratio -0.2000 nats) · entropy 0.800 nats" in box
    assert "probability of the token under the policy that step 1 started from" in text
    text = await page(client, f"tokens/{TRAINED}?colour=entropy&call=1&step=1")
    box = text.partition('<div class="tokens"')[2].partition("</div>")[0]
    assert re.findall(r'class="token (\w+)"', box) == ["s2"] * 4
    assert "Step 9 stored no ratios" in await page(client, f"tokens/{TRAINED}?colour=entropy&step=9")
    await page(client, f"tokens/{TRAINED}?step=x", 400)


async def test_two_trajectories_are_compared_and_rewards_looked_into(client: httpx2.AsyncClient) -> None:
    text = await page(client, f"pair?id={HOSTILE}&id={run.READY}/0/1")
    assert "They part at" in text
    same = await page(client, f"pair?a={TRAINED}&b={run.TRAINED}/0/2")
    assert "Both generated the same text" in same
    text = await page(client, "rewards")
    assert "correlation" in text
    assert text.count("<circle") == 5
    assert f"trajectories/{TRAINED}" in text
    assert "has a score" in await page(client, "rewards?split=%3Cscript%3E")


async def test_rewards_are_those_of_a_split_with_trajectories(
    client: httpx2.AsyncClient, store: Store
) -> None:
    await store.database["Record"].update_many({}, {"$set": {"split": "test"}})  # the tasks are of train
    assert (await page(client, "rewards")).count("<circle") == 6
    assert "<circle" not in await page(client, "rewards?split=train")


async def test_a_label_is_left_from_the_page_alone(client: httpx2.AsyncClient, store: Store) -> None:
    text = await page(client, f"trajectories/{HOSTILE}")
    found = re.search(r'name="csrf" value="(\w+)"', text)
    form = {"csrf": found[1], "label": SCRIPT, "note": CONTROL, "by": "ann", "score": "0.5"}
    where = f"labels/{HOSTILE}"
    for refused in (
        {"headers": {}}, {"headers": {"Origin": "http://evil"}}, {"headers": {"Origin": "null"}},
        {"headers": {**OWN, "Sec-Fetch-Site": "cross-site"}},
        {"headers": OWN, "data": {**form, "csrf": "0" * 64}}, {"headers": OWN, "data": {**form, "csrf": "é"}},
    ):  # fmt: skip
        assert (await client.post(where, **{"data": form, **refused})).status_code == 403  # type: ignore[arg-type]
    assert await store.labels.counts() == {}
    answer = await client.post(where, data=form, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (
        303, f"{client.base_url.path}trajectories/{HOSTILE}#labels"
    )  # fmt: skip
    (label,) = (await store.labels.of_records([HOSTILE]))[HOSTILE]
    assert (label.label, label.note, label.score) == (SCRIPT, CONTROL, 0.5)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;</span> score 0.50" in await page(
        client, f"trajectories/{HOSTILE}"
    )
    assert (await page(client, "trajectories?label=%3Cscript%3Ealert(1)%3C%2Fscript%3E")).count(
        "data-row"
    ) == 1
    for bad, status in (
        ({"score": "x"}, 400), ({"score": "nan"}, 400), ({"label": ""}, 400), ({"note": "x" * 70_000}, 413)
    ):  # fmt: skip
        assert (await client.post(where, data={**form, **bad}, headers=OWN)).status_code == status
    assert (await client.post("labels/nothing", data=form, headers=OWN)).status_code == 404
    await client.post(where, data={**form, "remove": "1"}, headers=OWN)
    assert await store.labels.counts() == {}


async def test_without_the_right_there_is_no_form(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await page(client, f"trajectories/{HOSTILE}")
    found = re.search(r'name="csrf" value="(\w+)"', text)

    async def never(labels: Labels) -> bool:
        return False

    monkeypatch.setattr(Labels, "may_write", never)
    assert "Read-only" in await page(client, f"trajectories/{HOSTILE}")
    form = {"csrf": found[1], "label": "x", "by": "ann"}
    answer = await client.post(f"labels/{HOSTILE}", data=form, headers=OWN)
    assert answer.status_code == 403
