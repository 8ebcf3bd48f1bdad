"""Pages of trajectories on a real server: every filter, every order, no row twice, bad input refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import small_run as run

from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.errors import ConfigError, StoreError
from agentrl.screens.views import read
from agentrl.screens.views.read import Bounds, TrajectoryFilter, TrajectoryOrder, TrajectorySearch
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


@pytest.fixture
async def filled(store: Store, tmp_path: Path) -> Store:
    """The small run, with texts to search in one of its trajectories."""
    await run.build(store, tmp_path / "weights")
    await store.database["DispatchedSamplingTask"].update_one(
        {"_id": f"{run.READY}/1/1/1"}, {"$set": {"response.content": "I say (a+)+$ and no more"}}
    )
    return store


async def ids(store: Store, wanted: TrajectoryFilter) -> set[str]:
    search = TrajectorySearch(store.connection)
    page = await search.page(wanted)
    assert page.after is None
    assert await search.count(wanted) in (None, len(page.rows))
    return {row.id for row in page.rows}


async def test_each_filter_selects_what_it_names(filled: Store) -> None:
    everything = await ids(filled, TrajectoryFilter())
    trained = {f"{run.TRAINED}/0/2", f"{run.TRAINED}/1/1"}
    assert len(everything) == 10
    assert await ids(filled, TrajectoryFilter(step=1)) == trained
    assert await ids(filled, TrajectoryFilter(step=99)) == set()
    assert await ids(filled, TrajectoryFilter(status=RecordStatus.FAILED)) == {
        f"{run.TRAINED}/0/1", f"{run.ABANDONED}/0/1"
    }  # fmt: skip
    assert await ids(filled, TrajectoryFilter(failure="engine")) == await ids(
        filled, TrajectoryFilter(status=RecordStatus.FAILED)
    )
    assert await ids(filled, TrajectoryFilter(split="eval")) == {"eval/0/one/0/1"}
    assert await ids(filled, TrajectoryFilter(task="ready")) == {f"{run.READY}/0/1", f"{run.READY}/1/1"}
    assert await ids(filled, TrajectoryFilter(task=run.TRAINED)) == {*trained, f"{run.TRAINED}/0/1"}
    assert await ids(filled, TrajectoryFilter(score=Bounds(0.5), step=1)) == {f"{run.TRAINED}/1/1"}
    assert await ids(filled, TrajectoryFilter(version=0, turns=Bounds(2))) == trained
    assert await ids(filled, TrajectoryFilter(tokens=Bounds(None, 0), status=RecordStatus.FAILED)) == {
        f"{run.ABANDONED}/0/1"
    }
    assert f"{run.ABANDONED}/0/1" not in await ids(filled, TrajectoryFilter(tool="add"))
    assert await ids(filled, TrajectoryFilter(tool="none")) == set()
    assert await ids(filled, TrajectoryFilter(text="SAY (A+)+$")) == {f"{run.READY}/1/1"}
    assert await ids(filled, TrajectoryFilter(text="2 + 2")) == everything
    await filled.labels.put(f"{run.READY}/0/1", by="ann", label="cheats")
    assert await ids(filled, TrajectoryFilter(label="cheats")) == {f"{run.READY}/0/1"}
    assert await ids(filled, TrajectoryFilter(label="cheats", step=1)) == set()


@pytest.mark.parametrize("order", list(TrajectoryOrder))
async def test_pages_hold_every_row_once_in_order(filled: Store, order: TrajectoryOrder) -> None:
    search = TrajectorySearch(filled.connection)
    whole = (await search.page(TrajectoryFilter(), order=order)).rows
    name, direction = order.key
    keys = [(getattr(row, name), row.id) for row in whole]
    assert keys == sorted(keys, reverse=direction < 0)
    found, after = [], None
    while True:
        page = await search.page(TrajectoryFilter(), order=order, limit=3, after=after)
        found += [row.id for row in page.rows]
        if (after := page.after) is None:
            break
    assert found == [row.id for row in whole]


async def test_a_search_goes_on_where_its_time_ended(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search = TrajectorySearch(filled.connection)
    monkeypatch.setattr(read, "_FIRST_WINDOW", 2)
    monkeypatch.setattr(read, "_LARGEST_WINDOW", 2)
    found: list[str] = []
    after, searched = None, 0
    monkeypatch.setattr(read, "SEARCH_SECONDS", 0.0)
    while True:
        page = await search.page(TrajectoryFilter(text="no more"), after=after)
        assert page.searched in (0, 2)
        searched += page.searched or 0
        found += [row.id for row in page.rows]
        if (after := page.after) is None:
            break
    assert searched == 10
    assert found == [f"{run.READY}/1/1"]


async def test_what_no_page_gave_is_refused(filled: Store) -> None:
    search = TrajectorySearch(filled.connection)
    page = await search.page(TrajectoryFilter(), limit=1)
    for after in ("", "x", "ü", "W10=", page.after or ""):
        with pytest.raises(ConfigError, match="which no page of this order gave"):
            await search.page(TrajectoryFilter(), order=TrajectoryOrder.LONGEST, after=after)
    with pytest.raises(ConfigError, match="page of 0"):
        await search.page(TrajectoryFilter(), limit=0)


async def test_a_read_that_takes_too_long_is_refused(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search = TrajectorySearch(filled.connection)
    monkeypatch.setattr(read, "READ_SECONDS", 0.000001)
    with pytest.raises(StoreError, match="could not be read within"):
        await search.page(TrajectoryFilter())


async def test_long_texts_are_cut(filled: Store) -> None:
    search = TrajectorySearch(filled.connection)
    document = await filled.database["Record"].find_one({"_id": f"{run.READY}/0/1"})
    record = replace(Record.from_document(document or {}), id="long", query="é" * 100_000, answer=[1])
    await filled.database["Record"].insert_one(record.to_document())
    row = (await search.page(TrajectoryFilter(), order=TrajectoryOrder.OLDEST)).rows
    (long,) = [each for each in row if each.id == "long"]
    assert len(long.query) == 400
    assert long.answer == [1]
