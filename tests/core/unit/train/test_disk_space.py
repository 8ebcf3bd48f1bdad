from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import write_tiny_policy

from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.model.load import load_policy
from agentrl.train.disk_space import KeptFiles, amount, check_output, model_bytes, retention
from agentrl.weights.snapshot import write_config

Usage = namedtuple("Usage", "total used free")
KEPT = KeptFiles(versions=4, version_bytes=10_000_000, checkpoints=2, checkpoint_bytes=30_000_000)


def test_bytes_are_those_that_the_model_has(base: Path) -> None:
    policy = load_policy(ModelConfig(model_name_or_path=str(base)))
    size = sum(part.bytes for part in policy.published.parts())
    assert model_bytes(base, 4) == model_bytes(base, 2) * 2 == size
    kept = retention(base, "float32", TrainConfig(save_total_limit=3), is_adapter=False)
    assert kept.bytes == size * (5 + 3 * 4)


def test_a_checkpoint_of_rounded_weights_holds_them_too(tmp_path: Path) -> None:
    base = write_tiny_policy(tmp_path)
    write_config(base, None, "bfloat16")
    count = model_bytes(base, 1)
    for trained, copies in (("float32", 12), ("bfloat16", 4)):
        kept = retention(base, trained, TrainConfig(), is_adapter=False)
        assert kept.version_bytes == 2 * count
        assert kept.checkpoint_bytes == (2 + copies) * count


def test_what_is_kept_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_output(tmp_path / "output", KEPT)
    assert "the newest 4 published versions (10.0 MB each) and 2 checkpoints (30.0 MB each)" in caplog.text
    assert "140.0 MB at most" in caplog.text
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["weights"]
    assert list((tmp_path / "output" / "weights").iterdir()) == []


def test_what_an_adapter_takes_is_not_called_nothing() -> None:
    adapter = replace(KEPT, version_bytes=0, checkpoint_bytes=0)
    newest = "the newest 4 published versions (of the adapter) and 2 checkpoints (of the adapter)"
    assert str(adapter) == newest
    assert (
        str(replace(adapter, keep_every=10)) == f"{newest}, and every 10th version forever (of the adapter)"
    )
    merged = str(replace(KEPT, checkpoint_bytes=0, keep_every=10))
    assert "50.0 MB at most without the latter and the adapter's, with one more" in merged


def test_a_disk_without_space_for_what_is_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 139_000_000))
    with pytest.raises(ConfigError, match=r"has 139\.0 MB free, and the run keeps .*140\.0 MB") as refused:
        check_output(tmp_path, KEPT)
    assert "lower --published_versions_kept or --save_total_limit" in str(refused.value)
    older = tmp_path / "weights" / "v000001" / "model.safetensors"
    older.parent.mkdir(parents=True)
    older.write_bytes(bytes(1_000_000))
    check_output(tmp_path, KEPT)


@pytest.mark.parametrize("blocked", ["output", "output/weights", "fallback"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "output").mkdir()
    if blocked == "output":
        (tmp_path / "output").rmdir()
    (tmp_path / blocked).write_text("a file is in the way")
    with pytest.raises(ConfigError, match=rf"{blocked}.* cannot be written"):
        check_output(tmp_path / "output", KEPT, [tmp_path / "fallback"])


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1600, "1.6 kB"), (5_400_000_000, "5.4 GB")]
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert amount(count) == text
