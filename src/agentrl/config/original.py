"""Flags of the original AgentRL that have another name here, or no effect: what to use instead."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.sampling import SamplingConfig, TaskConfig
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What to use instead of a flag of the original."""

    use: str
    name: str | None = None
    """The flag here that takes its value; None if there is none."""
    harmless: Collection[str] | None = None
    """Values with which it can be left out, in lower case: others are refused. None: every value."""


_OFF = ("false", "0", "none", "")
PENALTIES = ("presence_penalty", "frequency_penalty")
_BATCHES = "use --groups_per_step and --max_tokens"
_PREFETCH = "the trainer reads the next step's data during a step"

REPLACEMENTS = {
    "accelerator_config": Replacement(_BATCHES),
    "activation_offloading": Replacement("use --activation_offload", "activation_offload"),
    "attention_implementation": Replacement("the trainer chooses attention by device and model"),
    "beta1": Replacement("use --ce_grpo_beta_1", "ce_grpo_beta_1"),
    "beta2": Replacement("use --ce_grpo_beta_2", "ce_grpo_beta_2"),
    "bf16": Replacement("products are in bfloat16 where that is fast; --autocast_bf16 decides otherwise"),
    "bypass_causal_mask_check": Replacement("masks are built from the data"),
    "compress_history": Replacement("use --new_context discard_all", harmless=_OFF),
    "cpu_ram_efficient_loading": Replacement("each process reads its own part of the weights"),
    "dataloader_drop_last": Replacement(_BATCHES),
    "dataloader_num_workers": Replacement(_PREFETCH),
    "dataloader_prefetch_factor": Replacement(_PREFETCH),
    "decoder_sparse_step": Replacement("the model's config.json decides it", harmless=_OFF),
    "dynamic_batching": Replacement("micro-batches are packed up to --max_tokens"),
    "enable_loss_parallel": Replacement("--loss_vocab_chunk_size bounds the memory of logits"),
    "enable_oss": Replacement("MongoDB stores images and large fields", harmless=_OFF),
    "eval_strategy": Replacement("use --eval_steps N and --eval_file", harmless=("no", *_OFF)),
    "inf_ep_size": Replacement("use --engine_args, with the engine's own flag", harmless=("1", *_OFF)),
    "log_entropy": Replacement("every step reports its entropy"),
    "logging_steps": Replacement("every step is reported"),
    "max_pixels": Replacement("the model's preprocessor_config.json limits the size of images"),
    "mcp_auth_token": Replacement(
        "export it as a variable, and name that: --mcp_auth_token_env", harmless=_OFF
    ),
    "oss_connection_string": Replacement("MongoDB stores images and large fields", harmless=_OFF),
    "output_router_logits": Replacement("no loss of a router is trained", harmless=_OFF),
    "pad_to_maximum": Replacement("forests are packed and not padded"),
    "remove_experience": Replacement("documents are kept; `agentrl db prune` deletes them", harmless=_OFF),
    "remove_unused_columns": Replacement("scorers and agents get every field of a task"),
    "save_only_model": Replacement("checkpoints hold the optimizer's state too, so that training resumes"),
    "shift_labels": Replacement("labels belong to the token before them", harmless=("true", "1")),
    "skip_non_positive_advantage": Replacement(
        "use --group_filter with a function that drops these trajectories", harmless=_OFF
    ),
    "top_k": Replacement("the sampled token's logprob is stored; --preferred_sampling_params has top_k"),
    "torch_dtype": Replacement(
        "weights are trained in float32 and published in the model's dtype; see --dtype"
    ),
    "trainer": Replacement("config.json in the model's folder names its class"),
    "tune_vision": Replacement("use --freeze with a regular expression", harmless=("true", "1")),
}
"""Flags that the original's scripts and configs.py have and AgentRL has not."""


def replace_flag(name: str, value: str) -> str | None:
    """Return the flag that takes ``value`` of the original's flag ``name``, or None to leave it out.

    Logs what to use. Raises ConfigError for a value that would change the run and has no flag here.
    """
    found = REPLACEMENTS[name]
    if found.harmless is not None and value.lower() not in found.harmless:
        shown = "" if name == "mcp_auth_token" else f" {value}"  # a secret
        raise ConfigError(f"--{name}{shown} is a flag of the original that is not taken here", hint=found.use)
    effect = f"is --{found.name} here" if found.name else "has no effect"
    logger.warning("--%s %s: %s", name, effect, found.use)
    return found.name


def replace_flags(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with the original's flags replaced or left out.

    ``--eval_strategy no`` leaves out ``--eval_steps`` too: there it has no effect, here it evaluates.
    """
    words: list[str] = []
    rest = list(argv)
    evaluates = True
    while rest:
        word = rest.pop(0)
        name, joined, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in REPLACEMENTS:
            words.append(word)
            continue
        if not joined:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        evaluates = evaluates and name != "eval_strategy"
        new = replace_flag(name, value)
        words += [f"--{new}", value] if new is not None else []
    return words if evaluates else _without(words, "--eval_steps")


def derive_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the flags of ours that the original's flags among them stand for.

    ``--gradient_accumulation_steps`` times ``--per_device_train_batch_size`` are the trajectories of a step:
    the original's scripts split batches over the processes. Penalties become part of
    ``--preferred_sampling_params``. Raises ConfigError where the two ways to give a value disagree.
    """
    flags = dict(given)
    if (accumulated := flags.get("gradient_accumulation_steps")) is not None:
        rows = accumulated * (flags.get("per_device_train_batch_size") or 1)
        size = flags.get("num_generations", TaskConfig.num_generations)
        groups = math.ceil(rows / size) if min(rows, size) > 0 else 1  # their ranges refuse the rest
        if flags.setdefault("groups_per_step", groups) != groups:
            raise ConfigError(
                f"--gradient_accumulation_steps {accumulated} means {rows} trajectories a step, {groups}"
                f" groups of --num_generations {size}, and --groups_per_step is {flags['groups_per_step']}",
                hint="leave one of the two out",
            )
    penalties = {name: flags[name] for name in PENALTIES if flags.get(name) is not None}
    if penalties:
        text = flags.get("preferred_sampling_params", SamplingConfig.preferred_sampling_params)
        flags["preferred_sampling_params"] = _with_penalties(text, penalties)
    return flags


def _with_penalties(text: str, penalties: Mapping[str, float]) -> str:
    """Return the JSON ``text`` of sampling parameters with ``penalties``."""
    try:
        params = json.loads(text)
    except ValueError:
        return text  # refused where the parameters are read
    if not isinstance(params, dict):
        return text
    for name, value in penalties.items():
        if params.setdefault(name, value) != value:
            raise ConfigError(
                f"--{name} is {value:g}, and --preferred_sampling_params has {name} {params[name]}",
                hint="leave one of the two out",
            )
    return json.dumps(params)


def _without(words: list[str], flag: str) -> list[str]:
    """Return ``words`` without ``flag`` and its value."""
    kept = [word for word in words if not word.startswith(f"{flag}=")]
    while flag in kept:
        place = kept.index(flag)
        del kept[place : place + 2]
    return kept
