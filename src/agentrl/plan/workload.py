"""The data of one optimizer step, as far as memory, time and services depend on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.load import Configs
from agentrl.config.plan import PlanConfig
from agentrl.config.schema import OptimConfig, TaskConfig, TrainConfig
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Trajectories of one step and the tokens that they cost; all lengths are means."""

    groups: int
    group_size: int
    trajectory_tokens: int
    turns: int
    trained_share: float
    """Fraction of a trajectory's tokens that is generated, and so trained."""
    computed_tokens: int
    """Tokens that one pass over the step computes, after merging."""
    max_tokens: int
    """Tokens of a micro-batch."""
    passes: int
    """Passes over a step's data."""

    @property
    def trajectories(self) -> int:
        """Trajectories of one step."""
        return self.groups * self.group_size

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of one step."""
        return round(self.trajectories * self.trajectory_tokens * self.trained_share)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, per pass and layer."""
        return self.computed_tokens * (self.trajectory_tokens + 1) / 2

    def rank_tokens(self, data_ranks: int) -> int:
        """Return the tokens of the rank with most work: at least one trajectory."""
        longest = min(self.trajectory_tokens, self.max_tokens)
        return max(-(-self.computed_tokens // data_ranks), longest)

    def micro_batches(self, data_ranks: int) -> int:
        """Return the micro-batches that each rank runs in one pass."""
        return max(1, math.ceil(self.rank_tokens(data_ranks) / self.max_tokens))


def build_workload(configs: Configs) -> Workload:
    """Return the workload that the flags describe; ``--max_tokens`` is ``--context`` unless it is given."""
    plan, train = configs[PlanConfig], configs[TrainConfig]
    max_tokens = train.max_tokens if "max_tokens" in configs.given else plan.context
    if plan.context > max_tokens:
        raise ConfigError(
            f"--context {plan.context} is longer than a micro-batch of --max_tokens {max_tokens}",
            hint=f"set --max_tokens {plan.context} or more: a model call is trained in one piece",
        )
    length = plan.trajectory_tokens or plan.context
    if length > plan.context or plan.prompt_tokens > length:
        raise ConfigError(
            f"--prompt_tokens {plan.prompt_tokens}, --trajectory_tokens {length} and --context {plan.context}"
            " do not contain one another",
            hint="give prompt_tokens ≤ trajectory_tokens ≤ context",
        )
    groups, size = train.groups_per_step, configs[TaskConfig].num_generations
    computed = {
        "off": groups * size * length * (plan.turns + 1) // 2,
        "trajectory": groups * size * length,
        "group": groups * (plan.prompt_tokens + size * (length - plan.prompt_tokens)),
    }[train.prefix_merging]
    return Workload(
        groups=groups, group_size=size, trajectory_tokens=length, turns=plan.turns,
        trained_share=plan.trained_share, computed_tokens=computed, max_tokens=max_tokens,
        passes=configs[OptimConfig].num_epochs_per_batch,
    )  # fmt: skip
