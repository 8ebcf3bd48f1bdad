"""Context parallelism: run a model on this rank's part of each forest's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.data.forest import TokenForest
from agentrl.distributed.context_parallel.attention import IMPLEMENTATION, TILE
from agentrl.distributed.context_parallel.tokens import RankTokens, TokenExchange, split_tokens
from agentrl.distributed.pipeline_parallel.stages import receiving
from agentrl.errors import ConfigError
from agentrl.model.attention.compatibility import MaskLimits, check_compatibility, set_attention
from agentrl.model.attention.flex import BLOCK, forest_block_mask, has_flex
from agentrl.model.forward import ForwardOptions, forest_logprobs
from agentrl.model.output_head import OutputHead


def check_context(model: Any, max_tokens: int) -> None:
    """Raise ConfigError for a model that no mask makes exact on forests of up to ``max_tokens``."""
    reason = MaskLimits.of(model).reason(max_tokens)
    if reason is not None:
        raise ConfigError(
            f"--cp_size: {type(model).__name__} has {reason} (--max_tokens {max_tokens}): its tokens cannot"
            " be split over processes",
            hint="set --cp_size 1, or, if it only has a window, --max_tokens to at most that window",
        )


class ContextParallel:
    """A model whose ranks in ``group`` split the tokens of each forest.

    Every rank calls the same methods with the same forests.
    """

    def __init__(
        self, model: Any, group: ProcessGroup, executor: str = "auto", *, trains: bool = True
    ) -> None:
        """``executor``: auto, flex or varlen. ``trains``: refuse dropout and other noise."""
        if executor not in ("auto", "flex", "varlen"):
            raise ConfigError(
                f"attention executor {executor!r} cannot split tokens over processes",
                hint="use auto, flex or varlen",
            )
        check_compatibility(model, trains=trains)
        self._model, self._group, self._executor = model, group, executor

    def run(self, forest: TokenForest, received: Tensor | None = None) -> Tensor:
        """Return hidden states [n, H] of this rank's tokens.

        ``received`` [n, H] are those of the stage of layers before.
        """
        model, part = self._model, self._split(forest)
        set_attention(model, IMPLEMENTATION)
        tokens, device = part.tokens, model.device
        is_flex = has_flex(model) if self._executor == "auto" else self._executor == "flex"
        seen: dict[str, Any] = (
            {"block_mask": forest_block_mask(part.forest.subtree_end, device, tokens)}
            if is_flex
            else {"segments": part.segments(TILE)}
        )
        ids = part.forest.input_ids[tokens] if received is None else np.arange(len(tokens))
        with receiving(model, received):
            output = model.get_decoder()(
                input_ids=torch.from_numpy(ids).to(device)[None],
                position_ids=torch.from_numpy(part.forest.position_ids[tokens]).to(device)[None],
                attention_mask=None,
                use_cache=False,
                exchange=TokenExchange(self._group),
                **seen,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logprobs(
        self, hidden: Tensor, head: OutputHead, forest: TokenForest, options: ForwardOptions
    ) -> tuple[Tensor, Tensor]:
        """Return logprob (float32[T], with gradient) and entropy (float32[T]) of all trainable tokens.

        ``hidden`` [n, H] are this rank's. Gradients flow to its own tokens only; FSDP2 sums them over ranks.
        """
        own, parent = self._split(forest).targets()
        logprobs, entropy = forest_logprobs(hidden, head, forest, options, chosen=own, parent=parent)
        exchange, places = TokenExchange(self._group), torch.from_numpy(own).to(hidden.device)
        count = forest.trainable_tokens
        return exchange.join(logprobs, places, count), exchange.join(entropy, places, count)

    def tokens(self, forest: TokenForest) -> int:
        """Return n, the number of this rank's tokens, padding included."""
        return len(self._split(forest).tokens)

    def _split(self, forest: TokenForest) -> RankTokens:
        block = BLOCK if has_flex(self._model) else 1
        return split_tokens(forest, self._group.size(), self._group.rank(), block=block)
