"""Archives of what has changed in a container; what a hostile one packs is not kept."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentrl.worlds.containers.changes import NotKeptError, join

LIMIT = 1000
SPARSE = {
    "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50),
    "GNU.sparse.name": "changes.tar",
}  # fmt: skip


def packed(folder: Path, name: str, content: bytes, **fields: Any) -> Path:
    """What the programs of a container have written, with one member."""
    path = folder / "packed.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as target:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        for field, value in fields.items():
            setattr(member, field, value)
        target.addfile(member, io.BytesIO(content))
    return path


def test_the_changes_and_what_is_gone_are_one_archive(tmp_path: Path) -> None:
    archive = tmp_path / "kept.tar"
    join(archive, packed(tmp_path, "./changes.tar", b"x" * LIMIT), ["etc/gone"], LIMIT)
    with tarfile.open(archive) as found:
        assert found.getnames() == ["deleted.json", "changes.tar"]
    join(archive, None, [], LIMIT)
    with tarfile.open(archive) as found:
        assert found.getnames() == ["deleted.json"]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("member", "why"),
    [
        ({"name": "changes.tar", "content": b"x" * (LIMIT + 1)}, "no file of at most 1,000 bytes"),
        (
            {"name": "changes.tar", "content": b"1\n0\n1\n".ljust(512, b"\0"), "pax_headers": SPARSE},
            "no file of at most 1,000 bytes",
        ),
        (
            {"name": "changes.tar", "content": b"", "type": tarfile.SYMTYPE, "linkname": "/etc/shadow"},
            "no file of at most",
        ),
        ({"name": "other", "content": b""}, "nothing that can be read"),
    ],
)
def test_what_a_hostile_container_packs_is_not_kept(tmp_path: Path, member: dict[str, Any], why: str) -> None:
    with pytest.raises(NotKeptError, match=re.escape(why)):
        join(tmp_path / "kept.tar", packed(tmp_path, **member), [], LIMIT)


def test_a_damaged_archive_and_too_many_names_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "packed.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(NotKeptError, match="nothing that can be read"):
        join(tmp_path / "kept.tar", tmp_path / "packed.tar", [], LIMIT)
    with pytest.raises(NotKeptError, match="200 files are gone"):
        join(tmp_path / "kept.tar", None, ["x" * (1 << 17)] * 200, LIMIT)
