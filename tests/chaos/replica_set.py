"""A replica set of mongods on this machine, each in its own folder, whose members can be killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.errors import StoreError
from agentrl.local.mongod import (
    REPLICA_SET,
    Credentials,
    PortTakenError,
    choose_mongod,
    is_daemon,
    server_port,
    start_daemon,
    stop_daemon,
    uri,
)

_PRIMARY_SECONDS = 60.0
_GONE_SECONDS = 20.0
_ELECTION_MILLISECONDS = 2000
_INITIALIZED = 23


class Member:
    """One mongod: ``data/``, ``mongod.log`` and ``mongod.pid`` in its folder; its port is kept."""

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        self._credentials = credentials
        self._dbpath = folder / "data"
        self._log = folder / "mongod.log"
        self._pid: int | None = None
        self.port: int | None = None

    @property
    def running(self) -> bool:
        """Whether the server that was started last is running."""
        return self._pid is not None and is_daemon(self._pid, self._dbpath)

    def start(self) -> None:
        """Start it on its data unless it is running. Raises StoreError if it does not start."""
        if self.running:
            return
        self._dbpath.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            port = self.port or server_port()
            try:
                self._pid = start_daemon(
                    choose_mongod().mongod.path, self._dbpath, self._log, port,
                    key_file=self._credentials.key_file, cache_gigabytes=0.25,
                )  # fmt: skip
            except PortTakenError:
                if self.port is not None:
                    raise
                continue
            self.port = port
            return
        raise StoreError("no free port was found in five tries")

    @property
    def pid(self) -> int:
        """Its process id. Raises StoreError before ``start``."""
        if self._pid is None:
            raise StoreError("this member has not been started")
        return self._pid

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        if self._pid is None or not self.running:
            return
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_SECONDS
        while self.running:
            if time.monotonic() > deadline:
                raise StoreError(f"mongod with pid {self._pid} outlived a SIGKILL by {_GONE_SECONDS:g} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if it does not end."""
        if self._pid is not None:
            stop_daemon(self._pid, self._dbpath)


class ReplicaSet:
    """``members`` servers under ``folder``, with elections after two seconds without a primary."""

    def __init__(self, folder: Path, *, members: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._credentials = Credentials(folder)
        self._members = [Member(folder / f"member-{number}", self._credentials) for number in range(members)]

    @property
    def uri(self) -> str:
        """The connection string, with the password."""
        hosts = [f"127.0.0.1:{member.port}" for member in self._members]
        return uri(hosts, self._credentials.password, replicaSet=REPLICA_SET)

    def up(self) -> str:
        """Start every member, initiate the set, wait for a primary; return the URI. Raises StoreError."""
        self._credentials.make()
        try:
            for member in self._members:
                member.start()
            self._initiate()
            primary = self._members[self.primary()]
            with self._credentials.admin(f"127.0.0.1:{primary.port}") as client:
                self._credentials.ensure_user(client)
        except BaseException:
            self.down()
            raise
        return self.uri

    def primary(self) -> int:
        """Return the number of the primary. Raises StoreError if none is elected within a minute."""
        deadline = time.monotonic() + _PRIMARY_SECONDS
        while time.monotonic() < deadline:
            for number, member in enumerate(self._members):
                if member.running and _is_primary(member):
                    return number
            time.sleep(0.1)
        raise StoreError(f"the replica set elected no primary within {_PRIMARY_SECONDS:.0f} s")

    def primary_pid(self) -> int:
        """Return the process id of the primary."""
        return self._members[self.primary()].pid

    def kill_primary(self, alone_seconds: float = 0.0) -> int:
        """SIGKILL the primary; returns its number.

        With ``alone_seconds``, less than an election takes, the other members are killed that long before and
        started after it: its writes in between are on no other member, and are rolled back when it returns.
        """
        number = self.primary()
        others = [member for other, member in enumerate(self._members) if other != number]
        if alone_seconds:
            for member in others:
                member.kill()
            time.sleep(alone_seconds)
        self._members[number].kill()
        for member in others:
            member.start()
        return number

    def start_member(self, number: int) -> None:
        """Start a killed member on its data."""
        self._members[number].start()

    def down(self) -> None:
        """Stop every member."""
        for member in self._members:
            member.stop()

    def _initiate(self) -> None:
        config = {
            "_id": REPLICA_SET,
            "members": [
                {"_id": number, "host": f"127.0.0.1:{member.port}"}
                for number, member in enumerate(self._members)
            ],
            "settings": {"electionTimeoutMillis": _ELECTION_MILLISECONDS},
        }
        with self._credentials.admin(f"127.0.0.1:{self._members[0].port}") as client:
            try:
                client.admin.command("replSetInitiate", config)
            except OperationFailure as error:
                if error.code != _INITIALIZED:
                    raise StoreError(f"the replica set cannot be formed: {error}") from error
            except PyMongoError as error:
                raise StoreError(f"the replica set cannot be formed: {error}") from error


def _client(member: Member) -> MongoClient[dict[str, Any]]:
    return MongoClient(
        f"127.0.0.1:{member.port}", directConnection=True, serverSelectionTimeoutMS=2000, timeoutMS=30_000
    )


def _is_primary(member: Member) -> bool:
    with _client(member) as client:
        try:
            return bool(client.admin.command("hello").get("isWritablePrimary"))
        except PyMongoError:
            return False
