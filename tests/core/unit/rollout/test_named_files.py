"""Files that flags name: a missing or a wrong one is refused before the run's database is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from parsed_flags import parsed
from tiny_policy import write_tiny_policy

from agentrl.columns import scores
from agentrl.columns.teacher import read_prompt
from agentrl.config.load import Configs
from agentrl.config.schema import TeacherConfig
from agentrl.distributed.mesh import World
from agentrl.errors import AgentRLError, ConfigError, ModelError
from agentrl.evaluation import evaluate
from agentrl.rollout import setup
from agentrl.train.build import require_buildable

SAMPLED = ("prices", "chat_template", "agent_config_path", "agent_cfg_path", "mcp_servers_file",
           "tool_config_path")  # fmt: skip
CASES = [
    *(("sample", flag) for flag in (*SAMPLED, "judge_gold", "train_file")),
    *(("eval", flag) for flag in (*SAMPLED, "eval_file")),
    *(("score", flag) for flag in ("prices", "judge_gold")),
]
TASK = '{"id": "a", "query": "1 + 1?", "answer": "2"}\n'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("model"))


async def score(configs: Configs) -> object:
    return await scores.score(configs, "train", until_empty=True)


@pytest.mark.parametrize("content", [None, b"\x00\xff\xfe{bad: ["])
@pytest.mark.parametrize(("command", "flag"), CASES)
async def test_a_file_that_cannot_be_read_makes_no_run(
    command: str, flag: str, content: bytes | None, base: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    commands: dict[str, Callable[[Configs], Awaitable[object]]] = {
        "sample": setup.sample, "eval": evaluate.evaluate, "score": score,
    }  # fmt: skip
    opening = AsyncMock(side_effect=AssertionError("the database is opened"))
    for module, name in ((setup, "open_store"), (evaluate, "open_store"), (scores, "open_existing")):
        monkeypatch.setattr(module, name, opening)
    tasks, wrong = tmp_path / "tasks.jsonl", tmp_path / "wrong"
    tasks.write_text(TASK, encoding="utf-8")
    if content is not None:
        wrong.write_bytes(content)
    flags = {"model_name_or_path": base, "train_file": tasks, "eval_file": tasks, flag: wrong}
    configs = parsed(*(word for name, value in flags.items() for word in (f"--{name}", str(value))))
    with pytest.raises(AgentRLError, match=str(wrong)) as refused:
        await commands[command](configs)
    assert refused.value.exit_code == 2


async def test_tasks_of_a_judge_without_its_file_make_no_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        '{"id": "a", "query": "1 + 1?", "answer": "2", "scorer": "agentcpm"}\n', encoding="utf-8"
    )
    configs = parsed("--model_name_or_path", str(base), "--train_file", str(tasks), "--eval_file", str(tasks))
    opening = AsyncMock(side_effect=AssertionError("the database is opened"))
    for module, command in ((setup, setup.sample), (evaluate, evaluate.evaluate)):
        monkeypatch.setattr(module, "run_exists", AsyncMock(return_value=False))
        monkeypatch.setattr(module, "open_store", opening)
        with pytest.raises(ConfigError, match=r"agent_config\.yml cannot be read"):
            await command(configs)


def test_a_limit_of_money_needs_prices() -> None:
    with pytest.raises(ConfigError, match="nothing has a price"):
        setup.read_limits(parsed("--max_cost", "5"))


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_trainer_and_a_teacher_read_their_texts_at_once(
    base: Path, tmp_path: Path, content: bytes | None
) -> None:
    wrong = tmp_path / "wrong"
    if content is not None:
        wrong.write_bytes(content)
    flags = ("--model_name_or_path", str(base), "--chat_template", str(wrong))
    with pytest.raises(ModelError, match=f"{wrong} cannot be read"):
        require_buildable(parsed(*flags), World(torch.device("cpu")))
    with pytest.raises(ConfigError, match=f"{wrong} cannot be read"):
        read_prompt(TeacherConfig(teacher_prompt=str(wrong)))
    with pytest.raises(ConfigError, match="is not a folder"):
        read_prompt(TeacherConfig(teacher_tokenizer=str(wrong)))
