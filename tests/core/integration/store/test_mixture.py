"""A mixture on a real server: weights, gates and pools decide by what is stored, for every sampler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.config.schema import ClaimConfig, RunConfig
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.documents.task import Claim
from agentrl.errors import AgentRLError
from agentrl.rollout.housekeeping import EpochPlan, Housekeeping
from agentrl.rollout.load_tasks import read_task_source, store_tasks
from agentrl.store.claims import Needs
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration

EASY_HARD = (
    "easy: {path: easy.jsonl}\n  hard: {path: hard.jsonl, gate: {source: easy, pass_rate: 0.8, groups: 4}}"
)


class Mixed:
    """A run of a mixture, whose groups end as they are told; each has one trajectory."""

    def __init__(self, store: Store, folder: Path, epochs: int = 1) -> None:
        self.store = store
        self.file = folder / "mix.yml"
        self.epochs = epochs
        plan = EpochPlan(epochs=epochs, seed=0, num_generations=1, shuffle=True)
        self.housekeeping = Housekeeping(
            store, None, plan, split="train", claims=ClaimConfig(), made_work=lambda: None
        )  # type: ignore[arg-type]

    async def load(self, sources: str, tasks: Mapping[str, int], **how: bool) -> None:
        """Load a mixture of files with this many tasks."""
        for name, count in tasks.items():
            lines = [json.dumps({"query": "?", "answer": "1", "scorer": "exact"})] * count
            (self.file.parent / f"{name}.jsonl").write_text("\n".join(lines))
        self.file.write_text(f"sources:\n  {sources}\n")
        await store_tasks(self.store, read_task_source(self.file, num_generations=1), **how)

    async def claim(self, store: Store | None = None, without: Needs | None = None) -> Claim | None:
        """Claim the next group, whatever number is open; open epochs that are due, as a sampler does."""
        for _ in range(2):
            claimed = await (store or self.store).claims.claim(
                split="train", owner="s", lease_seconds=60.0, max_groups_open=1 + await self.unfinished(),
                epochs=self.epochs, without=without or Needs(),
            )  # fmt: skip
            if claimed is not None or not await self.housekeeping.open_next_epoch():
                break
        return claimed

    async def unfinished(self) -> int:
        return await self.store.groups.count_open("train")

    async def finish(self, claimed: Claim, pass_rate: float) -> None:
        """Finalize the group as if it had this pass rate; nothing of it is trained."""
        group = {
            "scored": 1,
            "failed": 0,
            "pass_rate": pass_rate,
            "mean_score": pass_rate,
            "outcome": "dropped",
        }
        fields = {
            "status": TaskStatus.COMPLETED.value, "slots.$[].status": SlotStatus.SCORED.value, "group": group,
        }  # fmt: skip
        tasks, query = self.store.database["Task"], {"_id": claimed.task.id}
        await tasks.update_one(query, {"$set": fields})
        await tasks.update_one(query, {"$currentDate": {"group.finalized_at": True}})

    async def run(self, groups: int, rates: Mapping[str, float] | None = None, **how: Store) -> str:
        """Begin and end group after group; return the first letters of their sources."""
        begun = ""
        for _ in range(groups):
            claimed = await self.claim(**how)
            if claimed is None:
                break
            source = str(claimed.task.source)
            await self.finish(claimed, (rates or {}).get(source, 0.5))
            begun += source[0]
        return begun


@pytest.fixture
def mixed(store: Store, tmp_path: Path) -> Mixed:
    return Mixed(store, tmp_path)


async def test_sources_take_turns_by_weight_and_each_goes_through_its_own_order(mixed: Mixed) -> None:
    await mixed.load("a: {path: a.jsonl, weight: 3}\n  b: {path: b.jsonl}", {"a": 9, "b": 9})
    assert await mixed.run(8) == "aabaaaba"
    tasks = await mixed.store.tasks.find("train", status=TaskStatus.COMPLETED)
    numbers = {task.task_id: task.begun.number for task in tasks if task.begun is not None}
    assert sorted(numbers.values()) == [*range(1, 9)]
    of_a = sorted((task for task in tasks if task.source == "a"), key=lambda task: task.order)
    assert [numbers[task.task_id] for task in of_a] == [1, 2, 4, 5, 6, 8]
    assert {task.task_id.partition("/")[0] for task in of_a} == {"a"}
    states = await mixed.store.mixtures.states()
    assert [(each.begun, each.share, each.target, each.pass_rate) for each in states] == [
        (6, 0.75, 0.75, 0.5), (2, 0.25, 0.25, 0.5),
    ]  # fmt: skip


async def test_another_process_goes_on_exactly_where_the_last_one_stopped(
    mixed: Mixed, run_config: RunConfig
) -> None:
    await mixed.load("a: {path: a.jsonl, weight: 3}\n  b: {path: b.jsonl}", {"a": 9, "b": 9})
    begun = ""
    for _ in range(8):
        async with await open_store(run_config) as other:
            begun += await mixed.run(1, store=other)
    assert begun == "aabaaaba"


async def test_one_admission_of_many_groups_mixes_as_many_of_one_group_do(mixed: Mixed) -> None:
    await mixed.load("a: {path: a.jsonl, weight: 3}\n  b: {path: b.jsonl}", {"a": 9, "b": 9})
    order = ""
    for _ in range(8):
        claimed = await mixed.store.claims.claim(
            split="train", owner="s", lease_seconds=60.0, max_groups_open=8
        )
        order += str(claimed.task.source) if claimed else "-"
    assert order == "aabaaaba"


async def test_a_small_source_begins_its_next_epoch_while_a_large_one_is_in_its_first(
    store: Store, tmp_path: Path
) -> None:
    mixed = Mixed(store, tmp_path, epochs=3)
    await mixed.load("a: {path: a.jsonl}\n  b: {path: b.jsonl}", {"a": 2, "b": 20})
    assert await mixed.run(12) == "ab" * 6
    # All three epochs of a are over: its weight goes to b.
    assert await mixed.run(4) == "bbbb"
    times = Counter(task.task_id for task in await store.tasks.find("train") if task.source == "a")
    assert times == {"a/0": 3, "a/1": 3}
    assert not await store.tasks.any_with_status("train", TaskStatus.CREATED, source="a")
    assert await store.epochs.due("train", 3) == [("b", 1)]
    assert not await mixed.housekeeping.nothing_is_left()
    assert len(await mixed.run(100)) == 50
    assert await store.epochs.due("train", 3) == []
    assert await mixed.housekeeping.nothing_is_left()


async def test_a_source_whose_epoch_ends_inside_an_admission_keeps_its_turns(
    store: Store, tmp_path: Path
) -> None:
    mixed = Mixed(store, tmp_path, epochs=3)
    await mixed.load("a: {path: a.jsonl}\n  b: {path: b.jsonl}", {"a": 2, "b": 20})
    order = ""
    while len(order) < 8:
        claimed = await store.claims.claim(
            split="train", owner="s", lease_seconds=60.0, max_groups_open=8, epochs=3
        )
        if claimed is not None:
            order += str(claimed.task.source)
        else:
            assert await mixed.housekeeping.open_next_epoch()
    assert order == "ab" * 4


async def test_a_source_whose_server_is_down_is_left_out_and_does_not_catch_up(mixed: Mixed) -> None:
    await mixed.load("a: {path: a.jsonl}\n  b: {path: b.jsonl}", {"a": 20, "b": 20})
    await mixed.store.database["Task"].update_many({"source": "b"}, {"$set": {"tools": ["search"]}})
    await mixed.store.database["Task"].update_many({"source": "a"}, {"$set": {"tools": []}})
    down = Needs(servers=frozenset({"search"}))
    begun = ""
    for without in [down] * 4 + [Needs()] * 4:
        claimed = await mixed.claim(without=without)
        assert claimed is not None
        await mixed.finish(claimed, 1.0)
        begun += str(claimed.task.source)
    assert begun == "aaaa" + "baba"


async def test_a_gate_opens_by_the_last_groups_of_its_source_and_stays_open(mixed: Mixed) -> None:
    await mixed.load(EASY_HARD, {"easy": 30, "hard": 30})
    assert await mixed.run(6, {"easy": 0.5}) == "e" * 6
    assert await mixed.run(3, {"easy": 1.0}) == "eee"  # 0.5, 1, 1, 1: a mean of 0.88
    assert await mixed.run(8, {"easy": 0.0}) == "eh" * 4
    (_, hard) = await mixed.store.mixtures.sources()
    assert hard.opened is not None
    assert (hard.opened.because, hard.opened.pass_rate, hard.opened.after_step) == ("pass_rate", 0.875, 0)
    assert [each.why for each in await mixed.store.mixtures.states()] == [
        "", "open since step 0: easy had 0.88",
    ]  # fmt: skip


async def test_a_gate_that_can_never_open_opens_when_nothing_else_is_left(mixed: Mixed) -> None:
    sources = f"{EASY_HARD}\n  rest: {{path: rest.jsonl, gate: {{source: hard, pass_rate: 1, groups: 2}}}}"
    await mixed.load(sources, {"easy": 3, "hard": 2, "rest": 1})
    assert await mixed.run(2) == "ee"
    last = await mixed.claim()
    assert last is not None
    assert await mixed.claim() is None, "the last group of easy may still open the gate"
    (_, hard, rest) = await mixed.store.mixtures.states()
    assert (hard.is_open, hard.why) == (False, "closed: easy has 0.50 in 2, and needs 0.8 in 4 groups")
    (unreachable,) = await mixed.store.mixtures.unreachable(1)
    assert unreachable.startswith("the gate of source hard waits for 4 groups of easy, which has 3 tasks")
    assert await mixed.store.mixtures.unreachable(2) == []
    assert not await mixed.housekeeping.nothing_is_left()
    await mixed.finish(last, 0.5)
    assert await mixed.run(9) == "hhr"
    (_, hard, rest) = await mixed.store.mixtures.states()
    assert hard.why == "open since step 0: easy had 0.50, because nothing else was left"
    assert rest.why == "open since step 0: hard had 0.50, because nothing else was left"
    assert await mixed.housekeeping.nothing_is_left()


async def test_groups_without_a_score_say_nothing_about_a_source(mixed: Mixed) -> None:
    await mixed.load(EASY_HARD, {"easy": 30, "hard": 30})
    for scored in (1, 0, 1, 0, 1, 0):
        claimed = await mixed.claim()
        assert claimed is not None
        await mixed.finish(claimed, 1.0)
        await mixed.store.database["Task"].update_one(
            {"_id": claimed.task.id}, {"$set": {"group.scored": scored, "group.pass_rate": float(scored)}}
        )
    assert await mixed.run(1, {"easy": 1.0}) == "e", "three scored groups are fewer than four"
    assert "h" in await mixed.run(2)


async def test_another_mixture_is_refused_and_changed_on_request(mixed: Mixed) -> None:
    await mixed.load("a: {path: a.jsonl}\n  b: {path: b.jsonl}", {"a": 9, "b": 9})
    await mixed.run(3)
    heavier = "a: {path: a.jsonl, weight: 5}\n  b: {path: b.jsonl}"
    with pytest.raises(AgentRLError, match=r"another mixture.*\n  a.weight 1.0 → 5.0"):
        await mixed.load(heavier, {})
    await mixed.load(heavier, {}, update=True)
    a, _ = await mixed.store.mixtures.sources()
    assert (a.weight, a.begun) == (5, 2)
    more = f"{heavier}\n  c: {{path: c.jsonl, weight: 6}}"
    with pytest.raises(AgentRLError, match="does not have the source c"):
        await mixed.load(more, {"c": 4}, append=False)
    await mixed.load(more, {"c": 4}, append=True)
    assert "c" in await mixed.run(3)
    with pytest.raises(AgentRLError, match="has the source c, and the mixture's file has not"):
        await mixed.load(heavier, {}, update=True)
    with pytest.raises(AgentRLError, match="are a mixture, and this file is none"):
        await store_tasks(mixed.store, read_task_source(mixed.file.parent / "a.jsonl", num_generations=1))


async def test_a_run_of_plain_tasks_gets_no_mixture(mixed: Mixed) -> None:
    (mixed.file.parent / "a.jsonl").write_text('{"query": "?", "answer": "1", "scorer": "exact"}')
    await store_tasks(mixed.store, read_task_source(mixed.file.parent / "a.jsonl", num_generations=1))
    with pytest.raises(AgentRLError, match="belong to no source"):
        await mixed.load("a: {path: a.jsonl}", {"a": 1})


async def test_pools_set_tasks_aside_by_their_last_pass_rate(store: Store, tmp_path: Path) -> None:
    mixed = Mixed(store, tmp_path, epochs=3)
    pools = (
        "pools: {hard: {threshold: 0.1, weight: 0}, fit: {threshold: 0.9, weight: 1},"
        " easy: {threshold: 1, weight: 0.5}}"
    )
    await mixed.load(f"a: {{path: a.jsonl, {pools}}}", {"a": 12})
    rates = {f"a/{n}": rate for n, rate in enumerate([0.0] * 4 + [0.5] * 2 + [1.0] * 6)}
    epochs = []
    while (claimed := await mixed.claim()) is not None:
        await mixed.finish(claimed, rates[claimed.task.task_id])
        epochs.append((claimed.task.epoch, rates[claimed.task.task_id]))
    counted = Counter(epochs)
    assert counted == {
        (0, 0.0): 4, (0, 0.5): 2, (0, 1.0): 6,  # what has no pass rate yet is sampled
        (1, 0.5): 2, (1, 1.0): 3,
        (2, 0.5): 2, (2, 1.0): 3,
    }  # fmt: skip
    (state,) = await store.mixtures.states()
    assert (state.epoch, state.set_aside, state.begun) == (2, {"hard": 4, "easy": 3}, 22)
    assert await store.epochs.due("train", 3) == []
    assert await mixed.housekeeping.nothing_is_left()


async def test_a_source_that_is_set_aside_as_a_whole_is_at_its_end(store: Store, tmp_path: Path) -> None:
    mixed = Mixed(store, tmp_path, epochs=50)
    pools = "pools: {rest: {threshold: 0.9, weight: 1}, easy: {threshold: 1, weight: 0}}"
    await mixed.load(f"a: {{path: a.jsonl, {pools}}}\n  b: {{path: b.jsonl}}", {"a": 2, "b": 2})
    assert await mixed.run(8, {"a": 1.0}) == "abab" + "bbbb"
    state = (await store.mixtures.states())[0]
    assert (state.epoch, state.set_aside) == (1, {"easy": 2})
