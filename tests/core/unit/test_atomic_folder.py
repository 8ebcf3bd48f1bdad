from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from waiting import waiting_program

from agentrl.base.atomic_folder import (
    ABANDONED_SECONDS,
    atomic_folder,
    begin_folder,
    remove_leftovers,
    scratch_folder,
)
from agentrl.base.processes import identify


def test_a_folder_replaces_an_earlier_one_at_the_end_of_the_block(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "old").write_text("x")
    with atomic_folder(target) as temporary:
        (temporary / "new").write_text("y")
        assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_error_in_the_block_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), atomic_folder(tmp_path / "m"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


WRITES = """
import sys
from pathlib import Path
from agentrl.base.atomic_folder import begin_folder
print(begin_folder(Path(sys.argv[1]) / "v000002").name, flush=True)
sys.stdin.read()
"""


def test_leftovers_of_a_killed_writer_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    writer, name = waiting_program(WRITES, tmp_path)
    try:
        (tmp_path / "v000001").mkdir()
        assert remove_leftovers(tmp_path) == []
        writer.send_signal(signal.SIGSTOP)
        assert remove_leftovers(tmp_path) == []
    finally:
        writer.kill()
        writer.communicate(timeout=30)
    assert remove_leftovers(tmp_path) == [name]
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_what_this_process_left_before_is_removed(tmp_path: Path) -> None:
    left = begin_folder(tmp_path / "v000001")
    assert remove_leftovers(tmp_path) == [left.name]


@pytest.mark.parametrize("name", [".tmp-v000001-7.7.00000000.00000000", ".tmp-v000001-7"])
def test_leftovers_of_a_writer_elsewhere_are_removed_when_they_are_old(tmp_path: Path, name: str) -> None:
    file = tmp_path / name / "inner" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    assert remove_leftovers(tmp_path) == []
    long_ago = time.time() - ABANDONED_SECONDS - 60
    for path in (file, file.parent, file.parent.parent):
        os.utime(path, (long_ago, long_ago))
    assert remove_leftovers(tmp_path) == [name]


@pytest.mark.attack
@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_the_clock_of_this_host_does_not_age_the_folder_of_a_writer_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    young, old = (tmp_path / f".tmp-v{number}-7.7.00000000.00000000" for number in (1, 2))
    young.mkdir()
    old.mkdir()
    real = time.time
    os.utime(old, (real() - ABANDONED_SECONDS - 60,) * 2)
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    assert remove_leftovers(tmp_path) == [old.name]
    assert list(tmp_path.iterdir()) == [young]


def test_two_writers_never_share_a_temporary_folder(tmp_path: Path) -> None:
    assert begin_folder(tmp_path / "v000001") != begin_folder(tmp_path / "v000001")
    here = identify(os.getpid())
    assert here is not None
    assert all(f"-{here.pid}.{here.started}." in path.name for path in tmp_path.iterdir())


MAKES = """
import sys
from agentrl.base.atomic_folder import scratch_folder
folder = scratch_folder("harness")
(folder / "files.tar").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.attack
def test_the_next_start_removes_what_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("agentrl-harness-x", "agentrl-harness-7.7.00000000.00000000", "mine")
    others = [tmp_path / name for name in names]
    for other in others:
        other.mkdir()
    (killed, left), (living, kept) = waiting_program(MAKES), waiting_program(MAKES)
    killed.kill()
    killed.communicate(timeout=30)
    try:
        assert Path(left).stat().st_mode & 0o777 == 0o700
        own = scratch_folder("sandbox")
        assert own.name.startswith("agentrl-sandbox-")
        assert set(tmp_path.iterdir()) == {*others, Path(kept), own}
        scratch_folder("sandbox")
        assert own.is_dir()
        assert str(os.getpid()) in own.name
    finally:
        living.kill()
        living.communicate(timeout=30)
