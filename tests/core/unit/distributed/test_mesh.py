"""The processes of a launcher, the layout of their mesh, and what it refuses."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import tiny_model
from torch import nn

from agentrl.config.schema import TrainConfig
from agentrl.distributed import mesh
from agentrl.distributed.fsdp import clip_gradients
from agentrl.distributed.mesh import Layout, join_alone, launched_world, leave_processes, plan_layout
from agentrl.distributed.parallel_model import check_divides
from agentrl.errors import ConfigError


def test_dp_shard_is_what_the_others_leave() -> None:
    config = TrainConfig(dp_replicate_size=2, tp_size=2)
    assert plan_layout(config, 8) == Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert plan_layout(TrainConfig(), 1) == Layout()


def test_an_equation_that_does_not_hold_is_stated() -> None:
    with pytest.raises(ConfigError, match="pp 1 × dp_replicate 1 × dp_shard × cp 1 × ep 1 × tp 4 = 6"):
        plan_layout(TrainConfig(tp_size=4), 6)


@pytest.mark.parametrize(("size", "what"), [(3, "4 attention heads"), (4, "2 key-value heads")])
def test_heads_that_do_not_split_are_refused(size: int, what: str) -> None:
    config = tiny_model("llama", vocab_size=60).config
    with pytest.raises(ConfigError, match=f"{what}, which --tp_size {size} does not divide"):
        check_divides("Llama", config, size)


def test_a_vocabulary_that_does_not_split_names_the_size_that_would() -> None:
    with pytest.raises(ConfigError, match=r"61 ids of vocabulary[\s\S]*to 62"):
        check_divides("Llama", tiny_model("llama").config, 2)


def test_clipping_without_meshes_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (3, 5)] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn_like(mine)
        other.grad = mine.grad.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert clip_gradients(ours, 0.5) == pytest.approx(expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_stage_without_trained_parameters_gets_the_norm_of_the_others() -> None:
    join_alone(torch.device("cpu"))
    try:
        assert clip_gradients([nn.Parameter(torch.zeros(3))], 1.0, dist.group.WORLD) == 0.0
    finally:
        leave_processes()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What PartialState is asked for, in place of joining anything, on a machine with 4 GPUs."""
    arguments: dict[str, Any] = {}

    def state(**given: Any) -> SimpleNamespace:
        arguments.update(given)
        device = torch.device("cpu", 0) if given["cpu"] else given["device_id"]
        return SimpleNamespace(device=device, num_processes=1, process_index=0)

    monkeypatch.setattr(mesh, "PartialState", state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    return arguments


def test_a_gpu_is_that_of_the_local_rank_and_objects_go_over_gloo(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "6")
    with launched_world() as found:
        assert found.device == torch.device("cuda", 2)
    assert asked.pop("timeout") >= timedelta(hours=1)
    assert asked == {"cpu": False, "backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", 2)}


@pytest.mark.parametrize(("gib", "hours"), [(16, 1.0), (470, 8.4)])
def test_ranks_wait_as_long_as_a_checkpoint_of_the_model_takes(
    gib: int, hours: float, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(gib << 30)  # sparse
    with launched_world(tmp_path):
        pass
    assert asked["timeout"] / timedelta(hours=1) == pytest.approx(hours, abs=0.02)


def test_processes_without_a_local_rank_are_not_worlds_of_one(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")
    with launched_world():
        pass
    assert asked["device_id"] == torch.device("cuda", 0)


def test_accelerate_can_choose_the_cpu_of_a_machine_with_gpus(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with launched_world() as found:
        assert found.device == torch.device("cpu")
    assert asked.keys() == {"cpu", "timeout"}
    assert asked["cpu"]


def test_gpus_without_peer_to_peer_transfers_name_the_variables(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise NotImplementedError("RTX 4000 series")

    monkeypatch.setattr(mesh, "PartialState", refuse)
    with pytest.raises(ConfigError, match="RTX 4000") as caught, launched_world():
        pass
    assert "NCCL_P2P_DISABLE=1" in str(caught.value.hint)


def test_a_process_alone_can_have_a_group() -> None:
    join_alone(torch.device("cpu"))
    try:
        join_alone(torch.device("cpu"))
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    finally:
        leave_processes()
