"""Flags of training: optimizer, adapters, memory, parallelism, the training loop, and its planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.flags import Flags, flag, names_in, require


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
        "group",
        "merge common prefixes into a tree per trajectory or per group; off: one row per model call",
    )
    staleness_policy: Literal["drop", "decay", "mask"] = flag(
        "drop",
        "what happens to data with tokens older than --max_staleness: drop it; multiply its advantage by"
        " exp(-out_of_date_decay) per optimizer step beyond (decay); or train it without these tokens (mask)",
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
        "chunk of the tokens in the projection to logits (default: 1024)",
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
        " bytes a trained token, whole trajectories, those of the first groups first (0: none)",
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
    """Supervised fine-tuning."""

    batch_size: int = flag(64, "conversations per optimizer step", within="[1, inf)")
    log_steps: int = flag(20, "interval of log lines", within="[1, inf)", unit="optimizer steps")
    sft_from_records: str | None = flag(
        None, "train the scored Records of this run, with their sampled token ids, instead of --train_file"
    )
    sft_split: str = flag("train", "split of these Records")
    sft_min_score: float = flag(1.0, "minimum score of these Records", within="(-inf, inf)")


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
