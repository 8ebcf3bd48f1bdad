"""``agentrl tasks load``: what it refuses, and that a refusal writes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from loaded_tasks import load_tasks

from agentrl.cli.main import main
from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.documents.status import TaskStatus
from agentrl.errors import TaskFileError
from agentrl.store.client import Store, run_exists

pytestmark = pytest.mark.integration


@pytest.fixture
def load(run_config: RunConfig, tmp_path: Path) -> Callable[..., int]:
    """Load tasks of these ids by the command, and return its exit code."""

    def load(ids: Iterable[int], *flags: str, query: str = "?", scorer: str = "exact") -> int:
        lines = [{"id": number, "query": query, "answer": "1", "scorer": scorer} for number in ids]
        file = tmp_path / "tasks.jsonl"
        file.write_text("\n".join(json.dumps(line) for line in lines))
        uri = str(run_config.db_connection_string)
        where = ["--run_name", run_config.run_name, "--db_connection_string", uri]
        return main(["tasks", "load", str(file), *where, *flags])

    return load


async def test_another_file_needs_append_and_other_texts_need_update(
    load: Callable[..., int], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    async def created() -> int:
        return (await store.tasks.counts("train"))[TaskStatus.CREATED]

    for _ in range(2):
        assert await asyncio.to_thread(load, range(3)) == 0
    assert await asyncio.to_thread(load, range(2)) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(load, range(2, 5), query="new") == 2
    refusal = capsys.readouterr().err
    assert "begun with another file: it does not have 2 tasks of this one: train/0/" in refusal
    assert "--append` adds them, and --update changes the 1 tasks that differ" in refusal
    assert await asyncio.to_thread(load, range(2, 5), "--append", query="new") == 2
    assert "--update" in capsys.readouterr().err
    assert await created() == 3
    assert await asyncio.to_thread(load, range(2, 5), "--append", "--update", query="new") == 0
    assert await created() == 5


@pytest.mark.parametrize("scorer", ["exakt", "module_of_another_host:score"])
def test_a_scorer_that_cannot_be_used_stops_the_load_and_begins_no_run(
    load: Callable[..., int], run_config: RunConfig, capsys: pytest.CaptureFixture[str], scorer: str
) -> None:
    assert load(range(3), scorer=scorer) == 2
    printed = capsys.readouterr().err
    assert "3 of 3 tasks of" in printed
    assert scorer.partition(":")[0] in printed
    assert not asyncio.run(run_exists(run_config))


async def test_a_samplers_file_of_other_tasks_is_refused_too(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    for ids in (range(3), range(2, 5)):
        lines = [{"id": number, "query": "?", "answer": "1", "scorer": "exact"} for number in ids]
        file = tmp_path / f"{ids.start}.jsonl"
        file.write_text("\n".join(json.dumps(line) for line in lines))
    await load_tasks(
        store, run_config, TaskConfig(), str(tmp_path / "0.jsonl"), split="train", num_generations=2
    )
    await load_tasks(
        store, run_config, TaskConfig(), str(tmp_path / "0.jsonl"), split="train", num_generations=2
    )
    with pytest.raises(TaskFileError, match="begun with another file: it does not have 2 tasks of this one"):
        await load_tasks(
            store, run_config, TaskConfig(), str(tmp_path / "2.jsonl"), split="train", num_generations=2
        )
    assert (await store.tasks.counts("train"))[TaskStatus.CREATED] == 3
