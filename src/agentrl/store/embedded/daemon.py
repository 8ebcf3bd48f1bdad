"""The mongod daemon of an embedded server: start, identify and stop it; its key and its password."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from agentrl.errors import StoreError
from agentrl.processes import tail

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


def free_port() -> int:
    """Return a free port below those that the kernel assigns to outgoing connections."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise StoreError("no free port was found in 100 tries", hint="name one: agentrl mongo up --port PORT")


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
