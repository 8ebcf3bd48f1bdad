"""``agentrl sft --sft_from_records`` on a real database: ids as sampled, filtered by score."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import small_run as run
from tiny_policy import tiny_format, write_tiny_policy

from agentrl.cli.services import sft as main
from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.run import PolicyVersion
from agentrl.errors import ConfigError
from agentrl.store.client import Store
from agentrl.train.reward_model import groups_of_records
from agentrl.train.sft import from_records
from agentrl.weights.folder import checksums

pytestmark = pytest.mark.integration


async def test_records_are_trained_by_score(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    base = write_tiny_policy(tmp_path / "base")
    good, _ = await from_records(run_config, "train", 1.0, base)
    assert [item.score for item in good] == [1.0] * 3
    assert {item.trainable_tokens for item in good} == {8}
    assert unpack_ids(good[0].input_ids).tolist()[:2] == [10, 20]
    assert len((await from_records(run_config, "train", 0.0, base))[0]) == 5
    with pytest.raises(ConfigError, match="0 Records of split train with a score of 2"):
        await from_records(run_config, "train", 2.0, base)


async def test_the_command_trains_them(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.build(store, tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    base = write_tiny_policy(tmp_path / "base")
    words = [
        "--model_name_or_path", str(base), "--sft_from_records", run_config.run_name, "--output_dir", "out",
        "--db_connection_string", str(run_config.db_connection_string), "--batch_size", "2",
        "--max_steps", "2",
    ]  # fmt: skip
    assert await asyncio.to_thread(main, words) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="two kinds of data"):
        await asyncio.to_thread(main, [*words, "--train_file", "x.jsonl"])


async def test_a_reward_model_compares_the_groups_of_a_run(
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    await run.build(store, tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    base = write_tiny_policy(tmp_path / "base")
    groups = await groups_of_records(run_config, "train", tiny_format())
    assert sum(len(group.items) for group in groups) == 5
    assert sorted(item.score for group in groups for item in group.items) == [0.0, 0.0, 1.0, 1.0, 1.0]
    words = [
        "--objective", "reward", "--model_name_or_path", str(base), "--sft_from_records", run_config.run_name,
        "--output_dir", "out", "--db_connection_string", str(run_config.db_connection_string),
        "--batch_size", "2", "--max_steps", "2", "--reward_heldout", "0",
    ]  # fmt: skip
    assert await asyncio.to_thread(main, words) == 0
    assert "trained: accuracy" in capfd.readouterr().err
    assert (tmp_path / "out" / "rewards.json").is_file()


async def test_another_tokenizer_is_refused(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    base = write_tiny_policy(tmp_path / "base")
    files = tuple(
        replace(file, sha256="0" * 64) if file.name == "tokenizer.json" else file for file in checksums(base)
    )
    await run.add_task(store, run.TRAINED, 0)
    await store.policy_versions.publish(
        PolicyVersion(id=0, step=0, location=str(base), files=files, train_step=None)
    )
    with pytest.raises(ConfigError, match=r"another tokenizer\.json"):
        await from_records(run_config, "train", 0.0, base)
