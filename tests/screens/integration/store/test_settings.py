"""What a run was begun with: written once, compared, shown, and set anew on request."""

from __future__ import annotations

import asyncio

import pytest
from db_command import agentrl_db
from rich.console import Console
from small_run import add_task, claim

from agentrl.config.agreement import sampler_settings, trainer_settings
from agentrl.config.load import Configs, parse
from agentrl.config.schema import LossConfig, RunConfig
from agentrl.documents.run import RunSettings
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError
from agentrl.evaluation.evaluate import evaluation_rules
from agentrl.losses.settings import LossSettings
from agentrl.observe.begin_run import begin_run
from agentrl.screens.run_screens import render_tables
from agentrl.screens.snapshot import SnapshotReader
from agentrl.screens.views.counts import Details
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


def flags(*words: str) -> Configs:
    return parse(words, command="agentrl sample", description="", shown=[])


async def join(store: Store, role: str, *words: str) -> RunSettings:
    configs = flags(*words)
    facts = (
        sampler_settings(configs)
        if role == "sample"
        else trainer_settings(configs, LossSettings.of(configs[LossConfig]))
    )
    return await begin_run(store, configs, role, facts)


async def test_the_first_process_writes_and_every_other_is_compared(store: Store) -> None:
    results = await asyncio.gather(
        *(join(store, "sample", "--num_generations", str(4 + number % 2)) for number in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, ConfigError) for result in results) == 4
    tasks = (await store.settings.all())["tasks"]
    stored = tasks.values["num_generations"]
    other = 9 - stored
    with pytest.raises(ConfigError) as caught:
        await join(store, "sample", "--num_generations", str(other))
    assert f"--num_generations is {other}, and the run has {stored}" in str(caught.value)
    assert "by agentrl sample on " in str(caught.value)
    assert "another --run_name" in str(caught.value)


async def test_an_evaluation_takes_the_runs_threshold(store: Store) -> None:
    assert (await evaluation_rules(store, flags())).right_threshold == 0.5
    await join(store, "sample", "--right_threshold", "0.9")
    assert (await evaluation_rules(store, flags())).right_threshold == 0.9
    assert (await evaluation_rules(store, flags("--right_threshold", "0.2"))).right_threshold == 0.2


@pytest.mark.parametrize(
    ("role", "first", "then", "named"),
    [
        ("train", ["--loss_calculater", "GRPO"], ["--loss_calculater", "GSPO"], "--loss_calculater is"),
        ("train", [], ["--epsilon", "0.3"], "--epsilon is 0.3, and the run has 0.2"),
        ("train", [], ["--rollout_quantization", "fp8"], "--rollout_quantization is 'fp8'"),
        ("train", [], ["--lora_rank", "8"], "--lora_rank is 8"),
        ("train", [], ["--advantage_whitening", "batch"], "--advantage_whitening is 'batch', and the run"),
        ("sample", [], ["--tool_call_parser", "qwen"], "--tool_call_parser is 'qwen'"),
        ("sample", [], ["--seed", "3"], "--seed is 3"),
        ("sample", [], ["--adv_scaling", "2"], "--adv_scaling is 2"),
        ("sample", [], ["--group_filter", "mine:keep"], "--group_filter is 'mine:keep'"),
        ("sample", [], ["--right_threshold", "0.6"], "--right_threshold is 0.6, and the run has 0.5"),
        ("sample", [], ["--preferred_sampling_params", '{"temperature": 0.5}'], "--temperature is 0.5"),
    ],
)  # fmt: skip
async def test_what_must_not_change_silently_is_named_and_can_be_accepted(
    store: Store, run_config: RunConfig, role: str, first: list[str], then: list[str], named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    await join(store, role, *first)
    with pytest.raises(ConfigError) as caught:
        await join(store, role, *then)
    assert named in str(caught.value)
    concern = str(caught.value).partition("`agentrl db accept ")[2].partition(" ")[0]
    assert await agentrl_db(run_config, "accept", concern) == 0
    assert "it was " in capsys.readouterr().out
    await join(store, role, *then)
    with pytest.raises(ConfigError):
        await join(store, role, *first)


async def test_what_may_change_between_restarts_is_not_compared(store: Store) -> None:
    await join(store, "sample")
    await join(store, "sample", "--max_concurrent_samples_per_process", "3", "--max_turns", "4")
    await join(store, "train")
    await join(store, "train", "--learning_rate", "1e-3", "--save_steps", "7", "--max_tokens", "128")


async def test_the_resolved_configuration_of_each_role_is_stored(store: Store) -> None:
    await join(store, "sample", "--max_turns", "3")
    await join(store, "train", "--loss_calculater", "GSPO")
    stored = await store.settings.resolved()
    assert list(stored) == ["sample", "train"]
    sample, train = stored.values()
    assert sample.given == ("max_turns",)
    assert train.values["epsilon"] == 3e-4
    assert {"python", "agentrl", "torch", "pymongo"} <= train.packages.keys()


async def test_a_step_has_the_flags_of_the_trainer_that_made_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a resume from an earlier step; a start with the flags of the one before stores nothing."""
    secret = ["--db_connection_string", "mongodb://someone:hunter2@host/"]

    async def start(attempt: int, *words: str) -> None:
        await store.settings.start(await join(store, "train", *words, *secret), attempt)

    await start(1, "--learning_rate", "1e-3", "--max_steps", "8")
    await start(2, "--learning_rate", "1e-3", "--max_steps", "8")
    assert not caplog.text
    for _ in range(2):  # a call whose answer was lost is repeated
        await start(3, "--learning_rate", "5e-4", "--max_steps", "5")
    assert caplog.text.count("--learning_rate is 0.0005, and agentrl train on") == 1
    await start(7, "--learning_rate", "1e-3", "--max_steps", "8")
    assert [item.id for item in await store.settings.starts()] == [
        "flags/train", "flags/train@3", "flags/train@7",
    ]  # fmt: skip
    steps = [
        TrainStep(id=f"{attempt}/{step}", step=step, policy_version=0, data=(), owner="t")
        for step, attempt in ((1, 1), (2, 2), (3, 3), (4, 6), (5, 12))
    ]
    found = await store.settings.of_steps(steps)
    assert [found[step.id].values["learning_rate"] for step in steps] == [1e-3, 1e-3, 5e-4, 5e-4, 1e-3]
    assert [found[step.id].values["max_steps"] for step in steps] == [8, 8, 5, 5, 8]
    assert (await store.settings.resolved())["train"].id == "flags/train@7"
    assert set(await store.settings.all()) == {"rollouts", "loss", "adapter", "critic"}
    assert "hunter2" not in str(await store.database["Settings"].find({}).to_list())


async def test_what_differs_without_harm_is_named_in_a_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await join(store, "sample", "--max_turns", "3", "--max_staleness", "2", "--log_dir", "a")
    await join(store, "sample", "--max_turns", "3", "--max_staleness", "2", "--log_dir", "b")
    assert not caplog.text
    await join(store, "sample", "--max_turns", "4", "--max_staleness", "2")
    assert "--max_turns is 4, and agentrl sample on" in caplog.text
    assert "has 3" in caplog.text
    assert "--max_staleness" not in caplog.text
    caplog.clear()
    await join(store, "train")
    assert not caplog.text
    await join(store, "train", "--max_staleness", "1")
    assert "--max_staleness is 1, and agentrl sample on" in caplog.text


async def test_what_one_role_resolves_another_may_leave_at_auto(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    configs = flags("--autocast_bf16", "auto")
    for resolved in ("true", "true", "false"):
        assert not caplog.text
        await begin_run(store, configs, "train", {}, {"autocast_bf16": resolved})
        await join(store, "sample", "--autocast_bf16", "auto")
    assert "--autocast_bf16 is 'false', and agentrl train on" in caplog.text


async def test_a_trainer_is_held_to_the_group_size_that_it_is_given(store: Store) -> None:
    await join(store, "sample", "--num_generations", "4")
    await join(store, "train")
    with pytest.raises(ConfigError, match="--num_generations is 8, and the run has 4"):
        await join(store, "train", "--num_generations", "8")


async def test_the_group_size_is_fixed_once_a_trajectory_has_begun(
    store: Store, run_config: RunConfig
) -> None:
    await join(store, "sample", "--num_generations", "4")
    await agentrl_db(run_config, "accept", "tasks")
    await join(store, "sample", "--num_generations", "2")
    await add_task(store, "train/0/a", 0)
    await claim(store)
    with pytest.raises(ConfigError, match="cannot change any more"):
        await agentrl_db(run_config, "accept", "tasks")


async def test_the_flags_of_each_role_are_kept_without_secrets_and_shown(store: Store) -> None:
    secret = "mongodb://someone:hunter2@host/"
    await join(
        store, "sample", "--db_connection_string", secret, "--mcp_manager_url", "http://u:hunter2@h/mcpapi",
        "--engine_args", "--api-key sk-0123456789abcdef0123",
    )  # fmt: skip
    await join(store, "train", "--learning_rate", "0.5")
    kept = await store.database["Settings"].find({"_id": {"$in": ["flags/sample", "flags/train"]}}).to_list()
    sample, train = sorted(kept, key=lambda document: str(document["_id"]))
    assert train["values"]["learning_rate"] == 0.5
    assert sample["values"]["run_name"]
    assert "db_connection_string" not in sample["values"]
    everything = str(await store.database["Settings"].find({}).to_list())
    assert "hunter2" not in everything
    assert "sk-0123456789" not in everything
    console = Console(width=160, record=True, file=None)
    with console.capture() as shown:
        reader = SnapshotReader(store)
        console.print(render_tables(await reader.read(), await Details(store.connection).read()))
    assert "Begun with" in shown.get()
    assert "learning_rate 0.5" in shown.get()
    assert "Configuration" in shown.get()
    assert "num_generations 8" in shown.get()
