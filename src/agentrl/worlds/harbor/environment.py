"""Environment ``harbor``: a task of Harbor's format in a container, scored by the tests of its folder.

    agentrl tasks load DIR --run_name …

DIR is the folder of a task, of a data set, or a git bundle of either. ``tests/`` and ``solution/`` do not
reach the container while the agent works: the tests are copied into it when the agent has ended.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import tarfile
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agentrl.base.untrusted_folder import discard
from agentrl.base.user_code import file_name
from agentrl.documents.document import is_score, replace_surrogates
from agentrl.documents.record import CommandRun, HarnessRun
from agentrl.documents.status import ToolState
from agentrl.documents.task import Task
from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import Environment, environment
from agentrl.errors import TaskEnvironmentError, ToolServerError
from agentrl.worlds.archives import compare
from agentrl.worlds.containers.changes import Changes, NotKeptError
from agentrl.worlds.containers.container import Container, Execution, FilesTooLargeError
from agentrl.worlds.harbor.folder import HarborTask, HealthCheck, ImageOf, process_folder
from agentrl.worlds.harbor.machine import (
    archive_of,
    back_end,
    copies_of,
    needs_copies,
    require_network,
    secrets,
    variables,
)
from agentrl.worlds.harbor.source import NAME, open_task
from agentrl.worlds.sandbox.tool import output_text

ROOT: Final = "0:0"
TESTS, LOGS, VERIFIER_LOGS, ARTIFACTS = "/tests", "/logs", "/logs/verifier", "/logs/artifacts"
REWARD: Final = "reward"
_REWARD_JSON, _REWARD_TEXT = "reward.json", "reward.txt"
_CONTROL_SECONDS: Final = 60.0
OUTPUT_BYTES: Final = 64 << 20
SHOWN_BYTES: Final = 64 << 10
_LOG_BYTES: Final = 64 << 20
"""Largest archive of the logs that is read."""
UNREADABLE: Final = (tarfile.TarError, OSError, ValueError, OverflowError)
"""Errors of reading an archive from the container's own tar, which an agent may have replaced."""
_FILE_BYTES, _FILES_BYTES = 32 << 10, 256 << 10
"""Bytes that are kept of one file of the logs, and of all."""


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """What the tests left: how they ran, the text files of ``/logs``, and the rewards by name."""

    run: CommandRun | None
    """None if they could not be started."""
    files: dict[str, str]
    rewards: dict[str, float] | str
    """The reason, if the tests gave no reward."""

    @property
    def reward(self) -> float:
        """Return ``reward``, the only reward, or the mean of all. Raises TaskEnvironmentError without one."""
        if isinstance(self.rewards, str):
            run = self.run
            said = "" if run is None else (run.stderr.strip() or run.stdout.strip())[-500:]
            how = "" if run is None else f"; it ended as {run.ended} with exit code {run.exit_code}"
            raise TaskEnvironmentError(
                f"the verifier gave no reward: {self.rewards}{how}"
                + (f"; its last output: {said}" if said else ""),
                hint=f"tests/test.sh must write a number to {VERIFIER_LOGS}/{_REWARD_TEXT};"
                " verifier.timeout_sec limits it",
            )
        return self.rewards.get(REWARD, sum(self.rewards.values()) / len(self.rewards))


async def prepare_logs(container: Container) -> None:
    """Make the folders of logs that agents and tests write to."""
    folders = f"{LOGS}/agent {VERIFIER_LOGS} {ARTIFACTS}"
    await control(container, f"mkdir -p {folders} && chmod 0777 {folders}")


async def control(container: Container, line: str, seconds: float = _CONTROL_SECONDS) -> Execution:
    """Run a shell line as root. Raises TaskEnvironmentError if it fails."""
    done = await container.run(["/bin/sh", "-c", line], seconds=seconds, user=ROOT, workdir="/")
    if not done.succeeded:
        raise TaskEnvironmentError(
            f"`{line}` failed in the container: {(done.stderr or done.stdout).strip()[-300:]}",
            hint="its image needs /bin/sh and coreutils",
        )
    return done


async def verify(
    container: Container, tests: Path | None, scratch: Path, *, seconds: float, user: str | None,
    variables: Mapping[str, str],
) -> TestVerdict:  # fmt: skip
    """Run the tests. ``tests`` is the archive of ``tests/``, None if the image has them.

    What the agent left under ``/tests`` and ``/logs/verifier`` is removed first, and what it left running
    goes on: tests may call a service that it started.
    """
    remove = f"rm -rf {VERIFIER_LOGS}" + (f" {TESTS}" if tests is not None else "")
    await control(container, remove)
    await prepare_logs(container)
    if tests is not None:
        await container.copy(tests, into=TESTS)
    await control(container, f"chmod +x {TESTS}/test.sh")
    done = await container.run(
        [f"{TESTS}/test.sh"], seconds=seconds, environment=variables, user=user, output_bytes=OUTPUT_BYTES,
        shown_bytes=SHOWN_BYTES,
    )  # fmt: skip
    run = done.as_command_run
    if done.exceeded is not None:
        return TestVerdict(run, {}, f"it reached its limit of {done.exceeded}")
    archive = scratch / "verifier.tar"
    try:
        await container.copy(archive, out_of=VERIFIER_LOGS, limit=_LOG_BYTES)
    except FileNotFoundError:
        return TestVerdict(run, {}, f"it removed {VERIFIER_LOGS}")
    except FilesTooLargeError as error:
        return TestVerdict(run, {}, f"{VERIFIER_LOGS} is larger than {_LOG_BYTES >> 20} MiB: {error.message}")
    try:
        files = await asyncio.to_thread(_read_archive, archive)
    except UNREADABLE as error:
        return TestVerdict(run, {}, f"the archive of {VERIFIER_LOGS} cannot be read: {error}")
    rewards = _rewards(files)
    kept = {f"verifier/{name}": text for name, text in files.items()}
    for folder in ("agent", "artifacts"):
        with suppress(FileNotFoundError, FilesTooLargeError, *UNREADABLE):
            other = scratch / f"{folder}.tar"
            await container.copy(other, out_of=f"{LOGS}/{folder}", limit=_LOG_BYTES)
            read = await asyncio.to_thread(_read_archive, other)
            kept |= {f"{folder}/{name}": text for name, text in read.items()}
    return TestVerdict(run, kept, rewards)


def _read_archive(archive: Path) -> dict[str, str]:
    """Return the text files of an archive, each cut, and only the sizes of others; the rewards first."""
    files: dict[str, str] = {}
    left = _FILES_BYTES
    with tarfile.open(archive, "r:") as source:
        members = [member for member in source if member.isreg()]
        for member in sorted(members, key=lambda item: PurePosixPath(item.name).name not in _REWARDS):
            name = str(PurePosixPath(member.name))
            reader = source.extractfile(member)
            content = b"" if reader is None else reader.read(min(_FILE_BYTES, left))
            left -= len(content)
            text = content.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
            if member.size > len(content):
                text += f"\n[{member.size - len(content):,} bytes left out]"
            files[name] = text
            if left <= 0:
                break
    return files


_REWARDS: Final = frozenset({_REWARD_JSON, _REWARD_TEXT})


def _rewards(files: Mapping[str, str]) -> dict[str, float] | str:
    """Return the rewards in ``reward.json``, else in ``reward.txt``; or why there are none."""
    text = files.get(_REWARD_JSON)
    if text is None:
        text = files.get(_REWARD_TEXT)
        if text is None:
            return f"it wrote neither {_REWARD_TEXT} nor {_REWARD_JSON}"
        with suppress(ValueError):
            if is_score(value := float(text)):
                return {REWARD: value}
        return f"{_REWARD_TEXT} holds {text[:100]!a}, not a number"
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        return f"{_REWARD_JSON} is not JSON: {text[:100]!a}"
    parts = given if isinstance(given, dict) else {REWARD: given}
    wrong = [name for name, value in parts.items() if not is_score(value)]
    if wrong or not parts:
        return f"{_REWARD_JSON} holds {text[:100]!a}, not numbers by name"
    return {name: float(value) for name, value in parts.items()}


_BASH_SECONDS: Final = 60.0
_LONGEST_BASH_SECONDS: Final = 3600.0
_SHOWN_BYTES: Final = 32 << 10
_SPARE_SECONDS: Final = 120.0
_SNAPSHOT_SECONDS: Final = 900.0
_SNAPSHOT_BYTES: Final = 8 << 20
"""Largest working directory whose changes are shown."""
_SOLUTION: Final = "/solution"
_FROM: Final = "/tmp/.agentrl-artifact"
_gives_reward: dict[str, bool] = {}
"""Digest of a task → whether its tests give a reward in an untouched container."""


@environment(NAME)
class Harbor(Environment):
    """A container with the tool ``bash``; the tests of the task give the reward."""

    tools = ("bash",)
    state = ToolState.SNAPSHOT
    scored_by_tests = True

    @classmethod
    def names(cls, task: Task) -> list[str]:
        """Return the folder or git bundle that the task was loaded from."""
        named = task.meta.get(NAME)
        return [file_name(str(named.get("source")))] if isinstance(named, Mapping) else []

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._harbor: HarborTask = open_task(task.meta)
        try:
            require_network(self._harbor)
        except BadTaskError as error:
            raise TaskEnvironmentError(f"Harbor task {self._harbor.name}: {error}") from error
        toml = self._harbor.toml
        check = toml.environment.healthcheck
        check_seconds = 0.0 if check is None else check.seconds
        build = toml.environment.build_timeout_sec + _SPARE_SECONDS
        self.call_seconds = {
            "setup": build + check_seconds,
            "bash": _LONGEST_BASH_SECONDS + _SPARE_SECONDS,
            "snapshot": _SNAPSHOT_SECONDS,
            "restore": _SNAPSHOT_SECONDS,
            "reward": 2
            * (toml.verifier.timeout_sec + (build + check_seconds) * (1 + toml.verifier.is_separate)),
        }
        self.agent_seconds = toml.agent.timeout_sec
        self.container: Container = back_end(self._harbor, self._harbor.image)
        self._shell = "/bin/sh"
        self._scratch = Path(tempfile.mkdtemp(dir=process_folder()))
        self._before: Path | None = None
        self._work: Changes | None = None
        self._beginning = asyncio.Lock()
        self._unkept: NotKeptError | None = None
        """Why the container's files cannot be kept."""

    async def setup(self) -> None:
        """Start the container and wait until it is healthy."""
        await self._start(self.container, self._harbor.image)
        has_bash = await self.container.run(["/bin/sh", "-c", "command -v bash"], seconds=_SPARE_SECONDS)
        self._shell = has_bash.stdout.strip() if has_bash.succeeded else self._shell
        self._before = await self._snapshot("before.tar")

    async def bash(self, command: str, seconds: float = _BASH_SECONDS) -> str:
        """Run a command line in the container and return what it prints.

        Files and processes in the background stay; variables and the working directory do not. A command is
        stopped after `seconds`.
        """
        if not 0 < seconds <= _LONGEST_BASH_SECONDS:
            raise ValueError(f"seconds is {seconds:g}; give a number up to {_LONGEST_BASH_SECONDS:g}")
        await self._note_beginning()
        return output_text(await self._run([self._shell, "-c", f"exec 2>&1\n{command}"], seconds=seconds))

    async def _note_beginning(self) -> None:
        """List the container's files before the first command, for snapshots: a harness needs none."""
        async with self._beginning:
            if self._work is None and self.keeps_files:
                self._work = Changes(self.container, self._scratch)
                try:
                    await self._work.begin()
                except NotKeptError as error:
                    self._unkept = error

    async def snapshot(self, archive: Path, limit: int) -> None:
        """Archive what commands have changed in the container. Raises NotKeptError."""
        if self._work is None or self._unkept is not None:
            raise self._unkept or NotKeptError("what the container began with was not listed")
        await self._work.save(archive, limit)

    async def restore(self, archive: Path) -> None:
        """Change the container's files as an earlier one's were."""
        await self._note_beginning()
        await Changes(self.container, self._scratch).apply(archive)

    @property
    def user(self) -> str | None:
        """The user of the agent's commands; None: the container's own."""
        return self._harbor.toml.agent.user

    async def run(self, command: list[str], *, seconds: float) -> Execution:
        """Run a command of the agent, as the agent's user; from then on no snapshot is made."""
        # Such commands are not stored: an agent that runs again runs them again, before files are restored.
        self._unkept = NotKeptError("the agent runs commands of its own beside its tools")
        return await self._run(command, seconds=seconds)

    async def _run(self, command: list[str], *, seconds: float) -> Execution:
        return await self.container.run(
            command, seconds=seconds, user=self.user, output_bytes=OUTPUT_BYTES,
            shown_bytes=_SHOWN_BYTES,
        )  # fmt: skip

    async def connect(self, gateway: tuple[str, int]) -> None:
        """Start the container anew, from which the gateway can be reached, and nothing else."""
        await self.container.stop()
        spec = replace(self.container.spec, network="gateway", gateway=gateway)
        self.container = type(self.container)(spec)
        await self.setup()

    async def solve(self) -> Execution:
        """Run the task's own solution instead of an agent. Raises TaskEnvironmentError without one."""
        folder, toml = self._harbor.solution, self._harbor.toml
        if folder is None:
            raise TaskEnvironmentError(
                f"Harbor task {self._harbor.name} has no solution/solve.sh", hint="only its tests can be run"
            )
        archive = await asyncio.to_thread(archive_of, folder, self._harbor.digest)
        await self.container.copy(archive, into=_SOLUTION)
        await control(self.container, f"chmod +x {_SOLUTION}/solve.sh")
        own = {"DEBIAN_FRONTEND": "noninteractive", **variables(toml.solution.env, "solution.env")}
        return await self.container.run(
            [f"{_SOLUTION}/solve.sh"], seconds=toml.agent.timeout_sec or _LONGEST_BASH_SECONDS,
            environment=own, user=toml.agent.user, output_bytes=OUTPUT_BYTES, shown_bytes=_SHOWN_BYTES,
        )  # fmt: skip

    async def reward(self) -> float:
        """Run the tests. If an agent's changes keep them from giving a reward, the score is 0.

        Tests that give none in an untouched container either are the task's fault: TaskEnvironmentError.
        """
        changed, count, diff = await self._changes()
        try:
            verdict = await self._verify(self.container)
        except (TaskEnvironmentError, ToolServerError) as error:
            if error.outage is not None:
                raise
            verdict = TestVerdict(None, {}, error.message)
        run = verdict.run
        self.left = HarnessRun(
            run=None, changed_files=changed, changes=count, diff=_hidden(diff),
            scoring=run and replace(run, stdout=_hidden(run.stdout), stderr=_hidden(run.stderr)),
            files={str(replace_surrogates(name)): _hidden(text) for name, text in verdict.files.items()},
        )  # fmt: skip
        if isinstance(verdict.rewards, dict) and set(verdict.rewards) != {REWARD}:
            self.reward_details = {"rewards": verdict.rewards}
        if isinstance(verdict.rewards, str) and await self._gives_reward_untouched():
            self.reward_details = {"problem": _hidden(verdict.rewards)}
            return 0.0
        return verdict.reward

    async def _gives_reward_untouched(self) -> bool:
        """Return whether the tests give a reward in a container that no agent has seen; asked once a task."""
        digest = self._harbor.digest
        if digest not in _gives_reward:
            container = back_end(self._harbor, self._harbor.image)
            try:
                await self._start(container, self._harbor.image)
                _gives_reward[digest] = not isinstance((await self._verify(container)).rewards, str)
            finally:
                await asyncio.shield(container.stop())
        return _gives_reward[digest]

    async def teardown(self) -> None:
        """Remove the container."""
        await self.container.stop()
        await asyncio.to_thread(discard, self._scratch)

    async def _start(self, container: Container, image: ImageOf) -> None:
        where = f"Harbor task {self._harbor.name}"
        await asyncio.to_thread(container.check, container.spec, where)
        await container.start()
        if needs_copies(self._harbor, image) and image.build is not None:
            archive = await asyncio.to_thread(copies_of, image.build, self._harbor.digest)
            await container.copy(archive, into="/")
        await prepare_logs(container)
        if image.table.healthcheck is not None:
            await _wait_until_healthy(container, image.table.healthcheck)

    async def _verify(self, worked_in: Container) -> TestVerdict:
        """Run the tests in the container of the agent's work, or in one that gets only its artifacts."""
        task = self._harbor
        if not task.toml.verifier.is_separate:
            return await self._test(worked_in)
        if task.verifier_image is None:
            raise TaskEnvironmentError(f"Harbor task {task.name} has no image for its verifier")
        for hook in task.toml.verifier.collect:
            await worked_in.run(["/bin/sh", "-c", hook.command], seconds=hook.timeout_sec)
        container = back_end(task, task.verifier_image, is_verifier=True)
        try:
            await self._start(container, task.verifier_image)
            for path in (ARTIFACTS, *(artifact.source for artifact in task.toml.artifacts)):
                await self._carry(posixpath.normpath(path), worked_in, container)
            return await self._test(container)
        finally:
            await asyncio.shield(container.stop())

    async def _test(self, container: Container) -> TestVerdict:
        task, tests = self._harbor, None
        if not task.tests_in_image:
            tests = await asyncio.to_thread(archive_of, task.folder / "tests", task.digest)
        return await verify(
            container, tests, self._scratch, seconds=task.toml.verifier.timeout_sec,
            user=task.toml.verifier.user, variables=variables(task.toml.verifier.env, "verifier.env"),
        )  # fmt: skip

    async def _carry(self, path: str, worked_in: Container, container: Container) -> None:
        """Copy a file or folder of one container to the same place of another, if it exists."""
        archive, target = self._scratch / "artifact.tar", path
        try:
            is_folder = await worked_in.run(["test", "-d", path], seconds=_SPARE_SECONDS)
            if is_folder.succeeded:
                await worked_in.copy(archive, out_of=path)
            else:
                line = f'rm -rf {_FROM} && mkdir {_FROM} && cp -a -- "$1" {_FROM}/'
                stage = ["/bin/sh", "-c", line, "sh", path]
                await worked_in.run(stage, seconds=_SPARE_SECONDS, user=ROOT)
                target = posixpath.dirname(path)
                await worked_in.copy(archive, out_of=_FROM)
        except FileNotFoundError:
            return
        await container.copy(archive, into=target)

    async def _snapshot(self, name: str) -> Path | None:
        """Archive the working directory; None for the root, and for one that is large."""
        folder = self.container.spec.workdir
        if folder is None or posixpath.normpath(folder) == "/":
            return None
        archive = self._scratch / name
        try:
            await self.container.copy(archive, out_of=folder, limit=_SNAPSHOT_BYTES)
        except FileNotFoundError:
            return None
        except ToolServerError as error:  # too large, too deep, or a container that has ended
            if error.outage is not None:
                raise
            return None
        return archive

    async def _changes(self) -> tuple[tuple[str, ...], int, str]:
        """Return how the agent changed the working directory: the first files, their number, and a diff."""
        after = None if self._before is None else await self._snapshot("after.tar")
        if self._before is None or after is None:
            return (), 0, ""
        try:
            changes = await asyncio.to_thread(compare, self._before, after)
        except UNREADABLE:
            return (), 0, ""
        return changes.files, changes.count, changes.diff


def _hidden(text: str) -> str:
    """Return the text without the values of ``--task_variables``."""
    for secret in secrets():
        text = text.replace(secret, "***")
    return text


async def _wait_until_healthy(container: Container, check: HealthCheck) -> None:
    """Repeat the health check until it succeeds. Raises TaskEnvironmentError after its retries."""
    grace = time.monotonic() + check.start_period_sec
    failures = 0
    while True:
        done = await container.run(["/bin/sh", "-c", check.command], seconds=check.timeout_sec)
        if done.succeeded:
            return
        is_starting = time.monotonic() < grace
        failures += not is_starting
        if failures >= check.retries:
            raise TaskEnvironmentError(
                f"the health check `{check.command}` failed {failures} times:"
                f" {(done.stderr or done.stdout).strip()[-300:] or f'exit code {done.exit_code}'}",
                hint="see environment.healthcheck in task.toml",
            )
        await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)
