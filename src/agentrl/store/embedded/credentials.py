"""The key and the password of an embedded MongoDB, in files that only their owner can read."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from agentrl.errors import StoreError

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
                _write(file, secrets.token_hex(_BYTES))

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


def _write(file: Path, text: str) -> None:
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
