"""Whose a folder is: claims, refusals, unmounted disks, renames, caches that processes share."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import waiting_program

from agentrl.base import folder_owner
from agentrl.base.folder_owner import (
    OWNER_FILE,
    Owner,
    claim,
    confirm,
    hand_over,
    hold_cache,
    read_owner,
    require_alone,
    require_not_foreign,
    require_unclaimed,
)
from agentrl.errors import ConfigError, PublishError

A, B = (Owner(run=name, id=name * 8, server="server:1") for name in "ab")
OTHERS = [B, Owner(run="a", id="another", server="server:2"), Owner(run="copy", id=A.id, server="server:1")]


@pytest.mark.parametrize("other", OTHERS, ids=["run", "database", "copy"])
def test_a_claimed_folder_is_the_runs_alone(tmp_path: Path, other: Owner) -> None:
    assert read_owner(tmp_path / "out") is None
    claim(tmp_path / "out", A, "--output_dir")
    claim(tmp_path / "out", Owner(run="a", id=A.id, server="moved:2", host="another"), "--output_dir")
    assert require_not_foreign(tmp_path / "out", A, "--output_dir")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out")
    for refused in (claim, require_not_foreign, hold_cache):
        for folder in (tmp_path / "out", link):
            with pytest.raises(ConfigError, match=r"belongs to run 'a' .*, and this is run") as error:
                refused(folder, other, "--output_dir")
            fix = f"give another --output_dir. If that run is gone for good, delete {folder}"
            assert fix in str(error.value)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [OWNER_FILE]
    assert not require_not_foreign(tmp_path / "new", A, "--output_dir")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_claim_at_once_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(source: Path, target: Path) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    runs = [Owner(run=f"r{number}", id=str(number), server="d") for number in range(16)]
    won: list[Owner] = []
    barrier = threading.Barrier(len(runs))

    def start(owner: Owner) -> None:
        barrier.wait(10)
        try:
            claim(tmp_path / "out", owner, "--output_dir")
        except ConfigError:
            return
        won.append(owner)

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(start, runs))
    assert won == [read_owner(tmp_path / "out")]


@pytest.mark.parametrize("lost", ["unmounted", "emptied", "replaced"])
def test_a_folder_is_confirmed_before_it_is_written(tmp_path: Path, lost: str) -> None:
    claim(tmp_path / "out", A, "--output_dir")
    confirm(tmp_path / "out", A)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    if lost != "unmounted":
        (tmp_path / "out").mkdir()
    if lost == "replaced":
        claim(tmp_path / "out", B, "--output_dir")
    with pytest.raises(PublishError, match=r"nothing is written or deleted there") as error:
        confirm(tmp_path / "out", A)
    assert "is its disk still mounted?" in str(error.value)


BAD = [
    *(b"", b"{", b"[]", b'{"run": "a"}', b"\xff\xfe", b"null", b"[" * 100_000, b" " * 100_000 + A.to_json()),
    A.to_json().replace(b'"a"', b'["a"]'),
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_an_unreadable_owner_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / OWNER_FILE).write_bytes(content)
    for call in (require_not_foreign, claim):
        with pytest.raises(ConfigError, match="does not say whose the folder is"):
            call(tmp_path, A, "--output_dir")
    with pytest.raises(PublishError, match="does not say"):
        confirm(tmp_path, A)


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "dangling link", "looping link"])
def test_what_is_no_file_is_refused_and_neither_waited_for_nor_taken_for_free(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / OWNER_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "dangling link": "nowhere", "looping link": str(path)}[kind])
    for call in (require_not_foreign, claim, hold_cache):
        with pytest.raises(ConfigError, match=f"{OWNER_FILE} cannot be read"):
            call(tmp_path, A, "--output_dir")
    assert [item.name for item in tmp_path.iterdir()] == [OWNER_FILE]


def test_a_later_version_may_say_more_in_an_owner_file(tmp_path: Path) -> None:
    (tmp_path / OWNER_FILE).write_bytes(A.to_json().replace(b"{", b'{"since": 1, ', 1))
    assert read_owner(tmp_path) == A


@pytest.mark.attack
def test_a_cache_changes_no_file_that_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / folder_owner._CACHE_FILE).symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        hold_cache(tmp_path, A, "--weights_dir")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_renamed_run_hands_its_folders_over_and_no_others(tmp_path: Path) -> None:
    for name, owner in ((".", A), ("weights", A), ("child", B)):
        claim(tmp_path / name, owner, "--output_dir")
    hand_over(tmp_path, A.id, "new")
    renamed = Owner(run="new", id=A.id, server="")
    assert [read_owner(tmp_path / name) for name in (".", "weights", "child")] == [renamed, renamed, B]


def test_what_holds_another_runs_folder_is_not_deleted(tmp_path: Path) -> None:
    claim(tmp_path, A, "--output_dir")
    require_alone(tmp_path, A, "delete")
    claim(tmp_path / "child", B, "--output_dir")
    with pytest.raises(ConfigError, match=r"child belongs to run 'b'.*\n.*delete .* by hand"):
        require_alone(tmp_path, A, "delete")
    for inside in (tmp_path, tmp_path / "checkpoint-000001" / "model"):
        with pytest.raises(ConfigError, match="which belongs to run 'a'"):
            require_unclaimed(inside, "--output_dir")
    require_unclaimed(tmp_path.parent, "--output_dir")


HOLDER = """
import sys; from pathlib import Path; from agentrl.base.folder_owner import Owner, hold_cache
hold_cache(Path(sys.argv[1]), Owner(run=sys.argv[2], id=sys.argv[2], server="d"), "--weights_dir")
print("held", flush=True); sys.stdin.read()
"""


def test_a_cache_belongs_to_the_run_whose_processes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines of one run share it; another run takes it over once all of them have ended."""
    monkeypatch.setattr(folder_owner, "_held_caches", {})
    engines = [waiting_program(HOLDER, tmp_path, "a") for _ in range(2)]
    other = Owner(run="b", id="b", server="d")
    for engine, said in engines:
        assert said == "held"
        with pytest.raises(ConfigError, match=r"is in use by run 'a'.*\n.*give another --weights_dir"):
            hold_cache(tmp_path, other, "--weights_dir")
        engine.kill()
        engine.communicate(timeout=10)
    hold_cache(tmp_path, other, "--weights_dir")
    hold_cache(tmp_path, other, "--weights_dir")
    [lock] = folder_owner._held_caches.values()
    os.close(lock)


@pytest.mark.attack
def test_a_lock_that_somebody_keeps_holds_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it wrote its name, or another user's."""
    monkeypatch.setattr(folder_owner, "_LOCK_SECONDS", 0.05)
    with (tmp_path / folder_owner._CACHE_FILE).open("w") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has locked"):
            hold_cache(tmp_path, A, "--weights_dir")
