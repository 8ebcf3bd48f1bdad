"""Labels on a real server: written, read, exported, imported and applied as scores."""

from __future__ import annotations

import getpass
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import small_run as run
from db_command import agentrl_db, violations

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.store.client import Store, open_existing

pytestmark = pytest.mark.integration

RIGHT, WRONG = f"{run.READY}/1/1", f"{run.READY}/0/1"


async def test_a_person_has_one_label_per_trajectory(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    first = await store.labels.put(RIGHT, by=" ann ", label="good", note="$why", score=1.0)
    again = await store.labels.put(RIGHT, by="ann", label="bad", score=0.0)
    await store.labels.put(RIGHT, by="bob", label="bad", score=0.5)
    assert (again.id, again.created_at, again.note) == (first.id, first.created_at, "")
    assert [label.by for label in (await store.labels.of_records([RIGHT, WRONG]))[RIGHT]] == ["ann", "bob"]
    assert again.written_by == f"{getpass.getuser()} on {socket.gethostname()}, database user agentrl"
    assert await store.labels.writers() == {
        f"ann (written by {again.written_by})": 1, f"bob (written by {again.written_by})": 1
    }  # fmt: skip
    assert await store.labels.scores() == {RIGHT: 0.25}
    assert await store.labels.counts() == {"bad": 2}
    assert await store.labels.remove(RIGHT, by="ann")
    assert not await store.labels.remove(RIGHT, by="ann")
    assert await store.labels.may_write()


async def test_bad_labels_are_refused(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    with pytest.raises(StoreError, match="there is no Record 'nothing'"):
        await store.labels.put("nothing", by="ann", label="good")
    for label, by, note, score in (
        ("", "ann", "", None), ("x" * 65, "ann", "", None), ("x", " ", "", None),
        ("x", "ann", "n" * 4001, None), ("x", "ann", "", float("nan")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"characters|the score is nan"):
            await store.labels.put(RIGHT, by=by, label=label, note=note, score=score)


async def test_labels_are_copied_with_the_run_and_become_scores(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights", unfinished=False)
    with pytest.raises(StoreError, match="no label with a score"):
        await agentrl_db(run_config, "rescore", "--from-labels")
    await store.labels.put(WRONG, by="ann", label="right", score=1.0)
    await store.labels.put(RIGHT, by="ann", label="wrong", score=0.25)
    await store.labels.put(f"{run.TRAINED}/0/2", by="ann", label="no score")
    copy = replace(run_config, run_name=f"{run_config.run_name}_copy")
    assert await agentrl_db(run_config, "export", str(tmp_path / "run")) == 0
    assert await agentrl_db(copy, "import", str(tmp_path / "run")) == 0
    async with await open_existing(copy) as copied:
        try:
            assert await agentrl_db(copy, "rescore", "--from-labels") == 0
            assert f"2 labels of ann (written by {getpass.getuser()} on " in capsys.readouterr().out
            scored = [await copied.records.get(key) for key in (WRONG, RIGHT)]
            assert [record.score for record in scored if record] == [1.0, 0.25]
            assert {record.score_details["scorer"] for record in scored if record} == {"labels"}
            assert await violations(copied) == []
        finally:
            await copied.database.client.drop_database(copy.run_name)
    with pytest.raises(ConfigError, match="goes with neither"):
        await agentrl_db(run_config, "rescore", "--from-labels", "--scorer", "math")
