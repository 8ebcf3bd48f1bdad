"""The policy at any published version, with the trainer's numerics, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from agentrl.chat.model_folder import context_length
from agentrl.config.load import Configs
from agentrl.config.schema import MemoryConfig, ModelConfig, TrainConfig
from agentrl.data.planner import packing_problem
from agentrl.distributed.build_policy import (
    build_replay,
    compile_layers,
    forward_options,
    load_run_policy,
    pack_forests,
    split_policy,
    step_precision,
)
from agentrl.distributed.load_shards import replace_weights
from agentrl.distributed.mesh import Layout, leave_processes, single_process
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData


class PublishedPolicy:
    """One model, whose weights are those of the version that was loaded last.

    It computes logprobs by the functions and on the forests with which a trainer of one process computes
    those of ``--old_logprobs recompute``: for the same weights and the same data they are the same, bit for
    bit.
    """

    def __init__(self, configs: Configs) -> None:
        """Load the model of ``--model_name_or_path``. Raises ModelError and ConfigError."""
        self._config, self._train = configs[ModelConfig], configs[TrainConfig]
        memory, world = configs[MemoryConfig], single_process()
        precision = step_precision(self._config, self._train, world)
        self._policy = load_run_policy(configs, None, precision, world)
        self._replay = build_replay(self._config, memory, self._policy)
        if memory.torch_compile:
            compile_layers(self._policy.model)
        # Freeze before the split: FSDP2 then frees what it gathered after each forward, and new weights act.
        self._policy.model.requires_grad_(requires_grad=False)
        self._model = split_policy(self._policy, Layout(), configs, precision, world)
        self._options = forward_options(self._train, memory)
        self.base = self._policy.base
        """The folder of ``--model_name_or_path``."""
        self.name = f"{self.base} in {str(precision.products).removeprefix('torch.')}"

    def load(self, folder: Path) -> None:
        """Take the weights in ``folder``. After a ModelError, load a version before the next ``logprobs``."""
        replace_weights(self._policy.model, folder, self._config)

    def problem(self, data: DBRecordData) -> str | None:
        """Return why a step cannot train ``data``, as the trainer finds it; None if it can."""
        vocabulary = self._policy.model.config.get_text_config().vocab_size
        context = context_length(self._config, self.base)
        return packing_problem(
            data, vocab_size=vocabulary, max_tokens=self._train.max_tokens, context=context
        )

    @torch.no_grad()
    def logprobs(self, data: DBRecordData, images: Mapping[str, Image]) -> NDArray[np.float32]:
        """Return the logprob in nats of each trainable token of one trajectory, float32[T] in order of spans.

        They have the temperature of the token, and the ids that top-p, top-k or min-p left. ``images`` has
        those of the data, by hash. Raises ForestError for an image that is missing.
        """
        forests = pack_forests(
            self._policy, self._model, self._replay, [data],
            max_tokens=self._train.max_tokens, merging=self._train.prefix_merging, images=images,
        )  # fmt: skip
        values = np.full(data.trainable_tokens, np.nan, np.float32)
        for forest, (logprobs, _) in zip(forests, self._model.logprobs(forests, self._options), strict=True):
            values[forest.label] = logprobs.float().cpu().numpy()
        return values

    def close(self) -> None:
        """Leave the process group that a mesh of one rank may have made."""
        del self._model, self._policy
        if dist.is_initialized():
            leave_processes()
