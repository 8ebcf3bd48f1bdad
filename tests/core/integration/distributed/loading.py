"""Compare models whose ranks read their own shards with models that are loaded whole and then split.

    torchrun --nproc_per_node 2 tests/core/integration/distributed/loading.py fsdp2 tp2 --folder DIR

Weights, buffers, ties and a step of training must be equal bit by bit, and each rank must read as many bytes
as its shards have in the files. Rank 0 prints a line per layout.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from layouts import CASES, LORA, Case, build_parallel, build_trainer
from safetensors import safe_open
from steps import step_data
from tiny_models import AGES, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.config.schema import LossConfig, ModelConfig, TrainConfig
from agentrl.distributed import load_shards as loading
from agentrl.distributed.load_shards import load_shards, read_rows
from agentrl.distributed.mesh import build_mesh, leave_processes, plan_layout
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.losses.settings import LossSettings
from agentrl.model.check_model import check_model
from agentrl.model.load import Policy, empty_model, load_model, placeholders
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.lora import add_adapter
from agentrl.train.build import build_reference
from agentrl.train.controller import PublishedShare
from agentrl.train.step import PolicyTrainer

CPU = torch.device("cpu")
MORE = {
    "fsdp2_lora_bf16": Case(2, TrainConfig(), lora=True, products="bfloat16"),
    "tp2_bf16": Case(2, TrainConfig(tp_size=2), products="bfloat16"),
    "fsdp3": Case(3, TrainConfig(), tied=True),
    "fsdp3_moe": Case(3, TrainConfig(), model="qwen3_moe"),
    "fsdp2_moe": Case(2, TrainConfig(), model="qwen3_moe"),
    "dp_replicate2×fsdp2×tp2": Case(8, TrainConfig(dp_replicate_size=2, tp_size=2), tied=True),
    "ep2×tp2×fsdp2": Case(8, TrainConfig(ep_size=2, tp_size=2), model="qwen3_moe"),
}
ALL = CASES | MORE


class CountedSlice:
    """A slice of a file that counts the bytes that are read from it."""

    read = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return cast("list[int]", self._inner.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._inner[index]
        CountedSlice.read += found.numel() * found.element_size()
        return found


class CountedFile:
    """``safe_open`` with slices that count."""

    def __init__(self, *arguments: Any) -> None:
        self._file: Any = safe_open(*arguments)

    def __enter__(self) -> CountedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.keys())

    def get_slice(self, name: str) -> CountedSlice:
        """Return what reads parts of a tensor."""
        return CountedSlice(self._file.get_slice(name))


def write_model(case: Case, folder: Path) -> ModelConfig:
    """Write a model in bfloat16, in several files and in the hub's form; every rank calls it."""
    if dist.get_rank() == 0:
        model: Any = tiny_model(case.model, tied=case.tied, vocab_size=64, num_hidden_layers=case.layers)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
        model.generation_config.temperature = 0.5
        model.generation_config.do_sample = True
        model.generation_config.save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
    dist.barrier()
    return ModelConfig(model_name_or_path=str(folder))


def build(case: Case, config: ModelConfig, folder: Path, *, is_empty: bool) -> PolicyTrainer:
    """Return what trains the model in ``folder``, loaded whole or by shards."""
    set_seed(1)
    dtype = getattr(torch, case.products) if case.lora else torch.float32
    model: Any = empty_model(folder, config, dtype) if is_empty else load_model(folder, config, dtype)
    adapter = None
    if case.lora and is_empty:
        with placeholders(model):
            adapter = add_adapter(model, LORA, Path(), None)
    elif case.lora:
        adapter = add_adapter(model, LORA, Path(), None)
    check_model(model)
    trainer = build_parallel(model, case, adapter)
    if is_empty:
        load_shards(model, folder, CPU, config)
    return build_trainer(trainer.model, case, adapter)


def local_tensors(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Return this rank's part of each parameter and buffer; tied ones by each name."""
    model = trainer.policy.model
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named}


def ties(trainer: PolicyTrainer) -> list[list[str]]:
    """Return the names of each group of tied parameters."""
    groups: dict[int, list[str]] = {}
    for name, value in trainer.policy.model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), []).append(name)
    return sorted(groups.values())


def check_same(whole: PolicyTrainer, shards: PolicyTrainer) -> None:
    """Check that two models are equal bit by bit, and in what is trained and tied."""
    expected, found = local_tensors(whole), local_tensors(shards)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        assert value.requires_grad == found[name].requires_grad, name
        assert torch.equal(value, found[name]), name
    assert ties(whole) == ties(shards)


def check_case(name: str, folder: Path) -> None:
    """Load a model both ways, train a step with each, and compare."""
    case = ALL[name]
    config = write_model(case, folder)
    whole = build(case, config, folder, is_empty=False)
    random = torch.rand(())
    CountedSlice.read = 0
    shards = build(case, config, folder, is_empty=True)
    read = CountedSlice.read
    assert torch.equal(random, torch.rand(())), "loading draws random numbers"
    assert whole.policy.model.generation_config == shards.policy.model.generation_config
    check_same(whole, shards)
    held = held_numbers(shards.model)
    assert read == 2 * held, f"{read} bytes read for {held} numbers in bfloat16"
    if not case.lora:
        check_reference(whole, case, config, folder)
        check_rows(shards, folder)
    results = [trainer.train(step_data(0), AGES).metrics for trainer in (whole, shards)]
    assert results[0]["loss"] == results[1]["loss"], results
    check_same(whole, shards)
    if not case.lora:
        check_share(shards, folder)
    if dist.get_rank() == 0:
        print(f"{name:<24} {read} bytes read  ok", flush=True)


def check_rows(shards: PolicyTrainer, folder: Path) -> None:
    """Check that rows of the files are those of this rank's parts, of every parameter."""
    names = {name for name, _ in shards.policy.model.named_parameters()}
    found, local = read_rows(shards.policy.model, folder, names, 5), local_tensors(shards)
    assert found.keys() == names
    for name, rows in found.items():
        assert len(rows.places) <= 5, name
        assert torch.equal(rows.of(local[name]), rows.values.float()), name


def check_share(shards: PolicyTrainer, folder: Path) -> None:
    """Check that all ranks have the same share of the update in what is published."""
    rounded = replace(shards.policy, own_dtype=torch.bfloat16, base=folder)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, PublishedShare(rounded).measure())
    assert 0 < shares[0] < 2, shares  # a change above half a step of bfloat16 becomes a whole one
    assert len(set(shares)) == 1, shares


def check_reference(policy: PolicyTrainer, case: Case, config: ModelConfig, folder: Path) -> None:
    """Check that the sharded reference computes what the whole model does."""
    mesh = build_mesh(plan_layout(case.config, dist.get_world_size()), "cpu")
    base = Policy(load_model(folder, config, torch.float32), cast("Any", None), folder, None)
    loss = LossSettings.of(LossConfig(kl_coef=0.1))
    reference = build_reference(
        loss, config, base, mesh, CPU, torch.float32, max_tokens=case.config.max_tokens
    )
    assert reference is not None
    assert reference.model is not None
    data = step_data(1)
    forests = policy.pack(data)
    with torch.no_grad():
        found = reference.logprobs(policy.model, forests, ForwardOptions())
        plain = ParallelModel(cast("Any", base.model)).logprobs(forests, ForwardOptions())
    for (one, _), (other, _) in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert held_numbers(reference.model) == held_numbers(policy.model)


def held_numbers(model: torch.nn.Module) -> int:
    """Return how many numbers this rank holds of the parameters, without adapters."""
    named = [(name, value) for name, value in model.named_parameters() if ".lora_" not in name]
    return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for _, value in named)


def main() -> None:
    """Run the layouts that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="+", choices=[*ALL])
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vars(loading)["safe_open"] = CountedFile
    dist.init_process_group("gloo")
    try:
        for name in arguments.layouts:
            check_case(name, arguments.folder / name)
    finally:
        leave_processes()


if __name__ == "__main__":
    main()
