"""Define the back end ``sandbox``: containers without a daemon, in namespaces over a root file system."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.untrusted_folder import discard
from agentrl.errors import ConfigError, ToolServerError
from agentrl.worlds.containers.container import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    ContainerSpec,
    Execution,
    FilesTooLargeError,
    container,
)
from agentrl.worlds.sandbox.local import LAUNCHER, encode_job, launch, read_answer, uses_namespaces
from agentrl.worlds.sandbox.program import Job
from agentrl.worlds.sandbox.rootfs import FIRST_USER, NO_FOLDER, TOO_LARGE

_START_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 30.0
_COPY_SECONDS: Final = 600.0
_UNPACK_SECONDS: Final = 1800.0
_SAID_BYTES: Final = 65536
_roots: dict[tuple[str, int], str] = {}
_lock = threading.Lock()


@container("sandbox")
class SandboxContainer(Container):
    """Namespaces over ``rootfs``, with a private overlay in memory. Root inside owns nothing on the host.

    Where the sampler is not root, the container has one user, root, who is the sampler's.
    """

    forwards_gateway: ClassVar[bool] = True

    def __init__(self, spec: ContainerSpec) -> None:
        super().__init__(spec)
        self._control: socket.socket | None = None

    @classmethod
    def check(cls, spec: ContainerSpec, where: str) -> None:
        """Unpack the root file system. Raises ConfigError without one, and without namespaces."""
        if spec.rootfs is None:
            image = spec.image or "IMAGE"
            raise ConfigError(
                f"{where}: the back end 'sandbox' needs a root file system",
                hint=f"where Docker runs: docker export $(docker create {image}) > rootfs.tar; then rootfs:"
                " rootfs.tar",
            )
        if spec.network not in ("none", "host", "gateway"):
            raise ConfigError(
                f"{where}: network is {spec.network!r}",
                hint="the back end 'sandbox' has none, gateway and host",
            )
        uses_namespaces("namespaces", where)
        root_of(spec.rootfs, where)

    async def start(self) -> None:
        """Build the namespaces and the overlay."""
        spec = self.spec
        root = await asyncio.to_thread(root_of, str(spec.rootfs), spec.name)
        job = Job(
            directory=root, namespaces=True, holds=True, limits=self._limits(spec.seconds),
            network=spec.network, gateway=spec.gateway if spec.network == "gateway" else None,
        )  # fmt: skip
        self._control = LAUNCHER.connect()
        await asyncio.to_thread(self._begin, job)

    def _begin(self, job: Job) -> None:
        control = self._control
        if control is None:
            raise ToolServerError(f"the container of {self.spec.name} has been stopped")
        try:
            control.settimeout(_START_SECONDS)
            control.sendall(encode_job(job))
            with control.makefile("rb") as reader:
                read_answer(reader.readline())
        except OSError as error:
            raise ToolServerError(f"the container of {self.spec.name} does not start: {error}") from error

    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
        shown_bytes: int | None = None,
    ) -> Execution:
        """Run a command with the rights of Docker's default, none if ``writable`` names folders."""
        spec = self.spec
        job = Job(
            directory="", namespaces=True, limits=self._limits(seconds, output_bytes), command=tuple(command),
            cwd=workdir or spec.workdir or "/", environment={**spec.environment, **(environment or {})},
            user=user or spec.user or "0", is_privileged=not spec.writable, shown_bytes=shown_bytes,
            stdin=stdin.decode("latin-1"), stdin_encoding="latin-1",
        )  # fmt: skip
        return await launch(job, seconds, self._connect)

    async def copy(
        self, archive: Path, *, into: str | None = None, out_of: str | None = None, limit: int = COPY_BYTES
    ) -> None:
        """Copy files by a process inside the container, with its limits."""
        way = ("in", str(into)) if out_of is None else ("out", out_of)
        limits = self._limits(_COPY_SECONDS)
        if out_of is not None:
            limits["disk_mb"] = max(1, limit >> 20)
        job = Job(directory=str(archive), namespaces=True, limits=limits, copies=way)
        done = await launch(job, _COPY_SECONDS, self._connect)
        if done.succeeded:
            return
        if done.exit_code == NO_FOLDER and out_of is not None:
            raise FileNotFoundError(f"the container of {self.spec.name} has no folder {out_of}")
        if done.exit_code == TOO_LARGE:
            raise FilesTooLargeError(
                f"{out_of} of the container of {self.spec.name} has more than {limit:,} bytes"
            )
        said = done.stderr.strip()[-300:] or done.exceeded or f"exit code {done.exit_code}"
        raise ToolServerError(f"files of the container of {self.spec.name} cannot be copied: {said}")

    async def stop(self) -> None:
        """Kill all that runs in it. The overlay goes with its namespaces."""
        control, self._control = self._control, None
        if control is not None:
            await asyncio.to_thread(_end, control)

    def _connect(self) -> socket.socket:
        if self._control is None:
            raise ToolServerError(f"the container of {self.spec.name} does not run")
        own, passed = socket.socketpair()
        with contextlib.closing(passed):
            try:
                socket.send_fds(self._control, [b"x"], [passed.fileno()])
            except OSError as error:
                own.close()
                raise ToolServerError(f"the container of {self.spec.name} has ended: {error}") from error
        return own

    def _limits(self, seconds: float, output_bytes: int = _SAID_BYTES) -> dict[str, float | None]:
        spec = self.spec
        return {
            "seconds": seconds, "cpu_seconds": spec.cpu_seconds, "memory_mb": spec.memory_mb,
            "disk_mb": spec.storage_mb, "files": spec.files, "processes": spec.processes,
            "open_files": spec.open_files, "output_bytes": output_bytes,
        }  # fmt: skip


def _end(control: socket.socket) -> None:
    """Close a container's connection; wait until its holder has killed it."""
    with contextlib.closing(control), contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_WR)
        control.settimeout(_STOP_SECONDS)
        while control.recv(_SAID_BYTES):
            pass


def root_of(rootfs: str, where: str) -> str:
    """Return a folder with a root file system, owned by the containers' root. Raises ConfigError.

    It is unpacked once per process, and removed at its end. Blocks.
    """
    path = os.path.realpath(rootfs)
    if not os.path.exists(path):
        raise ConfigError(
            f"{where}: there is no root file system {rootfs}", hint="name a folder or a tar archive"
        )
    with _lock:
        key = (path, os.stat(path).st_mtime_ns)
        if key not in _roots:
            _roots[key] = _unpack(path, where)
        return _roots[key]


def _unpack(path: str, where: str) -> str:
    is_root = os.getuid() == 0
    if os.path.isdir(path) and not is_root:
        return path
    folder = scratch_folder("rootfs")
    atexit.register(discard, folder)
    target = folder / "root"
    target.mkdir(mode=0o755)
    if os.path.isdir(path):
        words = ["cp", "--archive", "--reflink=auto", f"{path}/.", str(target)]
    else:
        owners = ["--numeric-owner", "--same-owner"] if is_root else ["--no-same-owner"]
        words = [
            "tar",
            "--extract",
            "--file",
            path,
            "--directory",
            str(target),
            "--same-permissions",
            *owners,
        ]
        words += ["--exclude=dev/*", "--exclude=./dev/*"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_UNPACK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{where}: {path} was not unpacked in {_UNPACK_SECONDS:g} s") from error
    if done.returncode != 0:
        raise ConfigError(
            f"{where}: the root file system {path} cannot be unpacked: {done.stderr.strip()[-300:]}",
            hint="it is a folder or a tar archive, as `docker export` writes it",
        )
    if is_root:
        _shift_owners(str(target))
    return str(target)


def _shift_owners(folder: str) -> None:
    """Give files to the containers' users, which own nothing else on this machine."""
    os.lchown(folder, FIRST_USER, FIRST_USER)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            if status.st_uid < FIRST_USER:  # else another name of a file that has been shifted
                os.lchown(path, FIRST_USER + status.st_uid, FIRST_USER + status.st_gid)
                if not os.path.islink(path):
                    os.chmod(path, status.st_mode & 0o7777)
