"""Folders that others fill: walked and deleted whatever their depth, paths, links and locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.base.untrusted_folder import DEEPEST, TooDeepError, discard, entries_of, remove_folder

pytestmark = pytest.mark.attack


def nest(folder: Path, levels: int, name: str = "d") -> None:
    """Make folders in each other, the last with a file; paths get longer than the system allows."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize(("levels", "name"), [(1, "d"), (1500, "d" * 250)])
def test_a_folder_of_any_depth_is_deleted(tmp_path: Path, levels: int, name: str) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    nest(folder, levels, name)
    remove_folder(folder)
    assert not folder.exists()


def test_locked_folders_and_links_are_deleted_and_what_links_lead_to_stays(tmp_path: Path) -> None:
    folder, other = tmp_path / "made", tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("x")
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(other)
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    for locked in (folder / "a" / "b" / "c", folder / "a" / "b", folder / "a", folder):
        locked.chmod(0)
    remove_folder(folder)
    assert not folder.exists()
    assert (other / "kept").read_text() == "x"
    remove_folder(folder)
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(NotADirectoryError):
        remove_folder(tmp_path / "link")
    discard(tmp_path / "link")
    assert (other / "kept").exists()


def test_entries_have_paths_of_any_length_and_a_bounded_number_of_levels(tmp_path: Path) -> None:
    nest(tmp_path, 20, "d" * 250)
    assert len(list(entries_of(tmp_path))) == 21
    (tmp_path / "link").symlink_to("/")
    assert len(list(entries_of(tmp_path))) == 22
    assert len(list(entries_of(tmp_path, skip=["d" * 250]))) == 2
    deep = tmp_path / "deep"
    deep.mkdir()
    nest(deep, DEEPEST)
    with pytest.raises(TooDeepError):
        list(entries_of(deep))
    assert len(os.listdir("/proc/self/fd")) < DEEPEST
    remove_folder(deep)
