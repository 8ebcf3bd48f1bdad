"""The embedded MongoDB: one mongod in one folder, a single-node replica set on 127.0.0.1."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.errors import StoreError
from agentrl.processes import start_ticks
from agentrl.store.embedded.daemon import (
    REPLICA_SET,
    Credentials,
    PortTakenError,
    free_port,
    is_daemon,
    last_messages,
    running_binary,
    start_daemon,
    stop_daemon,
    uri,
    write_private,
)  # fmt: skip
from agentrl.store.embedded.mongod import (
    OLDEST_RELEASE,
    Choice,
    Version,
    choose_mongod,
    read_data_version,
    write_data_version,
)  # fmt: skip

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
    choice: Choice | None = None

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
            port = (wanted_port or free_port()) if wanted_port is not None else (known_port or free_port())
            try:
                pid = start_daemon(
                    choice.mongod.path, self.dbpath, self.log, port, key_file=self._credentials.key_file
                )
            except PortTakenError:
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


def disk_problem(directory: Path) -> StoreError | None:
    """Return the error of a disk that is too full for the server, which then ends; None if it has room."""
    free = shutil.disk_usage(directory).free if directory.is_dir() else _FREE_BYTES
    if free >= _FREE_BYTES:
        return None
    return StoreError(
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
