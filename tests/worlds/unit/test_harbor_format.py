"""The format of Harbor tasks: what is read, and the exact reason of each refusal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from harbor_folder import write_task

from agentrl.documents.task_json import BadTaskError
from agentrl.worlds.harbor.environment import _rewards
from agentrl.worlds.harbor.folder import (
    filled,
    pack_copies,
    read_dockerfile,
    read_task_folder,
    read_task_toml,
)
from agentrl.worlds.harbor.source import is_harbor


def test_both_spellings_of_the_version_and_old_sizes_are_read() -> None:
    sizes = 'memory = "2G"\nstorage = "512M"\nallow_internet = false'
    old = read_task_toml(f'version = "1.0"\n[environment]\n{sizes}')
    numbers = 'memory_mb = 2048\nnetwork_mode = "no-network"'
    new = read_task_toml(f'schema_version = "1.4"\n[environment]\n{numbers}')
    assert old.environment.memory == new.environment.memory_mb == 2048
    assert old.environment.storage == 512
    assert not old.network("agent")
    assert not new.network("verifier")
    assert read_task_toml("unknown = 1\n[agent]\ntimeout_sec = 5\nnew_key = 2").agent.timeout_sec == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('schema_version = "9.0"', "has the schema version '9.0'; this AgentRL reads 1.0 to 1.4"),
        ("a = ", "task.toml is not TOML"),
        ("[agent]\ntimeout_sec = 'x'", "agent.timeout_sec is 'x'; it must be a number"),
        ('[environment]\nmemory = "much"', "environment.memory is 'much'; it must be a size such as '2G'"),
        ('[environment]\nos = "windows"', "environment.os is 'windows'; only linux runs here"),
        ("[environment]\ngpus = 1", "asks for accelerators"),
        ('[[environment.mcp_servers]]\nname = "x"', "mcp_servers are not started here"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode is 'allowlist'"),
        ('[[steps]]\nname = "one"', "the task has 1 steps"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "describes another container"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "names the service 'db'"),
        ('[[artifacts]]\nsource = "/x"\nservice = "db"', "names the service 'db'"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(text: str, said: str) -> None:
    with pytest.raises(BadTaskError, match=r"task\.toml") as refused:
        read_task_toml(text)
    assert said in str(refused.value)


def test_a_folder_is_read_without_its_canary_and_its_digest_is_of_all_files(tmp_path: Path) -> None:
    first = read_task_folder(write_task(tmp_path / "one", '[task]\nname = "org/one"'))
    assert (first.name, first.instruction) == ("org/one", "Do it.")
    same = read_task_folder(write_task(tmp_path / "two", '[task]\nname = "org/one"'))
    assert first.digest == same.digest
    os.chmod(tmp_path / "two/tests/test.sh", 0o755)
    assert read_task_folder(tmp_path / "two").digest != first.digest


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("tests/test.sh", None, "there is no tests/test.sh"),
        ("instruction.md", " \n", "there is no instruction.md with text"),
        ("environment/Dockerfile", None, "no environment/Dockerfile, and task.toml names no docker_image"),
        ("environment/docker-compose.yaml", "services: {}", "docker-compose.yaml has no service main"),
        ("environment/compose.yml", "services: [", "compose.yml: "),
        ("environment/compose.yml", "services: " + "[" * 3000, "compose.yml cannot be read: "),
        (
            "environment/compose.yml",
            "services: {main: {image: 2001-13-01}}",
            "compose.yml cannot be read: month",
        ),
        ("environment/compose.yml", "services: {main: {image: !!bool x}}", "compose.yml cannot be read: "),
        ("environment/compose.yml", "a: &a {b: 1}\nc: {<<: *a}", "merges mappings (<<)"),
        ("environment/compose.yml", "#" * (1 << 16) + "\n", "longer than 65,536 bytes"),
        (
            "environment/compose.yml",
            "{services: {main: {}, db: {}}, volumes: {}}",
            "compose.yml asks Docker Compose for the service db, volumes, and here a task is one container",
        ),
        (
            "environment/compose.yml",
            "services: {main: {build: {context: ..}, privileged: true}}",
            "asks Docker Compose for main.privileged, main.build.context",
        ),
        (
            "environment/compose.yml",
            "services: {main: {image: ubuntu, command: serve}}",
            "asks Docker Compose for main.image, main.command",
        ),
        ("trajectory.json", "{}", "begins with the conversation in trajectory.json"),
    ],
)
def test_a_folder_that_lacks_a_file_or_has_one_too_many_is_refused(
    path: str, text: str | None, said: str, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task")
    if text is None:
        (folder / path).unlink()
    else:
        (folder / path).write_text(text)
    with pytest.raises(BadTaskError, match=re.escape(said)):
        read_task_folder(folder)


@pytest.mark.parametrize(
    "text",
    [
        "services: {main: {build: .}}",
        "name: x\nservices:\n  main:\n    build: {context: '${CONTEXT_DIR}'}\n    image: ${MAIN_IMAGE_NAME}\n"
        "    command: [sh, -c, sleep infinity]\n",
    ],
)
def test_a_compose_file_of_the_one_service_main_is_its_dockerfile(text: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "environment/docker-compose.yaml").write_text(text)
    assert read_task_folder(folder).image.build == folder / "environment"


def test_a_dockerfile_says_where_commands_run_and_what_only_a_builder_can_do(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        'FROM --platform=x base AS first \nENV A=1 \\\n  # comment\n  B="two words"\nENV C three\n'
        "WORKDIR /srv\nWORKDIR app\nCOPY a b ./\nCOPY etc /etc\nCMD run\n"
    )
    found = read_dockerfile(path)
    assert (found.base, found.workdir, found.needs_build) == ("base", "/srv/app", None)
    assert found.environment == {"A": "1", "B": "two words", "C": "three"}
    assert found.copies == [(("a", "b"), "/srv/app/"), (("etc",), "/etc")]
    path.write_text("FROM base\nCOPY --from=x a b\nRUN make\n")
    assert read_dockerfile(path).needs_build == "line 2: COPY --from=x a b"
    path.write_text("FROM base\nCOPY ../secret x\n")
    with pytest.raises(BadTaskError, match="which its folder does not hold"):
        pack_copies(read_dockerfile(path), tmp_path, tmp_path / "out.tar")


def test_variables_of_this_machine_are_read_only_where_they_are_allowed() -> None:
    given = {"A": "plain", "B": "${X}", "C": "${Y:-default}"}
    assert filled(given, "env", {"X": "1"}) == {"A": "plain", "B": "1", "C": "default"}
    with pytest.raises(BadTaskError, match=r"env\.B is '\$\{X\}', a variable of this machine that tasks"):
        filled(given, "env", {})


def test_rewards_are_finite_numbers() -> None:
    assert _rewards({"reward.txt": "0.5\n"}) == {"reward": 0.5}
    assert _rewards({"reward.json": '{"a": 1, "b": 0}', "reward.txt": "x"}) == {"a": 1.0, "b": 0.0}
    assert _rewards({"reward.json": "1"}) == {"reward": 1.0}
    for name, text in (("txt", ""), ("txt", "nan"), ("json", "{}"), ("json", '{"a": "1"}')):
        assert isinstance(_rewards({f"reward.{name}": text}), str)
    assert isinstance(_rewards({}), str)


def test_folders_of_tasks_and_bundles_are_told_from_other_paths(tmp_path: Path) -> None:
    assert not is_harbor(tmp_path)
    write_task(tmp_path / "set/one")
    assert is_harbor(tmp_path)
    assert is_harbor(tmp_path / "set/one")
    (tmp_path / "x.bundle").write_bytes(b"# v2 git bundle\n")
    assert is_harbor(tmp_path / "x.bundle")
    assert not is_harbor(tmp_path / "missing")
