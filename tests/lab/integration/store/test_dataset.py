"""``agentrl db export --hf``: the scored trajectories of a run as Parquet."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import small_run as run
from db_command import agentrl_db

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.lab import transfer
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def test_the_scored_trajectories_become_rows(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    monkeypatch.setattr(transfer, "_PAGE", 2)
    await run.build(store, tmp_path / "weights")
    calls = [{"function": {"name": "add", "arguments": {"a": 2}}}]
    change = {"$set": {"response.tool_calls": calls, "response.content": [{"type": "text", "text": "é!"}]}}
    await store.database["DispatchedSamplingTask"].update_one({"_id": f"{run.TRAINED}/0/2/0"}, change)
    folder = tmp_path / "dataset"
    assert await agentrl_db(run_config, "export", str(folder), "--hf") == 0
    rows = {row["id"]: row for row in parquet.read_table(folder / "data/train.parquet").to_pylist()}
    assert len(rows) == 6
    row = rows[f"{run.TRAINED}/0/2"]
    names = ("task_id", "split", "score", "status", "trained", "trained_at_steps", "min_policy_version")
    assert tuple(row[name] for name in names) == ("trained", "train", 0.0, "trained", True, [1], 0)
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert row["messages"][1]["content"] == "é!"
    assert json.loads(row["messages"][1]["tool_calls"]) == calls
    assert (rows[f"{run.READY}/0/1"]["status"], rows[f"{run.READY}/0/1"]["trained"]) == ("ready", False)
    assert "data_files: data/train.parquet" in (folder / "README.md").read_text()
    with pytest.raises(StoreError, match="not empty"):
        await agentrl_db(run_config, "export", str(folder), "--hf")


async def test_without_pyarrow_the_extra_is_named(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as caught:
        await agentrl_db(run_config, "export", str(tmp_path / "dataset"), "--hf")
    assert "agentrl[parquet]" in str(caught.value.hint)
    assert not (tmp_path / "dataset").exists()


def test_rows_with_gaps_become_a_table() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    content = io.BytesIO()
    transfer.write_parquet([{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}], content)
    assert parquet.read_table(io.BytesIO(content.getvalue())).to_pylist()[1] == {"step": 2, "reward": 0.5}
