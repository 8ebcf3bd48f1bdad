"""Replay the experts that an engine chose: R3, Rollout Routing Replay (arXiv 2510.11370).

Each router of a mixture chooses its k experts by ``topk``. While the stored choice of a token is replayed,
``topk`` returns that choice with the router's own scores for it. All else is the model's own code: how scores
become weights, their normalization, and the gradient that reaches the router through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.data.forest import Ints, TokenForest
from agentrl.documents.model_call import ExpertShape
from agentrl.errors import ModelError

ARGUMENT = "expert_routing"
"""Argument of a decoder, int [tokens, layers, k], that its layers get too, like those of attention.

An argument, and not the state of a module, is right for recomputed layers and for interleaved micro-batches.
"""


def find_routers(model: Any) -> dict[int, nn.Module]:
    """Return the router of each sparse layer of a causal LM, by the number of the layer; empty if dense."""
    layers = getattr(model.get_decoder(), "layers", None)
    numbered = enumerate(layers) if isinstance(layers, nn.ModuleList) else ()
    return {number: each for number, layer in numbered for each in layer.modules() if _is_router(each)}


def _is_router(module: nn.Module) -> bool:
    """Return whether ``module`` scores experts: it holds a weight [experts, H], and none of theirs."""
    count, chosen = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    own = list(module.parameters())
    return (
        isinstance(count, int)
        and isinstance(chosen, int)
        and all(parameter.dim() < 3 for parameter in own)
        and any(parameter.dim() == 2 and len(parameter) == count for parameter in own)
    )


def record_choices(model: Any) -> dict[int, Tensor]:
    """Return a dict {layer: experts int64[tokens, k]} that each forward of ``model`` fills; {} if dense."""
    chosen: dict[int, Tensor] = {}
    for layer, router in find_routers(model).items():
        chosen[layer] = torch.empty(0)
        router.register_forward_hook(partial(_record, chosen, layer))
    return chosen


def _record(chosen: dict[int, Tensor], layer: int, _: nn.Module, args: Any, result: Any) -> None:
    if isinstance(result, tuple):  # (logits, weights, experts), as transformers' routers return them
        chosen[layer] = result[2]


def routing_input(
    forest: TokenForest, device: torch.device, tokens: Ints | None = None, *, padding: int = 0
) -> dict[str, Any]:
    """Return the decoder's argument for ``tokens`` of a forest (default: all), and ``padding`` free tokens.

    Empty for a forest without routing.
    """
    if forest.routing is None:
        return {}
    routing = forest.routing if tokens is None else forest.routing.select(tokens)
    experts = (routing.padded(padding) if padding else routing).experts
    return {ARGUMENT: torch.from_numpy(experts).to(device)}


@dataclass(eq=False)
class RouterReplay:
    """The routers of a model, which choose the experts that the decoder's argument ``ARGUMENT`` names.

    Without the argument, and for tokens whose experts are −1, they choose for themselves.
    """

    shape: ExpertShape
    choices: int = 0
    """Choices that routers have made: tokens × sparse layers."""
    _differing: list[Tensor] = field(default_factory=list)
    """Per router call: how many replayed choices differ from the router's own, and how many there are."""

    @classmethod
    def install(cls, model: Any, shape: ExpertShape) -> RouterReplay:
        """Prepare the layers of ``model``, before they are sharded. Raises ModelError without routers."""
        replay, routers = cls(shape), find_routers(model)
        if not routers:
            raise ModelError(
                f"{type(model).__name__} has no routers whose choice of experts can be replayed",
                hint="set --router_replay off",
            )
        for number, router in routers.items():
            layer, current = model.get_decoder().layers[number], _Current()
            for mixer in (child for child in layer.children() if hasattr(child, "layer_idx")):
                mixer.register_forward_pre_hook(partial(current.receive, number), with_kwargs=True)
            router.forward = replay._replaying(router, current)
        return replay

    def take_differing(self) -> float:
        """Return the share of choices since the last call that the router would have made otherwise."""
        differing, replayed = torch.stack(self._differing).sum(0).tolist() if self._differing else (0, 0)
        self._differing = []
        return float(differing / max(replayed, 1))

    def _replaying(self, router: Any, current: _Current) -> Callable[..., Any]:
        """Return the forward of ``router`` under the choice that its layer has received."""
        own = router.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if current.chosen is None:
                return own(hidden, *args, **kwargs)
            # Widen: forests hold small integers, and gather takes int64 alone.
            with _Replayed(current.chosen.long(), router.num_experts) as mode:
                result = own(hidden, *args, **kwargs)
            if mode.counts is None:
                raise ModelError(
                    f"{type(router).__name__} does not choose {self.shape.top_k} experts for each of"
                    f" {len(current.chosen)} tokens by topk: they cannot be replayed",
                    hint="set --router_replay off",
                )
            self.choices += len(current.chosen)
            self._differing.append(mode.counts)
            return result

        return forward


class _Current:
    """The stored choice [tokens, k] of the layer whose forward runs; None: its router chooses.

    The layer's attention receives it, before the router: unlike the hooks of a layer, those of its modules
    run again when the layer is recomputed.
    """

    chosen: Tensor | None = None

    def receive(self, layer: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Take the choice of ``layer`` from the arguments of its attention: a hook before its forward."""
        routing = kwargs.pop(ARGUMENT, None)
        self.chosen = None if routing is None else routing[:, layer]
        return args, kwargs


class _Replayed(TorchFunctionMode):
    """Replaces the result of ``topk`` over the experts by a stored choice, where that is not −1."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts
        self.counts: Tensor | None = None
        """int64[2]: replayed choices that differ from the router's own, and all replayed ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Call it in any case: its own choice is kept where none is stored, and counted where it differs.
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or not self._is_choice(args[0], result.indices):
            return result
        own, is_replayed = result.indices, self._chosen[:, :1] >= 0
        index = torch.where(is_replayed, self._chosen, own)
        # Sort both: the order of a token's experts changes no result.
        differs = (index.sort(-1).values != own.sort(-1).values).any(-1)
        self.counts = torch.stack([differs.sum(), is_replayed.sum()])
        return torch.return_types.topk((args[0].gather(-1, index), index))

    def _is_choice(self, scores: Tensor, indices: Tensor) -> bool:
        """Return whether a ``topk`` chooses among all experts, and not among groups or within one."""
        return scores.shape == (len(self._chosen), self._experts) and indices.shape == self._chosen.shape
