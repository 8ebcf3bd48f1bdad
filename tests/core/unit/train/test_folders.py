"""Whose a trainer's folders are, without a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.base.folder_owner import Owner
from agentrl.documents.training import STATE
from agentrl.errors import ConfigError
from agentrl.train.folders import RunFolders

A, B = (Owner(run=name, id=name, server="server:1") for name in "ab")


def folders(owner: Owner, output: Path) -> RunFolders:
    """The folders of a run without a fallback or a bucket."""
    return RunFolders(owner=owner, output=output, versions=str(output / "weights"))


@pytest.mark.parametrize("owner", [A, B], ids=["own", "another run's"])
@pytest.mark.parametrize("place", ["checkpoint-000001", "checkpoint-000002-7/model", "weights/v000001"])
async def test_no_output_lies_in_what_a_trainer_prunes(tmp_path: Path, owner: Owner, place: str) -> None:
    await folders(A, tmp_path).claim()
    for folder in ("checkpoint-000001", "checkpoint-000002-7/model", "weights/v000001"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("checkpoint-000001", "checkpoint-000002-7"):
        (tmp_path / name / STATE).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / place)
    for output in (tmp_path / place / "out", tmp_path / "link" / "out"):
        with pytest.raises(ConfigError, match=r"which run 'a' .* deletes when newer ones .*\n.*--output_dir"):
            await folders(owner, output).claim()
        assert not output.exists()
    await folders(B, tmp_path / "child").claim()
