"""``agentrl.run``: what it writes for the processes, and what it refuses before it starts any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import AgentRLError, ConfigError
from agentrl.local import started_run
from agentrl.local.started_run import Code, Estimate

MAIN = """
from __future__ import annotations
import json
import math as maths
import threading
import operator
from pathlib import Path
from agentrl.local.started_run import Code
from maker import made
from typing import Annotated, Literal

LIMIT, OPERATIONS = 2.5, {"-": operator.sub}
HANDLE = threading.Lock()

class Near:
    def __init__(self, by: float) -> None:
        self.by = by

def distance(given: str, right: str) -> float:
    return near(0.5).by + maths.fabs(OPERATIONS["-"](float(given), float(right)))

def near(by: float) -> Near:
    return Near(by) if by < LIMIT else distance("1", "2")

def own(model_answer: str, ground_truth: dict) -> float:
    return distance(model_answer, ground_truth["answer"])

def leaks(model_answer: str, ground_truth: dict) -> float:
    return float(HANDLE.locked())

def base64(text: Annotated[Literal["a", "b"], "one of two"]) -> str:
    return text.upper()

class Cart:
    def put(self, size: Literal["s", "l"]) -> str:
        return size

class Judge:
    def __init__(self, worth: float) -> None:
        self.worth = worth

    def score(self, given: str, right: str) -> float:
        return self.worth * (given == right)

code = Code(Path("code"), "agentrl_x")
print(code.path_of(own), code.path_of("exact"), code.path_of(json.dumps), code.path_of(lambda a, b: LIMIT))
print(code.path_of(base64), code.path_of(Judge(0.5).score), code.path_of(made(3)), code.path_of(Cart))
code.write()
try:
    code.path_of(made(4))
except Exception as error:
    print(error.message)
try:
    Code(Path("code"), "agentrl_y").path_of(leaks)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""


def test_functions_of_a_notebook_become_a_module_with_what_they_use(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(MAIN)
    maker = (
        "def made(by):\n    def times(given, right):\n        return by * float(given)\n    return times\n"
    )
    (tmp_path / "maker.py").write_text(maker)
    ran = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    named, others, twice, refused = ran.stdout.splitlines()
    assert named == "agentrl_x:own exact json:dumps agentrl_x:function_1"
    assert others == "agentrl_x:base64 agentrl_x:score agentrl_x:times agentrl_x:Cart"
    assert twice == "two functions are called times"
    assert refused.startswith(
        "ConfigError leaks uses what other processes cannot have: TypeError: cannot pickle"
    )
    used = (
        "import agentrl_x as x, pickle; again = pickle.loads(pickle.dumps(x.own));"
        " print(again('3', {'answer': '1'}), x.function_1(1, 2), x.own.__module__, x.base64('a'),"
        " x.score('1', '1'), x.times('2', ''), x.base64.__annotations__['text'],"
        " x.Cart.put.__annotations__['size'])"
    )
    again = subprocess.run(
        [sys.executable, "-c", used], cwd=tmp_path / "code", capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    types = "typing.Annotated[typing.Literal['a', 'b'], 'one of two'] typing.Literal['s', 'l']"
    assert again.stdout == f"2.5 2.5 agentrl_x A 0.5 6.0 {types}\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines that would have been started, in an empty folder."""
    commands: list[list[str]] = []

    class Process:
        returncode = 2

        def poll(self) -> int:
            return 2

    def start(
        words: list[str], *, log: Path, env: dict[str, str], pass_fds: tuple[int, ...], cwd: Path
    ) -> Process:
        assert (len(pass_fds), cwd) == (1, tmp_path)
        commands.append([*words, env["PYTHONPATH"].split(os.pathsep)[0]])
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("agentrl launch: error: the tokenizer is torn\n")
        return Process()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(started_run, "start_child", start)
    monkeypatch.setattr(started_run, "demo_model", lambda: tmp_path / "demo")
    return commands


def of(words: list[str], flag: str) -> str:
    return words[words.index(f"--{flag}") + 1]


def test_rows_become_a_task_file_and_keywords_flags(started: list[list[str]], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "2 + 2?", "answer": "4"},
        {"id": "b", "query": "?", "scorer": "math"},
    ]
    run = agentrl.run(
        tasks=rows, scorer="exact", steps=3, name="a-b", tools=["search", "mine:tool"], lora_rank=4
    )
    (words,) = started
    assert words[1:5] == ["-m", "agentrl", "launch", "train"]
    assert [of(words, flag) for flag in ("run_name", "max_steps", "recipe", "lora_rank")] == [
        "a-b",
        "3",
        "original-grpo",
        "4",
    ]
    assert of(words, "model_name_or_path") == str(tmp_path / "demo")
    assert of(words, "max_new_tokens") == "64"  # for the demonstration's model
    assert of(words, "tools") == "mine:tool"
    assert words[-1] == str(tmp_path / ".agentrl/started/a-b")
    lines = [json.loads(line) for line in Path(of(words, "train_file")).read_text().splitlines()]
    assert lines == [
        {"id": "task-00000", "scorer": "exact", "tools": ["search", "tool"], **rows[0]},
        {"scorer": "math", "tools": ["search", "tool"], **rows[1]},
    ]
    assert not run.is_running
    with pytest.raises(AgentRLError, match="exit code 2:\n  agentrl launch: error: the tokenizer is torn"):
        run.wait()
    with pytest.raises(AgentRLError, match="the tokenizer is torn"):
        run.steps()
    run.stop()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["query", "answer"]}, "row 0 of tasks is text: 'query'\n  → .* table.to_dict"),
        ({"tasks": [{"query": "?", "answer": float("nan")}]}, "row 0 of tasks is not JSON"),
        ({"tasks": [{"query": "?"}, {"query": Path()}]}, "row 1 of tasks is not JSON: .* PosixPath"),
        ({"tasks": "file.jsonl", "scorer": "exact"}, "scorer would be those of its rows"),
        ({"tasks": "file.jsonl", "tools": ["search"]}, "tools would be those of its rows"),
        ({"lerning_rate": 1e-3}, "lerning_rate"),
        ({"name": "not/a/name"}, "--run_name is 'not/a/name'"),
        ({"steps": 0}, "max_steps"),
        ({"recipe": "grpu"}, "--recipe is grpu; choose one of"),
        ({"run_name": "a"}, "run_name is given as a flag\n  → give it as name="),
    ],
)
def test_what_cannot_start_is_refused_before_it_starts(
    started: list[list[str]], given: dict[str, Any], problem: str
) -> None:
    rows = [{"query": "2 + 2?", "answer": "4"}]
    with pytest.raises(ConfigError, match=problem):
        agentrl.run(**{"tasks": rows, "steps": 1, **given})
    assert started == []


def test_functions_that_a_task_file_names_are_given_beside_it(started: list[list[str]]) -> None:
    agentrl.run(tasks="file.jsonl", steps=1, tools=["mine:tool", json.dumps])
    (words,) = started
    assert (of(words, "train_file"), of(words, "tools")) == ("file.jsonl", "mine:tool,json:dumps")


def test_lists_mappings_and_own_paths_reach_the_processes(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    start = started_run.start_child

    def remember(words: list[str], *, env: dict[str, str], **more: Any) -> Any:
        paths.extend(env["PYTHONPATH"].split(os.pathsep))
        return start(words, env=env, **more)

    monkeypatch.setattr(started_run, "start_child", remember)
    (tmp_path / "helpers").mkdir()
    monkeypatch.syspath_prepend("helpers")
    agentrl.run(
        tasks=[{"query": "2 + 2?", "answer": "4"}], steps=1, lora_target_modules=["q_proj", "v_proj"],
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    (words,) = started
    assert of(words, "lora_target_modules") == "q_proj,v_proj"
    assert of(words, "chat_template_kwargs") == '{"enable_thinking": false}'
    assert paths[1] == str(tmp_path / "helpers")
    assert not [path for path in paths if path.startswith(sys.prefix)]


def test_an_estimate_reads_as_the_evaluation_prints_it() -> None:
    assert str(Estimate(0.8125, 0.75, 0.871)) == "0.812 [0.750, 0.871]"


def test_a_function_of_a_file_is_named_by_its_module(tmp_path: Path) -> None:
    given: Callable[..., Any] = json.dumps
    code = Code(tmp_path, "agentrl_z")
    assert code.path_of(given) == "json:dumps"
    code.write()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_says_that_the_first_one_still_trains(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": "2 + 2?", "answer": "4"}]
    first = agentrl.run(tasks=rows, steps=1, name="first")
    monkeypatch.setattr(type(first), "is_running", property(lambda run: run.name == "first"))
    monkeypatch.setattr(started_run, "_STARTED", [first])
    with pytest.warns(UserWarning, match="run first still trains beside this one"):
        agentrl.run(tasks=rows, steps=1, name="second")
    assert len(started) == 2


@pytest.mark.parametrize(
    ("last", "shown"),
    [((0, None), "first: waiting for the first step"), ((1, 0.5), "first, reward 0.500"),
     ((3, 0.5), "first: it had more steps than the 2 asked for, reward 0.500")],
)  # fmt: skip
def test_the_bar_counts_the_steps_that_are_asked_for_or_were_there(
    last: tuple[int, float | None],
    shown: str,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = agentrl.run(tasks=[{"query": "2 + 2?", "answer": "4"}], steps=2, name="first")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(type(run), "is_running", False)
    monkeypatch.setattr(type(run), "_has_failed", False)
    monkeypatch.setattr(run, "_last_step", lambda: last)
    run.wait()
    said = capsys.readouterr().out
    assert said.startswith(shown)
    assert f"{last[0]}/{max(2, last[0])} " in said
    assert len(started) == 1


def test_the_files_of_a_run_that_trains_are_not_written_again(
    started: list[list[str]], tmp_path: Path
) -> None:
    rows = [{"query": "2 + 2?", "answer": "4"}]
    agentrl.run(tasks=rows, steps=1, name="held")
    tasks = tmp_path / ".agentrl/started/held/tasks.jsonl"
    before = tasks.read_bytes()
    with started_run._held(tasks.parent), pytest.raises(ConfigError, match="run held trains already"):
        agentrl.run(tasks=[{"query": "other", "answer": "1"}], steps=1, name="held")
    assert (tasks.read_bytes(), len(started)) == (before, 1)
    agentrl.run(tasks=rows, steps=2, name="held")
    assert len(started) == 2
