"""Check what two ranks publish, how much memory that takes, and a write that fails; for torchrun.

torchrun --nproc_per_node 2 tests/core/integration/distributed/publishing.py --folder DIR
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import Case, build_parallel, build_trainer, compare_step, publish, rank_writer, whole_weights
from peak_memory import peak_allocated
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from agentrl.config.schema import TrainConfig
from agentrl.distributed.mesh import leave_processes
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import TensorChecksum, checksums, stored_dtype

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 64}


def compare_files(together: PolicyTrainer, alone: PolicyTrainer, folder: Path) -> None:
    """Check files, memory, and that a step that is trained while they are written does not change them."""
    total = sum(part.bytes for part in together.policy.published.parts())
    writer = rank_writer(together, total // 8)
    weights = whole_weights(together)
    writes: list[Any] = []
    peak = peak_allocated(lambda: writes.append(writer.write_version(1, folder)))
    deviations = compare_step(alone, together, 1)
    written = writes[0].result(60)
    writer.close()
    # A rank's half of the weights, two layers of eight, and what gloo's threads have not freed yet.
    assert peak < 0.95 * total, (peak, total)
    if dist.get_rank() == 0:
        assert max(deviations.values()) < 1e-4
        files = [load_file(path) for path in folder.glob("*.safetensors")]
        found = {name: value for file in files for name, value in file.items()}
        assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
        assert stored_dtype(folder) == "bfloat16"
        assert {file.owner for file in writer.model.plan} == {0, 1}
        assert written.files == checksums(folder)
        assert written.tensors == {name: TensorChecksum.of(value) for name, value in found.items()}
        AutoModelForCausalLM.from_pretrained(folder)
        print(f"{total / 1e6:.1f} MB of weights, {peak / 1e6:.1f} MB at once", flush=True)


def compare_after_a_failure(together: PolicyTrainer, alone: PolicyTrainer, folder: Path) -> None:
    """Check that the ranks train on after rank 0 could not write."""
    try:
        publish(together, folder / "missing")
    except FileNotFoundError:
        assert dist.get_rank() == 0
    else:
        assert dist.get_rank() > 0
    deviations = compare_step(alone, together, 2)
    if dist.get_rank() == 0:
        print(f"after a failure: {max(deviations.values()):.1e}", flush=True)
    assert max(deviations.values()) < 1e-4


def main() -> int:
    """Publish, measure, fail, and go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        model = tiny_model("qwen3", **WIDE)
        case = Case(2, TrainConfig())
        alone = build_trainer(ParallelModel(copy.deepcopy(model)), case)
        together = build_parallel(model, case)
        compare_files(together, alone, folder)
        compare_after_a_failure(together, alone, folder)
    finally:
        leave_processes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
