"""The agent ``command``: small shell commands as harnesses, and how each of them ends."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from docker_here import docker_problem
from gateway_run import gateway_task
from harness_run import CALL, PYTHON, HarnessRun, write_harness
from rollout_fakes import FakeTools

from agentrl.base.concurrency import end_tasks
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, SamplingConfig
from agentrl.documents.record import Ending
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.errors import ENGINES, ConfigError, EngineError
from agentrl.rollout.preflight import probe
from agentrl.store.client import Store
from agentrl.worlds.harness.agent import is_up
from agentrl.worlds.sandbox.local import namespace_problem

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(params=["namespaces", "limits", "sandbox", "docker"])
def isolation(request: pytest.FixtureRequest) -> str:
    looks = {"namespaces": namespace_problem, "sandbox": namespace_problem, "docker": docker_problem}
    problem = looks[request.param]() if request.param in looks else None
    if problem is not None:
        pytest.skip(f"no {request.param} here: {problem}")
    return str(request.param)


async def test_a_harness_answers_changes_files_and_is_scored_by_a_command(
    store: Store, tmp_path: Path, isolation: str
) -> None:
    template = tmp_path / "template"
    (template / "tests").mkdir(parents=True)
    (template / "sum.py").write_text("def total(a, b):\n    return a - b\n")
    (template / "tests" / "check.sh").write_text("grep -q 'a + b' sum.py\n")
    command = f"{CALL}\nsed -i 's/a - b/a + b/' sum.py; echo true > tests/check.sh; cat $HOME/.rc >&2"
    path = write_harness(
        tmp_path, command, workspace={"template": "template"}, isolation=isolation,
        files={"~/.rc": "${AGENTRL_MODEL} of ${HOME}\n"},
        score={"command": "sh tests/check.sh", "restore": ["tests"]},
    )  # fmt: skip
    record = await HarnessRun(store, path).run()
    assert record.status is RecordStatus.SCORED, record.failure
    assert (record.score, record.stop_reason, record.turns) == (1.0, StopReason.ANSWERED, 1)
    assert record.final_answer == "the answer"
    run = record.harness
    assert run is not None
    assert run.scoring is not None
    assert (run.run.ended, run.scoring.ended) == (Ending.EXITED, Ending.EXITED)
    assert run.run.stdout == "the answer\n"
    assert run.run.stderr == "policy of ${HOME}\n"
    assert run.changed_files == ("sum.py", "tests/check.sh")
    assert "-    return a - b\n+    return a + b\n" in run.diff


TALK = f"""
{PYTHON} - <<'EOF'
import json, os, time, urllib.request
head = {{"Authorization": "Bearer " + os.environ["AGENTRL_API_KEY"], "Content-Type": "application/json"}}
url = os.environ["AGENTRL_BASE_URL"] + "/chat/completions"
messages = [{{"role": "user", "content": f"Clock {{time.time_ns()}}. Hi"}}]
for _ in range(3):
    ask = {{"model": "policy", "messages": messages}}
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(ask).encode(), head)))
    messages += [answer["choices"][0]["message"], {{"role": "user", "content": "more"}}]
    print(messages[-2]["content"], file=open("said.txt", "a"))
EOF
"""
"""A program with its own idea of the time, which asks three times and keeps what was said."""


async def test_a_program_starts_again_under_the_next_sampler_and_goes_on_where_it_was(
    store: Store, tmp_path: Path
) -> None:
    config = {"isolation": "limits", "volatile": [r"Clock \d+"], "answer": {"file": "said.txt"}}
    path = write_harness(tmp_path, TALK, **config)
    lost, hangs = HarnessRun(store, path, "one", "two"), asyncio.Event()
    generate = lost.engine.generate

    async def two_answers(*given: Any, **named: Any) -> Any:
        if len(lost.engine.outputs) == 2:
            hangs.set()
            await asyncio.Event().wait()
        return await generate(*given, **named)

    lost.engine.generate = two_answers  # type: ignore[method-assign]
    claim = await lost.claim()
    running = asyncio.create_task(lost.worker.run(claim))
    await hangs.wait()
    await store.claims.heartbeat([claim], 0.0)
    run = HarnessRun(store, path, "three")
    record = await run.run()
    await end_tasks(running)
    await lost.host.close()
    assert record.failure is None, record.failure
    assert record.final_answer == "one\ntwo\nthree\n"
    assert (len(run.engine.outputs), record.turns, record.dropped_calls) == (1, 3, ())
    assert [(owner.ended, owner.replayed) for owner in record.owners] == [("lease", 0), (None, 2)]


def post(key: str) -> str:
    """A shell line that posts a reward with a key, and prints the status."""
    return f"""
{PYTHON} - <<'EOF'
import json, os, urllib.error, urllib.request
head = {{"Authorization": "Bearer " + {key}}}
url = os.environ["AGENTRL_REWARD_URL"]
try:
    print(urllib.request.urlopen(urllib.request.Request(url, b'{{"score": 0.5}}', head)).status)
except urllib.error.HTTPError as error:
    print(error.code)
EOF
"""


@pytest.mark.attack
@pytest.mark.parametrize(
    ("source", "key", "said", "score"),
    [
        ("reward", 'open(os.environ["AGENTRL_REWARD_KEY_FILE"]).read()', "200", 0.5),
        ("scorer", 'os.environ["AGENTRL_API_KEY"]', "401", 0.0),
        ("exit_code", 'os.environ["AGENTRL_API_KEY"]', "401", 1.0),
    ],
)
async def test_a_reward_needs_a_key_that_the_program_has_only_if_it_scores(
    store: Store, tmp_path: Path, source: str, key: str, said: str, score: float
) -> None:
    path = write_harness(tmp_path, CALL + post(key), isolation="limits", score=source)
    record = await HarnessRun(store, path).run()
    assert record.status is RecordStatus.SCORED, record.failure
    assert (record.score, record.harness and record.harness.run.stdout) == (score, f"the answer\n{said}\n")


LIMITS: dict[str, Any] = {"seconds": 60}
DISK = "for n in 1 2 3; do dd if=/dev/zero of=$n bs=1M count=30; done; sleep 50"
MEMORY = f"{PYTHON} -c 'import time; x = b\"1\" * (600 << 20); time.sleep(50)'"
FILES = "i=0; while :; do i=$((i+1)); : > f$i || sleep 50; done"
ENDINGS: dict[str, tuple[str, dict[str, Any], Ending, int | None]] = {
    "exits137": ("exit 137", LIMITS, Ending.KILLED, 137),
    "killed": ("kill -9 $$", LIMITS, Ending.KILLED, -9),
    "time": ("trap '' TERM INT HUP; while :; do sleep 9; done", {"seconds": 2}, Ending.TIME_LIMIT, None),
    "disk": (DISK, {"disk_mb": 50}, Ending.DISK_LIMIT, None),
    "files": (FILES, {"files": 100}, Ending.DISK_LIMIT, None),
    "output": ("yes | head -c 1000000000", {"output_bytes": 5_000_000}, Ending.OUTPUT_LIMIT, None),
    "memory": (MEMORY, {"memory_mb": 200}, Ending.MEMORY_LIMIT, None),
    "exits3": (f"{CALL}\necho broken >&2; exit 3", LIMITS, Ending.NONZERO_EXIT, 3),
    "nocalls": ("echo hello", LIMITS, Ending.NO_CALLS, 0),
}


async def test_each_bad_ending_is_a_failed_attempt_with_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (command, limits, _, _) in ENDINGS.items():
        write_harness(tmp_path, command, f"{name}.yml", limits=limits, isolation=isolation)
    tasks = [replace(gateway_task(name, slots=1), agent_cfg_path=f"{name}.yml") for name in ENDINGS]
    records = await HarnessRun(store, None).run_all(tasks)
    for name, (_, _, ending, exit_code) in ENDINGS.items():
        record = records[name]
        assert record.failure is not None, name
        assert (record.status, record.failure.kind, record.score) == (RecordStatus.FAILED, "harness", None)
        assert f"({ending})" in record.failure.message
        assert "→" in record.failure.message
        assert record.harness is not None
        assert record.harness.run.ended is ending
        if exit_code is not None:
            by_shell = 128 - exit_code if isolation == "docker" and exit_code < 0 else exit_code
            assert record.harness.run.exit_code == by_shell
        assert len(record.harness.run.stdout) < 70_000
    exits = records["exits3"]
    assert exits.turns == 1, "the calls of a failed attempt are kept"
    assert exits.failure is not None
    assert "exit code 3" in exits.failure.message
    assert "broken" in exits.failure.message


@pytest.mark.attack
async def test_a_model_that_ends_its_harness_gets_the_score_of_what_it_leaves(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt is not trained: the model would avoid each 0. Without a call the harness broke."""
    monkeypatch.chdir(tmp_path)
    commands = {"killed": f"{CALL}\nkill -9 $$", "exits3": f"echo > done\n{CALL}\nexit 3", "broken": "exit 3"}
    for name, command in commands.items():
        write_harness(tmp_path, command, f"{name}.yml", isolation="limits", score={"command": "test -e done"})
    tasks = [replace(gateway_task(name, slots=1), agent_cfg_path=f"{name}.yml") for name in commands]
    records = await HarnessRun(store, None).run_all(tasks)
    scores = {name: (record.status, record.score) for name, record in records.items()}
    assert scores == {
        "killed": (RecordStatus.SCORED, 0.0), "exits3": (RecordStatus.SCORED, 1.0),
        "broken": (RecordStatus.FAILED, None),
    }  # fmt: skip
    assert records["killed"].harness is not None
    assert records["killed"].harness.run.ended is Ending.KILLED


def running(word: str) -> list[int]:
    """The processes with ``word`` in their command line."""
    live = [each for each in psutil.process_iter(["cmdline", "status"]) if each.info["status"] != "zombie"]
    return [each.pid for each in live if word in (each.info["cmdline"] or ())]


async def test_what_forks_away_ends_with_the_harness(store: Store, tmp_path: Path, isolation: str) -> None:
    word = str(random.randint(10**8, 10**9))
    fork = f"(setsid sh -c 'trap \"\" HUP TERM; sleep {word} & sleep {word}' &) & sleep 0.5\n"
    path = write_harness(tmp_path, fork + CALL, score="exit_code", isolation=isolation)
    record = await HarnessRun(store, path).run()
    assert (record.status, record.score) == (RecordStatus.SCORED, 1.0)
    assert running(word) == []


async def test_a_cancelled_trajectory_kills_its_harness(store: Store, tmp_path: Path, isolation: str) -> None:
    """So do a lost lease and a sampler that stops: both cancel it."""
    word = str(random.randint(10**8, 10**9))
    path = write_harness(tmp_path, f"setsid sleep {word} & sleep {word}", isolation=isolation)
    run = HarnessRun(store, path)
    claim = await run.claim()
    task = asyncio.create_task(run.worker.run(claim))
    for _ in range(600):
        if len(running(word)) >= 2 or task.done():
            break
        await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(word) == []
    await run.host.close()


async def test_only_named_variables_pass_and_their_values_are_hidden(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setenv("HARNESS_TOKEN", "sesame-4711")
    monkeypatch.setenv("OTHER_TOKEN", "do-not-pass")
    command = f"{CALL}\nenv; echo $HARNESS_TOKEN | tee token.txt; echo ${{#HARNESS_TOKEN}} > length.txt"
    path = write_harness(
        tmp_path,
        command,
        pass_environment=["HARNESS_TOKEN"],
        isolation=isolation,
        score={"file": "length.txt"},
    )
    record = await HarnessRun(store, path).run()
    assert record.score == 11.0
    assert "do-not-pass" not in repr(record)
    assert "sesame" not in repr(record)
    assert record.harness is not None
    assert "HARNESS_TOKEN=***" in record.harness.run.stdout
    assert "AGENTRL_API_KEY=***" in record.harness.run.stdout


async def test_a_harness_reaches_its_gateway_alone(store: Store, tmp_path: Path) -> None:
    problem = namespace_problem()
    if problem is not None:
        pytest.skip(f"no namespaces here: {problem}")
    connect = (
        f"{PYTHON} -c 'import socket, sys; socket.create_connection((\"127.0.0.1\", int(sys.argv[1])), 3)'"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = f"{CALL}\n! {connect} {port} 2> error.txt && grep -q refused error.txt"
        score = {"command": f"! {connect} $PORT"}
        path = write_harness(tmp_path, command, score=score, environment={"PORT": port})
        record = await HarnessRun(store, path).run()
        assert record.failure is None, record.failure.message
        assert record.score == 1.0


async def test_a_harness_refused_for_its_turns_is_scored(store: Store, tmp_path: Path) -> None:
    command = f"set -e\n{CALL}{CALL.replace('hi', 'again')}"
    path = write_harness(tmp_path, command, score={"command": "test -d ."})
    record = await HarnessRun(store, path, max_turns=1).run()
    assert record.failure is None
    assert (record.stop_reason, record.score, record.turns) == (StopReason.TURNS_LIMIT, 1.0, 1)


def make_bundle(folder: Path) -> None:
    """Write ``r.bundle`` with one commit on the branch ``work``."""
    repository = folder / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", "init", "-q", "-b", "work", str(repository)], check=True)
    (repository / "a.txt").write_text("one\n")
    bundle = ["bundle", "create", str(folder / "r.bundle"), "work"]
    for words in (["add", "."], ["commit", "-qm", "one"], bundle):
        subprocess.run([*git, *words], check=True, capture_output=True)


async def test_a_git_bundle_is_checked_out(store: Store, tmp_path: Path) -> None:
    make_bundle(tmp_path)
    command = f"{CALL}\ngit log --format=%s && echo two >> a.txt"
    path = write_harness(
        tmp_path, command, workspace={"bundle": "r.bundle", "ref": "work"}, score="exit_code", answer="stdout"
    )
    record = await HarnessRun(store, path).run()
    assert record.score == 1.0
    assert str(record.final_answer).endswith("\none")
    assert record.harness is not None
    assert record.harness.diff == "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1,2 @@\n one\n+two\n"


async def test_a_harness_that_cannot_run_is_refused_before_a_claim(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_harness(tmp_path, "no-such-agent", "missing.yml")
    write_harness(tmp_path, "true", "typo.yml", limits={"second": 3})
    named = replace(gateway_task("named"), agent_name="command", agent_cfg_path="missing.yml")
    await store.tasks.load([named, gateway_task("unnamed")])
    flags = AgentConfig(agent_name="command", agent_cfg_path="typo.yml")
    with pytest.raises(ConfigError, match="nothing is claimed") as caught:
        await probe(store, FakeTools(), SamplingConfig(), "train", agent=flags)
    for part in (
        "there is no command 'no-such-agent'",
        "install it",
        "'limits.second'",
        "did you mean 'seconds'",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize(
    "first", [httpx2.ReadTimeout("busy"), httpx2.ConnectError("refused"), httpx2.Response(503)], ids=repr
)
async def test_a_slow_gateway_does_not_hide_the_error_of_the_harness(
    first: httpx2.Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway answers at the second look: one that was slow was there, one that refused was not."""
    looks: list[Any] = [first, httpx2.Response(401)]

    async def get(client: httpx2.AsyncClient, url: str) -> httpx2.Response:
        look = looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    monkeypatch.setattr(httpx2.AsyncClient, "get", get)
    monkeypatch.setattr("agentrl.worlds.harness.agent._LOOK_SECONDS", 0.0)
    assert await is_up("http://gateway/v1") == isinstance(first, httpx2.ReadTimeout)
    assert looks == []


async def test_an_outage_of_engine_or_gateway_uses_up_no_attempt(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_harness(tmp_path, CALL)
    record = await HarnessRun(store, path, EngineError("down", outage=ENGINES)).run()
    assert (record.status, record.failure) == (RecordStatus.RELEASED, None)
    monkeypatch.setattr("agentrl.worlds.harness.agent.RETURN_SECONDS", 0.1)
    away = HarnessRun(store, path, config=GatewayConfig(gateway_url="http://127.0.0.1:9"))
    record = await away.run()
    assert (record.status, record.failure) == (RecordStatus.RELEASED, None)
    assert record.harness is not None
    assert record.harness.run.ended is Ending.NONZERO_EXIT
