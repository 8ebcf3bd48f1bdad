"""Merge the adapter of a checkpoint into its base model: a folder that any engine serves.

    python -m agentrl.model.merge_adapter ADAPTER BASE TARGET

``agentrl eval --eval_model`` runs it for a checkpoint of a run with ``--lora_rank``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl.config.run import ModelConfig
from agentrl.config.training import AdapterConfig
from agentrl.errors import AgentRLError
from agentrl.model.load import load_policy
from agentrl.weights.folder import read_adapter_config
from agentrl.weights.model_folder import atomic_model_folder, complete_folder
from agentrl.weights.sharded_writer import write_alone


def merge_adapter(adapter: Path, base: Path, target: Path) -> None:
    """Write the model in ``base`` with the ``adapter`` added, and its tokenizer, to ``target``.

    Raises ModelError for a folder that holds no adapter or no model, and for an adapter of another model.
    """
    policy = load_policy(ModelConfig(model_name_or_path=str(base)), adapter, adapter_settings(adapter))
    with atomic_model_folder(target, sum(part.bytes for part in policy.published.parts())) as temporary:
        write_alone(policy.published, temporary)
        complete_folder(base, temporary)


def adapter_settings(adapter: Path) -> AdapterConfig:
    """Return the flags that an adapter was trained with. Raises ModelError if its file cannot be read."""
    found = read_adapter_config(adapter)
    targets = found["target_modules"]
    return AdapterConfig(
        lora_rank=found["r"],
        lora_alpha=found["lora_alpha"],
        lora_target_modules=targets if isinstance(targets, str) else ",".join(sorted(targets)),
    )


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
