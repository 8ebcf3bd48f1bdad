"""Define the back end ``kubernetes``: a Job of one pod per container, by the API server's HTTP interface.

httpx2 and websockets, not the client ``kubernetes``: that one blocks, and cannot close a command's input.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shlex
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlencode

import httpx2
import yaml

from agentrl.base.batches import batches
from agentrl.base.concurrency import background
from agentrl.base.processes import has_ended, owned_name, owner_of
from agentrl.base.proxies import ProxiedTransport, blocking_transport, proxy_of
from agentrl.base.validation import Positive, SettingsModel, Text, read_config
from agentrl.errors import ConfigError, ToolServerError
from agentrl.worlds.containers.container import (
    COPY_BYTES,
    OUTPUT_BYTES,
    Container,
    ContainerSpec,
    Execution,
    FilesTooLargeError,
    back_end_away,
    container,
)
from agentrl.worlds.containers.docker import BEGIN, CHANGED, INTO, KILL, NO_FOLDER, OUT_OF, TELLING, exports
from agentrl.worlds.containers.output import Output

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server."""

    url: str
    namespace: str
    ssl: ssl.SSLContext | bool
    """False for http://."""
    token: str | Path | None
    """A token, or its file, which is read for each request: such tokens change."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        token = self.token.read_text(encoding="utf-8").strip() if isinstance(self.token, Path) else self.token
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def open_cluster(kubeconfig: str | None, context: str | None, namespace: str | None, where: str) -> Cluster:
    """Return the cluster of a kubeconfig, or the one in which this process runs. Raises ConfigError."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and host is not None and (_ACCOUNT / "token").exists():
        own = (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        trusted = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return Cluster(f"https://{host}:{port}", namespace or own, trusted, _ACCOUNT / "token")
    given = kubeconfig or os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0]
    path = Path(os.path.expanduser(given))  # Path.expanduser raises for a user without a home
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        chosen = _named(content, "contexts", context or content["current-context"])["context"]
        cluster = _named(content, "clusters", chosen["cluster"])["cluster"]
        user = _named(content, "users", chosen["user"])["user"]
        url = str(cluster["server"]).rstrip("/")
        if "exec" in user or "auth-provider" in user:
            raise ConfigError(
                f"{where}: the user of {path} logs in by a program, which is not run here",
                hint="use a service account's token: kubectl create token ACCOUNT",
            )
        security: ssl.SSLContext | bool = (
            _ssl(cluster, user, path.parent) if url.startswith("https") else False
        )
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: the kubeconfig {path} cannot be used: {type(error).__name__}: {error}",
            hint="give kubeconfig and context, or run in a pod with a service account",
        ) from error
    file = user.get("tokenFile")
    token = (path.parent / file) if file is not None else user.get("token")
    return Cluster(url, namespace or chosen.get("namespace", "default"), security, token)


def _named(content: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for item in content[kind]:
        if item["name"] == name:
            found: Mapping[str, Any] = item
            return found
    raise LookupError(f"it has no {name!r} in {kind}")


def _ssl(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    """Return what checks the server, and shows it the user's certificate."""
    authority = cluster.get("certificate-authority")
    context = ssl.create_default_context(
        cafile=None if authority is None else str(folder / authority),
        cadata=_decoded(cluster.get("certificate-authority-data")),
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    names = ("client-certificate", "client-key")
    if f"{names[0]}-data" in user:
        with tempfile.TemporaryDirectory() as private:  # OpenSSL reads files only
            for name in names:
                (Path(private) / name).write_text(_decoded(user[f"{name}-data"]) or "", encoding="ascii")
            context.load_cert_chain(Path(private) / names[0], Path(private) / names[1])
    elif names[0] in user:
        context.load_cert_chain(folder / user[names[0]], folder / user[names[1]])
    return context


def _decoded(text: str | None) -> str | None:
    return None if text is None else base64.b64decode(text).decode("ascii")


LABEL: Final = "agentrl-container"
_WAITING: Final = 'sleep "$1" & wait $!'
_KEPT_SECONDS: Final = 60
"""How long a Job that has ended stays for a look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(SettingsModel):
    """``options`` of a container of Kubernetes."""

    namespace: Text | None = None
    """None: that of the service account or of the context."""
    kubeconfig: Text | None = None
    """None: the service account in a pod, else ``$KUBECONFIG`` or ``~/.kube/config``."""
    context: Text | None = None
    start_seconds: Positive = 600.0
    """Time for a node and the image."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the pod's ``spec``, such as ``imagePullSecrets`` and ``nodeSelector``."""


def options_of(spec: ContainerSpec, where: str) -> KubernetesOptions:
    """Return the options of a container. Raises ConfigError, which begins with ``where``."""
    hint = "docs/containers.md lists the keys"
    options = read_config(KubernetesOptions, dict(spec.options), f"{where}: container", hint=hint)
    if spec.user is not None and not all(part.isdigit() for part in spec.user.split(":")):
        raise ConfigError(f"{where}: user is {spec.user!r}", hint="Kubernetes takes UID or UID:GID")
    return options


def job_of(spec: ContainerSpec, name: str, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Job of a container; ``pod`` has further fields of the pod's spec."""
    limits = {"memory": f"{spec.memory_mb}Mi", "ephemeral-storage": f"{spec.storage_mb}Mi"}
    limits |= {} if spec.cpus is None else {"cpu": str(spec.cpus)}
    rights: dict[str, Any] = {}
    if spec.user is not None:
        user, _, group = spec.user.partition(":")
        rights |= {"runAsUser": int(user), "runAsGroup": int(group or user)}
    if spec.writable:
        rights |= {
            "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
    labels = {"app": LABEL, "agentrl-network": spec.network}
    main = {
        "name": "main", "image": spec.image, "securityContext": rights,
        "command": ["/bin/sh", "-c", _WAITING, "sh", f"{spec.seconds:.0f}"],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": f"w{at}", "mountPath": path} for at, path in enumerate(spec.writable)],
    }  # fmt: skip
    memory = {"medium": "Memory", "sizeLimit": f"{spec.storage_mb}Mi"}
    described = {
        "restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0, "containers": [main],
        "volumes": [{"name": f"w{at}", "emptyDir": memory} for at in range(len(spec.writable))],
        **pod,
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": int(spec.seconds),
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": described},
        },
    }  # fmt: skip


def state_of(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return the phase of a pod, and why its container waits or has ended."""
    status = pod.get("status", {})
    states = [one.get("state", {}) for one in status.get("containerStatuses", [])]
    reasons = [detail.get("reason") for state in states for detail in state.values()]
    ended = any("terminated" in state for state in states)
    phase = "Failed" if ended and status.get("phase") == "Running" else str(status.get("phase", "Pending"))
    return phase, str(status.get("reason") or next(filter(None, reasons), ""))


CHUNK: Final = 1 << 16
_OPEN_SECONDS: Final = 30.0
_STDIN, _STDOUT, STDERR, STATUS, _CLOSE = b"\0", 1, 2, 3, b"\xff"
"""Channels of ``v5.channel.k8s.io``: the first byte of each message."""


@contextlib.asynccontextmanager
async def open_exec(
    cluster: Cluster, pod: str, words: Sequence[str], stdin: AsyncIterator[bytes] | None = None
) -> AsyncIterator[AsyncIterator[tuple[int, bytes]]]:
    """Start a command in the pod at path ``pod``; yield its messages, as channel and content, to its end.

    Raises ToolServerError, as an outage, if the pod cannot be reached, TimeoutError if it does not answer.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException
    from websockets.typing import Subprotocol

    query = [("container", "main"), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
    query += [("command", word) for word in words]
    try:
        connection = connect(
            f"ws{cluster.url.removeprefix('http')}{pod}/exec?{urlencode(query)}",
            ssl=cluster.ssl or None, additional_headers=cluster.headers(), compression=None,
            subprotocols=[Subprotocol("v5.channel.k8s.io")], max_size=None, open_timeout=_OPEN_SECONDS,
            proxy=proxy_of(cluster.url),
        )  # fmt: skip
        async with connection as socket, background(_feed(socket, stdin)):
            yield _messages(socket)
    except TimeoutError:
        raise
    except (OSError, WebSocketException) as error:
        name = pod.rpartition("/")[2]
        raise back_end_away("kubernetes", f"no command reaches the pod {name}: {error}") from error


async def _messages(socket: ClientConnection) -> AsyncIterator[tuple[int, bytes]]:
    async for message in socket:
        if isinstance(message, bytes) and message[1:]:
            yield message[0], message[1:]


async def _feed(socket: ClientConnection, stdin: AsyncIterator[bytes] | None) -> None:
    """Write a command's input and close it. A command that ends before it has read it is not an error."""
    from websockets.exceptions import ConnectionClosed

    with contextlib.suppress(ConnectionClosed):
        if stdin is not None:
            async for part in stdin:
                for piece in batches(part, CHUNK):
                    await socket.send(_STDIN + piece)
        await socket.send(_CLOSE + _STDIN)


class Command:
    """What a command says on its channels, and the limit that it has exceeded."""

    def __init__(self, output_bytes: int, shown_bytes: int | None) -> None:
        self.stdout, self.stderr = (Output.of(output_bytes, shown_bytes) for _ in range(2))
        self.pid: int | None = None
        self.code = -int(signal.SIGKILL)
        self.exceeded: str | None = None
        self._first = b""
        self._has_pid = asyncio.Event()

    async def input(self, script: bytes, stdin: bytes) -> AsyncIterator[bytes]:
        """Yield what the command reads: it begins with ``stdin`` once its id is known."""
        yield script
        await self._has_pid.wait()
        yield b"\n" + stdin

    def receive(self, channel: int, content: bytes) -> None:
        """Take one message. The first line of standard output is the id of the process."""
        if channel == STATUS:
            self.code = exit_code(content)
            return
        if channel == _STDOUT and self.pid is None:
            self._first += content
            line, found, content = self._first.partition(b"\n")
            if not found:
                return
            self.pid = int(line)
            self._has_pid.set()
        if not (self.stderr if channel == STDERR else self.stdout).add(content):
            self.exceeded = "output"


def exit_code(content: bytes) -> int:
    """Return the exit code of a command from the Status that ends its channel."""
    status: dict[str, Any] = json.loads(content)
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes", [])
    return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), 1)


_SECONDS: Final = 30.0
_COPY_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_CANNOT_START: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
_cleaned: set[tuple[str, str]] = set()


@container("kubernetes")
class KubernetesContainer(Container):
    """A Job with one pod. Its ``activeDeadlineSeconds`` end it, also when this process is killed."""

    takes_users: ClassVar[bool] = False

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
        return Execution.of(
            running.stdout, running.stderr, exit_code=running.code, exceeded=running.exceeded,
            seconds=time.monotonic() - started,
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
