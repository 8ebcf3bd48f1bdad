"""The views that Compass shows say what is stored; commands, notebooks and pages read the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import small_run as run
from db_command import violations
from test_ages_after_resume import add_groups, publish, statuses
from test_coalesced_writes import claim_all, make_call
from test_store_training import finalized, make_step

from agentrl.columns.pool import host_of
from agentrl.documents.document import Root
from agentrl.documents.record import Failure
from agentrl.documents.run import InferenceService
from agentrl.documents.status import DataStatus, StepStatus
from agentrl.documents.training import TrainStep
from agentrl.screens.trajectory_page import other_text
from agentrl.screens.views.counts import Continued, Counts, Rewards
from agentrl.screens.views.read import TokenReads, Views
from agentrl.store.client import Store
from agentrl.store.schema import prepare

pytestmark = pytest.mark.integration

NOW_DEPENDENT = {"seconds_since_heartbeat"}


async def equals_view(store: Store, view: str, rows: Sequence[Root]) -> bool:
    shown = {document["_id"]: document async for document in store.database[view].find()}
    read = {document["_id"]: document for document in (row.to_document() for row in rows)}
    assert shown.keys() == read.keys()
    for key, document in shown.items():
        assert document.keys() <= read[key].keys()
        differing = {name for name in document if document[name] != read[key][name]}
        assert differing <= NOW_DEPENDENT
    return bool(rows)


async def test_rows_equal_the_views(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    views = Views(store.connection)
    assert await equals_view(store, "audit_trajectories", await views.trajectories())
    assert await equals_view(store, "audit_groups", await views.groups())
    assert await equals_view(store, "audit_tasks", await views.tasks())
    assert await equals_view(store, "audit_steps", await views.steps())


async def test_who_sampled_a_trajectory_is_a_row_each_and_summed_up(store: Store) -> None:
    await run.add_task(store, run.TRAINED, 0)
    counts = Counts(store.connection)
    assert not (await counts.continued()).any
    first = await run.claim(store)
    await store.model_calls.add(first, run.call(first, 0, 0, 2))
    await store.attempts.release(first)
    second = await run.claim(store)
    assert second.record_id == first.record_id
    await store.records.note(second, replayed=1, tokens=4, tool_seconds=0.5)
    other = replace(run.call(second, 1, 0, 8), attempt=2)
    await store.model_calls.add(second, other)
    assert await store.model_calls.drop(second, 1) == 1
    restarted = await run.claim(store)
    await store.attempts.begin_anew(restarted, Failure(kind="replay", message="x"))
    found = await counts.continued()
    assert found == Continued(
        trajectories=1, released=1, turns=1, tokens=4, tool_seconds=0.5, diverged=1, dropped=1, restarted=1
    )
    rows = {row["_id"]: row async for row in store.database["audit_owners"].find({"task": run.TRAINED})}
    one, two = rows[f"{first.record_id}@1"], rows[f"{first.record_id}@2"]
    assert (one["ended"], one["saved_turns"], one["kept_as"]) == ("released", 0, None)
    assert one["host"] is None
    named = {"owners.0.owner": "node-a-71.8834411.1f0c9ae0.77aa00bb"}
    await store.database["Record"].update_one({"_id": first.record_id}, {"$set": named})
    row = await store.database["audit_owners"].find_one({"_id": f"{first.record_id}@1"})
    assert row["host"] == host_of(row["owner"]) == "node-a"
    assert (two["ended"], two["saved_turns"], two["diverged_at"]) == (None, 1, 1)
    assert two["kept_as"] == f"{run.TRAINED}/0/2"
    (whole_row,) = [each for each in await Views(store.connection).trajectories() if each.owners > 1]
    assert whole_row.id == first.record_id
    assert (whole_row.owners, whole_row.saved_turns, whole_row.saved_tokens) == (2, 1, 4)
    assert whole_row.dropped_turns == 1
    whole = await Views(store.connection).whole_trajectory(first.record_id)
    assert whole is not None
    assert [(other.id, other_text(other)) for other in whole.others] == [
        (two["kept_as"], "a branch that a divergence dropped; never trained")
    ]
    assert await violations(store, compare_tokens=lambda *_: None) == []
    index = await store.database["Record"].find({"owners.1.attempt": {"$gt": 0}}).explain()
    assert "owners.1.attempt" in str(index["queryPlanner"]["winningPlan"])


async def test_a_view_of_an_installed_package_is_made_with_the_others(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "passed = 'Record', [{'$match': {'score': 1.0}}]\nwrong = 'Record'\n"
    (tmp_path / "own_views.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    points = EntryPoints(
        EntryPoint(name, f"own_views:{name}", "agentrl.views") for name in ("passed", "wrong")
    )
    monkeypatch.setattr("agentrl.base.registry.entry_points", lambda **query: points.select(**query))
    await prepare(store.database)
    assert "wrong" not in await store.database.list_collection_names()
    assert await store.database["passed"].count_documents({}) == 0
    await run.build(store, tmp_path / "weights")
    assert [row["score"] async for row in store.database["passed"].find()] == [1.0] * 4


async def test_rows_are_filtered_and_limited(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    views = Views(store.connection)
    newest = await views.trajectories()
    assert [row.created_at for row in newest] == sorted((row.created_at for row in newest), reverse=True)
    assert {row.status for row in await views.trajectories(status="failed")} == {"failed"}
    assert len(await views.trajectories(limit=2)) == 2
    assert await views.trajectories(step=99) == []
    assert [row.step for row in await views.steps(last=1)] == [1]
    assert [row.split for row in await views.groups(split="eval")] == ["eval"]


async def test_views_show_a_planned_step_without_packed_arrays(store: Store) -> None:
    (one,) = await finalized(store, 1)
    await store.steps.plan(make_step(1, [one]))
    trajectory = await store.database["audit_trajectories"].find_one({"_id": one})
    turn = await store.database["audit_turns"].find_one({"record": one})
    step = await store.database["audit_steps"].find_one({"step": 1})
    assert (trajectory["training_status"], turn["response"]["content"]) == ("planned", "!")
    assert "output_ids" not in turn
    assert (step["trajectories"], step["groups"]) == (1, 1)


async def test_the_view_shows_what_a_tool_answered_where_the_model_read_it(store: Store) -> None:
    (claim, *_) = await claim_all(store)
    for index in range(2):
        await store.model_calls.add(claim, make_call(claim, index))
    shown = await store.database["audit_conversations"].find_one({"_id": claim.record_id})
    assert [message["content"] for message in shown["conversation"]] == ["?", "!", "Error: 3", "!"]


async def test_views_show_ages_of_the_oldest_token(store: Store) -> None:
    """Step 14 starts from weights of 13 steps; what waits then would train on weights of 14."""
    await publish(store, {number: number for number in range(21)})
    await store.policy_versions.withdraw_after(10)
    await publish(store, {21: 11, 22: 12, 23: 13})
    numbers = {number: number for number in range(24)}
    await add_groups(store, numbers, {"older": [[20, 21], [20]], "fresh": [[20, 22], [12]]})
    data = tuple(sorted(await statuses(store)))
    step = TrainStep(id="2/14", step=14, status=StepStatus.COMMITTED, policy_version=23, data=data, owner="t")
    await store.database["TrainStep"].insert_one(step.to_document())
    trained = await store.database["audit_training"].find({}, sort=[("trajectory", 1)]).to_list()
    assert [row["trajectory"] for row in trained] == list(data)
    assert [row["staleness"] for row in trained] == [1, 1, 2, 0]
    waiting = await store.database["audit_waiting"].find({}, sort=[("_id", 1)]).to_list()
    assert [(row["staleness_now"], row["newest_version"]) for row in waiting] == [
        (2, 23), (2, 23), (3, 23), (0, 23),
    ]  # fmt: skip
    for url, version in (("old", 20), ("new", 22), ("starting", None)):
        service = InferenceService(
            id=url, url=url, engine="local", model="m", host="h", pid=1, policy_version=version
        )
        await store.services.register(service)
    engines = await store.database["audit_engines"].find({}).to_list()
    assert {row["url"]: row["versions_behind"] for row in engines} == {"old": 3, "new": 1, "starting": None}


async def test_tokens_have_what_is_stored_of_them(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    reads = TokenReads(store.connection)
    trained = await reads.trajectory(f"{run.TRAINED}/1/1")
    assert trained.data_status is DataStatus.TRAINED
    assert [step.step for step in trained.steps] == [1]
    assert trained.steps[0].metrics == {"loss": 0.1}
    assert trained.locations == {0: str(tmp_path / "weights" / "v000000")}
    first = trained.calls[0]
    assert first.ids.tolist() == [1, 1, 2, 3]
    assert first.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert first.versions.tolist() == [0, 0, 0, 0]
    assert first.advantages.tolist() == [1.0] * 4

    abandoned = await reads.trajectory(f"{run.ABANDONED}/1/1")
    assert (abandoned.data_status, abandoned.steps) == (None, [])
    assert np.isnan(abandoned.calls[1].advantages).all()
    assert await reads.trajectory("nothing") is None


async def test_scored_trajectories_have_the_opinions_of_all_scorers(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    details = {"scorer": "1.0*judge + 0.5*exact", "parts": {
        "judge": {"score": 1.0, "judge": "m", "reply": "Correct"}, "exact": {"score": 0.0}}}  # fmt: skip
    judged = f"{run.READY}/1/1"
    await store.database["Record"].update_one(
        {"_id": judged},
        {"$set": {"score_details": details, "final_answer": "x" * 1000,
                  "rescored": {"score": 0.25, "details": {"scorer": "later"}}}},
    )  # fmt: skip
    await store.labels.put(judged, by="ann", label="wrong", score=0.0)
    rewards = Rewards(store.connection)
    found = {row.id: row for row in await rewards.newest("train")}
    assert set(found) == {
        judged, f"{run.READY}/0/1", f"{run.TRAINED}/0/2", f"{run.TRAINED}/1/1", f"{run.ABANDONED}/1/1"
    }  # fmt: skip
    assert found[judged].opinions == {
        "1.0*judge + 0.5*exact": 1.0, "judge": 1.0, "exact": 0.0, "later": 0.25, "people": 0.0
    }  # fmt: skip
    assert found[judged].judges == {"judge"}
    assert found[judged].answer == "x" * 300
    assert found[f"{run.READY}/0/1"].opinions == {"exact": 0.0}
    assert len(await rewards.newest("train", limit=2)) == 2
