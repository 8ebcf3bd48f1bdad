"""Context parallelism: the processes of a group share the tokens of the same forests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.batching.forest import TokenForest
from agentrl.errors import ConfigError
from agentrl.train.attention import has_flex
from agentrl.train.attention.flex import BLOCK, forest_block_mask
from agentrl.train.attention.implementation import use_attention
from agentrl.train.attention.limits import check_limits, unmaskable_at
from agentrl.train.logprobs import OutputHead, token_logprobs
from agentrl.train.parallel.attend import IMPLEMENTATION, TILE
from agentrl.train.parallel.chunks import TokenShare, share_tokens
from agentrl.train.parallel.exchange import TokenExchange
from agentrl.train.step import ForwardOptions


def check_context(model: Any, max_tokens: int) -> None:
    """Raise ConfigError for a model that no mask makes exact on forests of up to ``max_tokens``."""
    reason = unmaskable_at(model, max_tokens)
    if reason is not None:
        raise ConfigError(
            f"--cp_size: {type(model).__name__} has {reason} (--max_tokens {max_tokens}), so that its tokens"
            " cannot be shared out",
            cure="set --cp_size 1, or, where it is but a window, --max_tokens to no more than the window",
        )


def context_logprobs(
    model: Any, forest: TokenForest, options: ForwardOptions, head: OutputHead, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token of ``forest``.

    Every process of ``group`` calls it with the same forest, computes its share of the tokens, and gets the
    whole result; the gradients of the model are its own tokens' part, of which the sum is taken elsewhere.
    """
    exchange, device = TokenExchange(group), model.device
    is_flex = _is_flex(model, options.executor)
    share = share_tokens(forest, exchange.ranks, group.rank(), block=BLOCK if is_flex else 1)
    with torch.autocast(device.type, options.autocast_dtype, options.autocast_dtype is not None):
        hidden = _run_share(model, share, exchange, is_flex=is_flex)
    mine, parent = share.targets()
    logprobs, entropy = token_logprobs(
        hidden,
        head,
        torch.from_numpy(parent).to(device),
        torch.from_numpy(forest.input_ids[forest.target[mine]]).to(device),
        temperature=options.temperature,
        chunk_size=options.chunk_size,
        vocab_chunk_size=options.vocab_chunk_size,
    )
    places = torch.from_numpy(mine).to(device)
    count = forest.trainable_tokens
    return exchange.join(logprobs, places, count), exchange.join(entropy, places, count)


def _is_flex(model: Any, executor: str) -> bool:
    if executor not in ("auto", "flex", "varlen"):
        raise ConfigError(
            f"attention executor {executor!r} does not share tokens between processes",
            cure="use auto, flex or varlen",
        )
    return has_flex(model) if executor == "auto" else executor == "flex"


def _run_share(model: Any, share: TokenShare, exchange: TokenExchange, *, is_flex: bool) -> Tensor:
    """Hidden states [n, H] of this process's tokens."""
    check_limits(model)
    use_attention(model, IMPLEMENTATION)
    forest, tokens, device = share.forest, share.tokens, model.device
    seen: dict[str, Any] = (
        {"block_mask": forest_block_mask(forest.subtree_end, device, tokens)}
        if is_flex
        else {"segments": share.segments(TILE)}
    )
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids[tokens]).to(device)[None],
        position_ids=torch.from_numpy(forest.position_ids[tokens]).to(device)[None],
        attention_mask=None,
        use_cache=False,
        exchange=exchange,
        **seen,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
