"""Bundles that are checked out: what the commit does not reach is gone, so that no agent finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_here import git

from agentrl.base.untrusted_folder import BundleError, BundleTooLargeError, check_out


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


@pytest.mark.attack
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
