"""``agentrl doctor`` on a machine and on what a run needs: each fault is named with its fix."""

from __future__ import annotations

import json
import resource
import socket
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
from chat_models import KEEPS_ALL, RESULTS_BEHIND_CALLS, write_model

from agentrl.config.load import Configs, parse
from agentrl.config.schema import EngineConfig, ModelConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import StoreError
from agentrl.lab.database_server import ServerInfo
from agentrl.local import doctor, placement
from agentrl.local.doctor import (
    Check,
    State,
    check_agent_config,
    check_context,
    check_memory,
    check_mongod,
    check_open_files,
    check_processes,
    check_tools,
    model_checks,
    run_checks,
    server_checks,
)
from agentrl.local.placement import Gpus


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failed_check_sets_the_exit_code(
    state: State, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_checks(configs: object) -> list[Check]:
        return []

    check = Check("disk [x]", state, "found this", "do that")
    monkeypatch.setattr(doctor, "machine_checks", lambda configs: [check])
    monkeypatch.setattr(doctor, "_run_checks", no_checks)
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert all(part in out for part in (state, "disk [x]", "found this", "do that"))


def test_an_old_python_fails_with_a_hint() -> None:
    check = doctor.check_python((3, 10, 4))
    assert check.state == "fail"
    assert "3.11" in check.hint
    assert doctor.check_python().state == "ok"


def test_packages_are_held_against_the_tested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"good": "1.5", "old": "0.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    elsewhere = ["extra>=1; extra == 'dev'", "other>=1; sys_platform == 'win32'"]
    wanted = ["good>=1,<2", "old>=1", "gone>=3", *elsewhere]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(metadata, "version", version)
    checks = list(doctor.check_packages())
    states = {check.name: check.state for check in checks}
    assert states == {"package old": "warn", "package gone": "fail", "packages": "ok"}
    assert {check.hint for check in checks if check.hint} == {"pip install 'old>=1'", "pip install 'gone>=3'"}
    assert checks[-1].found.startswith("1 of 3")
    installed["agentrl"] = "0.0.8"
    first = next(iter(doctor.check_packages()))
    assert (first.name, first.state, first.found[:13]) == ("package agentrl", "fail", "0.0.8 of PyPI")


@pytest.mark.parametrize(
    ("problem", "landlock", "state", "found"),
    [
        (None, 0, "ok", "namespaces"),
        ("unshare: denied", 5, "ok", "limits and Landlock"),
        ("unshare: denied", 0, "warn", "programs read this user's files"),
    ],
)
def test_the_sandbox_says_how_programs_are_confined(
    problem: str | None, landlock: int, state: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "namespace_problem", lambda: problem)
    monkeypatch.setattr(doctor, "landlock_version", lambda: landlock)
    check = doctor.check_sandbox()
    assert check.state == state
    assert found in check.found


def test_a_taken_port_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor.check_port(EngineConfig(port=taken.getsockname()[1]))
    assert check.state == "fail"
    assert "--port 0" in check.hint
    assert doctor.check_port(EngineConfig()).state == "ok"


@pytest.mark.parametrize(("free", "state"), [(2**40, "ok"), (5 * 2**30, "warn"), (2**20, "fail")])
def test_disk_space_is_told(free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    check = doctor.check_disk(str(tmp_path / "not" / "yet"))
    assert check.state == state
    assert bool(check.hint) is (state != "ok")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_with_a_venv_is_needed_by_its_flag_alone(
    name: Literal["sglang", "vllm"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AGENTRL_{name.upper()}_VENV", str(tmp_path))
    assert doctor.check_engine_venv(name, EngineConfig()).state == "ok"
    failed = doctor.check_engine_venv(name, EngineConfig(engine=name))
    assert failed.state == "fail"
    assert f"scripts/setup_{name}.sh" in failed.hint


def test_a_torch_that_does_not_import_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libtorch is broken')")
    check = doctor.check_torch()
    assert check.state == "fail"
    assert "libtorch is broken" in check.found


@pytest.mark.parametrize(
    ("answer", "gpu", "state"),
    [("2.13.0+cpu|cpu|-", False, "ok"), ("2.13.0+cpu|cpu|-", True, "warn"), ("2.13.0|13.0|H200", True, "ok")],
)
def test_torch_is_held_against_the_gpu(
    answer: str, gpu: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print({answer!r})")
    monkeypatch.setattr(doctor, "has_gpu", lambda: gpu)
    assert doctor.check_torch().state == state


def parsed(*words: str) -> Configs:
    return parse(words, command="agentrl doctor", description="", shown=())


def test_the_gpus_are_divided_as_launch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = parsed("--train_gpus", "0-1")
    eight = Gpus(names=tuple("01234567"), kind="NVIDIA H100", memory_gib=(79.1,) * 8)
    monkeypatch.setattr(placement, "find_gpus", lambda environment: eight)
    check = doctor.check_gpus(configs)
    assert (check.state, check.hint) == ("ok", "")
    assert "8 GPUs (NVIDIA H100, 79.1 GiB): trainer on 0-1; 6 engines on 2, 3" in check.found
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    assert doctor.check_gpus(configs).state == "fail"
    assert doctor.check_gpus(parsed()).found == "none: all processes run on the CPU"


def test_gpus_that_torch_does_not_see_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    monkeypatch.setattr(placement, "_probe", lambda environment: (False, []))
    check = doctor.check_gpus(parsed())
    assert check.state == "warn"
    assert "torch sees no GPU" in check.found


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (check_open_files(512, 4096), "fail"),
        (check_open_files(1024, 65536), "warn"),
        (check_open_files(65536, 65536), "ok"),
        (check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok"),
        (check_processes(100), "warn"),
        (check_processes(resource.RLIM_INFINITY), "ok"),
        (check_memory(2**30), "fail"),
        (check_memory(4 * 2**30), "warn"),
        (check_memory(32 * 2**30), "ok"),
    ],
)
def test_limits(check: Check, state: str) -> None:
    assert check.state == state
    assert bool(check.hint) is (state != "ok")


TODAY = date(2026, 11, 22)


async def test_the_agent_config_is_optional_but_must_be_right(tmp_path: Path) -> None:
    path = tmp_path / "agent.yml"
    assert (await check_agent_config(SamplingConfig(agent_config_path=str(path)))).state == "warn"
    path.write_text("scorer_agent: {}")
    assert (await check_agent_config(SamplingConfig(agent_config_path=str(path)))).state == "fail"


async def test_a_stopped_server_is_one_row(tmp_path: Path) -> None:
    (only,) = await run_checks(RunConfig(mongo_dir=str(tmp_path / "mongo")), 10)
    assert (only.name, only.state) == ("database", "warn")


async def test_tool_servers_that_do_not_start_fail(tmp_path: Path) -> None:
    file = tmp_path / "servers.yml"
    words = f"command: {sys.executable}, args: ['-c', 'raise SystemExit(3)']"
    file.write_text(f"servers: {{broken: {{{words}}}}}")
    assert (await check_tools(ToolConfig(mcp_servers_file=str(file)))).state == "fail"
    assert (await check_tools(ToolConfig())).state == "ok"


@pytest.mark.parametrize(("uri", "state"), [(None, "fail"), ("mongodb://h", "ok")])
def test_the_embedded_server_needs_its_binary(
    uri: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise StoreError("no mongod is installed", hint="pip install it")

    monkeypatch.setattr("agentrl.local.mongod.choose_mongod", gone)
    assert check_mongod(RunConfig(db_connection_string=uri)).state == state


def _checks(**changes: Any) -> dict[str, Check]:
    fields: dict[str, Any] = {
        "host": "h:27017", "version": (7, 0, 14), "replica_set": "rs", "members": 3,
        "latency_seconds": 0.001, "clock_offset_seconds": 0.02, "user": "agentrl_auditor@admin",
        "roles": ["agentrl_auditor@admin"], "may_read": True, "may_write": False, "free_bytes": 2**40,
    }  # fmt: skip
    return {check.name: check for check in server_checks(ServerInfo(**(fields | changes)), TODAY)}


def test_a_good_server_passes() -> None:
    checks = _checks()
    assert {check.state for check in checks.values()} == {"ok"}
    assert "replica set rs of 3, supported until 2027-08-31" in checks["database"].found
    assert "enough for audit" in checks["database rights"].found


@pytest.mark.parametrize(
    ("changes", "name", "state", "part"),
    [
        ({"version": (6, 0, 5)}, "database", "warn", "support of 6.0 ended on 2025-07-31"),
        ({"version": (9, 1)}, "database", "warn", "knows 6, 7 and 8"),
        ({"latency_seconds": 0.2}, "database latency", "warn", "200.0 ms"),
        ({"clock_offset_seconds": -3.0}, "clock", "warn", "3.00 s ahead of"),
        ({"clock_offset_seconds": 60.0}, "clock", "warn", "60.00 s behind"),
        ({"user": None}, "database rights", "warn", "no login"),
        ({"may_read": False}, "database rights", "fail", "may not read"),
        ({"free_bytes": 2**28}, "database disk", "fail", "0.2 GiB"),
    ],
)
def test_each_fault_is_named_with_its_fix(changes: dict[str, Any], name: str, state: str, part: str) -> None:
    check = _checks(**changes)[name]
    assert check.state == state
    assert part in check.found
    assert check.hint


def model_folder(folder: Path, template: str | None = KEEPS_ALL, vocab_size: int = 1000) -> Path:
    """Write everything that the doctor looks for, and no real weights."""
    write_model(folder, template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    return folder


def failed(folder: Path) -> dict[str, Check]:
    checks = model_checks(ModelConfig(model_name_or_path=str(folder)))
    return {check.name: check for check in checks if check.state == "fail"}


def chat_format_of(folder: Path, template: str) -> Check:
    """The check of a chat format, which is the last one."""
    (*_, proven) = model_checks(ModelConfig(model_name_or_path=str(model_folder(folder, template))))
    return proven


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    checks = list(model_checks(ModelConfig(model_name_or_path=str(folder))))
    assert [check.state for check in checks] == ["ok"] * 4


def test_what_a_model_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=None, vocab_size=1)
    (folder / "model.safetensors").unlink()
    checks = failed(folder)
    assert set(checks) == {"model weights", "tokenizer", "chat format"}
    assert "ids, and the model embeds 1" in checks["tokenizer"].found
    assert "--chat_template" in checks["chat format"].hint


def test_a_missing_shard_and_a_broken_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{")
    checks = failed(folder)
    assert checks["model weights"].found == "missing: model-2.safetensors"
    assert "is not a tokenizer" in checks["tokenizer"].found


def test_the_chat_format_is_proven(tmp_path: Path) -> None:
    proven = chat_format_of(tmp_path / "all", KEEPS_ALL)
    assert (proven.name, proven.state) == ("chat format", "ok")
    assert "earlier thoughts stay in the context" in proven.found
    silent = failed(model_folder(tmp_path / "silent", template="{{ messages[0].content }}"))
    assert "loses the user's text" in silent["chat format"].found
    toolless = chat_format_of(tmp_path / "toolless", RESULTS_BEHIND_CALLS)
    assert toolless.state == "warn"
    assert "--chat_template" in toolless.hint


def test_a_template_that_ignores_tools_is_named(tmp_path: Path) -> None:
    proven = chat_format_of(tmp_path / "deaf", KEEPS_ALL.replace("{%- if tools %}", "{%- if false %}"))
    assert proven.state == "warn"
    assert "does not name the tools" in proven.found
    assert "--chat_template FILE" in proven.hint


def test_no_folder_at_all(tmp_path: Path) -> None:
    (check,) = model_checks(ModelConfig(model_name_or_path=str(tmp_path / "none")))
    assert check.state == "fail"
    (skipped,) = model_checks(ModelConfig())
    assert skipped.state == "ok"


def test_limits_that_nobody_set_are_no_warning() -> None:
    by_default = check_context(parsed("--max_model_len", "8192"))
    assert (by_default.state, by_default.found) == ("ok", "its 8192 tokens limit prompts and outputs")
    given = check_context(parsed("--max_model_len", "8192", "--max_new_tokens", "8000"))
    assert given.state == "warn"
