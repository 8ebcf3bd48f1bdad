"""Every flag that a trainer reads, with every loss and with an adapter: it changes something, or is refused.

``tests/core/unit/losses/test_loss_settings.py`` has the flags of losses and of groups. For those that do not
change a step, such as intervals and timeouts, there is the weakest proof alone: a module reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_data import group

import agentrl
from agentrl.config.load import Configs, flag_names
from agentrl.config.schema import (
    GROUPS,
    AdapterConfig,
    ContainerConfig,
    GatewayConfig,
    GroupConfig,
    IgnoredConfig,
    LossConfig,
    MemoryConfig,
    OptimConfig,
    ParallelConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import SFTConfig
from agentrl.data.stream import Freshness, freshness_of
from agentrl.distributed.mesh import plan_layout
from agentrl.documents.model_call import pack_floats, pack_ids, unpack_ids
from agentrl.documents.record import TokenColumns
from agentrl.errors import ConfigError
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import IDLE_RULES, check_loss
from agentrl.train.build import build_trainer
from agentrl.train.optimizer import build_optimizer, build_scheduler
from agentrl.train.sft import fine_tune
from agentrl.train.step import PolicyTrainer

LOOPS: Mapping[str, Any] = {"num_epochs_per_batch": 2, "mini_batches": 2}
"""Flag → a value with which a step calls the loss more often."""
UPDATES: Mapping[str, Any] = LOOPS | {
    "learning_rate": 1e-2, "weight_decay": 0.5, "optim_args": "eps=1e-2", "max_grad_norm": 1e-9,
}  # fmt: skip
"""Flag → a value that changes the weights after one step."""
BUILT: Mapping[str, Any] = {
    "lora_rank": 2, "lora_alpha": 8, "lora_target_modules": "q_proj", "freeze": r"layers\.0\.",
    "activation_checkpointing": "full", "gradient_checkpointing": True, "optimizer_offload": True,
    "fused_adamw": False, "loss_vocab_chunk_size": 7, "loss_seq_chunk_size": 3,
    "max_tokens": 10, "prefix_merging": "off", "token_statistics_mib": 0.0, "dtype": "bfloat16",
    "autocast_bf16": "true", "seed": 1,
}  # fmt: skip
"""Flag → a value with which another trainer is built, or with which it packs other micro-batches."""
SCHEDULES: Mapping[str, Any] = {
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "warmup_ratio": 0.5,
    "lr_scheduler_kwargs": '{"power": 3.0}', "max_steps": 3,
}  # fmt: skip
"""Flag → a value that changes the learning rates of ten steps of a polynomial schedule."""
AGES: Mapping[str, Any] = {"max_staleness": 3, "sync_sampling": True, "staleness_policy": "mask"}
"""Flag → a value with which other tokens count as old."""
ELSEWHERE = {
    "activation_offload": "tests/core/unit/train/test_memory.py",
    "torch_compile": "tests/core/integration/test_compiled_layers.py",
    "gradient_reduction": "tests/core/integration/distributed/accumulation.py",
}
"""Flags that are tried where there are several processes, or a compiler."""
READ = {
    "groups_per_step", "gradient_accumulation_steps", "advantage_whitening", "max_trained_count",
    "retrained_interval", "save_steps", "save_total_limit", "weight_sync", "full_every", "publish_steps",
    "publish", "publish_to", "published_versions_kept", "keep_every", "publish_wait_seconds",
    "fallback_output_dir", "max_bad_steps", "resume_from_checkpoint", "verify_data", "data_wait_seconds",
    "report_to", "per_device_train_batch_size",
}  # fmt: skip
"""Flags of ``TrainConfig`` that change which data a step has and what follows it: the weakest proof, that a
module reads them, beside the tests of that module and ``REFUSED``."""
DERIVED: Mapping[str, tuple[type, Any, str]] = {
    "import_modules": (TaskConfig, "m", "imported_modules"),
    "allowed_modules": (TaskConfig, "m", "allowed_names"),
    "allowed_folders": (TaskConfig, "/f", "allowed_names"),
    "task_variables": (ContainerConfig, "PATH", "variables"),
    "gateway_models": (GatewayConfig, "m", "models"),
    "gateway_idle_minutes": (GatewayConfig, 1.0, "idle_seconds"),
}  # fmt: skip
"""Flag → (its group, a value, the property of the group that it changes, which a module reads)."""
REFUSED: tuple[tuple[str, Any, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("mini_batches", 5, {}, {"groups_per_step": 5}),
    ("max_staleness", 3, {"sync_sampling": True}, {}),
    (
        "max_trained_count",
        2,
        {"retrained_interval": 2, "staleness_policy": "drop"},
        {"retrained_interval": 2, "max_staleness": 2},
    ),
    ("max_trained_count", 2, {"sync_sampling": True, "staleness_policy": "drop"}, {"sync_sampling": True}),
    ("retrained_interval", 5, {}, {"max_trained_count": 2, "max_staleness": 5}),
    ("per_device_train_batch_size", 2, {}, {"gradient_accumulation_steps": 2}),
    ("lr_scheduler_type", "constant_with_warmup", {}, {"warmup_steps": 5}),
    ("autocast_bf16", "false", {"dtype": "bfloat16"}, {}),
    ("publish", "delta", {"weight_sync": "tensor"}, {}),
    ("publish", "adapter", {}, {"lora_rank": 2}),
    ("publish", "adapter", {"lora_rank": 2, "weight_sync": "distributed"}, {"lora_rank": 2}),
    ("full_every", 9, {"publish": "full"}, {"publish": "full", "weight_sync": "tensor"}),
    ("full_every", 9, {"lora_rank": 2}, {"lora_rank": 2, "publish": "delta"}),
    ("lora_alpha", 8, {}, {"lora_rank": 2}),
    ("lora_target_modules", "q_proj", {}, {"lora_rank": 2}),
    *((flag, value, {}, {"critic": "head"}) for flag, value in {
        "critic_head": "m:f", "critic_learning_rate": 0.1, "critic_warmup_steps": 2, "gamma": 0.9,
        "gae_lambda": 0.9, "gae_over": "turns",
    }.items()),
    ("value_clip", 0.1, {}, {"critic": "head", "mini_batches": 2}),
    ("value_clip", 0.1, {"critic": "head"}, {"critic": "head", "num_epochs_per_batch": 2}),
    ("trace_content", True, {}, {"trace": "sqlite:///t.db"}),
    ("trace_queue", 9, {}, {"trace": "sqlite:///t.db"}),
)  # fmt: skip
"""(Flag, value, flags with which it changes nothing, flags with which it does), whatever the loss is."""
LOSSES_NAMED = sorted(LOSSES.names())


def configs_of(loss: str = "GRPO", **flags: Any) -> Configs:
    """The flags of a run with ``loss``, and with those that it needs."""
    if LOSSES.get(loss).ignores_score:
        flags = {"columns": "teacher", "drop_zero_advantage": False, "min_score_spread": 0.0, **flags}
    return Configs.of(GROUPS, {"loss_calculater": loss, **flags}, flags)


def taught() -> Iterator[Any]:
    """Two groups with a prompt in common and with the logprobs of a teacher."""
    columns = TokenColumns({"teacher": torch.full((4,), -4.0).numpy()}).pack()
    for item in (*group("a"), *group("b", size=4)):
        ids = [1, 2, 3, 4, 5, 6, *unpack_ids(item.input_ids)[6:].tolist()]
        yield replace(
            item, input_ids=pack_ids(ids), columns=columns, behavior_logprobs=pack_floats([-5.6] * 4)
        )


def built(base: Path, **flags: Any) -> PolicyTrainer:
    return build_trainer(configs_of(model_name_or_path=str(base), **flags), weights=None, total_steps=None)


def trained(built: PolicyTrainer, start: Mapping[str, torch.Tensor], **flags: Any) -> list[torch.Tensor]:
    """The weights after a step from ``start`` with the optimizer and the loop that ``flags`` ask for."""
    weights = dict(built.policy.model.named_parameters())
    with torch.no_grad():
        for name, value in start.items():
            weights[name].copy_(value)
    optim = OptimConfig(**{"learning_rate": 1e-3, **flags})
    optimizer = build_optimizer(built.policy.model, optim)
    other = replace(
        built, optimizer=optimizer, scheduler=build_scheduler(optimizer, optim, None),
        max_grad_norm=optim.max_grad_norm, epochs=optim.num_epochs_per_batch, mini_batches=optim.mini_batches,
    )  # fmt: skip
    assert other.train(list(taught()), {0: 0}).is_finite
    return [weights[name].detach().clone() for name in start]


def test_every_flag_is_in_a_table_or_read_by_a_module() -> None:
    """A new flag of training comes to a table; one of another process is read somewhere."""
    pytest.importorskip("agentrl.local", reason="wings read some flags")
    proven = {*UPDATES, *BUILT, *SCHEDULES, *AGES, *DERIVED, *flag_names(ParallelConfig, IgnoredConfig)}
    sources = (path for path in Path(agentrl.__file__).parent.rglob("*.py") if path.parent.name != "config")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    text += Path(agentrl.__file__).with_name("config").joinpath("load.py").read_text(encoding="utf-8")
    read = set(re.findall(r"""\.(\w+)\b|(?<=["'])(\w+)(?=["'])""", text))
    words = {word for found in read for word in found}
    names = set(flag_names(*(kind for kind in GROUPS if kind not in (LossConfig, GroupConfig))))
    assert sorted(names - proven - words) == []
    assert {name for _, _, name in DERIVED.values()} <= words
    of_training = set(flag_names(OptimConfig, AdapterConfig, MemoryConfig, TrainConfig))
    assert of_training - proven == READ | ELSEWHERE.keys()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("loss", LOSSES_NAMED)
def test_a_flag_of_updates_changes_the_weights_of_every_loss(base: Path, loss: str, rank: int) -> None:
    trainer = built(base, loss=loss, lora_rank=rank)
    check_loss(configs_of(loss, lora_rank=rank, **UPDATES))
    named = trainer.policy.model.named_parameters()
    start = {name: value.detach().clone() for name, value in named if value.requires_grad}
    for name, value in start.items():  # an adapter's B begins as 0, with which A has no gradient
        start[name] = value + 0.01 if "lora_" in name else value
    without = trained(trainer, start)
    assert any(not torch.equal(*pair) for pair in zip(without, start.values(), strict=True))
    # AdamW gets a gradient from every loss, and knows of no loss.
    for flag, value in (UPDATES if loss == "GRPO" else LOOPS).items():
        found = trained(trainer, start, **{flag: value})
        assert any(not torch.equal(*pair) for pair in zip(without, found, strict=True)), flag


def observed(trainer: PolicyTrainer) -> dict[str, Any]:
    """What is trained and how, and the micro-batches of a step."""
    model = trainer.policy.model
    return {
        "trained": {
            name: (value.dtype, value.double().sum().item())
            for name, value in model.named_parameters() if value.requires_grad
        },
        "scales": [layer.scaling for layer in model.modules() if hasattr(layer, "scaling")],
        "recomputes": getattr(model.get_decoder(), "gradient_checkpointing", None),
        "optimizer": (type(trainer.optimizer), trainer.optimizer.defaults["fused"]),
        "options": trainer.options, "recorded": trainer.recorded_tokens,
        "kinds": [type(layer) for layer in model.modules()],
        "forests": [len(forest.input_ids) for forest in trainer.pack(list(taught()))],
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 2])
def test_a_flag_of_the_build_changes_the_trainer_or_is_refused(base: Path, rank: int) -> None:
    without = observed(built(base, lora_rank=rank))
    for flag, value in BUILT.items():
        flags = {"lora_rank": rank, flag: value}
        if rank == 0 and flag in ("lora_alpha", "lora_target_modules"):
            with pytest.raises(ConfigError, match=f"--{flag} .*: --lora_rank is 0"):
                check_loss(configs_of(**flags))
            continue
        check_loss(configs_of(**flags))
        found = observed(built(base, **flags))
        assert found != without or (flag, rank) in {("lora_rank", 2), ("seed", 0)}, flag


def test_weights_that_an_adapter_freezes_are_not_frozen_again(base: Path) -> None:
    with pytest.raises(ConfigError, match="--freeze 'embed' finds weights that --lora_rank freezes already"):
        built(base, lora_rank=2, freeze="embed")
    with pytest.raises(ConfigError, match="--lora_target_modules all-linear,qproj matches no layer"):
        built(base, lora_rank=2, lora_target_modules="q_proj,all-linear,qproj")


def test_a_flag_of_the_schedule_changes_learning_rates() -> None:
    def rates(**flags: Any) -> list[float]:
        steps = flags.pop("max_steps", 9)
        config = OptimConfig(**{"lr_scheduler_type": "polynomial", **flags})
        scheduler = build_scheduler(torch.optim.SGD([torch.zeros(1)]), config, steps)
        return list(map(scheduler.lr_lambdas[0], range(9)))

    for flag, value in SCHEDULES.items():
        assert rates(**{flag: value}) != rates(), flag
    for wrong in ('{"num_cycles": NaN}', '{"num_cycles": Infinity}', '{"min_lr_rate": Infinity}'):
        kind = "cosine_with_min_lr" if "min" in wrong else "cosine"
        with pytest.raises(ConfigError, match="lr_scheduler_kwargs"):
            rates(lr_scheduler_type=kind, lr_scheduler_kwargs=wrong)
    with pytest.raises(ConfigError, match="constant does not read"):
        rates(lr_scheduler_type="constant", lr_scheduler_kwargs='{"power": 3.0}')


def test_a_flag_of_ages_changes_which_tokens_are_old() -> None:
    usual = freshness_of(configs_of())
    assert usual == Freshness(max_staleness=1)
    for flag, value in AGES.items():
        assert freshness_of(configs_of(**{flag: value})) != usual, flag


def test_sizes_of_the_layout_change_it_or_are_refused() -> None:
    for flag in flag_names(ParallelConfig):
        assert plan_layout(TrainConfig(**{flag: 2}), 4) != plan_layout(TrainConfig(), 4), flag
        with pytest.raises(ConfigError, match=f"--{flag}|does not divide"):
            plan_layout(TrainConfig(**{flag: 2}), 1)


def test_a_flag_that_a_property_reads_changes_it() -> None:
    for flag, (kind, value, name) in DERIVED.items():
        assert getattr(kind(**{flag: value}), name) != getattr(kind(), name), flag


@pytest.mark.parametrize("loss", LOSSES_NAMED)
def test_flags_without_effect_are_refused_with_every_loss(loss: str) -> None:
    for flag, value, without, needed in REFUSED:
        if "critic" in needed and not LOSSES.get(loss).reads_advantage:
            with pytest.raises(ConfigError, match=f"--critic head with --loss_calculater {loss}"):
                check_loss(configs_of(loss, critic="head"))
            continue
        with pytest.raises(ConfigError, match=f"--{flag} ") as refused:
            check_loss(configs_of(loss, **without, **{flag: value}))
        assert refused.value.hint
        check_loss(configs_of(loss, **needed, **{flag: value}))


def test_every_rule_is_tried() -> None:
    flags = {name for rule in IDLE_RULES for name in rule.flags}
    others = {"reference_model", "advantage_whitening", "staleness_policy"}
    of_losses = others.union(flag_names(LossConfig, GroupConfig))
    assert flags - of_losses == {flag for flag, *_ in REFUSED}


def test_fine_tuning_refuses_what_it_cannot_use_and_names_what_it_does_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="--lora_alpha 8"):
        fine_tune(configs_of(lora_alpha=8))
    flags = {"save_steps": 5, "mini_batches": 99, "max_steps": 3, "kl_coef": 0.1, "num_train_epochs": 2}
    with pytest.raises(ConfigError, match="no conversations"):
        fine_tune(Configs.of([*GROUPS, SFTConfig], flags, flags))
    unread = "--kl_coef, --mini_batches, --num_train_epochs, --save_steps"
    assert f"agentrl sft does not read {unread}" in caplog.text
    with pytest.raises(ConfigError, match="--sft_min_score 0"):
        SFTConfig(sft_min_score=0.5)
