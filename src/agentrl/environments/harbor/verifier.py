"""Run the tests of a Harbor task in a container, and read the reward and the logs that they leave."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agentrl.containers.base import Container, FilesTooLargeError
from agentrl.documents.base import is_score
from agentrl.documents.record import CommandRun
from agentrl.errors import TaskEnvironmentError
from agentrl.tools.sandbox.limits import Execution

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
class Verdict:
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
) -> Verdict:  # fmt: skip
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
        return Verdict(run, {}, f"it reached its limit of {done.exceeded}")
    archive = scratch / "verifier.tar"
    try:
        await container.copy(archive, out_of=VERIFIER_LOGS, limit=_LOG_BYTES)
    except FileNotFoundError:
        return Verdict(run, {}, f"it removed {VERIFIER_LOGS}")
    except FilesTooLargeError as error:
        return Verdict(run, {}, f"{VERIFIER_LOGS} is larger than {_LOG_BYTES >> 20} MiB: {error.message}")
    try:
        files = await asyncio.to_thread(_read_archive, archive)
    except UNREADABLE as error:
        return Verdict(run, {}, f"the archive of {VERIFIER_LOGS} cannot be read: {error}")
    rewards = _rewards(files)
    kept = {f"verifier/{name}": text for name, text in files.items()}
    for folder in ("agent", "artifacts"):
        with suppress(FileNotFoundError, FilesTooLargeError, *UNREADABLE):
            other = scratch / f"{folder}.tar"
            await container.copy(other, out_of=f"{LOGS}/{folder}", limit=_LOG_BYTES)
            read = await asyncio.to_thread(_read_archive, other)
            kept |= {f"{folder}/{name}": text for name, text in read.items()}
    return Verdict(run, kept, rewards)


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
