"""Hostile Harbor tasks: links out of them, bombs, variables and names that reach this machine."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from git_here import git
from harbor_folder import write_task

from agentrl.config.sampling import ContainerConfig
from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import use_containers
from agentrl.errors import TaskFileError
from agentrl.worlds.archives import compare
from agentrl.worlds.containers.docker import start_arguments
from agentrl.worlds.harbor import machine
from agentrl.worlds.harbor.environment import UNREADABLE, _read_archive
from agentrl.worlds.harbor.folder import pack_copies, read_dockerfile, read_task_folder, read_task_toml
from agentrl.worlds.harbor.machine import back_end, require_network
from agentrl.worlds.harbor.source import open_harbor

pytestmark = pytest.mark.attack


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    yield
    use_containers(ContainerConfig())


@pytest.mark.parametrize(
    "name", ["instruction.md", "tests", "tests/test.sh", "environment", "environment/Dockerfile", "solution"]
)
def test_what_is_read_here_is_no_link_out_of_the_task(name: str, tmp_path: Path) -> None:
    private = tmp_path / "private"
    write_task(private)
    task = write_task(tmp_path / "task")
    path = task / name
    path.rename(tmp_path / "moved")
    path.symlink_to(private / name)
    with pytest.raises(BadTaskError, match=f"{name} is a link out of the task's folder"):
        read_task_folder(task)
    path.unlink()
    (tmp_path / "moved").rename(task / "own")
    path.symlink_to(os.path.relpath(task / "own", path.parent))
    assert read_task_folder(task).digest


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"a = {'[' * 100_000}", "not TOML"),
        (f"a = {'{a=' * 10_000}", "not TOML"),
        (f"a = {'1' * 5000}", "not TOML"),
        (f"{'.'.join('a' * 100_000)} = 1", "512 dots"),
        (f'[environment]\nmemory = "{"9" * 400}G"', "a size such as"),
        ('[environment]\nmemory = "1.2.3G"', "a size such as"),
        ("[environment]\nmemory_mb = inf", "finite"),
    ],
    ids=["deep list", "deep table", "long number", "long key", "huge size", "two points", "inf"],
)
def test_a_task_toml_that_its_reader_chokes_on_is_refused_at_once(text: str, why: str) -> None:
    with pytest.raises(BadTaskError, match=why):
        read_task_toml(text)


@pytest.mark.parametrize(
    ("name", "target"), [("instruction.md", "instruction.md"), ("environment", "environment")]
)
def test_a_link_to_itself_spoils_its_task_alone(name: str, target: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks" / "looped")
    write_task(tmp_path / "tasks" / "good")
    (task / name).rename(tmp_path / "moved")
    (task / name).symlink_to(target)
    bad = [isinstance(item.value, BadTaskError) for item in open_harbor(tmp_path / "tasks").items()]
    assert bad.count(True) >= 1


@pytest.mark.parametrize("copied", [f"COPY {'[' * 100_000}", "COPY **a /x", "COPY ../../etc /x"])
def test_a_copy_line_that_cannot_be_read_spoils_its_task_alone(copied: str, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM x\n{copied}\n")
    found = read_dockerfile(path)
    if found.needs_build is None:
        with pytest.raises(BadTaskError, match="the Dockerfile copies"):
            pack_copies(found, tmp_path, tmp_path / "copies.tar")


def test_a_task_that_is_too_deep_or_too_long_is_refused(tmp_path: Path) -> None:
    deep = write_task(tmp_path / "deep")
    (deep / "tests" / "/".join("d" * 200)).mkdir(parents=True)
    with pytest.raises(BadTaskError, match="128 levels"):
        read_task_folder(deep)
    long = write_task(tmp_path / "long")
    os.truncate(long / "instruction.md", 1 << 40)
    with pytest.raises(BadTaskError, match=r"instruction\.md has 1,099,511,627,776 bytes"):
        read_task_folder(long)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('docker_image = "--privileged"', "environment.docker_image is '--privileged'"),
        ('env = {"A;curl evil" = "x"}', "letters, digits and _"),
        ('env = {"A\\nB" = "x"}', "letters, digits and _"),
    ],
)
def test_names_that_would_be_flags_or_shell_are_refused(toml: str, said: str) -> None:
    with pytest.raises(BadTaskError, match=said):
        read_task_toml(f"[environment]\n{toml}")


@pytest.mark.parametrize("network", ["", 'network_mode = "public"', "allow_internet = true"])
def test_a_task_reaches_this_machines_network_only_by_a_flag(network: str, tmp_path: Path) -> None:
    task = read_task_folder(write_task(tmp_path / "task", f"[environment]\n{network}"))
    docker, sandbox = ContainerConfig(containers="docker"), ContainerConfig(rootfs=str(tmp_path))
    use_containers(docker)
    require_network(task)
    container = back_end(task, task.image)
    assert container.spec.network == "bridge"
    assert "--network host" not in " ".join(start_arguments(container.spec, "name", "image"))
    use_containers(sandbox)
    assert back_end(task, task.image).spec.network == "none"
    with pytest.raises(BadTaskError, match="--task_network none or host"):
        require_network(task)
    for named in ("none", "host"):
        use_containers(ContainerConfig(rootfs=str(tmp_path), task_network=named))
        require_network(task)
        assert back_end(task, task.image).spec.network == named
    closed = read_task_folder(write_task(tmp_path / "closed", '[environment]\nnetwork_mode = "no-network"'))
    assert back_end(closed, closed.image).spec.network == "none"


def bundle_of(folder: Path, tree: str) -> Path:
    git(folder, "update-ref", "refs/heads/main", git(folder, "commit-tree", tree, "-m", "x"))
    git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    git(folder, "bundle", "create", "-q", "../x.bundle", "HEAD", "main")
    return folder.parent / "x.bundle"


@pytest.mark.parametrize("kind", ["wide", "deep", "link"])
def test_a_bundle_writes_nothing_beyond_its_limits_and_links_nowhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    monkeypatch.setattr(machine, "check_runnable", lambda task: None)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("agentrl.worlds.harbor.source.process_folder", lambda: tmp_path / "scratch")
    folder = tmp_path / "r"
    folder.mkdir()
    git(folder, "init", "-q")
    if kind == "link":
        write_task(made / "private")
        (folder / "a").mkdir()
        (folder / "a" / "evil").symlink_to(made / "private")
        git(folder, "add", "-A")
        bundle = bundle_of(folder, git(folder, "write-tree"))
        (item,) = open_harbor(bundle).items()
        assert "it is a link out of the bundle" in str(item.value)
        return
    blob = git(folder, "hash-object", "-w", "--stdin", stdin=bytes(1 << 20))
    tree = git(folder, "mktree", stdin=f"100644 blob {blob}\tf\n")
    for _ in range(200 if kind == "deep" else 4):
        names = ["d"] if kind == "deep" else [f"d{number}" for number in range(8)]
        tree = git(folder, "mktree", stdin="".join(f"040000 tree {tree}\t{one}\n" for one in names))
    with pytest.raises(TaskFileError, match="128 levels"):
        open_harbor(bundle_of(folder, tree))
    assert list((tmp_path / "scratch").iterdir()) == []


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as target:
        for member, content in members:
            target.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_that_a_container_packed_is_not_unpacked(tmp_path: Path) -> None:
    member = tarfile.TarInfo("reward.txt")
    plain = archive(tmp_path / "plain.tar", (member, b""))
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(UNREADABLE):
        _read_archive(packed)
    with pytest.raises(UNREADABLE):
        compare(plain, packed)


def test_a_sparse_file_of_any_size_is_compared_by_its_size(tmp_path: Path) -> None:
    sparse = tarfile.TarInfo("big")
    sparse.pax_headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50),
        "GNU.sparse.name": "big",
    }  # fmt: skip
    content = b"0\n".ljust(512, b"\0")
    sparse.size = len(content)
    after = tmp_path / "after.tar"
    with tarfile.open(after, "w", format=tarfile.PAX_FORMAT) as target:
        target.addfile(sparse, io.BytesIO(content))
    assert compare(archive(tmp_path / "before.tar"), after).files == ("big",)
