"""What a trainer takes its data from."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from parsed_flags import parsed

from agentrl.base.folder_owner import OWNER_FILE, Owner
from agentrl.base.registry import Registry
from agentrl.documents.run import PARENT, Relative
from agentrl.errors import ConfigError
from agentrl.train import start


async def test_the_steps_of_a_parent_are_trained_by_what_registers_for_them_and_else_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources: Registry[Any] = Registry("step source", group="agentrl.no_sources")
    monkeypatch.setattr(start, "STEP_SOURCES", sources)
    parent = Relative(id=PARENT, run="math", kind="whatif", step=3, checkpoint="/c", steps=(4, 6))

    async def of_parent() -> Relative:
        return parent

    async def open_steps(*given: Any) -> Any:
        return given

    store = cast("Any", SimpleNamespace(ancestry=SimpleNamespace(parent=of_parent)))
    progress = cast("Any", SimpleNamespace(train_steps=["1/1"]))
    configs = parsed()
    with pytest.raises(ConfigError, match="unknown step source 'whatif'"):
        await start.open_source(store, configs, cast("Any", None), progress, None)
    sources.add(open_steps, "whatif")
    opened = await start.open_source(store, configs, cast("Any", None), progress, 5)
    assert cast("Any", opened) == (store, parent, configs, ["1/1"], 5)


@pytest.mark.parametrize("begun_meanwhile", [False, True])
async def test_a_claimed_folder_refuses_a_new_run_unless_another_rank_has_begun_it(
    begun_meanwhile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OWNER_FILE).write_bytes(Owner(run="mine", id="0" * 32, server="localhost:27017").to_json())
    monkeypatch.setattr(start, "run_exists", AsyncMock(return_value=begun_meanwhile))
    monkeypatch.setattr(start, "_check_disk", lambda configs: None)
    monkeypatch.setattr(start, "require_buildable", lambda configs, world: None)
    configs = parsed("--run_name", "mine", "--output_dir", str(tmp_path))
    refused = nullcontext() if begun_meanwhile else pytest.raises(ConfigError, match="which is new")
    with refused:
        await start._require_startable(configs, cast("Any", None))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(["--lr_scheduler_type", "cosine"], 6), (["--warmup_ratio", "0.1"], 6), ([], None),
     (["--lr_scheduler_type", "cosine", "--max_steps", "9"], 9)],
)  # fmt: skip
async def test_a_schedule_that_needs_the_number_of_tasks_waits_until_they_are_loaded(
    flags: list[str], expected: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = cast("Any", SimpleNamespace(
        ancestry=SimpleNamespace(parent=AsyncMock(return_value=None)),
        epochs=SimpleNamespace(size=AsyncMock(side_effect=[0, 0, 24])),
        wait_for_change=AsyncMock(return_value=True),
    ))  # fmt: skip
    configs = parsed("--groups_per_step", "4", *flags)
    with caplog.at_level("INFO"):
        assert await start._total_steps(store, configs, asyncio.Event()) == expected
    assert ("waiting for the tasks" in caplog.text) == (expected == 6)


async def test_a_trainer_that_waits_for_tasks_can_be_stopped() -> None:
    stop = asyncio.Event()

    async def stopping(*collections: str, timeout: float) -> bool:
        stop.set()
        return False

    store = cast("Any", SimpleNamespace(
        ancestry=SimpleNamespace(parent=AsyncMock(return_value=None)),
        epochs=SimpleNamespace(size=AsyncMock(return_value=0)), wait_for_change=stopping,
    ))  # fmt: skip
    assert await start._total_steps(store, parsed("--lr_scheduler_type", "cosine"), stop) is None


async def test_tasks_that_nobody_loads_end_a_trainer_that_needs_their_number() -> None:
    store = cast("Any", SimpleNamespace(
        ancestry=SimpleNamespace(parent=AsyncMock(return_value=None)),
        epochs=SimpleNamespace(size=AsyncMock(return_value=0)), wait_for_change=AsyncMock(return_value=False),
    ))  # fmt: skip
    configs = parsed("--warmup_ratio", "0.1", "--data_wait_seconds", "0.05")
    with pytest.raises(ConfigError, match="no task was loaded"):
        await start._total_steps(store, configs, asyncio.Event())
