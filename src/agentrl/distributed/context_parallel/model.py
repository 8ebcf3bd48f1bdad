"""Context parallelism: the processes of a group share the tokens of the same forests."""

from __future__ import annotations

from dataclasses import dataclass
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
from agentrl.model.logprobs import token_logprobs
from agentrl.model.output_head import OutputHead
from agentrl.train.step import ForwardOptions


def check_context(model: Any, max_tokens: int) -> None:
    """Raise ConfigError for a model that no mask makes exact on forests of up to ``max_tokens``."""
    reason = MaskLimits.of(model).reason(max_tokens)
    if reason is not None:
        raise ConfigError(
            f"--cp_size: {type(model).__name__} has {reason} (--max_tokens {max_tokens}), so that its tokens"
            " cannot be shared out",
            hint="set --cp_size 1, or, where it is but a window, --max_tokens to no more than the window",
        )


@dataclass(frozen=True)
class Context:
    """This process's part of running forests whose tokens the processes of ``group`` share.

    Each calls the same methods with the same forests.
    """

    model: Any
    group: ProcessGroup

    def run(self, forest: TokenForest, options: ForwardOptions, received: Tensor | None = None) -> Tensor:
        """Hidden states [n, H] of this process's tokens; ``received``: those before, from another stage."""
        is_flex = self._is_flex(options.executor)
        check_compatibility(self.model, trains=self.model.training)
        set_attention(self.model, IMPLEMENTATION)
        share, model = self._share(forest), self.model
        tokens, device = share.tokens, model.device
        seen: dict[str, Any] = (
            {"block_mask": forest_block_mask(share.forest.subtree_end, device, tokens)}
            if is_flex
            else {"segments": share.segments(TILE)}
        )
        ids = share.forest.input_ids[tokens] if received is None else np.arange(len(tokens))
        enabled = options.autocast_dtype is not None
        with torch.autocast(device.type, options.autocast_dtype, enabled), receiving(model, received):
            output = model.get_decoder()(
                input_ids=torch.from_numpy(ids).to(device)[None],
                position_ids=torch.from_numpy(share.forest.position_ids[tokens]).to(device)[None],
                attention_mask=None,
                use_cache=False,
                exchange=TokenExchange(self.group),
                **seen,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logprobs(
        self, forest: TokenForest, options: ForwardOptions, hidden: Tensor, head: OutputHead
    ) -> tuple[Tensor, Tensor]:
        """Logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token, all of them.

        ``hidden`` [n, H] is this process's; gradients are those of its own tokens, summed elsewhere.
        """
        mine, parent = self._share(forest).targets()
        device = hidden.device
        logprobs, entropy = token_logprobs(
            hidden,
            head,
            torch.from_numpy(parent).to(device),
            torch.from_numpy(forest.input_ids[forest.target[mine]]).to(device),
            temperature=torch.from_numpy(forest.temperature[mine]),
            entropy_gradient=options.entropy_gradient,
            chunk_size=options.chunk_size,
            vocab_chunk_size=options.vocab_chunk_size,
        )
        exchange, places = TokenExchange(self.group), torch.from_numpy(mine).to(device)
        count = forest.trainable_tokens
        return exchange.join(logprobs, places, count), exchange.join(entropy, places, count)

    def tokens(self, forest: TokenForest) -> int:
        """n: this process's tokens, padding included."""
        return len(self._share(forest).tokens)

    def _share(self, forest: TokenForest) -> RankTokens:
        block = BLOCK if has_flex(self.model) else 1
        return split_tokens(forest, self.group.size(), self.group.rank(), block=block)

    def _is_flex(self, executor: str) -> bool:
        if executor not in ("auto", "flex", "varlen"):
            raise ConfigError(
                f"attention executor {executor!r} does not share tokens between processes",
                hint="use auto, flex or varlen",
            )
        return has_flex(self.model) if executor == "auto" else executor == "flex"
