"""Which GPUs are found, how they are divided among engines and trainer, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from parsed_flags import parsed

from agentrl.config.schema import PlacementConfig
from agentrl.errors import ConfigError
from agentrl.local import placement
from agentrl.local.placement import (
    Gpus,
    Need,
    Placement,
    UnseenGpuError,
    find_gpus,
    place,
    place_processes,
    ranges,
)

H100 = ("NVIDIA H100", 79 * 2**30)


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch in a child process prints, by call; the test fills it."""
    answers: list[Any] = []
    environments: list[Mapping[str, str]] = []

    def run(command: list[str], *, env: Mapping[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        answer = answers[0](env) if callable(answers[0]) else answers[0]
        return subprocess.CompletedProcess(command, 0, stdout=f"a warning\n{json.dumps(answer)}\n")

    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    answers.append([False, [H100] * 4])
    return answers


def test_gpus_are_numbered_as_nvidia_smi_does(torch_sees: list[Any]) -> None:
    found = find_gpus({})
    assert (found.names, found.kind) == (("0", "1", "2", "3"), "NVIDIA H100")
    assert found.memory_gib == (79.0,) * 4
    assert found.order == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    torch_sees[0] = [True, [H100] * 4]
    amd = find_gpus({})
    assert amd.variable == "HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize("visible", ["2,3,6,7", "GPU-a,GPU-b, GPU-c,GPU-d", "4,5,6,7,9"])
def test_gpus_of_a_job_keep_their_names(torch_sees: list[Any], visible: str) -> None:
    found = find_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert found.names == tuple(name.strip() for name in visible.split(","))[:4]
    assert found.order == {}


def test_each_mig_instance_is_counted(torch_sees: list[Any]) -> None:
    torch_sees[0] = lambda env: [False, [(env["CUDA_VISIBLE_DEVICES"], 10 * 2**30)]]
    found = find_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})
    assert (found.names, found.kind) == (("MIG-a", "MIG-b"), "MIG-a and MIG-b")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_no_gpus(torch_sees: list[Any], hidden: str) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": hidden}) is None


def test_a_machine_without_gpus_starts_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: False)
    monkeypatch.setattr(placement, "_probe", lambda environment: pytest.fail("a child was started"))
    assert find_gpus({}) is None


def test_torch_that_sees_no_gpu_is_told_from_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    with pytest.raises(UnseenGpuError, match="torch sees no GPU"):
        find_gpus({})  # this machine's torch, in a real child process
    monkeypatch.setattr(placement, "_PROBE", "raise ImportError('no libcuda')")
    with pytest.raises(UnseenGpuError, match="no libcuda"):
        find_gpus({})


def test_gpus_that_are_named_and_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    lines: list[str] = []
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is None
    assert lines == []
    with pytest.raises(ConfigError, match=r"--train_gpus is given, and there is no GPU here"):
        place_processes(parsed("--train_gpus", "0"), lines.append, trains=True, serves=True)


def test_the_placement_is_reported_and_an_unseen_gpu_too(
    torch_sees: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    assert place_processes(parsed(), lines.append, trains=False, serves=False) is None
    torch_sees[0] = [False, [H100]]
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is not None
    torch_sees[0] = [False, []]
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is None
    assert lines == [
        "1 GPU (NVIDIA H100, 79.0 GiB): the trainer and the engine take turns on it; the engine takes 0.8 of"
        " its memory (--inf_mem_ratio)",
        "no GPU is assigned to a process: torch sees no GPU; agentrl doctor names the cause",
    ]


def gpus(count: int, *names: str) -> Gpus:
    named = names or tuple(map(str, range(count)))
    return Gpus(names=named, kind="NVIDIA H100", memory_gib=(79.1,) * count)


def divide(machine: Gpus | int, *words: str, **needs: Any) -> Placement:
    found = gpus(machine) if isinstance(machine, int) else machine
    configs = parsed("--engine", "sglang", *words)
    usual = {"trains": True, "serves": True, "has_images": False, "machines": 1}
    return place(found, configs[PlacementConfig], Need.of(configs, found, **(usual | needs)))


@pytest.mark.parametrize(
    ("count", "words", "trainer", "engines"),
    [
        (2, "", "0", ["1"]),
        (3, "", "0", ["1", "2"]),
        (4, "", "0-1", ["2", "3"]),
        (8, "", "0-3", ["4", "5", "6", "7"]),
        (8, "--inf_tp_size 2", "0-3", ["4-5", "6-7"]),
        (8, "--inf_tp_size 4", "0-3", ["4-7"]),
        (8, "--inf_tp_size 6", "0-1", ["2-7"]),
        (8, "--tp_size 2 --cp_size 3", "0-5", ["6", "7"]),
        (6, "--inf_tp_size 2", "0-1", ["2-3", "4-5"]),
        (7, "--inf_tp_size 2 --tp_size 2", "0-1", ["2-3", "4-5"]),
        (8, "--train_gpus 0-5", "0-5", ["6", "7"]),
        (8, "--train_gpus 4-7", "4-7", ["0", "1", "2", "3"]),
        (8, "--train_gpus 0-4 --inf_tp_size 2", "0-4", ["5-6"]),
        (8, "--engine_gpus 0,2,4,6 --inf_tp_size 2", "1,3,5,7", ["0,2", "4,6"]),
        (8, "--engine_gpus 7 --tp_size 2", "0-5", ["7"]),
        (8, "--train_gpus 0-3 --engine_gpus 6-7", "0-3", ["6", "7"]),
    ],
)
def test_engines_and_trainer_get_gpus_of_their_own(
    count: int, words: str, trainer: str, engines: list[str]
) -> None:
    found = divide(count, *words.split())
    assert ranges(found.trainer) == trainer
    assert [ranges(each) for each in found.engines] == engines
    assert not found.shared


def test_a_single_gpu_is_shared_by_default_and_by_name() -> None:
    for words in ((), ("--train_gpus", "0", "--engine_gpus", "0")):
        found = divide(1, *words)
        assert (found.trainer, found.engines, found.others) == ((0,), ((0,),), (0,))
        assert str(found) == "1 GPU (NVIDIA H100, 79.1 GiB): the trainer and the engine take turns on it"
        assert found.is_colocated
    both = divide(1, "--colocate", "false")
    assert str(both) == "1 GPU (NVIDIA H100, 79.1 GiB): the trainer and the engine share it"
    assert not both.is_colocated


def test_children_of_a_sweep_see_equal_shares_and_never_the_same_gpu() -> None:
    seen = [share["CUDA_VISIBLE_DEVICES"] for share in gpus(8).split(3)]
    assert seen == ["0,1", "2,3", "4,5"]
    [mine, *_] = gpus(2, "GPU-aa", "GPU-bb").split(2)
    assert mine == {"CUDA_VISIBLE_DEVICES": "GPU-aa"}
    with pytest.raises(ConfigError, match=r"--parallel 3: there are 2 GPUs"):
        gpus(2).split(3)


def test_gpus_that_both_flags_name_are_shared_in_turns() -> None:
    found = divide(8, "--train_gpus", "0-3", "--engine_gpus", "2-7", "--inf_tp_size", "2")
    assert (found.trainer, found.engines) == ((0, 1, 2, 3), ((2, 3), (4, 5), (6, 7)))
    assert (found.shared, found.others, found.is_colocated) == ((2, 3), (), True)
    assert str(found).endswith("trainer on 0-3; 3 engines on 2-3, 4-5, 6-7; they take turns on 2-3")


def test_a_machine_that_runs_one_of_the_two_gives_it_all_gpus() -> None:
    served = divide(4, "--inf_tp_size", "2", "--train_gpus", "0-9", trains=False)
    assert (served.trainer, served.engines) == ((), ((0, 1), (2, 3)))
    trained = divide(4, "--engine_gpus", "9", serves=False)
    assert (trained.trainer, trained.engines) == ((0, 1, 2, 3), ())
    assert divide(8, "--train_gpus", "2-3", serves=False).trainer == (2, 3)
    assert divide(1, trains=False).engines == ((0,),)


def test_images_are_trained_on_one_gpu() -> None:
    assert divide(8, has_images=True).trainer == (0,)
    assert divide(8, has_images=True, serves=False).trainer == (0,)
    with pytest.raises(ConfigError, match=r"2 GPUs \(0-1\), and images are trained in one process"):
        divide(8, "--train_gpus", "0-1", has_images=True)


def test_sizes_of_a_trainer_on_several_machines_count_all_of_them() -> None:
    words = ("--tp_size", "4", "--pp_size", "2", "--train_gpus", "0-3")
    assert divide(8, *words, machines=2).trainer == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"not a multiple of --tp_size 4 × --pp_size 2"):
        divide(8, *words)


@pytest.mark.parametrize(
    ("count", "words", "message", "hint"),
    [
        (8, "--train_gpus 0-4 --engine_gpus 4-7 --colocate false", "both name GPU 4", "to one of them"),
        (8, "--train_gpus 0-8", r"names GPU 8, and there are 8 GPUs", "numbers up to 7"),
        (8, "--train_gpus 0,0", "names a GPU twice", "once"),
        (8, "--train_gpus 3-1", "names no GPU", "smaller number first"),
        (8, "--train_gpus all", "--train_gpus is 'all'", "0-3 or 0,2"),
        (8, "--train_gpus 0-7", r"an engine needs 1 of 8 GPUs .* trainer leaves it fewer", "--train_gpus"),
        (8, "--engine_gpus 0-7", r"the trainer needs 1 of 8 GPUs .* engines leave it fewer", "--engine_gpus"),
        (8, "--engine_gpus 0-2 --inf_tp_size 2", "engines: 3 is not a multiple of --inf_tp_size 2", ""),
        (8, "--train_gpus 0-2 --tp_size 2", "GPU 0-2 of the trainer: 3 is not a multiple", "--train_gpus"),
        (8, "--inf_tp_size 8", "8 GPUs are too few for a trainer of 1 .* engine of 8", "another machine"),
        (2, "--tp_size 2", r"2 GPUs are too few for a trainer of 2 \(--tp_size 2\)", "lower one"),
        (1, "--inf_tp_size 2", r"not a multiple of --inf_tp_size 2", "--inf_tp_size"),
        (1, "--tp_size 2", r"not a multiple of --tp_size 2", "sizes"),
        (4, "--engine local --inf_tp_size 2", "the local engine runs on one GPU", "ENGINE=sglang"),
    ],
)  # fmt: skip
def test_what_overlaps_or_is_too_small_is_refused(count: int, words: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        divide(count, *words.split())
    assert hint in str(refused.value.hint)


def test_processes_see_their_gpus_by_the_names_of_the_machine() -> None:
    machine = Gpus(
        names=("GPU-aa", "GPU-bb", "3"), kind="A100", memory_gib=(39.4, 39.4, 79.0),
        variable="HIP_VISIBLE_DEVICES", order={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )  # fmt: skip
    found = divide(machine, "--train_gpus", "1", "--engine_gpus", "GPU-aa")
    assert found.gpus.environment(found.trainer) == {
        "HIP_VISIBLE_DEVICES": "GPU-bb", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    assert found.gpus.environment(found.engines[0])["HIP_VISIBLE_DEVICES"] == "GPU-aa"
    assert found.gpus.environment(found.others)["HIP_VISIBLE_DEVICES"] == "3"
    assert divide(2).gpus.environment(()) == {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ConfigError, match="in HIP_VISIBLE_DEVICES GPU-aa,GPU-bb,3"):
        divide(machine, "--train_gpus", "3")


def test_the_line_says_who_has_which_gpus() -> None:
    assert str(divide(8, "--inf_tp_size", "2")) == (
        "8 GPUs (NVIDIA H100, 79.1 GiB): trainer on 0-3; 2 engines on 4-5, 6-7"
    )
    assert str(divide(8, "--train_gpus", "0,2", "--engine_gpus", "4")) == (
        "8 GPUs (NVIDIA H100, 79.1 GiB): trainer on 0,2; engine on 4; 1,3,5-7 unused by them"
    )
    mixed = Gpus(names=("0", "1"), kind="A and B", memory_gib=(24.0, 80.0))
    assert str(divide(mixed, trains=False)).startswith(
        "2 GPUs (A and B, 24.0 to 80.0 GiB): 2 engines on 0, 1"
    )


def test_a_mig_instance_is_one_process() -> None:
    machine = gpus(3, "MIG-a", "MIG-b", "MIG-c")
    found = divide(machine)
    assert (found.trainer, found.engines) == ((0,), ((1,), (2,)))
    with pytest.raises(ConfigError, match="one MIG instance"):
        divide(machine, "--inf_tp_size", "2")
