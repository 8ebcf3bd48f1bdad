"""``agentrl doctor`` on what a run needs: database, model, agent configuration, tool servers."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from chat_models import KEEPS_ALL, RESULTS_BEHIND_CALLS, write_model

from agentrl.config.schema import ModelConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import StoreError
from agentrl.lab.database_server import ServerInfo
from agentrl.local.doctor import (
    Check,
    check_agent_config,
    check_mongod,
    check_tools,
    model_checks,
    run_checks,
    server_checks,
)

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
