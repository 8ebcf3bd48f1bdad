"""Harbor tasks in containers of the sandbox: solutions, trajectories, rewards, and what a Record keeps."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import ScriptedEngine, format_of
from rootfs_here import make_rootfs, rootfs_problem
from waiting import cancel

from agentrl.base.folder_owner import OWNER_FILE
from agentrl.config.load import parse
from agentrl.config.sampling import ContainerConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig, ToolConfig
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.environments.environment import use_containers
from agentrl.environments.snapshots import Snapshots
from agentrl.errors import ENGINES, ConfigError, EngineError, TaskFileError
from agentrl.local.try_task import run_solutions
from agentrl.rollout.load_tasks import read_task_source
from agentrl.rollout.worker import Worker
from agentrl.screens.dashboard.pages.trajectories import verdicts_of
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool
from agentrl.worlds.harbor import machine
from agentrl.worlds.harbor.oracle import check_solutions
from agentrl.worlds.harbor.source import open_harbor

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason=f"no containers: {rootfs_problem()}"),
]

TASKS = Path(__file__).parents[3] / "assets/examples/harbor/tasks"
DONE = "<answer>done</answer>"


def call(command: str, **more: object) -> str:
    """What the model says to run a command."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command, **more}})}</tool_call>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of this machine's programs."""
    return make_rootfs(tmp_path_factory.mktemp("root") / "fs", "mktemp")


@pytest.fixture(autouse=True)
def containers(root: Path) -> Iterator[None]:
    """Let this process use it for every image."""
    use_containers(ContainerConfig(rootfs=str(root)))
    yield
    use_containers(ContainerConfig())


@pytest.fixture
async def tools() -> AsyncIterator[ToolPool]:
    async with ToolPool(ToolConfig()) as pool:
        yield pool


async def sample(store: Store, tools: ToolPool, source: Path | None, *script: str) -> Record:
    """Run the trajectory of the only task in ``source``, or loaded, by a scripted model."""
    engine = ScriptedEngine(format_of(), *script)
    worker = Worker(
        store=store, router=engine, tools=tools, chat_format=engine.chat_format, params=SamplingParams(),
        seed=7, agent=AgentConfig(agent_name="react"), sampling=SamplingConfig(),
        claims=ClaimConfig(max_attempts=1),
    )  # type: ignore[arg-type]  # fmt: skip
    if source is not None:
        await store.tasks.load(read_task_source(source, num_generations=1).tasks)
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    assert claim is not None
    await worker.run(claim)
    record = await store.records.get(claim.record_id)
    assert record is not None
    return record


def changed(tmp_path: Path, task: str, **files: str) -> Path:
    """A copy of a task with other files; ``__`` in a name is a slash, and ``_`` before the end a dot."""
    folder = tmp_path / task
    shutil.copytree(TASKS / task, folder)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.write_text(text)
        path.chmod(0o755)
    return folder


async def test_solutions_score_1_and_untouched_containers_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check_solutions(open_harbor(TASKS), None, at_once=4) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:3] for line in lines if "untouched" not in line}
    refused = [line for line in lines if line.startswith("refused")]
    assert len(rows) == 8 + 1  # and the two refused ones, under one word
    assert {tuple(rewards) for name, rewards in rows.items() if name != "refused"} == {("0", "1")}
    assert "two-containers" in refused[0]
    assert "wrong-schema" in refused[1]


def test_a_folder_is_loaded_without_what_is_refused_only_if_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"2 of 10 tasks of .* cannot be read") as refused:
        read_task_source(TASKS)
    assert "Harbor task two-containers: environment/docker-compose.yaml asks Docker Compose for" in str(
        refused.value
    )
    read = read_task_source(TASKS, skip_bad_lines=True, shuffle=False)
    assert len(read.tasks) == 8
    task = next(task for task in read.tasks if task.task_id == "sort-lines")
    assert task.query.startswith("Sort the lines")
    assert (task.environment, task.scorer, task.tools) == ("harbor", "environment", ())
    assert task.meta["tags"] == ["text", "file"]
    assert (task.meta["harbor"]["memory_mb"], task.meta["harbor"]["agent_seconds"]) == (512, 300.0)
    shutil.copytree(TASKS / "write-file", tmp_path / "repository/write-file")
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", "x"],
        ["bundle", "create", "../x.bundle", "HEAD"],
    ):
        subprocess.run([*git, *words], check=True, capture_output=True)
    bundled = read_task_source(tmp_path / "x.bundle").tasks[0]
    assert (
        bundled.meta["harbor"]["digest"]
        == next(each for each in read.tasks if each.task_id == "write-file").meta["harbor"]["digest"]
    )


def test_without_docker_and_a_root_each_task_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    use_containers(ContainerConfig())
    machine._docker_problem.cache_clear()
    try:
        with pytest.raises(TaskFileError, match="1 of 1 tasks") as refused:
            read_task_source(TASKS / "write-file")
    finally:
        machine._docker_problem.cache_clear()
    assert "Harbor task write-file: it needs Docker, and there is no command 'docker'" in str(refused.value)
    assert "--rootfs debian:bookworm-slim=FILE.tar" in str(refused.value)


async def test_an_oracle_with_nothing_to_run_says_why_and_what_to_do(tmp_path: Path) -> None:
    use_containers(ContainerConfig(containers="sandbox"))
    shutil.copytree(TASKS / "wrong-schema", tmp_path / "tasks/wrong-schema")
    shutil.copytree(TASKS / "write-file", tmp_path / "tasks/write-file")
    source = open_harbor(tmp_path / "tasks")
    with pytest.raises(ConfigError, match=r"none of 2 tasks of .* runs here") as refused:
        await check_solutions(source, None, at_once=1)
    assert "Harbor task wrong-schema: task.toml" in refused.value.message
    assert "write-file: --containers is sandbox, and --rootfs names no root" in refused.value.message
    assert "--rootfs FILE.tar" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"tests of Harbor tasks, and tasks\.jsonl has none"):
        await run_solutions(
            parse([], command="agentrl try", description="", shown=[]), "tasks.jsonl", line=None
        )
    with pytest.raises(ConfigError, match="has no task 9"):
        await check_solutions(open_harbor(tmp_path / "tasks"), 9, at_once=1)


async def test_a_trajectory_works_by_bash_and_keeps_log_diff_and_files(store: Store, tools: ToolPool) -> None:
    script = (
        call("cat total.sh; ls /tests /solution; pwd"),
        call("printf '#!/bin/bash\\ns=0; for n in \"$@\"; do s=$((s + n)); done; echo $s\\n' > total.sh"),
        call(
            "mkdir -p /tests /logs/verifier; echo 9 > /logs/verifier/reward.json; echo exit > /tests/test.sh"
        ),
        DONE,
    )
    record = await sample(store, tools, TASKS / "repair-script", *script)
    assert (record.status, record.score, record.stop_reason) == (
        RecordStatus.SCORED,
        1.0,
        StopReason.ANSWERED,
    )
    calls = await store.model_calls.by_record(record.id)
    first = calls[0].tool_executions[0]
    assert "No such file" in str(first.result)  # neither tests nor solution
    assert "/app" in str(first.result)
    assert record.harness is not None
    assert record.harness.run is None
    assert record.harness.changed_files == ("total.sh",)
    assert "+s=0; for n in" in record.harness.diff
    assert record.harness.scoring is not None
    assert "total.sh 1 2 3 4: 10, expected 10" in record.harness.scoring.stdout
    assert record.harness.files == {"verifier/reward.txt": "1\n"}


async def test_every_number_of_reward_json_is_a_detail_of_the_score(
    store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    test = '#!/bin/sh\necho \'{"style": 0.5, "works": 1}\' > /logs/verifier/reward.json'
    task = changed(tmp_path, "write-file", tests__test_sh=test)
    record = await sample(store, tools, task, DONE)
    assert (record.score, record.score_details["rewards"]) == (0.75, {"style": 0.5, "works": 1.0})
    shown = verdicts_of(record)[0].details
    assert shown is not None
    assert '"style": 0.5' in shown.text


async def test_services_outlive_their_command_and_a_separate_verifier_sees_artifacts_alone(
    store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    begin = call("(while true; do echo x >> ticks; sleep 0.05; done) > /dev/null 2>&1 & disown")
    assert (await sample(store, tools, TASKS / "ticker-service", begin, DONE)).score == 1.0
    artifact = call("touch left-by-the-agent; echo 3 > answer.txt")
    assert (await sample(store, tools, TASKS / "separate-verifier", artifact, DONE)).score == 1.0
    fake = call("echo 5 > answer.txt; for i in 1 2 3 4 5; do echo ERROR; done > server.log")
    other = changed(tmp_path, "separate-verifier", instruction_md="Count.")
    (other / "task.toml").write_text((other / "task.toml").read_text() + '[task]\nname = "a/other"\n')
    assert (await sample(store, tools, other, fake, DONE)).score == 0.0


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("#!/bin/bash\necho broken >&2; exit 3", "it wrote neither reward.txt nor reward.json; .* broken"),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt", "reward.txt holds 'nan"),
        ("#!/bin/bash\necho 1 > /logs/verifier/reward.txt; sleep 60", "it reached its limit of time"),
    ],
)
async def test_tests_without_a_reward_fail_the_attempt_and_never_score_0(
    test: str, said: str, store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    toml = (TASKS / "write-file/task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 1.0")
    folder = changed(tmp_path, "write-file", tests__test_sh=test, task_toml=toml)
    record = await sample(store, tools, folder, call("echo hello > greeting.txt"), DONE)
    assert (record.status, record.score) == (RecordStatus.FAILED, None)
    assert record.failure is not None
    assert record.failure.kind == "environment"
    assert record.harness is not None
    assert record.harness.scoring is not None
    assert re.search(said, record.failure.message), record.failure.message


@pytest.mark.attack
@pytest.mark.parametrize(
    "dodge",
    [
        "rm -rf /logs; touch /logs",
        "mv /logs /l && ln -s /proc /logs",
        "rm /bin/sh /usr/bin/sh",
    ],
)
async def test_what_an_agent_leaves_so_that_the_tests_give_no_reward_scores_0(
    dodge: str, store: Store, tools: ToolPool
) -> None:
    record = await sample(store, tools, TASKS / "write-file", call(dodge), DONE)
    assert (record.status, record.score) == (RecordStatus.SCORED, 0.0), record.failure
    assert record.score_details is not None
    assert record.score_details["problem"]


async def test_an_agent_that_takes_too_long_is_ended_and_what_it_did_is_scored(
    store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    toml = (TASKS / "write-file/task.toml").read_text().replace("timeout_sec = 300.0", "timeout_sec = 1.0")
    script = (call("echo hello > greeting.txt"), call("sleep 60"), DONE)
    record = await sample(store, tools, changed(tmp_path, "write-file", task_toml=toml), *script)
    assert (record.stop_reason, record.score, record.turns) == (StopReason.TIME_LIMIT, 1.0, 2)


async def test_files_that_have_changed_since_loading_fail_the_attempt(
    store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    folder = changed(tmp_path, "write-file")
    read = read_task_source(folder, num_generations=1)
    await store.tasks.load(read.tasks)
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt")
    record = await sample(store, tools, None, DONE)
    assert record.failure is not None
    assert "have changed since it was loaded" in record.failure.message


async def test_a_health_check_that_fails_names_its_command(
    store: Store, tools: ToolPool, tmp_path: Path
) -> None:
    toml = (TASKS / "echo-service/task.toml").read_text().replace("test -f", "test -d")
    toml = toml.replace("interval_sec = 0.5", "interval_sec = 0.05")
    record = await sample(store, tools, changed(tmp_path, "echo-service", task_toml=toml), DONE)
    assert record.failure is not None
    assert "test -d /app/protocol.md` failed 3 times" in record.failure.message
    assert record.harness is None or record.harness.scoring is None


FIRST = "echo $RANDOM$RANDOM$RANDOM > /root/first; rm /bin/yes; cat /root/first"
SECOND = "cat /root/first; [ -e /bin/yes ] || echo gone"


async def test_another_sampler_goes_on_with_the_files_of_the_container(store: Store, tmp_path: Path) -> None:
    """The first command never says the same again: the trajectory would begin anew without the files."""
    await store.tasks.load([read_task_source(TASKS / "write-file", num_generations=1).tasks[0]])
    reached = asyncio.Event()

    def hang(_: str) -> str:
        reached.set()
        raise EngineError("no engine answers", outage=ENGINES)

    def worker(*script: Any) -> Worker:
        engine = ScriptedEngine(format_of(), *script)
        return Worker(
            store=store, router=engine, tools=tools, chat_format=engine.chat_format, params=SamplingParams(),
            seed=7, agent=AgentConfig(agent_name="react"), sampling=SamplingConfig(),
            claims=ClaimConfig(max_attempts=1), snapshots=Snapshots(str(kept), store.settings.owner, 1 << 20),
        )  # type: ignore[arg-type]  # fmt: skip

    kept = tmp_path / "snapshots"
    async with ToolPool(ToolConfig()) as tools:
        first = await store.claims.claim(split="train", owner="first", lease_seconds=600)
        assert first is not None
        running = asyncio.create_task(worker(call(FIRST), hang).run(first))
        await reached.wait()

        async def reference() -> str | None:
            calls = await store.model_calls.by_record(first.record_id)
            return calls[0].snapshot if calls else None

        for _ in range(400):
            if await reference() is not None:
                break
            await asyncio.sleep(0.05)
        await cancel(running)
        await store.attempts.release(first)
        assert len([path for path in kept.iterdir() if path.is_dir()]) == 1

        second = await store.claims.claim(split="train", owner="second", lease_seconds=600)
        assert second is not None
        await worker(call(SECOND), DONE).run(second)
    record = await store.records.get(first.record_id)
    assert record is not None
    assert (record.status, record.owners[-1].replayed, record.turns) == (RecordStatus.SCORED, 1, 3)
    calls = await store.model_calls.by_record(record.id)
    began, went_on = (each.tool_executions[0].result for each in calls[:2])
    assert went_on == f"{began}\ngone"
    assert [path.name for path in kept.iterdir()] == [OWNER_FILE], "what is over is deleted"
