"""Which processes ``agentrl launch`` starts, with which limits, and what is refused before any of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from parsed_flags import parsed

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs
from agentrl.config.schema import (
    GROUPS,
    AgentConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    PlacementConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError, ModelError
from agentrl.local import launch, local_cli, placement
from agentrl.local.launch import (
    MemoryCheck,
    RunPlan,
    StepTooLargeError,
    fitted_limits,
    prepare,
    require_teacher,
)
from agentrl.local.placement import Gpus


class Launcher:
    """``agentrl launch`` with flags that need neither the demo's model nor a database; it starts nothing."""

    def __init__(self, *flags: str) -> None:
        self.flags = [*flags]
        self.plans: list[RunPlan] = []

    def plan(self, word: str, *flags: str) -> RunPlan:
        assert local_cli.launch([word, *self.flags, *flags]) == 0
        return self.plans[-1]

    def start(self, plan: RunPlan) -> int:
        self.plans.append(plan)
        return 0


async def is_joinable(*_: object) -> None:
    """The tests here have neither a database nor a model."""


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "1+1?", "answer": "2", "tools": []}))
    return str(file)


@pytest.fixture
def launcher(task_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    for name in ("MODEL_PATH", "ROLES", "SAMPLERS", "ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    database = ("--db_connection_string", "mongodb://127.0.0.1:9")
    launcher = Launcher("--run_name", "r", "--eval_file", task_file, *database)
    monkeypatch.setattr(launch, "run_processes", launcher.start)
    monkeypatch.setattr(launch, "require_usable", lambda *_: {})
    monkeypatch.setattr(launch, "require_joinable", is_joinable)
    return launcher


def test_an_evaluation_uses_the_engine_of_the_script_or_one_of_its_own(launcher: Launcher) -> None:
    plan = launcher.plan("eval")
    assert (plan.engines, plan.samplers) == (1, 0)
    assert plan.flags[:2] == ["--eval_engine", "shared"]
    own = launcher.plan("eval", "--eval_model", "m")
    assert own.engines == 0
    assert "shared" not in own.flags


def test_versions_are_evaluated_beside_training_on_request(launcher: Launcher) -> None:
    assert not launcher.plan("train").follows
    plan = launcher.plan("train", "--eval_steps", "5")
    assert plan.follows
    assert (plan.engines, plan.samplers) == (1, 2)


def test_a_teacher_is_started_with_the_recipe_that_distils(
    launcher: Launcher, task_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.flags += ["--train_file", task_file, "--recipe", "opd"]
    assert not launcher.plan("train").teaches
    assert "groups wait for teacher, and no --teacher is given" in capsys.readouterr().out
    plan = launcher.plan("train", "--teacher", "http://127.0.0.1:9")
    assert plan.teaches
    assert parsed(*plan.flags)[GroupConfig].columns == "teacher"
    monkeypatch.setenv("ROLES", "serve train")
    assert not launcher.plan("train", "--teacher", "http://127.0.0.1:9").teaches


def test_every_process_gets_the_recipe_and_limits_of_its_own(
    launcher: Launcher, task_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "fit", lambda configs, flags, *_, **named: flags)
    plan = launcher.plan(
        "train", "--train_file", task_file, "--recipe", "dapo", "--epsilon_higher", "0.12", "--fit_turns", "9"
    )
    assert "r: recipe dapo: arXiv 2503.14476" in capsys.readouterr().out
    configs = parsed(*plan.flags, command="agentrl sample")
    assert (configs[LossConfig].epsilon_higher, configs[LossConfig].dual_clip) == (0.12, math.inf)
    assert configs[GroupConfig].advantage == "grpo"
    placed = configs[PlacementConfig]
    assert (placed.fit_context, placed.fit_turns) == (161536, 9)
    assert configs[MemoryConfig].activation_checkpointing == "full"
    with pytest.raises(ConfigError, match="and no --train_file"):
        launcher.plan("train", "--recipe", "dapo")


def test_a_recipe_without_a_model_trains_the_demonstration(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_PATH")
    monkeypatch.setattr(launch, "demo_model", lambda: Path("demo"))
    monkeypatch.setattr(launch, "default_servers", lambda *_, **named: None)
    monkeypatch.setattr(launch, "fit", lambda configs, flags, *_, **named: flags)
    configs = parsed(*launcher.plan("train", "--recipe", "gspo").flags)
    assert str(configs[TaskConfig].train_file).endswith("tasks/calculator_train.jsonl")
    assert (configs[AgentConfig].max_turns, configs[TrainConfig].max_tokens) == (4, 4096)
    assert configs[PlacementConfig].fit_context is None


def test_a_run_with_version_as_its_old_policy_starts_the_filler_of_its_column(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not launcher.plan("train").teaches_self
    with pytest.raises(ConfigError, match="reads the column version_logprobs"):
        launcher.plan("train", "--old_logprobs", "version")
    plan = launcher.plan("train", "--old_logprobs", "version", "--columns", "version_logprobs")
    assert plan.teaches_self
    assert "start agentrl teach too" not in capsys.readouterr().out
    (filler,) = (each for each in launch.processes_of(plan)[0] if each.name == "old-logprobs")
    assert list(filler.command[-len(plan.flags) - 3 :]) == ["teach", "--self", "true", *plan.flags]


def eight_gpus(environment: Mapping[str, str]) -> Gpus:
    return Gpus(names=tuple("01234567"), kind="NVIDIA H100", memory_gib=(79.0,) * 8)


@pytest.fixture
def on_gpus(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """The same on a machine with eight GPUs."""
    monkeypatch.delenv("ACCELERATE_CONFIG", raising=False)
    monkeypatch.setattr(placement, "find_gpus", eight_gpus)
    launcher.flags += ["--check_memory", "false"]
    return launcher


@pytest.fixture
def accelerate_file(on_gpus: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELERATE_CONFIG", str(tmp_path / "accelerate.yml"))
    return tmp_path / "accelerate.yml"


def test_a_trainer_has_a_process_for_each_of_its_gpus(on_gpus: Launcher) -> None:
    plan = on_gpus.plan("train")
    assert plan.engines == 4
    words = "-m torch.distributed.run --standalone --nproc_per_node 4 -m agentrl.train"
    assert list(plan.main or ())[1:8] == words.split()
    single = on_gpus.plan("train", "--train_gpus", "7")
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
    content: str, given_count: str | None, on_gpus: Launcher, accelerate_file: Path
) -> None:
    accelerate_file.write_text(content, encoding="utf-8")
    plan = on_gpus.plan("train")
    words = list(plan.main or ())
    assert words[1:4] == ["launch", "--config_file", str(accelerate_file)]
    count = words[words.index("--num_processes") + 1] if "--num_processes" in words else None
    assert count == given_count
    assert plan.engines == {"5": 3, None: 8}.get(given_count, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [("gpu_ids: 0,1", "gpu_ids is 0,1"), ("[]", "no mapping"), ("{", "is not YAML")],
)
def test_an_accelerate_configuration_that_chooses_gpus_is_refused(
    content: str, message: str, on_gpus: Launcher, accelerate_file: Path
) -> None:
    accelerate_file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        on_gpus.plan("train")


def test_the_roles_of_the_machine_decide_who_gets_gpus(
    on_gpus: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLES", "serve sample")
    assert on_gpus.plan("train").engines == 8
    monkeypatch.setenv("ROLES", "train")
    assert "8" in list(on_gpus.plan("train").main or ())
    monkeypatch.setenv("ROLES", "sample")
    assert on_gpus.plan("train").placement is None
    assert on_gpus.plan("eval").engines == 8


def test_every_process_gets_the_engine_that_the_variable_names(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "vllm")
    flags = list(launcher.plan("train").flags)
    assert flags[flags.index("--engine") + 1] == "vllm"


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown word 'trian'"):
        local_cli.launch(["trian"])


def test_limits_of_a_recipe_follow_the_model_and_the_memory(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    plan = launcher.plan("train", *words)
    assert tried == [32768, 16384, 8192]
    assert plan.flags[:2] == ["--max_prompt_tokens", "7680"]
    assert "--max_prompt_tokens 7680 --max_tokens 8192" in capsys.readouterr().out


def test_tasks_may_name_python_tools_by_the_end_of_their_paths(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "reverse.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "Reverse abc", "answer": "cba", "tools": ["reverse"]}))
    launcher.flags += ["--eval_file", str(file)]
    plan = launcher.plan("eval", "--tools", "other:tool, my_tools:reverse")
    assert "--mcp_servers_file" not in plan.flags
    with pytest.raises(ConfigError, match="name the tools reverse") as refused:
        launcher.plan("eval", "--tools", "my_tools:turn")
    assert "--tools module:name" in str(refused.value.hint)


def test_engine_and_trainer_share_the_cores_of_a_machine_without_gpus(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    plan = launcher.plan("train")
    monkeypatch.setattr(launch, "half_of_cores", lambda: 4)
    helpers, main = launch.processes_of(plan)
    assert main is not None
    threads = {member.name: member.env["OMP_NUM_THREADS"] for member in (*helpers, main)}
    assert threads == {"engine": "4", "sampler-0": "1", "sampler-1": "1", "main": "4"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [({"mini_batches": 9}, "--mini_batches 9"), ({"import_modules": "nosuch"}, "--import_modules")],
)
def test_flags_of_training_are_checked_before_a_model_is_fetched(
    flags: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "demo_model", lambda: pytest.fail("fetched"))
    with pytest.raises(ConfigError, match=says):
        prepare("train", [], Configs.of(GROUPS, flags, flags), {})


def test_a_teacher_is_there_and_trajectories_wait_for_it(tmp_path: Path) -> None:
    require_teacher(str(tmp_path), ("teacher",))
    require_teacher("http://gpu7:30000", ("teacher",))
    with pytest.raises(ModelError, match="which is not a folder"):
        require_teacher("Qwen/Qwen3-8B", ("teacher",))
    with pytest.raises(ConfigError, match="no trajectory would wait for it"):
        require_teacher(str(tmp_path), ())


def limits(tmp_path: Path, own: int, *words: str, longest: int = 161536) -> dict[str, int]:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": own}))
    configs = parsed("--fit_turns", "200", *words, command="agentrl launch")
    found = fitted_limits(configs, str(tmp_path), longest)
    require_trainable(configs.with_flags(found))
    return found


def in_order(found: Mapping[str, int]) -> list[int | None]:
    return [found.get(name) for name in ("max_prompt_tokens", "max_new_tokens", "max_tokens", "max_turns")]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (262144, [128768, 32768, 161536, 200]),
        (40960, [30720, 10240, 40960, 120]),
        (8192, [6144, 2048, 8192, 24]),
        (2048, [1536, 512, 2048, 6]),
        (64, [48, 16, 64, 1]),
    ],
)
def test_prompt_and_output_fit_the_model(tmp_path: Path, own: int, expected: list[int]) -> None:
    found = limits(tmp_path, own)
    assert in_order(found) == expected
    assert found["prompt_reserve_tokens"] == min(1024, expected[0] // 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max_new_tokens 1024", [7168, None, 8192, 28]),
        ("--max_prompt_tokens 7000", [None, 1192, 8192, 27]),
        ("--max_tokens 4096", [3072, 1024, None, 12]),
        ("--max_prompt_tokens 3000 --max_new_tokens 1000 --max_turns 9", [None, None, 4000, None]),
        ("--max_model_len 1024", [768, 256, 1024, 3]),
    ],
)
def test_a_limit_that_is_given_moves_the_others(
    tmp_path: Path, words: str, expected: list[int | None]
) -> None:
    assert in_order(limits(tmp_path, 8192, *words.split())) == expected


def test_memory_limits_a_long_context(tmp_path: Path) -> None:
    assert in_order(limits(tmp_path, 262144, longest=16384)) == [12288, 4096, 16384, 48]


def test_a_limit_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max_prompt_tokens is 9000, and prompt and output have 8192"):
        limits(tmp_path, 8192, "--max_prompt_tokens", "9000")


def test_the_reserve_fits_a_short_prompt_that_is_given() -> None:
    assert AgentConfig(max_prompt_tokens=1024).prompt_reserve_tokens == 128
    assert AgentConfig(max_prompt_tokens=1025).prompt_reserve_tokens == 1024
    with pytest.raises(ConfigError, match="leaves nothing beside --prompt_reserve_tokens 600"):
        AgentConfig(max_prompt_tokens=512, prompt_reserve_tokens=600)
