"""Merge the adapter of a checkpoint into its base model: a folder that any engine serves.

    python -m agentrl.model.merge_adapter ADAPTER BASE TARGET

``agentrl eval --eval_model`` runs it for a checkpoint of a run with ``--lora_rank``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from agentrl.config.run import ModelConfig
from agentrl.errors import AgentRLError
from agentrl.model.load import load_policy
from agentrl.model.lora import read_layers
from agentrl.weights.folder import atomic_model_folder, complete_folder
from agentrl.weights.snapshot import write_alone


@torch.no_grad()
def merge_adapter(adapter: Path, base: Path, target: Path) -> None:
    """Write the model in ``base`` with the ``adapter`` added, and its tokenizer, to ``target``.

    The sum is taken in float32 and rounded once, to the base model's dtype. Raises ModelError for a folder
    that holds no adapter or no model, and for an adapter of another model or of a kind that is not applied.
    """
    policy = load_policy(ModelConfig(model_name_or_path=str(base)))
    embedding = policy.model.get_input_embeddings().weight
    layers = (item for item in policy.model.named_modules() if isinstance(item[1], nn.Linear))
    weights = {name: layer.weight for name, layer in layers if layer.weight is not embedding}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name, layer in read_layers(adapter, shapes).items():
        weights[name] += layer.scale * (layer.b.float() @ layer.a.float())
    with atomic_model_folder(target, sum(part.bytes for part in policy.published.parts())) as temporary:
        write_alone(policy.published, temporary)
        complete_folder(base, temporary)


def main(argv: list[str]) -> int:
    """Merge by the arguments ADAPTER, BASE and TARGET; print an error as one line."""
    if len(argv) != 3:
        print("usage: python -m agentrl.model.merge_adapter ADAPTER BASE TARGET", file=sys.stderr)
        return 2
    adapter, base, target = map(Path, argv)
    try:
        merge_adapter(adapter, base, target)
    except AgentRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
