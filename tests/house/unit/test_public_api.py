"""``import agentrl``: what it offers, what it does not import, and its types for a user's own file."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parents[3]

USER_FILE = '''
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from agentrl.config.schema import RunConfig

from agentrl import (
    LossSettings, Message, Outcome, ParsedMessage, Rollout, ScoredGroup, ScoreResult, ScorerContext,
    StopReason, Store, TokenBatch, TokenLosses, ToolCall, Turn, advantage, agent, context_manager,
    group_filter, loss, scorer, tool, tool_call_parser, tracker,
)


@agent("own_agent")
async def own_agent(rollout: Rollout) -> Outcome:
    turn: Turn = await rollout.generate(temperature=0.5)
    await rollout.call_tools(turn)
    return Outcome(StopReason.ANSWERED, turn.answer)


@context_manager("own_context")
async def own_context(rollout: Rollout) -> list[Message] | None:
    return rollout.messages[:1]


@scorer("own_scorer")
async def own_scorer(context: ScorerContext) -> ScoreResult:
    return ScoreResult(float(context.final_answer == context.answer), {"accepted": context.accepted})


@scorer("plain_scorer")
async def plain_scorer(context: ScorerContext) -> float:
    return 1.0


@advantage("own_advantage", needs_others=False)
def own_advantage(rewards: Sequence[float]) -> list[float]:
    return [reward - 0.5 for reward in rewards]


@group_filter("own_filter")
def own_filter(group: ScoredGroup) -> dict[str, str]:
    return {item.id: "too long" for item in group.trajectories if item.turns > 9}


@loss("own_loss", token_level_loss=True)
def own_loss(batch: TokenBatch, settings: LossSettings, *, scale: float = 1.0) -> TokenLosses:
    return TokenLosses(losses=-scale * torch.exp(batch.log_ratio) * batch.advantages)


@tool("own_function")
async def own_function(a: int) -> int:
    """Return a + 1."""
    return a + 1


@tool("own_class")
class OwnClass:
    def __init__(self) -> None:
        self.count = 0

    def more(self, by: int = 1) -> int:
        """Count."""
        self.count += by
        return self.count


@tool_call_parser("own_parser")
class OwnParser:
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedMessage:
        return ParsedMessage(text, (ToolCall("more", {"by": 2}),))


@tracker("own_tracker")
class OwnTracker:
    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        self.path = output / run.run_name

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        print(step, metrics, OwnClass().more(), own_advantage([1.0]), file=self.path.open("a"))

    def close(self) -> None:
        return None


def rewards(run: str) -> list[float | None]:
    with Store.open(run) as store:
        return [trajectory.score for trajectory in store.trajectories(step=3)]
'''


BLOCK = next(node for node in ast.parse(inspect.getsource(agentrl)).body if isinstance(node, ast.If)).body
"""What type checkers see."""


def test_every_public_name_is_imported_from_where_its_type_is() -> None:
    typed = {
        alias.name: module.removeprefix("agentrl.")
        for node in BLOCK
        if isinstance(node, ast.ImportFrom) and (module := str(node.module)).startswith("agentrl.")
        for alias in node.names
    }
    declared = dict.fromkeys(("StartedRun", "run"), "local.started_run") | {"Store": "screens.notebook"}
    assert typed | declared == agentrl._MODULES
    assert sorted(agentrl._MODULES) == sorted(agentrl.__all__)
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is getattr(sys.modules[f"agentrl.{agentrl._MODULES[name]}"], name)
    assert set(agentrl.__all__) <= set(dir(agentrl))


def test_the_store_of_type_checkers_has_the_parameters_of_the_one_that_opens_a_run() -> None:
    declared = {node.name: node.body for node in BLOCK if isinstance(node, ast.ClassDef)}
    for kind in (agentrl.Store, agentrl.StartedRun):
        public = {name for name in vars(kind) if not name.startswith("_")}
        methods = [node for node in declared.pop(kind.__name__) if isinstance(node, ast.FunctionDef)]
        assert {node.name for node in methods if not node.name.startswith("_")} == public
        if kind is agentrl.Store:  # the types of the other are those of packages that the core has not
            source = ast.parse(inspect.getsource(sys.modules["agentrl.screens.notebook"]))
            (real,) = (
                node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Store"
            )
            own = {node.name: ast.dump(node.args) for node in real.body if isinstance(node, ast.FunctionDef)}
            assert [
                node.name for node in methods if node.name in public and ast.dump(node.args) != own[node.name]
            ] == []
    assert declared == {}


def test_examples_import_public_names_from_the_package() -> None:
    deep = [
        f"{file.name}: {alias.name}"
        for file in (ROOT / "assets" / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentrl.")
        for alias in node.names
        if alias.name in agentrl.__all__
    ]
    assert deep == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Rolout'"):
        agentrl.Rolout  # noqa: B018


def test_the_import_is_light_and_what_samplers_use_needs_no_torch() -> None:
    code = """
import sys
before = set(sys.modules)
import agentrl
print(sorted(name for name in set(sys.modules) - before if name.startswith("agentrl")))
heavy = {"torch", "transformers", "pymongo", "pydantic", "numpy", "httpx2", "mcp"}
print(sorted(heavy & set(sys.modules)))
agentrl.agent, agentrl.scorer, agentrl.advantage, agentrl.tool, agentrl.context_manager, agentrl.loss
agentrl.Rollout, agentrl.Outcome, agentrl.group_filter, agentrl.tool_call_parser, agentrl.Store
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['agentrl', 'agentrl.base', 'agentrl.base.moved']", "[]", "False"]


def test_a_users_file_that_uses_every_decorator_and_the_examples_pass_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(USER_FILE)
    (tmp_path / "wrong.py").write_text("from agentrl import Rolout\n")
    # the cache of the project's own check, which knows all that these files import
    check = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={ROOT / '.mypy_cache'}"]
    examples = sorted(map(str, (ROOT / "assets" / "examples").glob("*.py")))
    done = subprocess.run(
        [*check, "own.py", "wrong.py", *examples], cwd=tmp_path, capture_output=True, text=True
    )
    (problem, summary) = done.stdout.splitlines()
    assert problem.startswith("wrong.py")
    assert 'no attribute "Rolout"' in problem
    assert summary == f"Found 1 error in 1 file (checked {2 + len(examples)} source files)"
