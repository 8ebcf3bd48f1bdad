"""Joining the processes of a launcher: what accelerate is asked for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl.distributed import mesh
from agentrl.distributed.mesh import join_alone, launched_world, leave_processes
from agentrl.errors import ConfigError


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
