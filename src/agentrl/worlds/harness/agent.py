"""Define the agent ``command``: a harness of its own process, which calls the model through a gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shlex
import shutil
import signal
import string
import tarfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.bounded_http import is_loopback
from agentrl.base.processes import process_tree
from agentrl.base.proxies import ProxiedTransport
from agentrl.base.untrusted_folder import discard
from agentrl.documents.document import is_score, sanitize_bson
from agentrl.documents.record import CommandRun, Ending, HarnessRun
from agentrl.documents.status import CallStatus, StopReason
from agentrl.errors import ENGINES, ConfigError, EngineError, HarnessError, ToolServerError
from agentrl.rollout.agent_io import Endpoint, Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.answers import extract_answer
from agentrl.scoring.scorers import ScoreResult
from agentrl.worlds.archives import (
    HOME,
    TEMPORARY,
    WORKSPACE,
    FolderChanges,
    add_files,
    compare,
    keep,
    read_file,
    restore,
)
from agentrl.worlds.containers.container import CONTAINERS, Execution, FilesTooLargeError
from agentrl.worlds.harbor.environment import Harbor, control
from agentrl.worlds.harness.prepare import (
    SYSTEM_PATH,
    TASK,
    Command,
    HarnessConfig,
    HarnessFile,
    Prepared,
    ScoreCommand,
    arguments_of,
    prepare,
)
from agentrl.worlds.sandbox.local import launch, uses_namespaces
from agentrl.worlds.sandbox.namespaces import LOOPBACK, WORK
from agentrl.worlds.sandbox.program import Job

logger = logging.getLogger(__name__)

SHOWN_BYTES: Final = 64 << 10
"""Bytes of each output that are kept."""
_MARKER: Final = "AGENTRL_HARNESS"
_HTTP_PORT: Final = 80
_HEADERS: Final = 64 << 20
"""Of the archive that a container packs, beside the contents of files."""


class Session(ABC):
    """The commands of one trajectory. ``archive`` holds its files, ``before`` those of its beginning."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._folder = Path()

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(scratch_folder, "harness")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(discard, self._folder)

    @property
    def archive(self) -> Path:
        """The files of the trajectory."""
        return self._folder / "files.tar"

    @property
    def before(self) -> Path:
        """The files with which it began."""
        return self._folder / "before.tar"

    @property
    @abstractmethod
    def root(self) -> str:
        """The folder of the files, as commands see it."""

    @property
    def workspace(self) -> str:
        """The working directory, as commands see it."""
        return f"{self.root}/{WORKSPACE}"

    async def changes(self) -> FolderChanges:
        """Return what differs in the working directory from its beginning."""
        return await asyncio.to_thread(compare, self.before, self.archive, WORKSPACE)

    @abstractmethod
    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it."""

    async def run(
        self,
        command: Command,
        environment: Mapping[str, str],
        *,
        seconds: float,
        secrets: Sequence[str] = (),
        calls_model: bool = True,
    ) -> CommandRun:
        """Run a command to its end or to a limit. ``secrets`` are hidden in its output.

        Without ``calls_model`` it cannot reach the gateway, where it has a network of its own. On
        cancellation it is killed with all that it started. Raises ToolServerError if the sandbox fails.
        """
        done = await self._execute(command, environment, seconds, calls_model)
        run = done.as_command_run
        return dataclasses.replace(run, stdout=hide(run.stdout, secrets), stderr=hide(run.stderr, secrets))

    @abstractmethod
    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        """Run a command for ``run``."""

    async def fill(self, files: Mapping[str, bytes]) -> None:
        """Make the working directory, with more files by their path in the archive."""

        def copy() -> None:
            shutil.copyfile(self._prepared.base, self.before)
            add_files(self.before, files)
            shutil.copyfile(self.before, self.archive)

        await asyncio.to_thread(copy)


class HarnessSession(Session):
    """The sandbox of one trajectory: namespaces, or limits only."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._namespaces = False
        self._gateway: tuple[str, int] | None = None
        self._marker = f"{_MARKER}={uuid.uuid4().hex}"

    async def __aenter__(self) -> Self:
        config = self._prepared.config
        self._namespaces = await asyncio.to_thread(uses_namespaces, config.isolation, str(config.source))
        return await super().__aenter__()

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return WORK if self._namespaces else str(self._folder / "work")

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it. Raises ConfigError for one that is not HTTP."""
        if not self._has_own_network:
            return url
        self._gateway, url = forwarded(url, self._prepared.config.source)
        return url

    @property
    def _has_own_network(self) -> bool:
        return self._namespaces and self._prepared.config.network == "gateway"

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        limits = dataclasses.replace(self._prepared.config.limits, seconds=seconds)
        job = Job(
            visible=self._prepared.visible, directory=str(self._folder), namespaces=self._namespaces,
            keep_files=True, limits=limits.as_dict(), command=arguments_of(command), cwd=WORKSPACE,
            environment={**self._base_environment(), **environment}, shown_bytes=SHOWN_BYTES,
            network="gateway" if self._has_own_network else "host",
            gateway=self._gateway if calls_model and self._has_own_network else None,
        )  # fmt: skip
        try:
            return await launch(job, seconds)
        except ToolServerError:
            await asyncio.to_thread(self._kill_remains)
            raise

    def _base_environment(self) -> dict[str, str]:
        name, _, value = self._marker.partition("=")
        return {
            "HOME": f"{self.root}/{HOME}", "TMPDIR": f"{self.root}/{TEMPORARY}",
            "PATH": os.pathsep.join([*self._prepared.path, SYSTEM_PATH]), name: value,
            "GIT_CONFIG_NOSYSTEM": "1",  # Git ends at a file that exists and cannot be read
        }  # fmt: skip

    def _kill_remains(self) -> None:
        """Kill what a supervisor that was killed itself has left."""
        for pid in process_tree((), self._marker):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


class ContainerSession(Session):
    """The files of one trajectory, which are copied into a new container for each command."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._kind = CONTAINERS.get(prepared.config.isolation)
        self._gateway: tuple[str, int] | None = None

    @property
    def root(self) -> str:
        """The folder of the files, as commands see it."""
        return WORK

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: the one that it advertises, or a loopback."""
        config = self._prepared.config
        if config.network == "gateway" and self._kind.forwards_gateway:
            self._gateway, url = forwarded(url, config.source)
        return url

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        """The files of a command that leaves more than ``disk_mb`` or ``files`` are dropped."""
        config, limits = self._prepared.config, self._prepared.config.limits
        network, gateway = (config.network, self._gateway) if calls_model else ("none", None)
        folders = {"HOME": f"{WORK}/{HOME}", "TMPDIR": f"{WORK}/{TEMPORARY}"}
        packed = self._folder / "packed.tar"
        async with self._kind(config.container_spec(network=network, gateway=gateway)) as container:
            await container.copy(self.archive, into=WORK)
            done = await container.run(
                arguments_of(command), seconds=seconds, environment={**folders, **environment},
                workdir=f"{WORK}/{WORKSPACE}", output_bytes=limits.output_bytes,
                shown_bytes=SHOWN_BYTES,
            )  # fmt: skip
            try:
                await container.copy(packed, out_of=WORK, limit=(limits.disk_mb << 21) + _HEADERS)
                is_kept = await asyncio.to_thread(
                    keep, packed, self.archive, limits.disk_mb << 20, limits.files
                )
            except FilesTooLargeError:
                is_kept = False
            except (ToolServerError, FileNotFoundError, tarfile.TarError) as error:
                if done.exceeded is None:  # else a limit may have ended the container
                    raise ToolServerError(f"the files of the harness cannot be copied: {error}") from error
                is_kept = True
        await asyncio.to_thread(packed.unlink, missing_ok=True)
        return done if is_kept else dataclasses.replace(done, exceeded=done.exceeded or "files")


def hide(text: str, secrets: Sequence[str]) -> str:
    """Return the text without the values of secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def forwarded(url: str, source: Path) -> tuple[tuple[str, int], str]:
    """Return the address of the gateway, and its URL where it is forwarded. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ConfigError(
            f"{source}: network is 'gateway', and the gateway is at {parts.scheme}://{parts.netloc}",
            hint="use network: host, or a gateway with an http:// URL",
        )
    address = (str(parts.hostname), parts.port or _HTTP_PORT)
    return address, parts._replace(netloc=f"{LOOPBACK}:{address[1]}").geturl()


_FILE_BYTES: Final = 1 << 20
_SCORING: Final = {
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.bareRepository", "GIT_CONFIG_VALUE_0": "explicit",
}  # fmt: skip
"""Settings of the command that scores: no packages of HOME, no folder that poses as a bare repository."""


async def score_files(
    config: HarnessConfig, session: Session, run: CommandRun, environment: dict[str, str]
) -> tuple[ScoreResult | None, CommandRun | None]:
    """Return the score, and the command that gave it; None for a score that comes from elsewhere.

    Raises HarnessError for a file or an output without a number.
    """
    if config.score == "exit_code":
        passed = run.ended is Ending.EXITED
        return ScoreResult(float(passed), {"exit_code": run.exit_code, "ended": run.ended.value}), None
    if isinstance(config.score, HarnessFile):
        name = config.score.file
        text = await asyncio.to_thread(read_file, session.archive, name, _FILE_BYTES)
        if text is None:
            raise HarnessError(
                f"the harness has not written {name!r}, the file with its score",
                hint="write a number, or JSON with 'score', into it",
            )
        return _read_score(text, f"the file {name!r}"), None
    if isinstance(config.score, ScoreCommand):
        return await _run_command(config.score, session, environment)
    return None, None


async def _run_command(
    command: ScoreCommand, session: Session, environment: dict[str, str]
) -> tuple[ScoreResult, CommandRun]:
    """Run the command on the working directory, with nothing else that the harness has left."""
    await asyncio.to_thread(restore, session.archive, session.before, command.restore)
    done = await session.run(
        command.command, {**_SCORING, **environment}, seconds=command.seconds, calls_model=False
    )
    if command.result == "stdout" and done.ended is Ending.EXITED:
        lines = done.stdout.strip().splitlines()
        return _read_score(lines[-1] if lines else "", "the last line of score.command"), done
    score = float(done.ended is Ending.EXITED)
    return ScoreResult(score, {"exit_code": done.exit_code, "ended": done.ended.value}), done


def _read_score(text: str, where: str) -> ScoreResult:
    """Read a number, or a JSON object with ``score`` and ``details``."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    details = value.get("details") if isinstance(value, dict) else None
    score = value.get("score") if isinstance(value, dict) else value
    if isinstance(score, bool) or not is_score(score):
        raise HarnessError(
            f"{where} holds {text[:100]!a}, not a score", hint='write a number, or {"score": 1.0}'
        )
    return ScoreResult(float(score), sanitize_bson(details) if isinstance(details, dict) else {})


class TaskContainer(Session):
    """The container of the task. Its files stay in it; the environment compares and scores them."""

    def __init__(self, prepared: Prepared, environment: Harbor) -> None:
        super().__init__(prepared)
        self._environment = environment
        self._gateway: tuple[str, int] | None = None

    @property
    def root(self) -> str:
        """The folder of the harness's own files, beside the task's."""
        return WORK

    @property
    def workspace(self) -> str:
        """The working directory of the task."""
        return self._environment.container.spec.workdir or "/"

    def reachable(self, url: str) -> str:
        """Return the URL of the gateway as commands reach it: its own, or a loopback without a network.

        Raises ConfigError if the container does not reach the gateway and its back end does not forward it.
        """
        container = self._environment.container
        network = container.spec.network
        if network == "host" or (network != "none" and not is_loopback(urlsplit(url).hostname or "")):
            return url
        if not container.forwards_gateway:
            raise ConfigError(
                f"the container of task {self._environment.task.task_id} cannot reach the gateway {url} from"
                f" its network {network!r}",
                hint="use --rootfs, whose sandbox forwards the gateway; or, for tasks with network_mode ="
                ' "public", a --gateway_url that containers reach, or --task_network host',
            )
        self._gateway, url = forwarded(url, self._prepared.config.source)
        return url

    async def fill(self, files: Mapping[str, bytes]) -> None:
        """Copy the files of the harness into the container; its work into the task's folder."""
        if self._gateway is not None:
            await self._environment.connect(self._gateway)
        inside = f"{WORKSPACE}/"
        own = {name: content for name, content in files.items() if not name.startswith(inside)}
        work = {name[len(inside) :]: content for name, content in files.items() if name.startswith(inside)}
        container = self._environment.container
        await control(container, f"mkdir -p {WORK}/{HOME} {WORK}/{TEMPORARY}")
        for into, content in ((WORK, own), (self.workspace, work)):
            archive = self._folder / "own.tar"
            await asyncio.to_thread(_pack, archive, content)
            await container.copy(archive, into=into)
        if (user := self._environment.user) is not None:
            paths = [WORK, *(f"{self.workspace}/{name}" for name in work)]
            await control(container, shlex.join(["chown", "-R", "--", user, *paths]))

    async def changes(self) -> FolderChanges:
        """Return none: the environment compares the files of its container."""
        return FolderChanges((), 0, "")

    async def _execute(
        self, command: Command, environment: Mapping[str, str], seconds: float, calls_model: bool
    ) -> Execution:
        folders = {"HOME": f"{WORK}/{HOME}", "TMPDIR": f"{WORK}/{TEMPORARY}"}
        return await self._environment.container.run(
            arguments_of(command), seconds=seconds, environment={**folders, **environment},
            user=self._environment.user, output_bytes=self._prepared.config.limits.output_bytes,
            shown_bytes=SHOWN_BYTES,
        )  # fmt: skip


def _pack(archive: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT):
        pass
    add_files(archive, files)


TASK_FILE: Final = "task.json"
REWARD_KEY_FILE: Final = "reward_key"
QUESTION_FILE: Final = "task.txt"
_VARIABLE_BYTES: Final = 100_000
"""Longest question in a variable; the kernel allows 128 KiB. A longer one is only in the files."""
_ANSWER_BYTES: Final = 64 << 10
_SHOWN: Final = 1000
RETURN_SECONDS: Final = 60.0
"""How long to wait for a gateway that does not answer; then the trajectory is released."""
_LOOK_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 5.0
STOPPED: Final = {"turns": StopReason.TURNS_LIMIT, "length": StopReason.LENGTH_LIMIT}


@agent("command")
class CommandAgent:
    """Runs the command line that ``agent_cfg_path`` describes, once per trajectory."""

    @staticmethod
    def check(path: Path | None) -> None:
        """Raise ConfigError unless this machine can run the harness."""
        prepare(path)

    async def run(self, rollout: Rollout) -> Outcome:
        """Run the harness in a working directory of its own. Raises HarnessError for a failed attempt."""
        prepared = await asyncio.to_thread(prepare, rollout.agent_cfg_path)
        config = prepared.config
        passed = {name: os.environ[name] for name in config.pass_environment}
        async with _session(prepared, rollout) as session:
            async with rollout.gateway(config.train, config.volatile) as endpoint:
                variables = _variables(rollout, endpoint, session)
                secrets = tuple(filter(None, (endpoint.api_key, endpoint.reward_key, *passed.values())))
                key_file = {}
                if config.score == "reward":
                    # in a file that the program can remove: its variables stay readable in /proc
                    variables["AGENTRL_REWARD_KEY_FILE"] = f"{session.root}/{REWARD_KEY_FILE}"
                    key_file[REWARD_KEY_FILE] = (endpoint.reward_key or "").encode()
                await session.fill({**_files(rollout, config, variables), **key_file})
                own = {name: _filled(value, variables) for name, value in config.environment.items()}
                run = await session.run(
                    config.command,
                    {**variables, **passed, **own},
                    seconds=config.limits.seconds,
                    secrets=secrets,
                )
                answers = await is_up(endpoint.base_url)  # here: a trial ends its gateway with its endpoint
            # Exit code 0 without a model call says nothing of the policy.
            if run.ended is Ending.EXITED and not rollout.turns:
                run = replace(run, ended=Ending.NO_CALLS)
            changes = await session.changes()
            rollout.harness_run = HarnessRun(
                run=run, changed_files=changes.files, changes=changes.count,
                diff=hide(changes.diff, secrets),
            )  # fmt: skip
            stopped_by = STOPPED.get(endpoint.result.stopped_by or "")
            if stopped_by is None and run.ended is not Ending.EXITED:
                failure = _failure(prepared, run)
                if endpoint.result.stopped_by == "unavailable":
                    raise EngineError(
                        f"no engine answered a request of the harness; {failure}", outage=ENGINES
                    )
                if not answers:
                    raise EngineError(
                        f"the gateway did not answer when the harness ended; {failure}", outage=ENGINES
                    )
                broke_by_itself = config.fail_on is None and not rollout.turns
                if run.ended in config.failing or broke_by_itself:
                    hint = _HINTS.get(run.ended, f"raise the limit, or leave {run.ended} out of fail_on")
                    raise HarnessError(failure, hint=hint)
            answer = await _answer(rollout, config, session, run)
            score = await _score(rollout, config, session, run, {**passed, **own})
        return Outcome(stopped_by or StopReason.ANSWERED, answer, score)


def _session(prepared: Prepared, rollout: Rollout) -> Session:
    """Return where the harness runs. Raises ConfigError if only one of harness and task has a container."""
    config, environment = prepared.config, rollout.environment
    is_harbor = isinstance(environment, Harbor)
    if is_harbor != (config.isolation == TASK):
        brings = "brings a container" if is_harbor else "brings no container"
        raise ConfigError(
            f"task {rollout.task.task_id} {brings}, and {config.source} has isolation: {config.isolation}",
            hint=f"isolation: {TASK} is that of Harbor's tasks, and of no others",
        )
    if isinstance(environment, Harbor):
        return TaskContainer(prepared, environment)
    return ContainerSession(prepared) if config.in_container else HarnessSession(prepared)


async def is_up(url: str) -> bool:
    """Return whether the gateway answers; wait for one that does not. One that only took long was there."""
    end = time.monotonic() + RETURN_SECONDS
    was_down = False
    while (answers := await _answers(url)) is not True and time.monotonic() < end:
        was_down |= answers is False
        await asyncio.sleep(_LOOK_SECONDS)
    return bool(answers) and not was_down


async def _answers(url: str) -> bool | None:
    """Return whether a gateway is up, whatever it says of the token. None: no answer in time."""
    try:
        async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS, transport=ProxiedTransport()) as client:
            return (await client.get(f"{url}/models")).status_code < 500
    except httpx2.TimeoutException:
        return None
    except httpx2.HTTPError:
        return False


def _variables(rollout: Rollout, endpoint: Endpoint, session: Session) -> dict[str, str]:
    """Return the variables that every harness gets."""
    question = rollout.question.replace("\0", "")
    base_url = session.reachable(endpoint.base_url)
    root_url = base_url.removesuffix("/v1")
    variables = {
        "AGENTRL_BASE_URL": base_url,
        "AGENTRL_ROOT_URL": root_url,
        "AGENTRL_REWARD_URL": f"{root_url}/reward",
        "AGENTRL_API_KEY": endpoint.api_key,
        "AGENTRL_MODEL": endpoint.model,
        "AGENTRL_TASK_FILE": f"{session.root}/{TASK_FILE}",
        "AGENTRL_QUESTION_FILE": f"{session.root}/{QUESTION_FILE}",
        "AGENTRL_WORKSPACE": session.workspace,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
    }
    if len(question.encode("utf-8", "replace")) <= _VARIABLE_BYTES:
        variables["AGENTRL_TASK"] = question.encode("utf-8", "replace").decode()
    return variables


def _files(rollout: Rollout, config: HarnessConfig, variables: dict[str, str]) -> dict[str, bytes]:
    """Return the files of a trajectory beside its working directory's, by their path in the archive."""
    task = rollout.task
    described = {
        "id": task.task_id, "question": rollout.question, "query": task.query,
        "system_prompt": task.system_prompt, "meta": task.meta,
    }  # fmt: skip
    files = {
        TASK_FILE: json.dumps(described, ensure_ascii=True, default=str).encode(),
        QUESTION_FILE: rollout.question.encode("utf-8", "replace"),
    }
    for name, text in config.files.items():
        path = f"{HOME}/{name[2:]}" if name.startswith("~/") else f"{WORKSPACE}/{name}"
        files[os.path.normpath(path)] = _filled(text, variables).encode("utf-8", "replace")
    return files


def _filled(text: str, variables: dict[str, str]) -> str:
    """Replace ``${AGENTRL_…}`` by its value; other variables stay as they are."""
    return string.Template(text).safe_substitute(
        {name: value for name, value in variables.items() if name.startswith("AGENTRL_")}
    )


async def _answer(rollout: Rollout, config: HarnessConfig, session: Session, run: CommandRun) -> str | None:
    """Return the final answer: the last message, standard output or a file, cut to the task's schema."""
    text: str | None
    is_malformed = False
    if isinstance(config.answer, HarnessFile):
        text = await asyncio.to_thread(read_file, session.archive, config.answer.file, _ANSWER_BYTES)
    elif config.answer == "stdout":
        text = run.stdout.strip()
    else:
        last = rollout.messages[-1] if rollout.scored_calls else {}
        content = last.get("content")
        text = content if isinstance(content, str) else None
        made = [call for call in rollout.scored_calls if not call.dropped]
        is_malformed = bool(last) and made[-1].status == CallStatus.FORMAT_ERROR
    if text is None:
        return None
    answer = None if is_malformed else extract_answer(text, rollout.task.answer_schema)
    return text if answer is None else answer


async def _score(
    rollout: Rollout, config: HarnessConfig, session: Session, run: CommandRun, own: dict[str, str]
) -> ScoreResult | None:
    """Return the score of the working directory; None if the client's report or the scorer gives it."""
    if config.score == "reward" and rollout.reported_reward is None:
        raise HarnessError(
            "the harness has reported no reward",
            hint='POST {"score": 1.0} to $AGENTRL_REWARD_URL with the key in $AGENTRL_REWARD_KEY_FILE, or'
            " change 'score'",
        )
    score, scoring = await score_files(config, session, run, own)
    kept = rollout.harness_run
    if scoring is not None and kept is not None:
        rollout.harness_run = replace(kept, scoring=scoring)
    return score


def _failure(prepared: Prepared, run: CommandRun) -> str:
    limits = prepared.config.limits
    what = {
        Ending.NONZERO_EXIT: f"ended with exit code {run.exit_code}",
        Ending.KILLED: f"was killed (exit code {run.exit_code})",
        Ending.TIME_LIMIT: f"ran longer than limits.seconds {limits.seconds:g} or limits.cpu_seconds",
        Ending.MEMORY_LIMIT: f"used more than limits.memory_mb {limits.memory_mb}",
        Ending.DISK_LIMIT: f"filled its disk: limits.disk_mb {limits.disk_mb}, limits.files {limits.files}",
        Ending.OUTPUT_LIMIT: f"printed more than limits.output_bytes {limits.output_bytes:,}",
        Ending.NO_CALLS: "ended without a model call",
    }[run.ended]
    said = (run.stderr.strip() or run.stdout.strip())[-_SHOWN:]
    return f"the harness {what} ({run.ended})" + (f"; its last output: {said}" if said else "")


_HINTS: Final = {
    Ending.NONZERO_EXIT: "score it anyway by leaving nonzero_exit out of fail_on",
    Ending.KILLED: "137 is often a lack of memory: raise limits.memory_mb",
    Ending.NO_CALLS: "let it use $AGENTRL_BASE_URL, $AGENTRL_API_KEY and $AGENTRL_MODEL",
}
