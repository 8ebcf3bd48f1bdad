"""Decide whose a folder is: a run claims the folders it writes to, and everything that deletes there asks.

A folder that a run fills and prunes (checkpoints, published versions) has an owner file, which is made once,
atomically. It names the run and the run's random id, which its database holds: two runs of one name on two
servers are two owners. The host is named for people alone, since a run may move to another one. Processes and
hosts of one run are one owner; a renamed run hands its folders over; a fork or a what-if is another owner.

A cache can be made again, so that it is not owned for good: it belongs to the run whose processes use it. Log
files have no owner file: many runs share their folder, and each file names its run and process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from agentrl.base.atomic_folder import replace_file
from agentrl.errors import ConfigError, PublishError, quoted

OWNER_FILE = "agentrl-owner.json"
_CACHE_FILE = "agentrl-cache-owner.json"
_LOCK_SECONDS, _POLL_SECONDS = 5.0, 0.02
_MOST_BYTES = 1 << 16
"""Of an owner file."""
_UNREADABLE = "delete it if no run uses the folder; else give another folder"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run as the owner of folders. Two are equal if they are the same run."""

    run: str
    id: str
    """Random, stored in the run's database."""
    server: str = field(compare=False)
    """Address of the database."""
    host: str = field(compare=False, default_factory=socket.gethostname)
    """Where the folder was claimed."""

    def __str__(self) -> str:
        return f"run {self.run!r} of the database at {self.server} ({self.id[:8]}, begun on {self.host})"

    def to_json(self) -> bytes:
        """Return the content of the owner file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, place: str) -> Owner:
        """Read the content of an owner file at ``place``. Raises ConfigError if it is not one."""
        try:
            found = json.loads(content)
            values = {name: found[name] for name in ("run", "id", "server", "host")}
            if not all(isinstance(value, str) for value in values.values()):
                raise TypeError(f"{values} are not all texts")
            return cls(**values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{place} does not say whose the folder is: {error}", hint=_UNREADABLE
            ) from error


_held_caches: dict[tuple[Path, Owner], int] = {}
"""The locked file of each. The locks are held until the process ends, however it ends."""


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of ``folder``; None without an owner file. Raises ConfigError for a bad file."""
    path = folder / OWNER_FILE
    try:
        return Owner.from_json(_read(path), str(path))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_missing and not path.is_symlink():  # a dangling link is neither an owner nor a free place
            return None
        hint = f"check its permissions; {_UNREADABLE}"
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def _read(path: Path) -> bytes:
    """Return the first ``_MOST_BYTES`` of a file. Raises OSError if it is not a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def require_not_foreign(folder: Path, owner: Owner, flag: str) -> bool:
    """Return whether ``folder`` is the owner's; False if nobody has claimed it.

    Raises ConfigError, which names both runs, if it is another run's; ``flag`` gives another folder.
    """
    found = read_owner(folder)
    if found is not None and found != owner:
        raise foreign(str(folder), found, owner, flag)
    return found is not None


def foreign(place: str, found: Owner, owner: Owner | str, flag: str) -> ConfigError:
    """Return the error of ``owner`` for a folder of another run."""
    return ConfigError(
        f"{place} belongs to {found}, and this is {owner}",
        hint=f"give another {flag}. If that run is gone for good, delete {place}/{OWNER_FILE}: the next run"
        " that starts with the folder then takes it with its content",
    )


def claim(folder: Path, owner: Owner, flag: str) -> None:
    """Make ``folder`` the owner's, atomically; idempotent. Raises as ``require_not_foreign``, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OWNER_FILE
    if not path.exists():
        temporary = folder / f".{OWNER_FILE}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.write_bytes(owner.to_json())
            with contextlib.suppress(FileExistsError):
                _create(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    require_not_foreign(folder, owner, flag)


def _create(temporary: Path, path: Path) -> None:
    """Make ``path`` with the content of ``temporary``. Raises FileExistsError: one of several wins."""
    try:
        # Link it: the name appears with its whole content, and others read it at once.
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with path.open("xb") as stream:
            stream.write(temporary.read_bytes())


def confirm(folder: Path, owner: Owner) -> None:
    """Check before writing or deleting in ``folder`` that it still is what ``owner`` claimed.

    Raises PublishError otherwise: an unmounted disk leaves an empty folder of the same path.
    """
    try:
        found = read_owner(folder)
    except ConfigError as error:
        raise PublishError(error.message, hint=error.hint) from error
    if found != owner:
        now = "has no owner file any more" if found is None else f"belongs to {found} now"
        raise PublishError(
            f"{folder} {now}, and {owner} claimed it: nothing is written or deleted there",
            hint="is its disk still mounted?",
        )


def hand_over(folder: Path, id: str, run_name: str) -> None:
    """Write the new name of the run with ``id`` into its owner files in ``folder``. Raises OSError."""
    # List them first: files are replaced in the folders that are searched.
    for place, owner in list(owners_in(folder)):
        if owner.id == id:
            replace_file(place / OWNER_FILE, replace(owner, run=run_name).to_json())


def owners_in(folder: Path) -> Iterator[tuple[Path, Owner]]:
    """Yield each folder in ``folder``, itself included, that a run has claimed, with its owner."""
    for path in folder.rglob(OWNER_FILE):
        owner = read_owner(path.parent)
        if owner is not None:
            yield path.parent, owner


def require_alone(folder: Path, owner: Owner, verb: str) -> None:
    """Raise ConfigError if ``folder`` is or holds a folder of another run; ``verb`` is what is to be done."""
    for place, other in owners_in(folder):
        if other != owner:
            raise ConfigError(
                f"{place} belongs to {other}, and this is {owner}", hint=f"{verb} {folder} by hand"
            )


def require_unclaimed(folder: Path, flag: str) -> None:
    """Raise ConfigError if ``folder`` is, or lies in, a folder that a run has claimed."""
    for place in (folder, *folder.resolve().parents):
        owner = read_owner(place)
        if owner is not None:
            raise ConfigError(f"{flag} {folder} is in {place}, which belongs to {owner}", hint="give another")


def hold_cache(folder: Path, owner: Owner, flag: str) -> None:
    """Use ``folder`` as a cache of the owner's run until this process ends; idempotent.

    The processes of a run share it. If those of another run used it before, and none of them lives, it is
    taken over: what it holds is checked before it is used. Raises ConfigError if one lives, or if the folder
    is another run's output; OSError if it cannot be written.
    """
    require_not_foreign(folder, owner, flag)
    folder.mkdir(parents=True, exist_ok=True)
    key = (folder.resolve(), owner)
    if key in _held_caches:
        return
    # Follow no link: the file is cut to nothing below, and a link may point to anybody's.
    lock = os.open(folder / _CACHE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with contextlib.suppress(BlockingIOError):  # others use the folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _cache_owner(lock) != owner:
                os.ftruncate(lock, 0)
                os.pwrite(lock, owner.to_json(), 0)
        _share(lock, folder)
        found = _cache_owner(lock)
        if found != owner:
            raise ConfigError(
                f"{folder} is in use by {found or 'another run'}, and this is {owner}",
                hint=f"give another {flag}",
            )
    except BaseException:
        os.close(lock)
        raise
    _held_caches[key] = lock


def _share(lock: int, folder: Path) -> None:
    """Share the lock of a cache. Raises ConfigError if another process holds it alone.

    One of ours does so while it writes its name; one that was stopped then, or another user's, for longer.
    """
    latest = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > latest:
                raise ConfigError(
                    f"another process has locked {folder / _CACHE_FILE} for {_LOCK_SECONDS:g} s",
                    hint=f"end it (fuser {quoted(folder / _CACHE_FILE)} shows it), or give another folder",
                ) from None
            time.sleep(_POLL_SECONDS)


def _cache_owner(lock: int) -> Owner | None:
    try:
        return Owner.from_json(os.pread(lock, _MOST_BYTES, 0), _CACHE_FILE)
    except ConfigError:
        return None  # nobody yet, or its writer was killed: it can be taken
