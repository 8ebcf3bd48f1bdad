"""Random models of a few thousand parameters, and forests for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.data.forest import TokenForest, forest_from_data
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.model.logprobs import ForwardOptions

VOCABULARY = 61
AGES = {0: 1, 1: 0}
"""Of the policy versions of ``trajectory``."""


def tiny_model(kind: str, *, tied: bool = False, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """``llama``, ``phi3``, ``qwen3`` or ``qwen3_moe`` (2 of 8 experts), in training mode.

    2 layers, 4 heads over 2.
    """
    torch.manual_seed(seed)
    numbers = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "attn_implementation": "sdpa", "initializer_range": 0.3,
    } | overrides  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**numbers)).train()
    if kind == "phi3":
        return Phi3ForCausalLM(
            Phi3Config(pad_token_id=None, eos_token_id=None, bos_token_id=None, **numbers)
        ).train()
    if kind == "qwen3_moe":
        mixture = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **(mixture | numbers))).train()
    return Qwen3ForCausalLM(Qwen3Config(**({"head_dim": 8} | numbers))).train()


def trajectory(
    rng: np.random.Generator, nodes: list[tuple[int, int, int]], spans: list[tuple[int, int]], name: str = "q"
) -> DBRecordData:
    """Random ids and logprobs on the given (start, end, parent) nodes and (start, end) spans."""
    tokens = nodes[-1][1]
    trainable = sum(end - start for start, end in spans)
    teacher = {"teacher": np.linspace(-3.0, -0.5, trainable, dtype=np.float32)}
    return DBRecordData(
        id=name, record=name, task=name, split="train", score=1.0, advantage=1.0, min_version=0,
        max_version=1, tokens=tokens, trainable_tokens=trainable, turns=len(spans),
        nodes=tuple(Node(start=start, end=end, parent=parent) for start, end, parent in nodes),
        spans=tuple(
            TrainableSpan(
                start=start, end=end, call=i, version=i % 2, advantage=float(rng.normal()),
                temperature=0.8 + i % 3 / 4,
            )
            for i, (start, end) in enumerate(spans)
        ),
        input_ids=pack_ids(rng.integers(0, VOCABULARY, tokens).tolist()),
        behavior_logprobs=pack_floats((-5 * rng.random(trainable)).tolist()),
        columns=TokenColumns(teacher).pack(),
    )  # fmt: skip


def chains(seed: int = 0, count: int = 5) -> list[DBRecordData]:
    """Two-turn trajectories of different lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        first, second, third = np.cumsum(rng.integers(2, 9, 3)).tolist()
        made.append(trajectory(rng, [(0, third, -1)], [(1, first), (second, third)], name=f"q{index}"))
    return made


def tree(seed: int = 0) -> DBRecordData:
    """A trajectory with a shared prefix of 6 tokens, two branches, and a fork in one of them."""
    return trajectory(
        np.random.default_rng(seed),
        [(0, 6, -1), (6, 10, 0), (10, 15, 1), (15, 19, 1), (19, 26, 0)],
        [(3, 6), (11, 15), (16, 19), (19, 26)],
    )


def path_to(forest: TokenForest, index: int) -> list[int]:
    """Token indices from the root of its tree to the token, by walking ``parent``."""
    way = [index]
    while (parent := int(forest.parent[way[-1]])) >= 0:
        way.append(parent)
    return way[::-1]


def paths(forest: TokenForest) -> list[list[int]]:
    """Token indices from the root to each leaf."""
    leaves = sorted(set(range(forest.tokens)) - set(forest.parent.tolist()))
    return [path_to(forest, leaf) for leaf in leaves]


def model_logprobs(
    model: PreTrainedModel, forest: TokenForest, options: ForwardOptions | None = None, executor: str = "auto"
) -> torch.Tensor:
    """Return the logprob of each trainable token as training computes it, float32[T] with gradient."""
    logprobs: torch.Tensor
    logprobs, _ = ParallelModel(model, executor=executor, trains=False)(forest, options or ForwardOptions())
    return logprobs


def plain_logprobs(
    model: PreTrainedModel,
    forest: TokenForest,
    inputs_of: Callable[[list[int]], dict[str, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """float32[T]: the logprob of each trainable token, each path run by itself through the whole model.

    ``inputs_of`` a path are the model's inputs beside its ids.
    """
    before: dict[int, torch.Tensor] = {}
    for path in paths(forest):
        ids = torch.from_numpy(forest.input_ids[path])
        more = inputs_of(path) if inputs_of else {}
        logits = model(input_ids=ids[None], use_cache=False, **more).logits[0].float()
        for place in range(1, len(path)):
            before.setdefault(path[place], logits[place - 1])
    labels = zip(forest.target.tolist(), forest.temperature.tolist(), strict=True)
    return torch.stack([
        torch.log_softmax(before[target] / temperature, -1)[int(forest.input_ids[target])]
        for target, temperature in labels
    ])  # fmt: skip


def packed(data: list[DBRecordData]) -> TokenForest:
    """One forest of all the data, ids checked."""
    return forest_from_data(data, vocab_size=VOCABULARY, ages=AGES)
