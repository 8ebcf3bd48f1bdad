"""Flags of ``agentrl whatif``: the parent's, of which some may change; and of ``agentrl blame``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from agentrl.config.flags import Flags, flag, require
from agentrl.config.load import Configs, flag_names
from agentrl.config.schema import (
    GROUPS,
    AdapterConfig,
    CriticConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TraceConfig,
    TrainConfig,
)
from agentrl.config.training import LOSS_PARAMETERS
from agentrl.errors import ConfigError

_OF_LOSS = LOSS_PARAMETERS | {
    "loss_args", "token_level_loss", "skip_length_normalization", "strict_in_bound", "epsilon",
    "epsilon_higher", "importance_weight_cap_ratio",
}  # fmt: skip
"""Flags whose defaults belong to a loss: another loss begins with its own."""
_NEVER = 10**9
_CHILD: Mapping[str, Any] = {
    "publish_steps": _NEVER, "publish": "auto", "publish_to": None, "weight_sync": "disk",
    "colocate": "false", "resume_from_checkpoint": "auto", "fallback_output_dir": None,
}  # fmt: skip
"""Flags that every what-if has: nothing samples with its weights, and its last ones are published."""
_TRAINING = frozenset({
    "staleness_policy", "max_staleness", "advantage_whitening", "reference_model", "verify_data",
    "save_steps", "save_total_limit", "max_bad_steps", "token_statistics_mib", "report_to",
})  # fmt: skip


GROUP_RULES = frozenset(flag_names(GroupConfig)) - {"columns", "baseline_versions"}
"""Flags by which a stored group is decided again; what it waited for is stored with it."""
CHANGEABLE = (
    GROUP_RULES | _TRAINING | set(flag_names(LossConfig, CriticConfig, OptimConfig, MemoryConfig))
) - {"freeze", "critic", "critic_model", "critic_head"}
"""Flags that may differ from the parent's."""
_OF_PROCESS = set(flag_names(RunConfig, TraceConfig)) - {"seed", "run_name"} | {"lease_seconds"}
"""Flags of this process, which are not the parent's."""
_OF_STEPS = set(
    flag_names(
        ModelConfig, TaskConfig, GroupConfig, LossConfig, CriticConfig, OptimConfig, AdapterConfig,
        MemoryConfig, TrainConfig,
    )
) - {
    "model_name", "train_file", "eval_file", "skip_bad_lines", "save_steps", "save_total_limit",
    "published_versions_kept", "keep_every", "publish_wait_seconds", "full_every", "data_wait_seconds",
    "report_to", "max_bad_steps",
} | {
    "seed", "max_staleness", "sync_sampling", "rollout_quantization", "scorer_timeout_seconds",
    "agent_config_path",
}  # fmt: skip
"""Flags on which the numbers of a stored step may depend when it is trained again."""


@dataclass(frozen=True, kw_only=True)
class WhatIfConfig(Flags):
    """The stored steps that are trained again."""

    steps: str | None = flag(
        None, "the parent's steps to train again with the flags that are given, such as 40-60 (default: all)"
    )
    without: str | None = flag(
        None, "file with the ids of Records to leave out, one a line: their groups are decided without them"
    )
    scorer: str | None = flag(
        None, "score the Records again, for the new run alone: a name, or a path module:function"
    )
    order_seed: int = flag(
        0,
        "seed that shuffles the order of the steps; 0: the parent's order. The spread over seeds tells how"
        " much depends on the order alone",
        within="[0, inf)",
    )
    compare: str | None = flag(
        None, "train nothing: compare these runs, comma-separated, with the parent of the first"
    )
    out: str | None = flag(None, "file of the page that compares (default: whatif.html in --output_dir)")

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """The first and the last step; None for all. Raises ConfigError for other texts than 40 or 40-60."""
        if self.steps is None:
            return None
        first, dash, last = self.steps.partition("-")
        is_range = first.isdecimal() and (not dash or last.isdecimal())
        found = (int(first), int(last if dash else first)) if is_range else (0, 0)
        require(
            1 <= found[0] <= found[1],
            f"--steps is {self.steps}",
            "give the first and the last step of the parent that are trained again, such as 40-60",
        )
        return found

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The ids in the file ``without``, read once: it may be a pipe. Raises ConfigError without any."""
        if self.without is None:
            return frozenset()
        try:
            lines = Path(self.without).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--without {self.without} cannot be read: {error}", hint="write one id a line"
            ) from error
        found = frozenset(line.strip() for line in lines if line.strip())
        require(bool(found), f"--without {self.without} names no Record", "write one id a line")
        return found


def check_flags(configs: Configs) -> None:
    """Raise ConfigError for wrong steps or ids, and for a given flag that a what-if cannot change."""
    _ = configs[WhatIfConfig].first_and_last, configs[WhatIfConfig].excluded
    own = CHANGEABLE.union(_OF_PROCESS, flag_names(WhatIfConfig))
    recipe = configs[RunConfig].recipe
    left_out = "leave it out" if recipe is None else f"leave it or --recipe {recipe}, which may give it, out"
    for name in sorted(configs.given - own):
        require(
            False,
            f"--{name} cannot differ from the parent's: the stored data, the checkpoint and the layout were"
            " made with it",
            f"{left_out}; a what-if changes the flags of the loss, of the groups and of the optimizer,"
            f" and {', '.join(sorted(_TRAINING))}",
        )


def parent_configs(stored: Mapping[str, Any], given: Collection[str], here: Configs) -> Configs:
    """Return the parent's configuration for a trainer of this process that publishes nothing.

    ``stored`` are the flags of the parent's trainer, ``given`` those that were given to it. ``here`` has the
    flags of this command: those of the process are taken from it.
    """
    of_process = {name: value for name, value in here.flags.items() if name in _OF_PROCESS}
    return Configs.of(GROUPS, {**stored, **of_process, **_CHILD}, set(given) & set(flag_names(*GROUPS)))


def of_steps(configs: Configs) -> dict[str, Any]:
    """Return the flags that decide what a stored step computes when it is trained again."""
    own = {name: value for name, value in configs.flags.items() if name in _OF_STEPS}
    optim = configs[OptimConfig]
    if optim.lr_scheduler_type.startswith("constant") and not optim.warmup_ratio:
        # Leave out what only says where the learning rate ends.
        del own["max_steps"], own["num_train_epochs"]
    return own


def child_configs(parent: Configs, here: Configs) -> Configs:
    """Return the child's configuration: the parent's, with the flags that are given here.

    With another ``--loss_calculater``, the flags whose defaults belong to the loss are the new loss's, unless
    they are given here; with ``--recipe``, all flags of the loss are.
    """
    changed = {name: value for name, value in here.flags.items() if name in here.given & CHANGEABLE}
    old, has_recipe = parent[LossConfig].loss_calculater, here[RunConfig].recipe is not None
    if has_recipe or changed.get("loss_calculater", old) != old:
        of_loss = dataclasses.asdict(LossConfig())
        kept = parent.given - (of_loss.keys() if has_recipe else _OF_LOSS)
        fresh = {name: value for name, value in of_loss.items() if name not in kept}
        parent = Configs(list(parent.with_flags(fresh)), kept)
    return parent.with_flags(changed)


def changes(parent: Configs, child: Configs, loss: LossConfig) -> dict[str, Any]:
    """Return {flag: [the parent's value, the child's]} of the flags that differ.

    ``loss`` are the child's flags of the loss with the defaults of the loss filled in, as the parent's are.
    """
    old, new = parent.flags, child.flags | Configs([loss]).flags
    return {name: [old[name], new[name]] for name in sorted(CHANGEABLE) if old[name] != new[name]}


@dataclass(frozen=True, kw_only=True)
class BlameConfig(Flags):
    """Which changes are explained, from which weights, and where the ranking goes."""

    section = "blame"

    changes: Literal["fell", "rose", "all"] = flag(
        "fell", "the held-out tasks to explain: those whose mean score fell, rose, or both"
    )
    checkpoints: int = flag(
        10, "weights at which gradients are computed, at most, spread over the steps", within="[1, inf)"
    )
    adam_scale: bool = flag(
        True, "scale gradients as AdamW does, with the moments of the nearest checkpoint, if there is one"
    )
    top: str = flag("5%", "how many trajectories are blamed: a number, or a percentage of all")
    out: str | None = flag(None, "write the ids of the blamed Records to this file, one a line")
    csv: str | None = flag(None, "write every trajectory with its effect to this CSV file")
    label: str | None = flag(
        None, "give the blamed Records this label, by which the dashboard and `agentrl audit records` filter"
    )
    limit: int = flag(20, "trajectories and members of a group shown", within="[1, inf)")
    json: bool = flag(False, "print one JSON value on stdout; progress goes to stderr")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.top_of(100)

    def top_of(self, count: int) -> int:
        """Return how many of ``count`` trajectories are blamed, at least one. ConfigError for a bad --top."""
        found = re.fullmatch(r"(?P<percent>\d+(\.\d+)?)%|(?P<number>\d+)", self.top.strip())
        percent = float(found["percent"] or 0) if found else 0.0
        number = int(found["number"] or 0) if found else 0
        require(
            0 < percent <= 100 or number > 0,
            f"--top is {self.top!r}", "give a number of trajectories above 0, or a percentage such as 5%",
        )  # fmt: skip
        return min(count, number or math.ceil(count * percent / 100))
