"""Settings of ``accelerate launch``: from a config file, through accelerate's launcher, into our flags."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from parsed_flags import parsed
from tiny_models import tiny_model

from agentrl.config.load import Configs
from agentrl.config.schema import MemoryConfig, TrainConfig
from agentrl.distributed.accelerate_config import with_launch_settings
from agentrl.errors import ConfigError

SHIPPED = Path(__file__).parents[4] / "assets" / "fsdp2_dst.yml"
Launch = Callable[..., Configs]
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what another launcher set; monkeypatch also restores what the code under test sets."""
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING")


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """The configuration of a trainer that accelerate starts with a config file, and flags of ours."""

    def start(*flags: str, processes: int = 8, **config: Any) -> Configs:
        content = yaml.safe_load(SHIPPED.read_text(encoding="utf-8")) | config
        file = tmp_path / "accelerate.yml"
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        words = f"--num_processes {processes} --main_process_port 0 train.py"
        arguments = launch_command_parser().parse_args(["--config_file", str(file), *words.split()])
        arguments, _, _ = _validate_launch_command(arguments)
        for name, value in prepare_multi_gpu_env(arguments).items():
            if name.startswith(PREFIXES):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        return with_launch_settings(parsed(*flags))

    return start


def fsdp(**settings: Any) -> dict[str, Any]:
    """The section of FSDP2 with ``settings``, whose names begin with fsdp_."""
    return {"fsdp_config": {"fsdp_version": 2} | {f"fsdp_{name}": value for name, value in settings.items()}}


def parallelism(**settings: Any) -> dict[str, Any]:
    """The section of parallelism with ``settings``, beside one of FSDP2."""
    sizes = {f"parallelism_config_{name}": value for name, value in settings.items()}
    return fsdp() | {"parallelism_config": sizes}


def test_without_a_launcher_nothing_changes() -> None:
    given = parsed("--tp_size", "2")
    assert with_launch_settings(given) is given


def test_settings_that_change_no_result_are_taken_with_a_line(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    """The original's fsdp2_dst.yml has the first two."""
    caplog.set_level(logging.INFO)
    found = launch(**fsdp(
        forward_prefetch=True, cpu_ram_efficient_loading=False, backward_prefetch="BACKWARD_POST",
        sync_module_states=False, use_orig_params=False,
    ))  # fmt: skip
    assert list(found) == list(parsed())
    assert "fsdp_forward_prefetch true, " in caplog.text
    assert "fsdp_cpu_ram_efficient_loading false changes no result here" in caplog.text
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


def test_the_shipped_file_sets_no_flag(launch: Launch) -> None:
    found = launch()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert found.given == frozenset()
    assert list(found) == list(parsed())
    # transformers would load empty weights on all ranks but 0
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


def test_settings_become_flags(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizes = parallelism(tp_size=2, cp_size=2, dp_shard_size=2, dp_replicate_size=2)
    recomputes = fsdp(activation_checkpointing=True, activation_checkpointing_offload=True)
    compiles = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    found = launch(processes=16, mixed_precision="bf16", **(sizes | recomputes | compiles))
    train, memory = found[TrainConfig], found[MemoryConfig]
    assert (train.tp_size, train.cp_size, train.dp_replicate_size) == (2, 2, 2)
    assert str(train.autocast_bf16).lower() == "true"
    assert (memory.activation_checkpointing, memory.activation_offload) == ("full", True)
    assert memory.torch_compile
    assert "parallelism_config_tp_size 2 is --tp_size 2" in caplog.text
    assert "mixed_precision bf16 is --autocast_bf16 true" in caplog.text


def test_a_flag_that_says_the_same_is_no_contradiction(launch: Launch) -> None:
    assert launch("--tp_size", "2", **parallelism(tp_size=2, dp_shard_size=4))[TrainConfig].tp_size == 2


def test_our_own_dimensions_count_among_the_processes(launch: Launch) -> None:
    assert launch("--pp_size", "2", **parallelism(dp_shard_size=4))[TrainConfig].pp_size == 2


@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        ("--autocast_bf16 false", fsdp() | {"mixed_precision": "bf16"},
         ["mixed_precision", "--autocast_bf16 "]),
        ("--tp_size 4", parallelism(tp_size=2), ["parallelism_config_tp_size 2", "--tp_size 4"]),
        ("--activation_checkpointing none", fsdp(activation_checkpointing=True),
         ["fsdp_activation_checkpointing", "--activation_checkpointing none"]),
        ("--tp_size 2", parallelism(dp_shard_size=8), ["parallelism_config_dp_shard_size is 8", "leave 4"]),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(
    launch: Launch, flags: str, config: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(*flags.split(), **config)
    assert all(part in caught.value.message for part in named), caught.value.message


@pytest.mark.parametrize(
    ("config", "key", "hint"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision", "--autocast_bf16"),
        (fsdp(version=1), "fsdp_version", "accelerate to-fsdp2"),
        ({"fsdp_config": {}}, "fsdp_version", "accelerate to-fsdp2"),
        (fsdp(offload_params=True), "fsdp_offload_params", "--optimizer_offload"),
        (fsdp(reshard_after_forward=False), "fsdp_reshard_after_forward", "resharded"),
        (fsdp(auto_wrap_policy="NO_WRAP"), "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        (fsdp(auto_wrap_policy="SIZE_BASED_WRAP"), "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        (fsdp(ignored_modules="lm_head"), "fsdp_ignored_modules", "leave it out"),
        (fsdp(sharding_strategy="HYBRID_SHARD"), "fsdp_sharding_strategy", "--dp_replicate_size"),
        (fsdp(min_num_params=1000), "fsdp_min_num_params", "decoder layers"),
        ({"debug": True}, "debug", "TORCH_DISTRIBUTED_DEBUG"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "dynamo_backend", "INDUCTOR"),
        (parallelism(sp_size=2), "parallelism_config_sp_size", "--cp_size"),
        (parallelism(cp_size=2, cp_comm_strategy="alltoall"), "parallelism_config_cp_comm_strategy",
         "leave it out"),
    ],
)  # fmt: skip
def test_what_the_trainer_does_not_have_is_refused_by_name(
    launch: Launch, config: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=f"accelerate's {key}") as caught:
        launch(**config)
    assert hint in str(caught.value.hint)


def test_every_setting_is_in_the_table() -> None:
    """Settings are the fields of accelerate's config file, and the launcher's flags of its sections."""
    page = (Path(__file__).parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    table = page.partition("## Settings of Accelerate")[2].partition("\n## ")[0]
    sections = ("fsdp_config", "parallelism_config", "dynamo_config")
    settings = [field.name for field in fields(ClusterConfig) if field.name not in sections]
    prefixes = ("fsdp_", "parallelism_config_", "dynamo_")
    settings += [
        action.dest for action in launch_command_parser()._actions if action.dest.startswith(prefixes)
    ]
    assert len(settings) > 40
    assert [name for name in settings if f"`{name}" not in table] == []


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM")],
)
def test_other_trainers_are_refused(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=f"distributed_type is {name}") as caught:
        with_launch_settings(parsed())
    assert "fsdp_version: 2" in str(caught.value.hint)


def test_what_accelerate_itself_refuses_is_an_error_of_its_config_file(launch: Launch) -> None:
    with pytest.raises(ConfigError, match=r"accelerate refuses its parallelism_config: .*pure data"):
        launch(**parallelism(tp_size=2, dp_replicate_size=4))


def test_wrapped_layers_are_the_models_decoder_layers(launch: Launch, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("qwen3").save_pretrained(base)
    (base / "tokenizer.json").write_text("{}", encoding="utf-8")

    def wrap(layer: str) -> None:
        settings = fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=layer)
        launch("--model_name_or_path", str(base), **settings)

    wrap("Qwen3DecoderLayer")
    with pytest.raises(ConfigError, match="cls_to_wrap is LlamaDecoderLayer") as caught:
        wrap("LlamaDecoderLayer")
    assert "Qwen3DecoderLayer" in str(caught.value.hint)
