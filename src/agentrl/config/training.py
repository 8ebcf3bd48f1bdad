"""Flags of training: groups, losses, optimizer, adapters, memory, parallelism, the training loop."""

from __future__ import annotations

import difflib
import importlib
import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from agentrl.config.flags import Flags, flag, names_in, require
from agentrl.errors import ConfigError

RIGHT_THRESHOLD = 0.5
"""Default of ``--right_threshold``."""


LINEAR: Final = frozenset({"leave_one_out", "dr_grpo", "reward"})
"""Built-in advantage estimators that are linear in the rewards."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Flags):
    """How the scores of a group become advantages."""

    section = "groups"

    advantage: str = flag(
        "leave_one_out",
        "advantage estimator: leave_one_out, grpo, dr_grpo, maxrl, reward (the score, without a baseline), or"
        " your own as module:name",
    )
    baseline: Literal["none", "window"] = flag(
        "none",
        "what is subtracted from the score with --advantage reward: window is the mean score of the newest"
        " trajectories of all groups, so that a group of one trajectory can be trained",
    )
    baseline_versions: int = flag(
        8,
        "policy versions of that window, up to the newest one in the group",
        within="[1, inf)",
        unit="policy versions",
    )
    adv_scaling: float = flag(1.0, "factor of every advantage", within="(-inf, inf)")
    right_threshold: float = flag(
        RIGHT_THRESHOLD, "a trajectory counts as right if its score is above this", within="(-inf, inf)"
    )
    clamp_advantage_by_score: bool = flag(
        False, "clamp advantages to A ≤ 0 for score ≤ --right_threshold and to A ≥ 0 otherwise"
    )
    balance_sample: bool = flag(
        False, "keep at most one wrong and two right trajectories more than the smaller side has"
    )
    drop_zero_advantage: bool = flag(
        True,
        "do not train model calls with advantage 0; false: they count in the loss's mean, and are computed"
        " where the loss reads more of them (metric computed_fraction)",
    )
    minimal_advantage: float = flag(
        0.0, "do not train model calls whose |advantage| is below this", within="[0, inf)"
    )
    min_turns: int = flag(
        1,
        "do not train right trajectories with fewer model calls than this",
        within="[1, inf)",
        unit="model calls",
    )
    efficient_rewarding: bool = flag(
        False, "adjust scores by the rank of the number of turns, within right and within wrong trajectories"
    )
    reserve_context_error_count: int = flag(
        -1,
        "trajectories that ended with a context error to keep per group (-1: all)",
        within="[-1, inf)",
        unit="trajectories",
    )
    group_filter: str | None = flag(
        None, "your own filter, a name or module:function, that drops trajectories before all other rules"
    )
    min_score_spread: float = flag(
        0.1, "drop a group whose highest and lowest score differ by less than this", within="[0, inf)"
    )
    overlong_limit: int = flag(
        0,
        "generated tokens of a trajectory from which its reward is lowered by the whole --overlong_penalty",
        within="[0, inf)",
        unit="tokens",
    )
    overlong_buffer: int = flag(
        0,
        "tokens before --overlong_limit over which the penalty grows linearly (0: no penalty)",
        within="[0, inf)",
        unit="tokens",
    )
    overlong_penalty: float = flag(
        1.0, "subtracted from the reward of a trajectory at --overlong_limit", within="(0, inf)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = flag(
        "sum_then_normalize",
        "of a score that is a weighted sum of scorers, --advantage takes the sum; with normalize_then_sum the"
        " advantage is the weighted sum of what it makes of each scorer",
    )
    step_advantage: Literal["off", "gigpo"] = flag(
        "off",
        "credit single model calls: gigpo adds what --advantage makes of the discounted returns of the calls"
        " that a group makes in the same state",
    )
    step_advantage_weight: float = flag(1.0, "weight of these advantages", within="(0, inf)")
    turn_discount: float | None = flag(
        None,
        "discount per model call of later turn rewards, and with --step_advantage of the score (default: 0,"
        " a call gets its own turn reward; with --step_advantage 0.95)",
        within="[0, 1]",
    )
    columns: str = flag(
        "",
        "columns that a trajectory waits for before it is trained: teacher (`agentrl teach` fills it),"
        " version_logprobs (`agentrl teach --self`), or ones that processes of your own fill",
    )

    @property
    def discount(self) -> float:
        """``turn_discount``, resolved."""
        if self.turn_discount is not None:
            return self.turn_discount
        return 0.0 if self.step_advantage == "off" else 0.95

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names in ``columns``."""
        return tuple(names_in(self.columns))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.overlong_buffer == 0 or self.overlong_limit >= self.overlong_buffer,
            f"--overlong_buffer {self.overlong_buffer} is longer than --overlong_limit {self.overlong_limit}",
            "give --overlong_limit: generated tokens of a whole trajectory that are too many",
        )
        require(
            self.advantage != "maxrl" or not (self.overlong_buffer or self.efficient_rewarding),
            "--advantage maxrl divides by the mean of the rewards, and --overlong_buffer and"
            " --efficient_rewarding lower some below 0",
            "leave out one of the two",
        )
        require(
            self.step_advantage == "off" or self.advantage != "reward",
            f"--step_advantage {self.step_advantage} compares the calls of a group, and --advantage reward"
            " compares nothing",
            "use another --advantage, e.g. grpo or leave_one_out",
        )
        require(
            self.baseline == "none" or self.advantage == "reward",
            f"--baseline {self.baseline} with --advantage {self.advantage}, which has a baseline of its own",
            "use --advantage reward, or leave it out",
        )
        self._require_apart()
        for name in self.column_names:
            require(
                name.isidentifier(),
                f"--columns has {name!r}",
                "use letters, digits and _ in a name; the columns of a task file are named by --task_fields",
            )

    def _require_apart(self) -> None:
        """Refuse what normalizing each scorer by itself does not change, and what has no scorer."""
        if self.multi_objective_aggregation == "sum_then_normalize":
            return
        what = "--multi_objective_aggregation normalize_then_sum"
        require(
            self.advantage not in LINEAR,
            f"{what} with --advantage {self.advantage}, which is linear: apart or as a sum, it is the same",
            "use --advantage grpo, which divides by the standard deviation",
        )
        require(
            not (self.overlong_buffer or self.efficient_rewarding),
            f"{what}: --overlong_buffer and --efficient_rewarding change the sum, and no scorer's score",
            "leave them out, or make the length a scorer of the sum",
        )
        require(
            self.step_advantage == "off",
            f"{what} with --step_advantage {self.step_advantage}: a return is one number, and has no scorers",
            "leave out one of the two",
        )


OldLogprobs = Literal["behavior", "recompute", "loglinear", "version"]
OLD_LOGPROBS: tuple[OldLogprobs, ...] = get_args(OldLogprobs)
VERSION_LOGPROBS: Final = "version_logprobs"
"""The column with the policy's own logprobs at the version that sampled each token."""

CAPS = ("tis", "seq_tis")
WEIGHTS = (*CAPS, "icepop", "seq_icepop", "kpop")
_ONE_NUMBER = (*CAPS, "kpop", "seq_kl")

_LOSSES = importlib.import_module("agentrl.losses.loss")
LOSS_PARAMETERS = frozenset(_LOSSES.loss_flags())
"""Flags that a loss reads only if it has a parameter of that name."""

C = TypeVar("C", bound=type[Flags])


def _with_flags_of_losses(group: C) -> C:
    """Add the flags that losses declare, each in its own file, to the fields of ``group``.

    The package of losses is above this one, so it is found by name; its declarations import no torch.
    """
    for name, declared in _LOSSES.loss_flags().items():
        group.__annotations__[name] = declared.type
        setattr(group, name, declared.field)
    return group


@dataclass(frozen=True, kw_only=True)
# Apply it below dataclass, which reads the annotations of a class once, when it makes it.
@_with_flags_of_losses
class LossConfig(Flags):
    """The loss (docs/losses.md)."""

    section = "loss"

    loss_calculater: str = flag(
        "GRPO", f"the loss: {', '.join(_LOSSES.built_in_losses())}, or one of your own as module:function"
    )
    loss_args: str = flag("{}", "JSON of the parameters of a loss that are no flags, e.g. '{\"beta\": 0.1}'")
    token_level_loss: bool | None = flag(
        None, "average over the step's tokens instead of its trajectories (default: the loss's own)"
    )
    skip_length_normalization: bool | None = flag(
        None, "use the sum of a trajectory's token losses instead of their mean (default: the loss's own)"
    )
    loss_length_divisor: int | None = flag(
        None,
        "divide the sum of a trajectory's token losses by this constant, e.g. the generation budget"
        " (Dr. GRPO)",
        within="[1, inf)",
        unit="tokens",
    )
    strict_in_bound: bool | None = flag(
        None,
        "drop tokens whose πθ/μ is outside [1 - epsilon, 1 + epsilon + epsilon_higher] in the direction of"
        " their advantage (default: the loss's own)",
    )
    epsilon: float | None = flag(
        None, "lower end of the clip interval: 1 - epsilon (default: the loss's own)", within="[0, 1]"
    )
    epsilon_higher: float | None = flag(
        None,
        "upper end of the clip interval: 1 + epsilon + epsilon_higher (default: the loss's own)",
        within="[0, inf)",
    )
    importance_weight_cap_ratio: float | None = flag(
        None,
        "drop tokens whose πθ/μ is outside the clip interval widened by this factor, e.g. 4; inf drops none"
        " (default: the loss's own)",
        within="[1, inf]",
    )
    out_of_date_decay: float | None = flag(
        None,
        "multiply the width of these bounds by exp(-decay) per optimizer step of a token's age; also the"
        " decay of --staleness_policy decay",
        within="[0, inf)",
    )
    importance_correction: str = flag(
        "",
        "corrections of the mismatch between engine and trainer, comma-separated: tis, seq_tis, icepop,"
        " seq_icepop, kpop, token_mask, seq_mask, seq_kl; e.g. 'icepop:0.5:5,seq_kl:0.1'",
    )
    old_logprobs: Literal["behavior", "recompute", "loglinear", "version"] = flag(
        "behavior",
        "logprobs of π_old: the engine's (behavior), the trainer's at the start of the step (recompute), an"
        " interpolation by a token's age (loglinear), or the trainer's at the version that sampled the token"
        " (version; needs --columns version_logprobs and `agentrl teach --self`)",
    )
    kl_coef: float = flag(
        0.0, "weight of the KL to a reference model in the loss (0: none)", within="[0, inf)"
    )
    kl_estimator: Literal["weighted_k3", "k1", "k2", "k3"] = flag(
        "weighted_k3", "estimator of that KL from a sampled token; weighted_k3 is unbiased off-policy"
    )
    entropy_coef: float = flag(
        0.0, "weight of the entropy bonus, which is subtracted from the loss (0: none)", within="[0, inf)"
    )

    distill_coef: float | None = flag(
        None,
        "weight of log π_teacher/πθ in a token's advantage, with --columns teacher (default: OPD 1, else 0)",
        within="[0, inf)",
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # a flag that a loss declares

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_corrections(self.importance_correction)
        # Parse both now: what is wrong in them ends the command before it loads a model.
        _ = self.arguments
        require(
            self.loss_length_divisor is None or not self.token_level_loss,
            f"--loss_length_divisor is {self.loss_length_divisor}, and --token_level_loss is true",
            "set --token_level_loss false: an average over the step's tokens divides by their number",
        )

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """``importance_correction``, parsed."""
        return parse_corrections(self.importance_correction)

    @property
    def arguments(self) -> dict[str, Any]:
        """``loss_args``, parsed. Raises ConfigError unless it is a JSON object."""
        try:
            values = json.loads(self.loss_args)
        except ValueError as error:
            raise ConfigError(
                f"--loss_args is {self.loss_args!r}: {error}",
                hint="give a JSON object, e.g. '{\"beta\": 0.1}'",
            ) from error
        require(
            isinstance(values, dict),
            f"--loss_args is {self.loss_args!r}",
            "give a JSON object, e.g. '{\"beta\": 0.1}'",
        )
        return dict(values)


@dataclass(frozen=True, slots=True)
class Correction:
    """One entry of ``--importance_correction``: its name and its bounds."""

    name: str
    low: float
    high: float

    @property
    def caps(self) -> bool:
        """Whether it caps a weight; the other corrections drop tokens outside the bounds."""
        return self.name in CAPS

    @property
    def reads_trajectory(self) -> bool:
        """Whether it reads the whole trajectory of a token."""
        return self.name.startswith("seq_")


_DEFAULTS = {
    "tis": Correction("tis", 0.0, 2.0),
    "seq_tis": Correction("seq_tis", 0.0, 2.0),
    "icepop": Correction("icepop", 0.5, 5.0),
    "seq_icepop": Correction("seq_icepop", 0.0, 3.0),
    "seq_mask": Correction("seq_mask", 0.9, 1.1),
    "kpop": Correction("kpop", 0.0, 0.1),
    "token_mask": Correction("token_mask", 0.5, 2.0),
    "seq_kl": Correction("seq_kl", 0.0, 0.1),
}


def parse_corrections(text: str) -> tuple[Correction, ...]:
    """Read ``--importance_correction``: names with optional bounds, comma-separated.

    Below, w is π_old/μ; where π_old is μ, it is πθ/μ instead.
    ``tis[:C]`` multiplies by w capped at C (truncated importance sampling; default 2, ``inf`` caps nothing).
    ``seq_tis[:C]`` multiplies by the product of w over the trajectory, capped at C (2).
    ``icepop[:low:high]`` multiplies by w and drops tokens with w outside the bounds (0.5, 5).
    ``seq_icepop[:low:high]`` multiplies by that product and drops trajectories with it outside the bounds
    (0, 3).
    ``kpop[:limit]`` multiplies by w and drops tokens for which the KL between the two probabilities of the
    token, as those of a yes or no, is above the limit in either direction (0.1 nats).
    ``token_mask[:low:high]`` drops tokens with w outside the bounds (0.5, 2) and multiplies by nothing.
    ``seq_mask[:low:high]`` drops trajectories whose geometric mean of w is outside the bounds (0.9, 1.1).
    ``seq_kl[:limit]`` drops trajectories whose mean of w − 1 − log w, an estimate of the KL from μ, is above
    the limit (0.1 nats per token).
    Raises ConfigError for an unknown or repeated name and for invalid bounds.
    """
    corrections: list[Correction] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        correction = _parse_correction(entry)
        if correction.name in {earlier.name for earlier in corrections}:
            raise ConfigError(
                f"--importance_correction names {correction.name!r} twice", hint="name each correction once"
            )
        corrections.append(correction)
    require(
        bool(corrections) or not text, f"--importance_correction {text!r} names none", "give one, e.g. tis:2"
    )
    return tuple(corrections)


def _parse_correction(entry: str) -> Correction:
    name, *numbers = entry.split(":")
    if name not in _DEFAULTS:
        # Set the cutoff to 0: then the list is never empty, however far the name is.
        nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--importance_correction has the unknown name {name!r}; choose from {', '.join(_DEFAULTS)}",
            hint=f"did you mean {nearest!r}?",
        )
    if not numbers:
        return _DEFAULTS[name]
    form = f"{name}:{'C' if name in CAPS else 'limit'}" if name in _ONE_NUMBER else f"{name}:low:high"
    hint = f"write it as {form} with numbers, 0 ≤ low < high"
    try:
        bounds = [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(f"--importance_correction has {entry!r}", hint=hint) from error
    if name in _ONE_NUMBER:
        bounds = [0.0, *bounds]
    if len(bounds) != 2 or any(math.isnan(bound) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
        raise ConfigError(f"--importance_correction has {entry!r}", hint=hint)
    return Correction(name, bounds[0], bounds[1])


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Flags):
    """The critic: a value model that gives advantages (PPO)."""

    section = "critic"

    critic: Literal["off", "head", "model"] = flag(
        "off",
        "value model: a head on the policy's hidden states, which its gradient does not reach (head), or a"
        " model of its own (model)",
    )
    critic_model: str | None = flag(
        None, "folder that --critic model begins from (default: that of the policy)"
    )
    critic_head: str = flag(
        "linear", "what turns a hidden state into a value: linear, or your own as module:name"
    )
    critic_learning_rate: float | None = flag(
        None,
        "peak learning rate of the critic; its schedule is the policy's (default: 1e-5 of a model, 0.1 /"
        " hidden size of a head)",
        within="(0, inf)",
    )
    critic_warmup_steps: int = flag(
        0,
        "first steps, which train the critic alone; the policy's schedule begins after them",
        within="[0, inf)",
        unit="optimizer steps",
    )
    gamma: float = flag(1.0, "discount of a reward per later token or turn", within="[0, 1]")
    gae_lambda: float = flag(
        1.0, "weight of later values in an advantage: 1, the return alone; 0, the next value", within="[0, 1]"
    )
    gae_over: Literal["tokens", "turns"] = flag("tokens", "what is one action: a token, or a model call")
    value_clip: float = flag(
        0.5, "in later updates of a step, values move at most this far from its start (inf: no limit)",
        within="(0, inf]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.critic_model is None or self.critic == "model",
            f"--critic_model {self.critic_model} with --critic {self.critic}",
            "set --critic model, or leave it out",
        )

    @property
    def is_on(self) -> bool:
        """Whether there is a critic."""
        return self.critic != "off"


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Flags):
    """The optimizer and its schedule."""

    section = "optimizer"

    learning_rate: float = flag(1e-6, "peak learning rate", within="(0, inf)")
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt", "warmup_stable_decay",
    ] = flag("constant", "schedule after warm-up, by its name in transformers")  # fmt: skip
    lr_scheduler_kwargs: str = flag("{}", "JSON of the schedule's own arguments, e.g. '{\"num_cycles\": 2}'")
    warmup_steps: int = flag(
        0, "length of the linear warm-up (0: none)", within="[0, inf)", unit="optimizer steps"
    )
    warmup_ratio: float = flag(
        0.0,
        "length of the linear warm-up as a fraction of all steps; instead of --warmup_steps",
        within="[0, 1)",
    )
    weight_decay: float = flag(
        0.0, "weight decay of AdamW; norms and biases are not decayed", within="[0, inf)"
    )
    optim_args: str = flag("beta1=0.9,beta2=0.999,eps=1e-8", "betas and eps of AdamW")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", within="(0, inf)")
    num_epochs_per_batch: int = flag(
        1, "passes over the data of a step; old logprobs are kept", within="[1, inf)", unit="passes"
    )
    mini_batches: int = flag(
        1, "optimizer updates per pass; the groups are split", within="[1, inf)", unit="updates"
    )
    freeze: str | None = flag(
        None, "regular expression; parameters whose name it matches somewhere are not trained"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.warmup_steps and self.warmup_ratio),
            f"--warmup_steps {self.warmup_steps} and --warmup_ratio {self.warmup_ratio} set the same thing",
            "leave one of them out",
        )


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Flags):
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained instead of the model's weights."""

    section = "lora"

    lora_rank: int = flag(0, "rank of the adapters (0: train the weights themselves)", within="[0, inf)")
    lora_alpha: int = flag(
        32, "the output of an adapter is multiplied by lora_alpha / lora_rank", within="[1, inf)"
    )
    lora_target_modules: str = flag(
        "all-linear",
        "layers with an adapter: all-linear (all linear layers except the output head), or names,"
        " comma-separated",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.target_modules), "--lora_target_modules names no layer", "give all-linear")

    @property
    def target_modules(self) -> str | list[str]:
        """``lora_target_modules`` as peft takes them."""
        names = names_in(self.lora_target_modules)
        return names[0] if names == ["all-linear"] else names


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Flags):
    """Memory and speed of a training step; no flag changes a loss beyond rounding."""

    section = "memory"

    activation_checkpointing: Literal["none", "full", "selective"] = flag(
        "none",
        "activations that the backward recomputes: none; those of whole layers (full, the same as"
        " --gradient_checkpointing); or all except the results of matrix products and attention (selective)",
    )
    activation_offload: bool = flag(
        False, "keep the activations that checkpointing full saves in the host's memory"
    )
    optimizer_offload: bool = flag(
        False, "keep the moments of AdamW in the host's memory; one tensor at a time is copied"
    )
    fused_adamw: bool = flag(True, "use the fused AdamW kernel")
    gradient_reduction: Literal["auto", "last", "every"] = flag(
        "auto",
        "when several processes reduce gradients: in the last micro-batch of a step (until then each process"
        " holds the gradients of the whole model), or in every micro-batch (it holds its shard); auto: every,"
        " if whole gradients would take more than an eighth of the device's memory",
    )
    torch_compile: bool = flag(False, "compile the decoder layers with torch.compile")
    loss_vocab_chunk_size: int | None = flag(
        None,
        "chunk of the vocabulary in the projection to logits (default: 8192)",
        within="[1, inf)",
        unit="vocabulary entries",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Flags):
    """Parallelism of the trainer; the model is sharded (FSDP) over the ranks that these sizes leave."""

    section = "parallel"

    dp_replicate_size: int = flag(
        1, "replicas of the model; each is sharded over the remaining ranks", within="[1, inf)", unit="ranks"
    )
    tp_size: int = flag(
        1, "ranks that split each layer (tensor parallelism)", within="[1, inf)", unit="ranks"
    )
    pp_size: int = flag(
        1, "ranks that hold consecutive layers (pipeline parallelism)", within="[1, inf)", unit="ranks"
    )
    cp_size: int = flag(
        1,
        "ranks that split the tokens of each trajectory (context parallelism)",
        within="[1, inf)",
        unit="ranks",
    )
    ep_size: int = flag(
        1,
        "ranks that split the experts of a mixture of experts (expert parallelism)",
        within="[1, inf)",
        unit="ranks",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ParallelConfig):
    """The training loop: steps, data, checkpoints and published weights."""

    section = "training"

    max_steps: int = flag(
        -1,
        "optimizer steps of the whole run (-1: until the tasks are used up)",
        within="[-1, inf)",
        unit="optimizer steps",
        per_process=True,
    )
    groups_per_step: int = flag(4, "groups that one optimizer step trains", within="[1, inf)", unit="groups")
    gradient_accumulation_steps: int | None = flag(
        None,
        "times --per_device_train_batch_size, the trajectories of one optimizer step over all processes:"
        " another way to give --groups_per_step",
        within="[1, inf)",
    )
    per_device_train_batch_size: int | None = flag(
        None, "factor of --gradient_accumulation_steps (default: 1)", within="[1, inf)", unit="trajectories"
    )
    max_tokens: int = flag(65536, "size of a micro-batch", within="[1, inf)", unit="tokens")
    prefix_merging: Literal["off", "trajectory", "group"] = flag(
        "group", "merge common prefixes into a tree per trajectory or per group; off: one row per model call"
    )
    staleness_policy: Literal["keep", "decay", "mask", "drop"] = flag(
        "keep",
        "what happens to tokens older than --max_staleness: train them as others (keep); multiply their"
        " advantage by exp(-out_of_date_decay) per optimizer step beyond it (decay); train their trajectory"
        " without them (mask); or drop their group (drop)",
    )
    advantage_whitening: Literal["none", "batch"] = flag(
        "none",
        "batch: subtract the mean of the advantages over the step's trained tokens, and divide by their"
        " standard deviation (REINFORCE++)",
    )
    max_trained_count: int = flag(1, "how often one trajectory is trained", within="[1, inf)", unit="times")
    retrained_interval: int = flag(
        1, "steps between two trainings of one trajectory", within="[0, inf)", unit="optimizer steps"
    )
    save_steps: int = flag(10, "interval of resumable checkpoints", within="[1, inf)", unit="optimizer steps")
    save_total_limit: int = flag(2, "checkpoints kept", within="[1, inf)", unit="checkpoints")
    weight_sync: Literal["disk", "tensor", "distributed"] = flag(
        "disk",
        "how versions reach engines: disk: as files; tensor: from the trainer's memory, on its own host;"
        " distributed: over the network, without a disk",
    )
    full_every: int = flag(
        50,
        "store whole weights at least every N-th version, between deltas or beside --weight_sync tensor or"
        " distributed; an engine that starts reads them and the deltas since",
        within="[1, inf)",
        unit="versions",
    )
    publish_steps: int = flag(1, "interval of published weights", within="[1, inf)", unit="optimizer steps")
    publish: Literal["auto", "full", "delta", "adapter"] = flag(
        "auto",
        "what a version holds: full, the whole weights, with adapters merged in; delta, the elements that"
        " differ from the version before; adapter, that of --lora_rank alone, which an engine without"
        " adapters merges itself; auto, the adapter where one is trained, else a delta where it has less"
        " than half of the bytes",
    )
    publish_to: str | None = flag(
        None,
        "where published weights are stored, in a subfolder of the run's name: a folder, or a URL with s3://,"
        " gs://, http:// or https:// (default: the folder weights in --output_dir)",
    )
    published_versions_kept: int = flag(
        4,
        "versions of published weights kept on disk; at least 2, since engines may still load the older one",
        within="[2, inf)",
        unit="versions",
    )
    keep_every: int = flag(
        0,
        "also keep every N-th published version without limit (0: none)",
        within="[0, inf)",
        unit="versions",
    )
    publish_wait_seconds: float = flag(
        600.0,
        "how long training pauses when weights cannot be published and data would become too stale; after"
        " that it saves and exits",
        within="(0, inf)",
        unit="seconds",
    )
    fallback_output_dir: str | None = flag(
        None, "folder on another disk for checkpoints that do not fit in --output_dir", per_process=True
    )
    max_bad_steps: int = flag(
        3,
        "consecutive steps without a finite loss and gradient after which training ends",
        within="[1, inf)",
        unit="optimizer steps",
    )
    resume_from_checkpoint: str | None = flag(
        "auto",
        "checkpoint to resume from: auto (the newest one whose steps have not been reverted), a checkpoint"
        " folder, or none",
        per_process=True,
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward")
    loss_seq_chunk_size: int | None = flag(
        None,
        "chunk of the tokens in the projection to logits (default: 1024, on a GPU 8192)",
        within="[1, inf)",
        unit="tokens",
    )
    autocast_bf16: Literal["auto", "true", "false"] = flag(
        "auto",
        "compute matrix products in bfloat16, and add up gradients in --dtype; auto: where the device"
        " multiplies bfloat16 faster than float32, which a CPU measures at start",
    )
    token_statistics_mib: float = flag(
        4.0,
        "importance ratios and entropies of single tokens that a step stores for the dashboard, at most: 4"
        " bytes a computed token, whole trajectories, those of the first groups first (0: none)",
        within="[0, inf)",
        unit="MiB a step",
        per_process=True,
    )
    verify_data: bool = flag(
        True, "check training data against their Records and model calls before a step trains them"
    )
    data_wait_seconds: float = flag(
        3600.0,
        "exit if the data of one step are not complete after this long",
        within="(0, inf)",
        unit="seconds",
    )
    report_to: str = flag(
        "none",
        "trackers, comma-separated: none, tensorboard, wandb, swanlab, mlflow, trackio, comet, clearml, or"
        " your own as module:name (docs/metrics.md)",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_steps != 0, "--max_steps is 0", "give 1 or more, or -1: until the tasks are used up")


@dataclass(frozen=True, kw_only=True)
class IgnoredConfig(Flags):
    """Flags of the original's scripts that are accepted without effect; using one logs a warning."""

    section = "ignored"

    enable_sampling: bool = flag(True, "sampling is a process of its own: `agentrl sample`", ignored=True)
    pad_to_multiple_of: int | None = flag(None, "forests are packed and not padded", ignored=True)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Flags):
    """Supervised fine-tuning, and reward models."""

    objective: Literal["sft", "reward"] = flag(
        "sft",
        "what is trained: sft, what assistants say; reward, a reward model on pairs of trajectories of one"
        " task (docs/preferences.md)",
    )
    batch_size: int = flag(
        64, "conversations per optimizer step; with --objective reward groups, of which all pairs count",
        within="[1, inf)",
    )  # fmt: skip
    log_steps: int = flag(20, "interval of log lines", within="[1, inf)", unit="optimizer steps")
    sft_from_records: str | None = flag(
        None, "train the scored Records of this run, with their sampled token ids, instead of --train_file"
    )
    sft_split: str = flag("train", "split of these Records")
    sft_min_score: float = flag(1.0, "minimum score of these Records", within="(-inf, inf)")
    reward_heldout: float = flag(
        0.1, "fraction of the questions that --objective reward leaves out, to measure its accuracy",
        within="[0, 1)",
    )  # fmt: skip
    reward_margin: float = flag(
        0.0,
        "what the rewards of a pair must differ by, as a multiple of the difference of its scores, or of the"
        " margin of its line",
        within="[0, inf)",
    )
    center_rewards_coefficient: float = flag(
        0.0, "coefficient of (r_chosen + r_rejected)², which keeps rewards around 0 (arXiv 2312.09244)",
        within="[0, inf)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {item.name: item.default for item in fields(self)}
        reads_pairs = self.objective == "reward"
        for name in ("reward_heldout", "reward_margin", "center_rewards_coefficient"):
            require(
                reads_pairs or getattr(self, name) == defaults[name],
                f"--{name} {getattr(self, name):g} with --objective {self.objective}: it is a reward model's",
                "add --objective reward, or leave it out",
            )
        require(
            not reads_pairs or self.sft_min_score == 1.0,
            f"--sft_min_score {self.sft_min_score:g} with --objective reward, which compares all scores",
            "leave it out",
        )
        require(
            self.sft_from_records is not None or (self.sft_split, self.sft_min_score) == ("train", 1.0),
            f"--sft_split {self.sft_split} and --sft_min_score {self.sft_min_score:g} choose Records",
            "add --sft_from_records RUN, or leave them out",
        )


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Flags):
    """The GPUs that are planned for, and the trajectories that they train."""

    section = "plan"

    model: str | None = flag(None, "folder with the model's config.json; weights are not read")
    gpus: str = flag("8xH100", "number and kind of the trainer's GPUs")
    gpu_memory_gib: float | None = flag(
        None, "memory of one GPU (default: that of its kind)", within="(0, inf)", unit="GiB"
    )
    gpus_per_node: int = flag(8, "GPUs of one machine", within="[1, inf)", unit="GPUs")
    network_gbps: float = flag(400.0, "bandwidth between machines, per GPU", within="(0, inf)", unit="Gbit/s")
    memory_reserve: float = flag(
        0.1,
        "fraction of a GPU's memory that is left free: CUDA context, NCCL, workspaces, fragmentation",
        within="[0, 1)",
    )
    context: int = flag(32768, "longest trajectory", within="[2, inf)", unit="tokens")
    trajectory_tokens: int | None = flag(
        None, "mean length of a trajectory (default: --context)", within="[2, inf)", unit="tokens"
    )
    prompt_tokens: int = flag(
        0, "context that the trajectories of a group have in common", within="[0, inf)", unit="tokens"
    )
    turns: int = flag(10, "model calls of a trajectory", within="[1, inf)", unit="model calls")
    trained_share: float = flag(0.5, "fraction of a trajectory's tokens that is generated", within="(0, 1]")
    tool_seconds: float = flag(1.0, "time of the tool calls of one turn", within="[0, inf)", unit="seconds")
    mfu: float = flag(
        0.4, "fraction of the GPU's peak FLOP/s that matrix products are assumed to reach", within="(0, 1]"
    )
    engine_gpu: str | None = flag(None, "kind of an engine's GPU (default: the trainer's)")
    request_tokens_per_second: float = flag(
        30.0, "tokens that an engine generates for one request", within="(0, inf)", unit="tokens/s"
    )
    fitting: int = flag(3, "layouts that fit to show, the fastest ones", within="[1, inf)", unit="layouts")
    json: bool = flag(False, "print JSON")
