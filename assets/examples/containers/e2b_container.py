"""A container back end in one file: sandboxes of E2B. Needs `pip install e2b` and E2B_API_KEY.

isolation: e2b_container:E2BContainer
container: {template: base}
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from e2b import AsyncSandbox, CommandExitException, SandboxException, TimeoutException

from agentrl.errors import ToolServerError
from agentrl.worlds.containers.container import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    Execution,
    FilesTooLargeError,
    back_end_away,
    container,
)
from agentrl.worlds.containers.output import Output

ARCHIVE = "/tmp/agentrl.tar"
INPUT = "/tmp/agentrl.in"


@container("e2b")
class E2BContainer(Container):
    """A sandbox of E2B, made from the template that ``options`` names."""

    sandbox: Any = None

    async def start(self) -> None:
        try:
            self.sandbox = await AsyncSandbox.create(
                self.spec.options.get("template"), timeout=int(self.spec.seconds),
                envs=dict(self.spec.environment), allow_internet_access=self.spec.network != "none",
            )  # fmt: skip
        except SandboxException as error:
            raise back_end_away("e2b", f"E2B starts no sandbox: {error}") from error

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
        line = shlex.join(command)
        if stdin:
            await self.sandbox.files.write(INPUT, stdin)
            line += f" < {INPUT}"
        if workdir or self.spec.workdir:
            folder = shlex.quote(workdir or str(self.spec.workdir))
            line = f"mkdir -p {folder}; cd {folder}; {line}"
        stdout, stderr = (Output.of(output_bytes, shown_bytes) for _ in range(2))
        started, code, exceeded = time.monotonic(), 0, None
        try:
            await self.sandbox.commands.run(
                line, envs=dict(environment or {}), user=user or "root", timeout=seconds,
                on_stdout=lambda text: stdout.add(text.encode()),
                on_stderr=lambda text: stderr.add(text.encode()), retain_output=False,
            )  # fmt: skip
        except CommandExitException as error:
            code = error.exit_code
        except TimeoutException:
            code, exceeded = -9, "time"
        except SandboxException as error:
            raise back_end_away("e2b", f"E2B runs no command: {error}") from error
        if max(stdout.total, stderr.total) > output_bytes:
            exceeded = "output"
        return Execution.of(
            stdout, stderr, exit_code=code, exceeded=exceeded, seconds=time.monotonic() - started
        )

    async def copy(
        self, archive: Path, *, into: str | None = None, out_of: str | None = None, limit: int = COPY_BYTES
    ) -> None:
        if into is not None:
            content = await asyncio.to_thread(archive.read_bytes)
            await self.sandbox.files.write(ARCHIVE, content, user="root")
            line = f"mkdir -p {shlex.quote(into)} && tar -xf {ARCHIVE} -C {shlex.quote(into)}"
            done = await self.run(["/bin/sh", "-c", line], seconds=600, workdir="/")
            if not done.succeeded:
                raise ToolServerError(f"{archive} cannot be extracted: {done.stderr}")
            return
        folder = shlex.quote(str(out_of))
        line = f"[ -d {folder} ] || exit 44; tar -cf {ARCHIVE} -C {folder} . && wc -c < {ARCHIVE}"
        done = await self.run(["/bin/sh", "-c", line], seconds=600, workdir="/")
        if done.exit_code == 44:
            raise FileNotFoundError(f"the sandbox has no folder {out_of}")
        if int(done.stdout or 0) > limit:
            raise FilesTooLargeError(f"{out_of} has more than {limit:,} bytes")
        content = await self.sandbox.files.read(ARCHIVE, format="bytes", user="root")
        await asyncio.to_thread(archive.write_bytes, content)

    async def stop(self) -> None:
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            await sandbox.kill()
