"""The working directory of a harness as an archive: what a hostile one holds, and what is put back."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from git_here import git

from agentrl.errors import ConfigError
from agentrl.worlds.archives import add_files, keep, read_file, restore
from agentrl.worlds.harness.prepare import HarnessConfig, HarnessLimits, Workspace, build_base


def archive_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w"):
        """Begin with nothing."""
    add_files(path, files)
    return path


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as source:
        return {member.name for member in source if not member.isdir()}


@pytest.mark.attack
def test_what_a_container_packs_is_kept_without_what_leaves_it(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar", {"workspace/old": b"1"})
    packed = tmp_path / "packed.tar"
    with tarfile.open(packed, "w") as target:
        for name, kind, link, mode in (
            ("./workspace/deep", tarfile.DIRTYPE, "", 0),
            ("./workspace/deep/two.txt", tarfile.REGTYPE, "", 0o6755),
            ("./workspace/link", tarfile.SYMTYPE, "/etc/shadow", 0),
            ("./workspace/pipe", tarfile.FIFOTYPE, "", 0), ("./workspace/disk", tarfile.BLKTYPE, "", 0),
            ("../outside", tarfile.REGTYPE, "", 0),
            ("/etc/passwd", tarfile.REGTYPE, "", 0), ("workspace/../../up", tarfile.REGTYPE, "", 0),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, link, mode
            target.addfile(member)
    assert keep(packed, archive, max_bytes=1 << 30, max_files=100)
    assert names(archive) == {"workspace/deep/two.txt", "workspace/link"}
    with tarfile.open(archive) as source:
        kept = {member.name: (member.mode, member.uid) for member in source}
    assert kept["workspace/deep/two.txt"] == (0o755, 1000)
    assert kept["workspace/deep"] == (0o700, 1000)


@pytest.mark.attack
def test_what_a_container_packs_is_dropped_above_the_limits(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar", {"workspace/old": b"1"})
    (tmp_path / "files").mkdir()
    with (tmp_path / "files/sparse").open("w") as sparse:
        sparse.truncate(40 << 20)
    packed = tmp_path / "packed.tar"
    command = ["tar", "--sparse", "-cf", str(packed), "-C", str(tmp_path / "files"), "."]
    subprocess.run(command, check=True, timeout=20)
    assert packed.stat().st_size < 1 << 20
    assert not keep(packed, archive, max_bytes=10 << 20, max_files=100)
    assert keep(packed, tmp_path / "other.tar", max_bytes=50 << 20, max_files=100)
    many = archive_of(tmp_path / "many.tar", {f"workspace/{number}": b"" for number in range(20)})
    assert not keep(many, archive, max_bytes=1 << 30, max_files=19)
    assert names(archive) == {"workspace/old"}


@pytest.mark.parametrize(
    ("name", "names", "origin"),
    [
        ("home/.profile", (), "before"),
        ("home/added", (), None),
        ("workspace/work.py", ("tests",), "after"),
        ("workspace/tests/check.sh", (), "after"),
        ("workspace/tests/check.sh", ("tests",), "before"),
        ("workspace/tests/check.sh", ("./tests/check.sh",), "before"),
        ("workspace/tests/added.py", ("tests",), None),
        ("workspace/conftest.py", (), "after"),
        ("workspace/conftest.py", ("tests",), "before"),
        ("workspace/deep/sitecustomize.py", ("tests",), None),
        ("workspace/.git/config", ("tests",), "before"),
        ("workspace/.git/index", ("tests",), "after"),
        ("workspace/.git/hooks/pre-commit", ("tests",), None),
        ("workspace/sub/.git", ("tests",), None),
        ("workspace/file/below", ("file",), None),
        ("workspace/file", ("file",), "before"),
    ],
)
def test_which_archive_a_member_comes_from(
    tmp_path: Path, name: str, names: tuple[str, ...], origin: str | None
) -> None:
    begun = ("home/.profile", "workspace/work.py", "workspace/tests/check.sh", "workspace/conftest.py",
             "workspace/.git/config", "workspace/file")  # fmt: skip
    left = (*begun[:-1], "home/added", "workspace/tests/added.py", "workspace/deep/sitecustomize.py",
            "workspace/.git/index", "workspace/.git/hooks/pre-commit", "workspace/sub/.git",
            "workspace/file/below")  # fmt: skip
    before = archive_of(tmp_path / "before.tar", dict.fromkeys(begun, b"before"))
    archive = archive_of(tmp_path / "files.tar", dict.fromkeys(left, b"after"))
    restore(archive, before, names)
    with tarfile.open(archive) as source:
        found = {each.name: source.extractfile(each) for each in source if each.isreg()}
        reader = found.get(name)
        assert (None if reader is None else reader.read().decode()) == origin


def test_what_is_restored_does_not_leave_through_a_link(tmp_path: Path) -> None:
    before = archive_of(tmp_path / "before.tar", {"workspace/a/tests/check.sh": b"true", "workspace/b": b"1"})
    archive = archive_of(tmp_path / "files.tar", {"workspace/b": b"2"})
    with tarfile.open(archive, "a") as target:
        link = tarfile.TarInfo("workspace/a")
        link.type, link.linkname = tarfile.SYMTYPE, "/outside"
        target.addfile(link)
    restore(archive, before, ("a/tests",))
    assert names(archive) == {"workspace/a/tests/check.sh", "workspace/b"}
    assert read_file(archive, "b", 10) == "2", "what is not named stays as it was changed"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two branches and a tag, and HEAD on ``main``."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for branch, text in (("main", "one"), ("other", "two")):
        git(folder, "checkout", "--quiet", "-B", branch)
        (folder / "file").write_text(text)
        git(folder, "add", "file")
        git(folder, "commit", "--quiet", "--message", text)
        git(folder, "tag", f"tag-{branch}")
    git(folder, "checkout", "--quiet", "main")
    return folder


def base_of(repository: Path, ref: str | None, **limits: int) -> Path:
    """Build the archive of a harness from a bundle of the repository."""
    bundle = repository.parent / "all.bundle"
    git(repository, "bundle", "create", "--quiet", str(bundle), "--all", "HEAD")
    workspace = Workspace(bundle=bundle, ref=ref)
    config = HarnessConfig(
        source=Path("h.yml"), command="true", workspace=workspace, limits=HarnessLimits(**limits)
    )
    build_base(config, repository.parent / "base.tar")
    return repository.parent / "base.tar"


@pytest.mark.parametrize(
    ("ref", "text"),
    [(None, "one"), ("main", "one"), ("other", "two"), ("tag-other", "two"), ("HEAD~0", "one")],
)
def test_a_bundle_is_checked_out(repository: Path, ref: str | None, text: str) -> None:
    assert read_file(base_of(repository, ref), "file", 10) == text
    assert read_file(base_of(repository, git(repository, "rev-parse", "other")), "file", 10) == "two"


def test_a_bundle_without_the_ref_is_named(repository: Path) -> None:
    with pytest.raises(ConfigError, match="no such branch, tag or commit"):
        base_of(repository, "nowhere")


@pytest.mark.attack
@pytest.mark.timeout(30)
@pytest.mark.parametrize("levels", [2, 7])
def test_a_bundle_that_unpacks_to_any_size_is_refused_before_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    """A tree of ten names of a tree of ten names …: two kilobytes hold ten million files."""
    kind, key = "100644 blob", git(repository, "rev-parse", "main:file")
    for _ in range(levels):
        names = "".join(f"{kind} {key}\t{number}\n" for number in range(10))
        kind, key = "040000 tree", git(repository, "mktree", stdin=names)
    git(repository, "update-ref", "refs/heads/main", git(repository, "commit-tree", key, "-m", "bomb"))
    (repository.parent / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(repository.parent / "tmp"))
    with pytest.raises(ConfigError, match=r"holds more than limits\.disk_mb"):
        base_of(repository, None, files=99)
    assert list((repository.parent / "tmp").iterdir()) == []


@pytest.mark.attack
def test_a_bundle_does_not_run_or_read_what_it_names(repository: Path) -> None:
    """Hooks, filters, submodules and links of a bundle stay text."""
    (repository / ".gitattributes").write_text("file filter=evil diff=evil\n")
    evil = '[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch /tmp/x"\n'
    (repository / ".gitmodules").write_text(evil)
    (repository / "link").symlink_to("/etc/passwd")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "evil")
    base = base_of(repository, "main")
    assert read_file(base, "link", 100) is None
    with tarfile.open(base) as files:
        assert {m.name for m in files if "/hooks/" in m.name and not m.name.endswith(".sample")} == set()
