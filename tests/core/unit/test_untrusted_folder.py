"""Folders and git bundles that others made: they are walked, deleted and checked out within bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from git_here import git

from agentrl.base.untrusted_folder import (
    DEEPEST,
    BundleError,
    BundleTooLargeError,
    TooDeepError,
    check_out,
    discard,
    entries_of,
    remove_folder,
)

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


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Three commits on main, each with a tag, and a branch with the solution."""
    folder = tmp_path / "made"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for text in ("1", "2", "3"):
        (folder / "file").write_text(text)
        git(folder, "add", "file")
        git(folder, "commit", "--quiet", "--message", text)
        git(folder, "tag", f"v{text}")
    git(folder, "branch", "solution")
    git(folder, "bundle", "create", "--quiet", str(tmp_path / "all.bundle"), "--all", "HEAD")
    return tmp_path / "all.bundle"


@pytest.mark.parametrize(("ref", "reached"), [("v2", 2), ("main~2", 1), ("solution", 3), (None, 3)])
def test_an_agent_finds_no_commit_after_the_one_that_is_checked_out(
    ref: str | None, reached: int, bundle: Path, tmp_path: Path
) -> None:
    later = [git(tmp_path / "made", "rev-parse", f"v{number}") for number in range(reached + 1, 4)]
    name = git(tmp_path / "made", "rev-parse", ref) if ref == "main~2" else ref
    check_out(bundle, tmp_path / "out", ref=name, max_bytes=1 << 20, max_files=10)
    assert (tmp_path / "out" / "file").read_text() == str(reached)
    objects = git(tmp_path / "out", "cat-file", "--batch-all-objects", "--batch-check")
    assert not any(commit in objects for commit in later)
    assert set(git(tmp_path / "out", "log", "--all", "--format=%s").split()) == set("123"[:reached])
    assert git(tmp_path / "out", "tag").split() == [f"v{number + 1}" for number in range(reached)]


def test_what_cannot_be_checked_out_is_said(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such branch, tag or commit"):
        check_out(bundle, tmp_path / "out", ref="nowhere", max_bytes=1 << 20, max_files=10)
    with pytest.raises(BundleTooLargeError, match="0 files"):
        check_out(bundle, tmp_path / "other", max_bytes=1 << 20, max_files=0)
