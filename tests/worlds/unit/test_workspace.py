"""The working directory of a harness as an archive: what a hostile one holds, and what is put back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from git_here import git

from agentrl.base.untrusted_folder import remove_folder
from agentrl.errors import ConfigError
from agentrl.worlds.archives import add_files, keep, read_file, restore, write_beginning
from agentrl.worlds.harness.prepare import HarnessConfig, HarnessLimits, Workspace, build_base
from agentrl.worlds.sandbox.program import extract


def archive_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w"):
        """Begin with nothing."""
    add_files(path, files)
    return path


def add_link(target: tarfile.TarFile, name: str, link: str, kind: bytes = tarfile.SYMTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    target.addfile(member)


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


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "link", "too"),
    [
        ("workspace/x/home/.gitconfig", "..", ()),
        ("workspace/x", "/outside", ("workspace/x",)),
        ("workspace/x/deep/file", "deep", ()),
        ("workspace/..data/file", "..", ("workspace/..data/file",)),
        ("..data", "..", ("..data",)),
    ],
)
def test_nothing_is_kept_below_a_link(tmp_path: Path, name: str, link: str, too: tuple[str, ...]) -> None:
    packed = tmp_path / "packed.tar"
    with tarfile.open(packed, "w") as target:
        add_link(target, "workspace/x", link)
        target.addfile(tarfile.TarInfo(name))
    assert keep(packed, tmp_path / "a.tar", max_bytes=1 << 30, max_files=100)
    assert names(tmp_path / "a.tar") == {"workspace/x", *too}


@pytest.mark.attack
@pytest.mark.parametrize("linked", ["/etc/passwd", "../../victim", "workspace/none", "workspace/link"])
def test_no_hard_link_is_kept_but_to_a_kept_file(tmp_path: Path, linked: str) -> None:
    packed = archive_of(tmp_path / "packed.tar", {"./workspace/file": b"1"})
    with tarfile.open(packed, "a") as target:
        add_link(target, "workspace/link", "/etc/passwd")
        add_link(target, "workspace/bad", linked, tarfile.LNKTYPE)
        add_link(target, "workspace/good", "./workspace/file", tarfile.LNKTYPE)
    assert keep(packed, tmp_path / "a.tar", max_bytes=1 << 30, max_files=100)
    assert names(tmp_path / "a.tar") == {"workspace/file", "workspace/link", "workspace/good"}


@pytest.mark.attack
@pytest.mark.parametrize(("levels", "kept"), [(100, True), (1000, False)])
def test_folders_too_deep_are_too_large(tmp_path: Path, levels: int, kept: bool) -> None:
    name = "workspace/" + "d/" * levels + "file"
    with tarfile.open(tmp_path / "packed.tar", "w") as target:
        target.addfile(tarfile.TarInfo(name))
    assert keep(tmp_path / "packed.tar", tmp_path / "a.tar", max_bytes=1 << 30, max_files=100) is kept
    folder = tmp_path / "saved"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    # In a process of its own: ``save`` limits the sizes of this one's files.
    program = (
        "import os, sys; from agentrl.worlds.sandbox.program import *; job = Job(limits={'disk_mb': 9},"
        " directory='', namespaces=False); saved = os.open(sys.argv[1] + '.tar', os.O_CREAT | os.O_WRONLY);"
        " sys.setrecursionlimit(9000); sys.exit(0 if save(saved, sys.argv[1], job) else 3)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], timeout=20)
    remove_folder(folder)
    assert done.returncode == (0 if kept else 3)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("members", "refused"),
    [
        pytest.param([("a", tarfile.SYMTYPE, "{victim}"), ("a", tarfile.REGTYPE, "")], False, id="file"),
        pytest.param([("a", tarfile.SYMTYPE, "{outside}"), ("a", tarfile.DIRTYPE, ""),
                      ("a/victim", tarfile.REGTYPE, "")], False, id="folder"),
        pytest.param([("a", tarfile.SYMTYPE, "{outside}"), ("a/victim", tarfile.REGTYPE, "")], True,
                     id="below a link"),
        pytest.param([("a", tarfile.SYMTYPE, "../outside"), ("a/victim", tarfile.SYMTYPE, "x")], True,
                     id="a link below a link"),
        pytest.param([("../outside/victim", tarfile.REGTYPE, "")], True, id="above"),
        pytest.param([("{victim}", tarfile.REGTYPE, "")], True, id="absolute"),
        pytest.param([("a", tarfile.LNKTYPE, "{victim}"), ("a", tarfile.REGTYPE, "")], True, id="hard link"),
        pytest.param([("a", tarfile.SYMTYPE, "{victim}"), ("b", tarfile.LNKTYPE, "a")], True,
                     id="hard link of a link"),
    ],
)  # fmt: skip
def test_what_is_extracted_changes_nothing_elsewhere(
    tmp_path: Path, members: list[tuple[str, bytes, str]], refused: bool
) -> None:
    folder, victim = tmp_path / "work", tmp_path / "outside/victim"
    for made in (folder, victim.parent):
        made.mkdir(mode=0o755)
    victim.write_text("mine")
    victim.chmod(0o640)
    with tarfile.open(tmp_path / "a.tar", "w") as target:
        for name, kind, link in members:
            add_link(
                target, name.format(victim=victim), link.format(victim=victim, outside=victim.parent), kind
            )
    with pytest.raises(tarfile.ExtractError, match="would change") if refused else nullcontext():
        extract(os.open(tmp_path / "a.tar", os.O_RDONLY), str(folder))
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("mine", 0o640)
    assert victim.parent.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in victim.parent.iterdir()] == ["victim"]


def test_links_of_the_work_are_extracted_as_they_are(tmp_path: Path) -> None:
    """Those to elsewhere too: they are read through, and may be meant for a container."""
    source = tmp_path / "source"
    (source / "real").mkdir(parents=True)
    (source / "away").symlink_to("/usr/bin")
    (source / "link").symlink_to("real")
    (source / "real/first").write_text("1")
    os.link(source / "real/first", source / "real/second")
    write_beginning(tmp_path / "a.tar", source)
    add_files(tmp_path / "a.tar", {"workspace/link/task.json": b"{}", "workspace/away": b"2"})
    folder = tmp_path / "work"
    folder.mkdir()
    for _ in range(2):
        extract(os.open(tmp_path / "a.tar", os.O_RDONLY), str(folder))
    work = folder / "workspace"
    assert (work / "link").readlink() == Path("real")
    assert (work / "real/task.json").read_text() == "{}"
    assert (work / "real/first").samefile(work / "real/second")
    assert not (work / "away").is_symlink()
    assert (work / "away").read_text() == "2", "a file of the task takes the place of a link"


STEERING = (
    "conftest.py", "sub/pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "sitecustomize/__init__.py",
    "deep/sitecustomize.py", "sitecustomize.cpython-311-x86_64-linux-gnu.so", "usercustomize.so", "a.pth",
    "usercustomize/__init__.py", "x.dist-info/entry_points.txt", ".git/hooks/pre-commit", "sub/.git",
    ".git/modules/a/b/config", ".git/modules/a/modules/b/hooks/pre-commit",
    ".git/worktrees/a/config.worktree", ".git/worktrees/a/commondir",
)  # fmt: skip
WORK = (
    ".git/index", ".git/modules/a/index", ".git/refs/heads/config", "my_conftest.py", "pytest.toml.md",
    "modules/a/config", "customize.py", "mysitecustomize.py", "pyproject.toml",
)  # fmt: skip


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
        ("workspace/tests/conftest.py", (), "after"),
        ("workspace/tests/conftest.py", ("work.py",), "before"),
        *((f"workspace/{name}", ("tests",), None) for name in STEERING),
        *((f"workspace/{name}", ("tests",), "after") for name in WORK),
        ("workspace/.git/config", ("tests",), "before"),
        ("workspace/file/below", ("file",), None),
        ("workspace/file", ("file",), "before"),
    ],
)
def test_which_archive_a_member_comes_from(
    tmp_path: Path, name: str, names: tuple[str, ...], origin: str | None
) -> None:
    begun = ("home/.profile", "workspace/work.py", "workspace/tests/check.sh", "workspace/tests/conftest.py",
             "workspace/.git/config", "workspace/file")  # fmt: skip
    added = (f"workspace/{name}" for name in (*STEERING, *WORK))
    left = (*begun[:-1], "home/added", "workspace/tests/added.py", "workspace/file/below", *added)
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
        add_link(target, "workspace/a", "/outside")
    restore(archive, before, ("a/tests",))
    assert names(archive) == {"workspace/a/tests/check.sh", "workspace/b"}
    assert read_file(archive, "b", 10) == "2", "what is not named stays as it was changed"


@pytest.mark.parametrize("restored", ["src", "tests", "tests/b", "src/a"])
def test_a_file_with_two_names_is_not_lost_with_the_first(tmp_path: Path, restored: str) -> None:
    source = tmp_path / "source"
    for folder in ("src", "tests"):
        (source / folder).mkdir(parents=True)
    (source / "src/a").write_text("data")
    for name in ("src/b", "tests/a", "tests/b"):
        os.link(source / "src/a", source / name)
    write_beginning(tmp_path / "before.tar", source)
    shutil.copyfile(tmp_path / "before.tar", tmp_path / "a.tar")
    restore(tmp_path / "a.tar", tmp_path / "before.tar", (restored,))
    (tmp_path / "work").mkdir()
    extract(os.open(tmp_path / "a.tar", os.O_RDONLY), str(tmp_path / "work"))
    texts = {
        name: (tmp_path / f"work/workspace/{name}").read_text()
        for name in ("src/a", "src/b", "tests/a", "tests/b")
    }
    assert texts == dict.fromkeys(texts, "data")
    assert len(texts) == 4
    files = [path.stat().st_ino for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert len(set(files)) == 2, "it is copied once for each archive that it comes from"


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
