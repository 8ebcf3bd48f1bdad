"""The images and ``deploy/compose.yml``: real flags, few rights and networks, loopback ports, no secrets."""

from __future__ import annotations

import os
import re
import runpy
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config.agreement import require_trainable
from agentrl.config.commands import COMMANDS
from agentrl.config.load import Configs, parse
from agentrl.config.schema import EngineConfig, GatewayConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.lab.db_cli import parser as db_parser
from agentrl.screens.screens_cli import dashboard_parser
from agentrl.store.mechanics.connection import Connection
from agentrl.tools.config import load_servers
from agentrl.worlds.worlds_cli import parser as tools_parser

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
WITH_FLAGS = ("serve", "sample", "gateway", "train", "score", "eval")
"""Commands that read the flags of a run."""


class _Loader(yaml.SafeLoader):
    """Reads Compose's tag !reset as null."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def load(name: str) -> dict[str, Any]:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    filled = re.sub(r"\$\{\w+(?::[-?]([^}]*))?\}", lambda found: found[1] or "", text)
    content: dict[str, Any] = yaml.load(filled, _Loader)
    return content


COMPOSE = load("compose.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "mongo"}


def flags_of(command: list[str], name: str) -> Configs:
    words = [str(word).replace("/config/", f"{DEPLOY}/compose/") for word in command]
    return parse(words, command=f"agentrl {name}", description="", shown=(), validate=require_trainable)


def commands(file: str) -> list[tuple[str, list[str]]]:
    services = load(file)["services"]
    given = [(name, service["command"]) for name, service in services.items() if service.get("command")]
    return [(name, command) for name, command in given if command[0] in {*COMMANDS, *WITH_FLAGS}]


@pytest.mark.parametrize(
    ("service", "command"),
    [*commands("compose.yml"), *commands("compose.cpu.yml")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_every_flag_is_a_real_one(service: str, command: list[str]) -> None:
    name, *words = command
    if name in WITH_FLAGS:
        configs = flags_of(words, name)
        assert configs[RunConfig].output == "/output/my_run"
        assert configs[TaskConfig].train_file == "/tasks/train.jsonl"
    else:
        {"dashboard": dashboard_parser, "tools": tools_parser}[name]().parse_args(words)


def test_what_the_processes_agree_on() -> None:
    engine = flags_of(SERVICES["engine"]["command"][1:], "serve")[EngineConfig]
    sampler = flags_of(SERVICES["sampler"]["command"][1:], "sample")
    assert (engine.engine, engine.host, engine.port) == ("sglang", "0.0.0.0", 30000)
    assert sampler[EngineConfig].engine == engine.engine
    gateway = flags_of(SERVICES["gateway"]["command"][1:], "gateway")[GatewayConfig]
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:8790:{gateway.gateway_port}"]
    file = Path(str(sampler[ToolConfig].mcp_servers_file).replace("/config/", f"{DEPLOY}/compose/"))
    assert [server.name for server in load_servers(file)] == ["units"]
    words = SERVICES["manager"]["command"]
    assert sampler[ToolConfig].mcp_manager_url == f"http://manager:{words[words.index('--port') + 1]}/mcpapi"
    nodes = Path(words[words.index("--mcp_servers_file") + 1].replace("/config/", f"{DEPLOY}/compose/"))
    assert [server.name for server in load_servers(nodes)] == ["calculator"]


def test_an_engine_is_reached_by_its_host_name() -> None:
    assert SERVICES["engine"]["hostname"] == "engine"
    assert set(SERVICES["engine"]["networks"]) & set(SERVICES["sampler"]["networks"]) >= {"models"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert "privileged" not in service
    assert ("cap_add" in service) == (name == "secrets")
    assert not [volume for volume in service.get("volumes", ()) if "docker.sock" in volume]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


def test_root_runs_only_where_files_are_given_away() -> None:
    roots = [name for name, service in SERVICES.items() if service.get("user", "").startswith("0")]
    assert roots == ["secrets"]
    assert SERVICES["secrets"]["network_mode"] == "none"


def test_tool_servers_reach_neither_the_database_nor_the_internet() -> None:
    assert SERVICES["tools"]["networks"] == SERVICES["manager"]["networks"] == ["tools"]
    members = {name for name, service in SERVICES.items() if "tools" in service.get("networks", ())}
    assert members == {"tools", "manager", "sampler"}
    internal = {name for name, network in COMPOSE["networks"].items() if network.get("internal")}
    assert internal == {"database", "models", "tools"}
    reached = {name for name, service in SERVICES.items() if "host" in service.get("networks", ())}
    assert reached == {"gateway", "dashboard"}


def test_each_role_sees_its_own_credential_alone() -> None:
    seen = {
        name: [volume.split(":")[0] for volume in service.get("volumes", ()) if volume.startswith("secrets_")]
        for name, service in SERVICES.items()
    }
    assert {name: volumes for name, volumes in seen.items() if len(volumes) > 1}.keys() == {"secrets"}
    assert (seen["sampler"], seen["trainer"], seen["tools"]) == (["secrets_sampler"], ["secrets_trainer"], [])
    assert (seen["dashboard"], seen["look"]) == (["secrets_annotator"], ["secrets_auditor"])
    for name, service in OURS.items():
        if seen[name] and name != "secrets":
            assert any(volume.endswith(":/secrets:ro") for volume in service["volumes"])


def test_no_file_holds_a_password() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in {".yml", ".yaml", ".env", ".sh", ".sbatch", ".tpl"}:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"mongodb(\+srv)?://[^\s\"'$@{}]+:[^\s\"'$@{}]+@", text), path
            assert not re.search(r"(?i)\b(password|token|api_key)\s*[:=]\s*[\"']?[a-z0-9]{6,}", text), path


def test_secrets_are_made_once_and_only_their_owner_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    script = runpy.run_path(str(DEPLOY / "compose/make_secrets.py"))
    assert script["main"]([str(tmp_path), "my_run"]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    first = {path: path.read_text() for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o400}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o700}
    key = first[tmp_path / "mongo/keyfile"]
    assert re.fullmatch(r"[0-9a-f]{6,1024}", key), "MongoDB reads base64 characters, 1024 at most"
    uri = first[tmp_path / "sampler/uri"]
    assert first[tmp_path / "admin/agentrl_sampler"] in uri
    connection = Connection(uri, "my_run", 1.0)
    assert connection.host == "mongo:27017"
    assert script["main"]([str(tmp_path), "other_run"]) == 0
    second = {path: path.read_text() for path in files}
    changed = {path.relative_to(tmp_path).as_posix() for path in files if first[path] != second[path]}
    assert changed == {f"{role}/uri" for role in ("sampler", "trainer", "engine", "auditor", "annotator")}
    assert second[tmp_path / "sampler/uri"] == uri.replace("authSource=my_run", "authSource=other_run")
    said = capsys.readouterr().out
    assert key not in said
    assert uri not in said
    assert script["main"]([]) == 2


@pytest.mark.parametrize("name", ["sampler", "trainer", "engine"])
def test_an_image_is_pinned_and_not_roots(name: str) -> None:
    text = (DEPLOY / f"docker/{name}.Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-", base), f"{base} has no exact tag"
    last = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["10001:10001"]
    assert 'ENTRYPOINT ["tini", "--", "agentrl"]' in last
    # docker compose up --wait fails for a service whose image has the health check NONE.
    assert "HEALTHCHECK NONE" not in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), path
            allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
            assert f"!{path.split('/')[0]}" in allowed, f"{path} is not in the build context"


def test_samplers_install_no_torch() -> None:
    text = (DEPLOY / "docker/sampler.Dockerfile").read_text(encoding="utf-8")
    assert "--requirement requirements/sampler.txt" in text
    assert "requirements/trainer.txt" not in text
    parts = [ROOT / f"requirements/{part}.txt" for part in ("base", "sampler", "trainer")]
    base, sampler, trainer = (part.read_text(encoding="utf-8") for part in parts)
    for name in ("torch", "accelerate", "transformers", "gguf"):
        assert re.search(rf"^{name}", trainer, re.MULTILINE), name
        assert not re.search(rf"^{name}", base + sampler, re.MULTILINE), name


def test_users_are_made_by_a_real_command() -> None:
    text = (DEPLOY / "compose/make_users.sh").read_text(encoding="utf-8")
    words = text[text.index("agentrl db ") :].split()[2:]
    arguments = db_parser().parse_args([word.replace('"$2"', "my_run") for word in words])
    assert (arguments.create, arguments.new_run, arguments.all_runs) == (True, True, False)


def test_the_example_of_variables_names_only_those_that_are_used() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yml").read_text(encoding="utf-8")))
    lines = (DEPLOY / "compose/example.env").read_text(encoding="utf-8").splitlines()
    assert {line.partition("=")[0] for line in lines if line and not line.startswith("#")} <= used


def test_the_judges_server_is_the_one_of_the_example() -> None:
    (service,) = load("sglang/docker-compose.yml")["services"].values()
    example = yaml.safe_load((ROOT / "assets/agent_config_example.yml").read_text(encoding="utf-8"))
    models = [*example["scorer_agent"]["models"], *example["browse_agent"]["models"]]
    local = {model["model"] for model in models if model["base_url"] == "http://localhost:38889/v1"}
    assert local == {"local-model"}
    assert "--served-model-name=local-model" in service["command"]
    assert "--port=38889" in service["command"]
    assert service["ports"] == ["127.0.0.1:38889:38889"]
