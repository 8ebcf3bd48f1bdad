"""Define the back end ``kubernetes``: a Job of one pod per container, by the API server's HTTP interface.

httpx2 and websockets, not the client ``kubernetes``: that one blocks, and cannot close a command's input.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlencode

import httpx2

from agentrl.containers.base import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    ContainerSpec,
    FilesTooLargeError,
    back_end_away,
    container,
)
from agentrl.containers.cluster import Cluster, open_cluster
from agentrl.containers.docker import BEGIN, CHANGED, INTO, KILL, NO_FOLDER, OUT_OF, TELLING, exports
from agentrl.containers.kubernetes_exec import CHUNK, STATUS, STDERR, Command, exit_code, open_exec
from agentrl.containers.kubernetes_job import LABEL, job_of, options_of, state_of
from agentrl.errors import ConfigError, ToolServerError
from agentrl.processes import has_ended, owned_name, owner_of
from agentrl.proxies import ProxiedTransport, blocking_transport
from agentrl.tools.sandbox.limits import Execution

_SECONDS: Final = 30.0
_COPY_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_CANNOT_START: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
_cleaned: set[tuple[str, str]] = set()


@container("kubernetes")
class KubernetesContainer(Container):
    """A Job with one pod. Its ``activeDeadlineSeconds`` end it, also when this process is killed."""

    def __init__(self, spec: ContainerSpec) -> None:
        super().__init__(spec)
        self._options = options_of(spec, spec.name)
        self._cluster: Cluster | None = None
        self._name = self._pod = ""

    @classmethod
    def check(cls, spec: ContainerSpec, where: str) -> None:
        """Raise ConfigError without an image, and without an API server that lets this account run Jobs."""
        if spec.image is None:
            raise ConfigError(
                f"{where}: the back end 'kubernetes' needs an image",
                hint="build and push it, then image: NAME",
            )
        options = options_of(spec, where)
        cluster = open_cluster(options.kubeconfig, options.context, options.namespace, where)
        try:
            transport = blocking_transport(cluster.url, verify=cluster.ssl)
            with httpx2.Client(transport=transport, timeout=_SECONDS, trust_env=False) as client:
                answer = client.get(f"{cluster.url}{_jobs(cluster)}?limit=1", headers=cluster.headers())
        except httpx2.HTTPError as error:
            raise ConfigError(
                f"{where}: the API server {cluster.url} does not answer: {error}",
                hint="try `kubectl get jobs`",
            ) from error
        if answer.status_code != 200:
            raise ConfigError(
                f"{where}: {cluster.url} refuses Jobs in namespace {cluster.namespace!r}: {_said(answer)}",
                hint="the account needs create, get, list and delete of jobs, get and list of pods, and"
                " create and get of pods/exec",
            )

    async def start(self) -> None:
        """Create the Job, and wait until its pod runs."""
        options = self._options
        self._cluster = await asyncio.to_thread(
            open_cluster, options.kubeconfig, options.context, options.namespace, self.spec.name
        )
        await self._remove_those_of_ended()
        self._name = owned_name(f"agentrl-{self.spec.name}")
        await self._ask("POST", _jobs(self._cluster), job_of(self.spec, self._name, options.pod))
        deadline = time.monotonic() + options.start_seconds
        selector = urlencode({"labelSelector": f"job-name={self._name}"})
        said = "it has no pod"
        while time.monotonic() < deadline:
            pods = (await self._ask("GET", f"{_pods(self._cluster)}?{selector}")).get("items", [])
            for pod in pods:
                self._pod = pod["metadata"]["name"]
                phase, said = state_of(pod)
                if phase == "Running":
                    return
                if phase in ("Failed", "Succeeded") or said in _CANNOT_START:
                    raise ToolServerError(f"the pod {self._pod} does not start: {said or phase}")
            await asyncio.sleep(_LOOK_SECONDS)
        raise back_end_away("kubernetes", f"no pod of {self._name} in {options.start_seconds:g} s: {said}")

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
        """Run a command by a websocket of ``exec``, as the container's user."""
        if user not in (None, self.spec.user):
            raise ToolServerError(f"Kubernetes runs commands as the container's user, not as {user}")
        script = self._script(environment or {}, workdir)
        words = ["/bin/sh", "-c", BEGIN + TELLING, "sh", str(len(script)), *command]
        running = Command(output_bytes, shown_bytes)
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds),
                self._exec(words, running.input(script, stdin)) as messages,
            ):
                async for channel, content in messages:
                    running.receive(channel, content)
                    if running.exceeded is not None:
                        break
        except TimeoutError:
            running.exceeded = "time"
        finally:
            if running.code < 0 and running.pid is not None:
                await asyncio.shield(self._kill(running.pid))
        if running.code != 0 and running.exceeded is None:
            running.exceeded = await self._ended_by()
        if running.pid is None and running.exceeded is None:
            why = running.stderr.text.strip()[-300:]
            raise ToolServerError(f"no command starts in the pod {self._pod}: {why}")
        return Execution(
            stdout=running.stdout.text, stderr=running.stderr.text, exit_code=running.code,
            exceeded=running.exceeded, seconds=time.monotonic() - started, memory_mb=0.0,
            stdout_bytes=running.stdout.total, stderr_bytes=running.stderr.total,
        )  # fmt: skip

    def _script(self, environment: Mapping[str, str], workdir: str | None) -> bytes:
        """Return the lines of shell that set a command's variables, folder and limits."""
        spec, folder = self.spec, workdir or self.spec.workdir
        lines = [] if folder is None else [f"mkdir -p {shlex.quote(folder)}; cd {shlex.quote(folder)}"]
        lines.append(f"ulimit -c 0; ulimit -n {spec.open_files} 2>/dev/null")
        lines += [] if spec.cpu_seconds is None else [f"ulimit -t {spec.cpu_seconds}"]
        return exports({**spec.environment, **environment}, *lines)

    async def copy(
        self, archive: Path, *, into: str | None = None, out_of: str | None = None, limit: int = COPY_BYTES
    ) -> None:
        """Copy by ``tar`` in the container."""
        line = INTO if out_of is None else OUT_OF
        words = ["/bin/sh", "-c", line, "sh", str(into or out_of)]
        file = await asyncio.to_thread(open, archive, "rb" if out_of is None else "wb")
        code, said, size = -1, b"", 0
        with file:
            async with (
                asyncio.timeout(_COPY_SECONDS),
                self._exec(words, _chunks(file) if out_of is None else None) as messages,
            ):
                async for channel, content in messages:
                    if channel == STATUS:
                        code = exit_code(content)
                    elif channel == STDERR:
                        said += content[: CHUNK - len(said)]
                    elif out_of is not None:
                        size += len(content)
                        if size > limit:
                            raise FilesTooLargeError(f"{out_of} of {self._pod} has more than {limit:,} bytes")
                        await asyncio.to_thread(file.write, content)
        text = said.decode("utf-8", "replace")
        if code == NO_FOLDER and out_of is not None:
            raise FileNotFoundError(f"the pod {self._pod} has no folder {out_of}")
        if code != 0 and not (code == 1 and CHANGED in text):
            raise ToolServerError(f"files of the pod {self._pod} cannot be copied: {text.strip()[-300:]}")

    async def stop(self) -> None:
        """Delete the Job with its pod."""
        name, self._name = self._name, ""
        if name and self._cluster is not None:
            with contextlib.suppress(ToolServerError):
                await self._delete(name)

    async def _kill(self, pid: int) -> None:
        words = ["/bin/sh", "-c", KILL.format(pid=pid)]
        with contextlib.suppress(ToolServerError, TimeoutError):
            async with asyncio.timeout(_SECONDS), self._exec(words) as messages:
                async for _ in messages:
                    pass

    async def _ended_by(self) -> str | None:
        """Return the limit that ended the pod, if it has ended. Raises ToolServerError for another end."""
        pod = await self._ask("GET", f"{_pods(self._cluster)}/{self._pod}")
        phase, said = state_of(pod)
        if phase == "Running":
            return None
        if said in ("OOMKilled", "Evicted", "DeadlineExceeded"):
            return {"OOMKilled": "memory", "Evicted": "files"}.get(said, "time")
        raise ToolServerError(f"the pod {self._pod} has ended: {said or phase}")

    async def _remove_those_of_ended(self) -> None:
        """Delete the Jobs of processes of this machine that have ended, once per process."""
        cluster = self._cluster
        if cluster is None or (cluster.url, cluster.namespace) in _cleaned:
            return
        _cleaned.add((cluster.url, cluster.namespace))
        selector = urlencode({"labelSelector": f"app={LABEL}"})
        for job in (await self._ask("GET", f"{_jobs(cluster)}?{selector}")).get("items", []):
            owner = owner_of(job["metadata"]["name"])
            if owner is not None and has_ended(owner):
                await self._delete(job["metadata"]["name"])

    async def _delete(self, name: str) -> None:
        policy = {"propagationPolicy": "Background", "gracePeriodSeconds": 0}
        await self._ask("DELETE", f"{_jobs(self._cluster)}/{name}", policy)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the API server answers. Raises ToolServerError, as an outage unless it refuses."""
        cluster = self._cluster
        if cluster is None:
            raise ToolServerError(f"the container of {self.spec.name} does not run")
        try:
            transport = ProxiedTransport(verify=cluster.ssl)
            async with httpx2.AsyncClient(transport=transport, timeout=_SECONDS, trust_env=False) as client:
                answer = await client.request(
                    method, cluster.url + path, json=body, headers=cluster.headers()
                )
        except httpx2.HTTPError as error:
            raise back_end_away(
                "kubernetes", f"the API server {cluster.url} does not answer: {error}"
            ) from error
        if answer.status_code == 404 and method == "DELETE":
            return {}
        if answer.status_code == 429 or answer.status_code >= 500:
            raise back_end_away("kubernetes", f"the API server refuses: {_said(answer)}")
        if answer.status_code >= 400:
            raise ToolServerError(
                f"the API server refuses {method} {path.partition('?')[0]}: {_said(answer)}"
            )
        content: dict[str, Any] = answer.json()
        return content

    def _exec(
        self, words: Sequence[str], stdin: AsyncIterator[bytes] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, bytes]]]:
        """Start a command; the block gets its messages, as channel and content, until it ends."""
        if self._cluster is None:
            raise ToolServerError(f"the container of {self.spec.name} does not run")
        return open_exec(self._cluster, f"{_pods(self._cluster)}/{self._pod}", words, stdin)


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK):
        yield chunk


def _jobs(cluster: Cluster | None) -> str:
    return f"/apis/batch/v1/namespaces/{'' if cluster is None else cluster.namespace}/jobs"


def _pods(cluster: Cluster | None) -> str:
    return f"/api/v1/namespaces/{'' if cluster is None else cluster.namespace}/pods"


def _said(answer: httpx2.Response) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return f"{answer.status_code} {answer.json().get('message', '')}"[:300]
    return str(answer.status_code)
