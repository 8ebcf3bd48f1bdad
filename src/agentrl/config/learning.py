"""Flags of what a step learns: the loss, the optimizer, and which weights it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.fields import flag, require, require_positive


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    learning_rate: float = flag(1e-6, "peak learning rate")
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt", "warmup_stable_decay",
    ] = flag("constant", "schedule after warm-up, by its name in transformers")  # fmt: skip
    lr_scheduler_kwargs: str = flag("{}", "JSON of the schedule's own arguments, e.g. '{\"num_cycles\": 2}'")
    warmup_steps: int = flag(0, "steps of linear warm-up")
    warmup_ratio: float = flag(0.0, "steps of linear warm-up as a share of all; instead of --warmup_steps")
    weight_decay: float = flag(0.0, "AdamW weight decay; none on norms and biases")
    optim_args: str = flag("beta1=0.9,beta2=0.999,eps=1e-8", "AdamW's betas and eps")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    num_epochs_per_batch: int = flag(1, "passes over a step's data, the old logprobs kept")
    mini_batches: int = flag(1, "optimizer updates that a pass is split into, by groups")
    freeze: str | None = flag(None, "regular expression: parameters whose name it finds are not trained")

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "max_grad_norm", "num_epochs_per_batch", "mini_batches")
        require(self.warmup_steps >= 0, f"--warmup_steps is {self.warmup_steps}", "0 has no warm-up")
        require(
            0 <= self.warmup_ratio < 1, f"--warmup_ratio is {self.warmup_ratio}", "give a share in [0, 1)"
        )
        require(
            not (self.warmup_steps and self.warmup_ratio),
            f"--warmup_steps {self.warmup_steps} and --warmup_ratio {self.warmup_ratio} say the same thing",
            "leave one of them out",
        )
        require(self.weight_decay >= 0, f"--weight_decay is {self.weight_decay}", "give 0 or more")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained in place of the model's weights."""

    lora_rank: int = flag(0, "rank of the adapters (0: train the weights themselves)")
    lora_alpha: int = flag(32, "an adapter adds lora_alpha / lora_rank times its product")
    lora_target_modules: str = flag(
        "all-linear", "layers with an adapter: all-linear (but the head), or names, comma-separated"
    )

    def __post_init__(self) -> None:
        require(self.lora_rank >= 0, f"--lora_rank is {self.lora_rank}", "0 trains without adapters")
        require_positive(self, "lora_alpha")
        require(bool(self.target_modules), "--lora_target_modules names no layer", "give all-linear")

    @property
    def target_modules(self) -> str | list[str]:
        """``lora_target_modules`` as peft takes them."""
        names = [name.strip() for name in self.lora_target_modules.split(",") if name.strip()]
        return names[0] if names == ["all-linear"] else names
