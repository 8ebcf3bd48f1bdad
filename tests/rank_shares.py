"""Forests, numbers of ranks, and the tokens that each rank of context parallelism computes of a forest."""

from __future__ import annotations

from hypothesis import strategies as st
from tiny_models import chains, packed, tree

from agentrl.data.forest import TokenForest
from agentrl.distributed.context_parallel import RankTokens, split_tokens

forests = st.builds(
    lambda seed, count, trees: packed([*chains(seed, count), *(tree(seed + i) for i in range(trees))]),
    st.integers(0, 1000), st.integers(1, 5), st.integers(0, 3),
)  # fmt: skip
ranks = st.integers(1, 5)


def all_shares(forest: TokenForest, ranks: int, block: int = 1) -> list[RankTokens]:
    return [split_tokens(forest, ranks, rank, block=block) for rank in range(ranks)]
