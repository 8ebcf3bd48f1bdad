"""The working directory of a harness as an archive: what a hostile one holds, and what is put back."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from agentrl.harness.workspace import add_files, make_readable, pack, restore, unpack


def archive_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w"):
        """Begin with nothing."""
    add_files(path, files)
    return path


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as source:
        return {member.name for member in source if not member.isdir()}


def test_files_go_to_a_folder_and_back_without_links_followed(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar", {"workspace/one.txt": b"1", "workspace/deep/two.txt": b"2"})
    folder = tmp_path / "folder"
    unpack(archive, folder, os.getuid())
    assert (folder / "workspace/deep/two.txt").read_bytes() == b"2"
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    (folder / "workspace/link").symlink_to(secret)
    os.mkfifo(folder / "workspace/pipe")
    hidden = folder / "workspace/deep"
    (hidden / "two.txt").chmod(0)
    hidden.chmod(0)
    make_readable(folder)
    pack(folder, archive)
    assert names(archive) == {"workspace/one.txt", "workspace/deep/two.txt", "workspace/link"}
    assert b"of the host" not in archive.read_bytes()


def test_what_is_restored_does_not_leave_through_a_link(tmp_path: Path) -> None:
    before = archive_of(tmp_path / "before.tar", {"workspace/a/tests/check.sh": b"true", "workspace/b": b"1"})
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "changed"
    (folder / "workspace").mkdir(parents=True)
    (folder / "workspace/a").symlink_to(outside)
    (folder / "workspace/b").write_text("2")
    archive = tmp_path / "files.tar"
    pack(folder, archive)
    restore(archive, before, ("a/tests",))
    target = tmp_path / "again"
    unpack(archive, target, os.getuid())
    assert (target / "workspace/a/tests/check.sh").read_bytes() == b"true"
    assert not (target / "workspace/a").is_symlink()
    assert (target / "workspace/b").read_text() == "2", "what is not named stays as it was changed"
    assert list(outside.iterdir()) == []
