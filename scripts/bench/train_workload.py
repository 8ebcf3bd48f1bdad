"""Build the models and the groups of trajectories that the training benchmark uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan

SMOLLM = Path(".agentrl/models/SmolLM2-135M-Instruct")
"""The model that `agentrl quickstart` downloads."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
"""Qwen3 shapes with random weights."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Trajectories with a common prompt. Lengths are uniform between 0.5 and 1.5 times the mean."""

    trajectories: int
    turns: int
    prompt: int
    output: int
    """Mean output tokens of a model call."""
    observation: int
    """Mean tokens between two model calls."""
    uneven: bool = False
    """Draw output lengths from an exponential distribution, cut at four times the mean."""
    even: bool = False
    """Make every length the mean."""

    @property
    def context(self) -> int:
        """Tokens of a trajectory with mean lengths."""
        return self.prompt + self.turns * self.output + (self.turns - 1) * self.observation

    @property
    def computed(self) -> int:
        """Tokens that are computed of the group with mean lengths: its prompt is computed once."""
        return self.prompt + self.trajectories * (self.context - self.prompt)

    def plain(self) -> dict[str, Any]:
        """Return the group as a dict for the JSON file."""
        return asdict(self)

    def data(self, vocabulary: int, seed: int = 0) -> list[DBRecordData]:
        """Return the group's training data: a chain per trajectory, behavior logprobs near the policy's."""
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, vocabulary, self.prompt)
        return [self._trajectory(rng, prompt, vocabulary, index) for index in range(self.trajectories)]

    def _trajectory(
        self, rng: np.random.Generator, prompt: np.ndarray[Any, Any], vocabulary: int, index: int
    ) -> DBRecordData:
        advantage = 1.0 if index % 2 else -1.0
        spans, end = [], self.prompt
        for call in range(self.turns):
            start = end if call == 0 else end + self._draw(rng, self.observation)
            end = start + self._output(rng)
            spans.append(
                TrainableSpan(
                    start=start, end=end, call=call, version=0, advantage=advantage, temperature=1.0
                )
            )
        trainable = sum(span.end - span.start for span in spans)
        ids = np.concatenate([prompt, rng.integers(0, vocabulary, end - self.prompt)])
        name = f"bench/{index}"
        return DBRecordData(
            id=name, record=name, task="bench", split="train", score=float(advantage > 0),
            advantage=advantage, min_version=0, max_version=0, tokens=end, trainable_tokens=trainable,
            turns=self.turns, nodes=(Node(start=0, end=end),), spans=tuple(spans),
            input_ids=pack_ids(ids.tolist()),
            behavior_logprobs=pack_floats([-float(np.log(vocabulary))] * trainable),
        )  # fmt: skip

    def _draw(self, rng: np.random.Generator, mean: int) -> int:
        return mean if self.even else int(rng.integers(max(1, mean // 2), mean + mean // 2 + 1))

    def _output(self, rng: np.random.Generator) -> int:
        if not self.uneven:
            return self._draw(rng, self.output)
        return int(np.clip(rng.exponential(self.output), 4, 4 * self.output))


def load_model(name: str) -> Any:
    """Return a float32 model in training mode, from a shape of ``SHAPES`` or from a folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from agentrl.model.load import disable_dropout

    torch.manual_seed(0)
    if name in SHAPES:
        others = {
            "max_position_embeddings": 65536,
            "tie_word_embeddings": True,
            "attn_implementation": "sdpa",
        }
        config = Qwen3Config(**(SHAPES[name] | others))
        model: Any = Qwen3ForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="sdpa")
    disable_dropout(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train()
