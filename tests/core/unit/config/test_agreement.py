"""Flags that contradict each other are refused at start, and only those; what a run's processes agree on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from parsed_flags import parsed

from agentrl.cli import services
from agentrl.config.agreement import require_trainable, sampler_settings, trainer_settings
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    CriticConfig,
    EngineConfig,
    GroupConfig,
    LossConfig,
    OptimConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.rollout.setup import AdmissionLimit

STEPS = 12
GROUPS = 3


def is_refused(sampling: SamplingConfig, training: TrainConfig) -> bool:
    try:
        others = [AgentConfig(), GroupConfig(), LossConfig(), CriticConfig(), OptimConfig(), EngineConfig()]
        require_trainable(Configs([sampling, training, *others]))
    except ConfigError:
        return True
    return False


class Simulation:
    """A run in which samplers begin what admission allows and the trainer trains as soon as it can."""

    def __init__(self, sampling: SamplingConfig, training: TrainConfig) -> None:
        self.admission = AdmissionLimit(sampling, training)
        self.publish_steps = training.publish_steps
        self.step = self.open = 0
        self.versions = [0]
        """The step of each published version."""
        self.policy_versions = SimpleNamespace(latest=self._latest, get=self._get)
        self.steps = SimpleNamespace(last=self._last_step)

    async def _latest(self) -> Any:
        return SimpleNamespace(id=len(self.versions) - 1, step=self.versions[-1])

    async def _get(self, version: int) -> Any:
        return SimpleNamespace(id=version, step=self.versions[version])

    async def _last_step(self) -> Any:
        return SimpleNamespace(step=self.step) if self.step else None

    async def makes_progress(self) -> bool:
        """Whether the run comes to its end; engines load a version when nothing else can be done."""
        engine = 0
        while self.step < STEPS:
            room = await self.admission.groups_allowed(self, [engine])  # type: ignore[arg-type]
            self.open = max(self.open, room.groups)
            if self.open >= GROUPS:
                self.open -= GROUPS
                self.step += 1
                ahead = self.step - self.versions[-1]
                if self.step % self.publish_steps == 0 or ahead > self.admission.max_staleness:
                    self.versions.append(self.step)
            elif engine < len(self.versions) - 1:
                engine += 1
            else:
                return False
        return True


@pytest.mark.parametrize("publish_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("sync_sampling", [False, True])
async def test_what_is_accepted_makes_progress(
    publish_steps: int, max_staleness: int, sync_sampling: bool
) -> None:
    sampling = SamplingConfig(max_staleness=max_staleness, sync_sampling=sync_sampling)
    training = TrainConfig(publish_steps=publish_steps, groups_per_step=GROUPS)
    assert is_refused(sampling, training) is ((sync_sampling or not max_staleness) and publish_steps > 1)
    assert await Simulation(sampling, training).makes_progress()


WHITENED = "--advantage_whitening batch --drop_zero_advantage false"
REFUSED: dict[str, tuple[str, list[str]]] = {
    "waits": ("--max_staleness 0 --publish_steps 2", ["--max_staleness 0", "--publish_steps is"]),
    "waits, too": ("--sync_sampling true --publish_steps 4", ["--sync_sampling", "is 4"]),
    "whitening, zeros": ("--advantage_whitening batch", ["--drop_zero_advantage true", "false"]),
    "whitening, agreement": (
        f"{WHITENED} --advantage reward", ["--min_score_spread 0.1", "set --min_score_spread 0"],
    ),
    "whitening, signs": (
        f"{WHITENED} --clamp_advantage_by_score true", ["--clamp_advantage_by_score true", "signs"],
    ),
    "whitening, scale": (f"{WHITENED} --adv_scaling 2", ["--adv_scaling 2.0", "set --adv_scaling 1"]),
    "greedy": (
        """--preferred_sampling_params '{"temperature": 0}'""", ["temperature 0", "0.01", "agentrl eval"],
    ),
    "sampling parameters that are no JSON": ("--preferred_sampling_params {top_p", ["give JSON"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "params"),
    [
        ("local", '{"temperature": 0.5, "top_p": 0.9, "top_k": 20, "presence_penalty": 1}'),
        ("vllm", '{"top_p": 0.9, "repetition_penalty": 1.1}'),
        ("sglang", '{"temperature": 0.7, "presence_penalty": 1, "extra": {"logit_bias": {"5": 1}}}'),
        ("sglang", '{"top_k": 9, "top_p": 0.9, "min_p": 0.1, "extra": {"logit_bias": {"5": 1}}}'),
        ("sglang", '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1, "stop_token_ids": [5]}'),
    ],
)
def test_what_the_engine_returns_right_logprobs_for_is_accepted(engine: str, params: str) -> None:
    require_trainable(parsed("--preferred_sampling_params", params, "--engine", engine))


@pytest.mark.parametrize("flags", ["reward --min_score_spread 0", "dr_grpo", "dr_grpo --min_score_spread 0"])
def test_reinforce_plus_plus_is_accepted(flags: str) -> None:
    words = f"--advantage_whitening batch --drop_zero_advantage false --advantage {flags}"
    require_trainable(parsed(*words.split()))


@pytest.mark.parametrize("command", [services.sample, services.train], ids=["sample", "train"])
@pytest.mark.parametrize("name", REFUSED)
def test_sampler_and_trainer_refuse_before_they_begin(command: Callable[[list[str]], int], name: str) -> None:
    flags, words = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        command(["--run_name", "x", *shlex.split(flags)])
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_other_commands_take_the_same_flags() -> None:
    parsed(*REFUSED["waits"][0].split(), command="agentrl serve")


def test_an_evaluation_samples_however_it_likes() -> None:
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        services.evaluate(["--run_name", "x", *shlex.split(REFUSED["greedy"][0])])


def loss_facts(*flags: str) -> dict[str, object]:
    configs = parsed(*flags)
    return trainer_settings(configs, LossSettings.of(configs[LossConfig]))["loss"]


def test_a_value_given_and_the_same_by_default_agree() -> None:
    assert loss_facts("--epsilon", "0.2", "--token_level_loss", "false") == loss_facts()
    assert loss_facts("--loss_calculater", "GSPO")["epsilon"] == 3e-4
    assert loss_facts("--loss_calculater", "GSPO") != loss_facts()
    assert None not in {name: loss_facts()[name] for name in ("epsilon", "strict_in_bound")}.values()


def test_a_loss_that_cannot_act_has_no_facts() -> None:
    with pytest.raises(ConfigError, match="--importance_correction is tis"):
        loss_facts("--importance_correction", "tis")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("", "set --columns version_logprobs for"),
        ("--columns teacher", "set --columns teacher,version_logprobs for"),
        ("--columns version_logprobs --lora_rank 4", "recompute, or train whole weights"),
        ("--columns version_logprobs --weight_sync tensor", "set --weight_sync disk"),
    ],
)
def test_old_logprobs_of_versions_are_refused_where_none_could_be_computed(words: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="--old_logprobs version") as refused:
        require_trainable(parsed("--old_logprobs", "version", *words.split()))
    assert hint in str(refused.value.hint)
    require_trainable(parsed("--old_logprobs", "version", "--columns", "teacher,version_logprobs"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--advantage leave_one_out", "--critic head with --advantage leave_one_out"),
        ("--drop_zero_advantage true", "--critic head with --drop_zero_advantage true"),
        ("--minimal_advantage 0.1", "--critic head with --minimal_advantage 0.1"),
        ("--min_score_spread 0.1", "--critic head with --min_score_spread 0.1"),
        ("--clamp_advantage_by_score true", "--critic head with --clamp_advantage_by_score true"),
        ("--balance_sample true", "--critic head with --balance_sample true"),
        ("--baseline window", "--critic head with --baseline window"),
        ("--turn_discount 0.9", "--critic head with --turn_discount 0.9"),
        ("--staleness_policy decay --out_of_date_decay 0.5", "--critic head with --staleness_policy decay"),
        ("--verify_data false", "--critic head with --verify_data false"),
    ],
)
def test_a_critic_needs_the_rewards_of_all_trajectories(flags: str, said: str) -> None:
    words = ["--recipe", "ppo", "--critic", "head", "--advantage_whitening", "none"]
    require_trainable(parsed(*words))
    for command in ("agentrl sample", "agentrl train"):
        with pytest.raises(ConfigError, match=said) as refused:
            require_trainable(parsed(*words, *shlex.split(flags), command=command))
        assert refused.value.hint


def test_a_run_with_a_critic_agrees_about_rewards_and_a_run_without_about_no_critic() -> None:
    """A sampler that makes other advantages is refused, whichever of the two starts first."""
    found, without = (
        trainer_settings(configs, LossSettings.of(configs[LossConfig]))
        for configs in (parsed("--recipe", "ppo"), parsed())
    )
    assert found["groups"] == sampler_settings(parsed("--recipe", "ppo"))["groups"]
    assert found["groups"]["advantage"] == "reward"
    assert (found["critic"]["critic"], without["critic"]["critic"]) == ("model", "off")
    assert "groups" not in without
    with pytest.raises(ConfigError, match="--critic_model x with --critic head"):
        CriticConfig(critic="head", critic_model="x")
