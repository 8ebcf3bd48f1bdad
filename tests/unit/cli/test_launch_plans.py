"""Which processes ``agentrl launch`` starts, and by which commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.cli import launch
from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError
from agentrl.launch import before_start, placement, processes
from agentrl.launch.gpus import Gpus
from agentrl.launch.memory import MemoryCheck, StepTooLargeError
from agentrl.launch.processes import RunPlan


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags that need neither the demo's model nor a database."""
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "1+1?", "answer": "2", "tools": []}))
    for name in ("MODEL_PATH", "ROLES", "SAMPLERS", "ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    return ["--run_name", "r", "--eval_file", str(file), "--db_connection_string", "mongodb://127.0.0.1:9"]


def plan_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> RunPlan:
    plans: list[RunPlan] = []

    def run(plan: RunPlan) -> int:
        plans.append(plan)
        return 0

    async def is_joinable(*_: object) -> None:
        """The tests here have neither a database nor a model."""

    monkeypatch.setattr(processes, "run_processes", run)
    monkeypatch.setattr(before_start, "require_usable", lambda *_: {})
    monkeypatch.setattr(before_start, "require_joinable", is_joinable)
    assert launch.main(list(words)) == 0
    return plans[0]


def test_an_evaluation_uses_the_engine_of_the_script_or_one_of_its_own(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(monkeypatch, "eval", *given)
    assert (plan.engines, plan.samplers) == (1, 0)
    assert plan.flags[:2] == ["--eval_engine", "shared"]
    own = plan_of(monkeypatch, "eval", *given, "--eval_model", "m")
    assert own.engines == 0
    assert "shared" not in own.flags


def test_versions_are_evaluated_beside_training_on_request(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plan_of(monkeypatch, "train", *given).follows
    plan = plan_of(monkeypatch, "train", *given, "--eval_steps", "5")
    assert plan.follows
    assert (plan.engines, plan.samplers) == (1, 2)


def test_a_teacher_is_started_with_the_recipe_that_distils(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_file = given[given.index("--eval_file") + 1]
    words = [*given, "--train_file", task_file, "--recipe", "opd"]
    assert not plan_of(monkeypatch, "train", *words).teaches
    assert "groups wait for teacher, and no --teacher is given" in capsys.readouterr().out
    plan = plan_of(monkeypatch, "train", *words, "--teacher", "http://127.0.0.1:9")
    assert plan.teaches
    assert "teacher" in plan.flags[plan.flags.index("--columns") + 1]
    monkeypatch.setenv("ROLES", "serve train")
    assert not plan_of(monkeypatch, "train", *words, "--teacher", "http://127.0.0.1:9").teaches


def eight_gpus(environment: Mapping[str, str]) -> Gpus:
    return Gpus(names=tuple("01234567"), kind="NVIDIA H100", memory_gib=(79.0,) * 8)


@pytest.fixture
def on_gpus(given: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same flags on a machine with eight GPUs."""
    monkeypatch.delenv("ACCELERATE_CONFIG", raising=False)
    monkeypatch.setattr(placement, "find_gpus", eight_gpus)
    return [*given, "--check_memory", "false"]


def test_a_trainer_has_a_process_for_each_of_its_gpus(
    on_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(monkeypatch, "train", *on_gpus)
    assert plan.engines == 4
    assert list(plan.main or ())[1:7] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", "-m",
    ]  # fmt: skip
    assert list(plan.main or ())[7] == "agentrl.train"
    single = plan_of(monkeypatch, "train", *on_gpus, "--train_gpus", "7")
    assert list(single.main or ())[1:4] == ["-m", "agentrl", "train"]
    assert single.engines == 7


@pytest.mark.parametrize(
    ("content", "given_count"),
    [
        ("num_processes: 1", "4"),
        ("num_machines: 2", "8"),
        ("parallelism_config: {parallelism_config_tp_size: 4}", "4"),
        ("parallelism_config: {parallelism_config_cp_size: 5}", "5"),
        ("{use_cpu: true, num_processes: 3}", None),
    ],
)
def test_accelerate_starts_a_process_for_each_of_the_trainers_gpus(
    content: str, given_count: str | None, on_gpus: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "accelerate.yml"
    file.write_text(content, encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_CONFIG", str(file))
    plan = plan_of(monkeypatch, "train", *on_gpus)
    words = list(plan.main or ())
    assert words[1:4] == ["launch", "--config_file", str(file)]
    count = words[words.index("--num_processes") + 1] if "--num_processes" in words else None
    assert count == given_count
    assert plan.engines == {"5": 3, None: 8}.get(given_count, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [("gpu_ids: 0,1", "gpu_ids is 0,1"), ("[]", "no mapping"), ("{", "is not YAML")],
)
def test_an_accelerate_configuration_that_chooses_gpus_is_refused(
    content: str, message: str, on_gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "accelerate.yml"
    file.write_text(content, encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_CONFIG", str(file))
    with pytest.raises(ConfigError, match=message):
        launch.main(["train", *on_gpus])


def test_the_roles_of_the_machine_decide_who_gets_gpus(
    on_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLES", "serve sample")
    assert plan_of(monkeypatch, "train", *on_gpus).engines == 8
    monkeypatch.setenv("ROLES", "train")
    assert "8" in list(plan_of(monkeypatch, "train", *on_gpus).main or ())
    monkeypatch.setenv("ROLES", "sample")
    assert plan_of(monkeypatch, "train", *on_gpus).placement is None
    assert plan_of(monkeypatch, "eval", *on_gpus).engines == 8


def test_every_process_gets_the_engine_that_the_variable_names(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "vllm")
    flags = list(plan_of(monkeypatch, "train", *given).flags)
    assert flags[flags.index("--engine") + 1] == "vllm"


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown word 'trian'"):
        launch.main(["trian"])


def test_limits_of_a_recipe_follow_the_model_and_the_memory(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training step that does not fit halves the context; the user's own flag stays."""
    tried = []

    def check(self: MemoryCheck, *_: object) -> None:
        tried.append(self.configs[TrainConfig].max_tokens)
        if tried[-1] > 8192:
            raise StepTooLargeError("the trainer does not fit GPU 0")

    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    monkeypatch.setattr(placement, "find_gpus", eight_gpus)
    monkeypatch.setattr(MemoryCheck, "check", check)
    words = ["--fit_context", "161536", "--fit_turns", "200", "--max_new_tokens", "512"]
    plan = plan_of(monkeypatch, "train", *given, *words)
    assert tried == [32768, 16384, 8192]
    assert plan.flags[:2] == ["--max_prompt_tokens", "7680"]
    assert "--max_prompt_tokens 7680 --max_tokens 8192" in capsys.readouterr().out


def test_tasks_may_name_python_tools_by_the_end_of_their_paths(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reverse.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "Reverse abc", "answer": "cba", "tools": ["reverse"]}))
    words = [*given, "--eval_file", str(file)]
    plan = plan_of(monkeypatch, "eval", *words, "--tools", "other:tool, my_tools:reverse")
    assert "--mcp_servers_file" not in plan.flags
    with pytest.raises(ConfigError, match="name the tools reverse") as refused:
        plan_of(monkeypatch, "eval", *words, "--tools", "my_tools:turn")
    assert "--tools module:name" in str(refused.value.hint)


def test_engine_and_trainer_share_the_cores_of_a_machine_without_gpus(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    plan = plan_of(monkeypatch, "train", *given)
    monkeypatch.setattr(processes, "half_of_cores", lambda: 4)
    helpers, main = processes.processes_of(plan)
    assert main is not None
    threads = {member.name: member.env["OMP_NUM_THREADS"] for member in (*helpers, main)}
    assert threads == {"engine": "4", "sampler-0": "1", "sampler-1": "1", "main": "4"}
