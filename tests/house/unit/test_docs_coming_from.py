"""docs/coming_from.md names what the guides of other systems tell to write, and flags that exist."""

from __future__ import annotations

import dataclasses
import re

import pytest
from docs_pages import ROOT

from agentrl.config.load import parse
from agentrl.config.schema import GROUPS

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
FLAGS = {item.name for group in GROUPS for item in dataclasses.fields(group)}
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
OURS = [row.rstrip(" |").split(" | ")[-1] for row in ROWS]
NAMED = {
    "The original AgentRL": (
        "minirl_example.sh", "grpo_example.sh", "eval_example.sh", "import models, sampler",
        "tests/mongo_connection_test.py", "tests/dtensor_bench.py", "src/databases/deploy/mongo",
        "src/databases/deploy/sglang", "agent_config.yml", "--mcp_manager_url", "register_scorer()",
        "AsyncSampler", "logs/as/RUN_train_RANK.log", "output/RUN/", "src/configs.py", "evaluate_record()",
        "MCP-Docker", "pip install -r requirements.txt --no-build-isolation",
        "assets/agent_config_example.yml",
        "assets/fsdp2_dst.yml", "src/rollout/mcp/scorer.py", "_rewarding.py", "Mongo Compass", "`/v1`",
    ),
    "verl": (
        "data.return_raw_chat", "`rollout.mode` `async`", "agent_name", "single_turn_agent", "tool_agent",
        "rollout.trace.backend", "rollout.multi_turn.tool_config_path", "rollout.name",
        "examples/data_preprocess/gsm8k_tool_agent_loop.py", "examples/grpo_trainer/",
        "examples/sglang_multiturn/",
        "mlflow ui --backend-store-uri sqlite:////tmp/mlruns.db", "Failed to decode tool call", "AgentLoop",
        "AsyncLLMServerManager", "ChatModel", "recipe/langgraph_agent", "recipe/stream_mode",
    ),
    "ChatLearn": (
        "runtime_args.task_type", "runtime_args.rollout_backend", "use_rollout_manager",
        "policy.is_sync_mode", "@register", "build_graph", "`run`", "agent_cfg_path", "cfg.xxx",
        "math_lighteval_agent.py", "prompt_dataset", "math_eval.yaml", "chatlearn:torch",
        "train_fsdp_sglang_qwen3_8b_grpo_agentic_math_task.sh",
    ),
}  # fmt: skip
"""What the guides of each system name, beside its flags."""


@pytest.mark.parametrize("system", NAMED)
def test_what_a_guide_names_is_on_the_page(system: str) -> None:
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    assert [name for name in NAMED[system] if name not in section] == []


def test_the_scripts_that_replace_others_exist() -> None:
    scripts = set(re.findall(r"scripts/\w+\.sh", PAGE))
    assert len(scripts) >= 4
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_our_flags_exist() -> None:
    named = {name for cell in OURS for name in re.findall(r"--([A-Za-z_0-9]+)", cell)}
    assert len(named) > 80
    assert named - FLAGS == set()


@pytest.mark.parametrize("given", sorted({
    code for cell in OURS for code in re.findall(r"`(--\w+ [^`]+)`", cell) if "…" not in code
}))  # fmt: skip
def test_our_values_are_accepted(given: str) -> None:
    values = given.replace("LOW:HIGH", "0.5:2").replace("LIMIT", "0.1").replace("'", "")
    flags = re.findall(r"(--\w+) (\{.*\}|\S+)", values)
    assert flags
    words = [word for pair in flags for word in pair]
    parse(["--num_train_epochs", "2", *words], command="agentrl", description="", shown=())
