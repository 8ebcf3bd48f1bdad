"""Run a forest through a model, by the fastest attention that is exact for it.

Every executor runs any forest and returns the same hidden states:

- ``flex``: FlexAttention under a block mask; GPU
- ``varlen``: attention segment by segment, without padding
- ``sdpa``: one dense mask
- ``per_sequence``: each path as a sequence of its own, for models that no mask makes exact
- ``per_sequence_padded``: the same in one padded call, for accelerators and ranks that shard a model

Segment by segment needs neither padding nor a dense mask: all other layers run once over the N packed tokens.
A segment's queries attend to its ancestors' keys and, causally, to its own keys. A chain is one segment
without ancestors: plain causal attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.decorators import maybe_mark_dynamic
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.data.forest import Ints, TokenForest
from agentrl.data.planner import SequenceRows
from agentrl.errors import ConfigError, ModelError
from agentrl.model.flops import ModelShape
from agentrl.model.path_attention import Segment, path_attention
from agentrl.model.routing import routing_input
from agentrl.model.vision import forest_inputs

logger = logging.getLogger(__name__)

SEGMENTS = "agentrl_segments"
"""Attention segment by segment, by its name in transformers."""


def set_attention(model: Any, implementation: str) -> None:
    """Make every attention layer use ``implementation``; ModelError if the model does not support it."""
    text = model.config.get_text_config()
    if text._attn_implementation == implementation:
        return
    hint = "use a model that transformers runs through its attention interface (Llama, Qwen, Mistral, …)"
    name = type(model).__name__
    try:
        if text is model.config:
            model.set_attn_implementation(implementation)
        else:  # the vision tower keeps its own
            model.set_attn_implementation({"text_config": implementation})
    except ValueError as error:
        raise ModelError(f"{name} has no {implementation!r} attention: {error}", hint=hint) from error
    if text._attn_implementation != implementation:
        raise ModelError(f"{name} does not let its attention be set to {implementation!r}", hint=hint)


def check_call(module: Any, lacking: str | None, softcap: float | None, s_aux: Tensor | None) -> None:
    """Raise ModelError for an attention layer that no executor called, or that computes more than they do.

    ``lacking`` is what the call should have been given; None: nothing.
    """
    name = type(module).__name__
    if lacking is not None:
        raise ModelError(
            f"{name} was called without a {lacking}",
            hint='run it through build_executor, or call model.set_attn_implementation("sdpa") before',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")


def split_segments(forest: TokenForest) -> list[Segment]:
    """Split ``forest`` into segments, in order; they cover its tokens without overlap."""
    starts = np.flatnonzero(forest.parent != np.arange(forest.tokens) - 1)
    # Add the first token: its parent, −1, looks like the token before it.
    if forest.tokens:
        starts = np.union1d(starts, [0])
    ends = np.append(starts[1:], forest.tokens)
    segments: list[Segment] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        parent = int(forest.parent[start])
        ancestors: tuple[tuple[int, int], ...] = ()
        if parent >= 0:
            above = segments[int(np.searchsorted(starts, parent, side="right")) - 1]
            ancestors = (*above.ancestors, (above.start, parent + 1))
        segments.append(Segment(start, end, ancestors))
    return segments


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How to split keys and values, so that each segment's path is a concatenation of pieces.

    Tokens are cut where a segment begins and where another branches off. The gradient of a piece has the
    piece's length; that of a slice would have the length of the forest.
    """

    segments: tuple[int, ...]
    """Length of each segment in tokens."""
    pieces: tuple[int, ...]
    """Length of each piece in tokens; the pieces cover the forest without overlap."""
    paths: tuple[tuple[int, ...], ...]
    """Indices of the pieces that each segment sees, from the root to its own."""


def plan_segments(segments: list[Segment]) -> SegmentPlan:
    """Return the plan of ``segments``, which cover the tokens of a forest."""
    ranges = [(*segment.ancestors, (segment.start, segment.end)) for segment in segments]
    cuts = np.unique([bound for path in ranges for range_ in path for bound in range_]).tolist()
    number = {bound: index for index, bound in enumerate(cuts)}
    return SegmentPlan(
        segments=tuple(segment.end - segment.start for segment in segments),
        pieces=tuple(np.diff(cuts).tolist()),
        paths=tuple(
            tuple(piece for start, end in path for piece in range(number[start], number[end]))
            for path in ranges
        ),
    )


def run_varlen(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] of the forest; no token is computed twice."""
    set_attention(model, SEGMENTS)
    device = model.device
    segments = split_segments(forest)
    seen: dict[str, Any] = {"segments": segments}
    if sum(segment.mask_entries for segment in segments) <= MASK_ENTRIES:
        seen = {
            "segment_plan": plan_segments(segments),
            "segment_masks": [segment.mask(device) for segment in segments],
        }
    output = model.get_decoder()(
        **forest_inputs(model, forest),
        attention_mask=None,
        use_cache=False,
        **routing_input(forest, device),
        **seen,
    )
    return cast(Tensor, output.last_hidden_state[0])


def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_plan: SegmentPlan | None = None,
    segment_masks: list[Tensor | None] | None = None,
    segments: list[Segment] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention along each path of the forest, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    ``segments``, in place of a plan with its masks, are computed by ``path_attention``. Raises ModelError
    without either, and for a layer with capped scores or attention sinks.
    """
    lacks = segment_plan is None and segments is None
    check_call(module, "segment plan" if lacks else None, softcap, s_aux)
    if segments is not None:
        return path_attention(query, key, value, segments, scaling).transpose(1, 2), None
    assert segment_plan is not None
    assert segment_masks is not None
    keys, values = (states.split_with_sizes(segment_plan.pieces, 2) for states in (key, value))
    outputs = [
        scaled_dot_product_attention(
            states,
            _joined([keys[piece] for piece in path]),
            _joined([values[piece] for piece in path]),
            attn_mask=mask,
            dropout_p=dropout,
            # Say it without a mask where possible: SDPA's flash kernel takes none.
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for states, path, mask in zip(
            query.split_with_sizes(segment_plan.segments, 2), segment_plan.paths, segment_masks, strict=True
        )
    ]
    return _joined(outputs, 1), None


MASK_ENTRIES = 1 << 22
"""Entries of the masks that a forest may have at once; a layer saves them as floats. One branch at half of
131,072 tokens would have 8.6e9."""


def _joined(pieces: list[Tensor], dim: int = 2) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


AttentionInterface.register(SEGMENTS, segment_attention)


def forest_mask(subtree_end: Tensor) -> Tensor:
    """Return bool[1, 1, N, N], True where query q sees key k: k ≤ q < subtree_end[k]."""
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = index[:, None], index[None, :]
    return ((key <= query) & (query < subtree_end[None, :]))[None, None]


def run_sdpa(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] of the forest in one row; attention costs N² memory and time."""
    set_attention(model, "sdpa")
    device = model.device
    output = model.get_decoder()(
        **forest_inputs(model, forest),
        attention_mask=forest_mask(torch.from_numpy(forest.subtree_end).to(device)),
        use_cache=False,
        **routing_input(forest, device),
    )
    return cast(Tensor, output.last_hidden_state[0])


def run_per_sequence(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] from one call per path; a shared prefix is computed once per path."""
    pieces = [
        _run(model, forest, _path_tokens(segment)[None])[0, segment.ancestor_count :]
        for segment in split_segments(forest)
    ]
    return torch.cat(pieces)


def run_per_sequence_padded(model: Any, forest: TokenForest) -> Tensor:
    """Return what ``run_per_sequence`` returns, from one call: a path is a row, padded at its end."""
    segments = split_segments(forest)
    rows = np.zeros((len(segments), forest.depth), dtype=np.int64)
    for row, segment in zip(rows, segments, strict=True):
        tokens = _path_tokens(segment)
        row[: len(tokens)] = tokens
    hidden = _run(model, forest, rows)
    pieces = [
        states[segment.ancestor_count :][: segment.end - segment.start]
        for states, segment in zip(hidden, segments, strict=True)
    ]
    return torch.cat(pieces)


def _path_tokens(segment: Segment) -> Ints:
    """Return the places in the forest from the root to the end of ``segment``."""
    return np.concatenate([np.arange(start, end) for start, end in segment.path])


def _run(model: Any, forest: TokenForest, rows: Ints) -> Tensor:
    """Return hidden states [P, L, H] of sequences of the forest's tokens, int64[P, L]."""
    set_attention(model, "sdpa")
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids[rows]).to(model.device),
        # Pass no mask: rows are padded at their ends, which causal attention does not see.
        attention_mask=None,
        use_cache=False,
        **routing_input(forest, model.device, rows.reshape(-1)),
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


FLEX = "agentrl_flex"
BLOCK = 128
"""Tokens along each side of a mask block; rows are padded to a multiple of it."""
MIN_HEAD_DIM = 16
"""Width of the narrowest attention head that its kernels take."""
VARIANTS = 32
"""Compilations of FlexAttention before Dynamo gives up; torch's own limit, 8, counts those of all models.

A model needs one for each dtype and set of inputs with a gradient: two in an ordinary run, one more with
frozen layers and for a reference model with other heads.
"""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(subtree_end: Tensor, tokens: Tensor | None = None) -> MaskFunction:
    """Return mask_mod(batch, head, query, key), True where the query is the key or follows it on a path.

    With ``tokens``, query q is token ``tokens[q]``.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = query if tokens is None else tokens[query]
        return (key <= token) & (token < subtree_end[key])

    return sees


def padded_ends(subtree_end: Ints) -> Ints:
    """Pad ``subtree_end`` to whole blocks, at least two; a padding token sees only itself.

    Dynamo compiles a dimension of 1 as a constant: one block would need a kernel of its own.
    """
    count = len(subtree_end)
    return np.concatenate([subtree_end, np.arange(count, max(2, -(-count // BLOCK)) * BLOCK) + 1])


def block_kinds(subtree_end: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (partial, full), bool[query blocks, key blocks]: some, or all, queries see all keys there.

    A query after key k sees it up to ``subtree_end[k]``, so the largest and the smallest end in a key block
    decide every block below the diagonal. N must be a multiple of ``BLOCK``; the cost is (N / BLOCK)².
    """
    ends = subtree_end.reshape(-1, BLOCK)
    start = np.arange(len(ends)) * BLOCK
    below = start[:, None] > start[None, :]
    touched = below & (ends.max(1)[None, :] > start[:, None])
    full = below & (ends.min(1)[None, :] >= start[:, None] + BLOCK)
    return (touched & ~full) | np.eye(len(ends), dtype=np.bool_), full


def forest_block_mask(subtree_end: Ints, device: torch.device | str, tokens: Ints | None = None) -> BlockMask:
    """Return the BlockMask of a forest whose ``subtree_end`` is padded to whole blocks, without N² work.

    ``tokens``: the queries, if they are not all tokens; whole blocks, in ascending order.
    """
    kinds = block_kinds(subtree_end)
    queries = None if tokens is None else torch.from_numpy(tokens).to(device)
    if tokens is not None:
        partial, full = (kind[tokens[::BLOCK] // BLOCK] for kind in kinds)
        kinds = partial, full
    ends = torch.from_numpy(subtree_end).to(device)
    mask = BlockMask.from_kv_blocks(
        *_indices(kinds[0], device),
        *_indices(kinds[1], device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(ends, queries),
        seq_lengths=(len(subtree_end) if tokens is None else len(tokens), len(subtree_end)),
    )
    for lengths in (ends, queries):
        if lengths is not None:
            _any_length(lengths, 0)
    for blocks in mask.as_tuple():
        if isinstance(blocks, Tensor):
            _any_length(blocks, *range(2, blocks.dim()))
    return mask


def _indices(kind: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, int32[1, 1, Q], and their indices [1, 1, Q, K]."""
    counts = torch.from_numpy(kind.sum(1).astype(np.int32)).to(device)
    order = torch.from_numpy(np.argsort(~kind, axis=1, kind="stable").astype(np.int32)).to(device)
    return counts[None, None], order[None, None].contiguous()


def has_flex(model: Any) -> bool:
    """Return whether FlexAttention has a kernel for the model, backward included: on CUDA."""
    if model.device.type != "cuda":
        return False
    return ModelShape.of(model.config).head_dim >= MIN_HEAD_DIM


def run_flex(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] of the forest in one row; attention costs the blocks that paths touch."""
    set_attention(model, FLEX)
    device = model.device
    ends = padded_ends(forest.subtree_end)
    padding = (0, len(ends) - forest.tokens)
    output = model.get_decoder()(
        input_ids=torch.from_numpy(np.pad(forest.input_ids, padding)).to(device)[None],
        position_ids=torch.from_numpy(np.pad(forest.position_ids, padding)).to(device)[None],
        attention_mask=None,
        use_cache=False,
        **routing_input(forest, device, padding=padding[1]),
        block_mask=forest_block_mask(ends, device),
    )
    return cast(Tensor, output.last_hidden_state[0, : forest.tokens])


_BLOCKS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def flex_any_length(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, **options: Any
) -> Tensor:
    """Call FlexAttention with the tensors' lengths: Dynamo compiles the mask's ints as constants."""
    mask = BlockMask(
        (query.shape[2], key.shape[2]),
        **{name: getattr(block_mask, name) for name in _BLOCKS},
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=block_mask.mask_mod,
    )
    return cast(Tensor, flex_attention(query, key, value, block_mask=mask, **options))


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    """Return FlexAttention, compiled if the device has a kernel for it."""
    if device_type == "cpu":
        return cast(Callable[..., Tensor], flex_attention)
    return compile_kernel(flex_any_length)


def compile_kernel(attention: Callable[..., Tensor], backend: Any = "inductor") -> Callable[..., Tensor]:
    """Return ``attention`` compiled.

    A call becomes one operation, ``inductor_compiled_code``, which selective checkpointing can keep. Without
    that option, operations in compiled code are hidden from it.
    """
    made = torch.compile(  # type: ignore[call-overload]  # the overloads lack recompile_limit
        attention,
        fullgraph=True,
        backend=backend,
        recompile_limit=VARIANTS,
        options={"wrap_inductor_compiled_regions": True},
    )
    return cast(Callable[..., Tensor], made)


def _any_length(tensor: Tensor, *dimensions: int) -> None:
    """Let Dynamo compile for any size of ``dimensions``, from the first size on.

    By default, it compiles the first size as a constant. A micro-batch of that size, recomputed in its
    backward after another size was compiled (1F1B), would then run another kernel than in its forward, and
    selective checkpointing would not find what it kept.
    """
    maybe_mark_dynamic(tensor, dimensions)


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    block_mask: BlockMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention under ``block_mask``, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    Raises ModelError without a mask, and for a layer with capped scores or attention sinks.
    """
    check_call(module, "block mask" if block_mask is None else None, softcap, s_aux)
    value = value.to(query.dtype)
    for states in (query, key, value):
        _any_length(states, 2)
    if scaling == query.shape[3] ** -0.5:
        scaling = None  # the default: Dynamo compiles a number that differs between models as a variable
    output = _kernel(query.device.type)(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX, block_attention)


_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NOISE = ("dropout", "pdrop", "router_jitter_noise", "layerdrop")
EXECUTORS: dict[str, Callable[[Any, TokenForest], Tensor]] = {
    "sdpa": run_sdpa,
    "varlen": run_varlen,
    "flex": run_flex,
    "per_sequence": run_per_sequence,
    "per_sequence_padded": run_per_sequence_padded,
}
_WITH_IMAGES = ("varlen", "sdpa")
_WITHOUT_MASK = ("per_sequence", "per_sequence_padded")
DENSE_TOKENS = 512
"""A CPU runs a branching forest of up to this many tokens under one dense mask: fewer, larger calls."""


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """Reasons why no attention mask makes a model exact on a forest; a path run alone is always exact."""

    state: str | None
    """Layers that carry a state along the row (linear attention, convolutions, recurrences), and so read
    the tokens packed before a sequence."""
    window: int | None
    """Tokens of the smallest attention window: a layer measures it along the row, not by depth in a tree."""

    @classmethod
    def of(cls, model: Any) -> MaskLimits:
        """Read them from the model's configuration."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ())
        # Count a kind that nobody knows as stateful: each path alone is exact for any layer.
        stateful = sorted(layers - _FULL - set(_WINDOWED))
        state = None
        if stateful or getattr(model, "_is_stateful", False):
            state = ", ".join(stateful) or "a recurrent state"
        return cls(state, _window(config))

    def reason(self, depth: int) -> str | None:
        """Return why no mask is exact on paths of up to ``depth`` tokens; None if one is."""
        if self.state is not None:
            return f"{self.state}, which carries over from one sequence to the next"
        if self.window is not None and depth > self.window:
            return f"layers that see only {self.window} tokens back, less than a sequence"
        return None


def check_compatibility(model: Any, *, trains: bool = True) -> None:
    """Raise ModelError for a model whose result depends on what its sequences are packed with.

    The causes are an auxiliary router loss over a micro-batch, experts with a token capacity, attention
    scores that are capped inside the kernel, and, if the model ``trains``, dropout and other noise.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if trains:
        _check_noise(name, model, config)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{name} adds an auxiliary loss of its router, a mean over the tokens of a micro-batch: it would"
            " depend on how trajectories are packed and merged",
            hint="set output_router_logits to false in the model's config.json",
        )
    if getattr(config, "expert_capacity", None):
        raise ModelError(
            f"{name} drops tokens beyond {config.expert_capacity} per expert: neighbors change its result",
            hint="use a mixture-of-experts model whose experts take every token",
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            f"{name} caps its attention scores at {config.attn_logit_softcapping}, which no executor does",
            hint="use a model without attn_logit_softcapping",
        )


_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions of which transformers chooses the frequencies anew in each call."""


def check_positions(model: Any, max_tokens: int) -> None:
    """Raise ConfigError for rotary positions that depend on what a sequence is packed or split with.

    Above a length, the longest sequence of a call changes the positions of all tokens in it. Engines choose
    the frequencies in other ways: vLLM once for its longest context.
    """
    config = model.config.get_text_config()
    found = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *(part for part in found.values() if isinstance(part, dict))):
        kind = rope.get("rope_type")
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _CHANGING and max_tokens > limit:
            raise ConfigError(
                f"{type(model).__name__} has {kind} rotary positions: a sequence above {limit} tokens changes"
                f" those of all sequences in its micro-batch of --max_tokens {max_tokens}",
                hint=f"set --max_tokens {limit} or less",
            )


def _window(config: Any) -> int | None:
    """Return the smallest window of the attention layers, in tokens; None if all see every token."""
    layers = getattr(config, "layer_types", None)
    if layers is None:
        # Ask for both: Qwen2's config.json names a window also where it is switched off.
        used = getattr(config, "use_sliding_window", True)
        names = ["sliding_window"] if used else []
    else:
        names = [_WINDOWED[layer] for layer in set(layers) if layer in _WINDOWED]
    windows = [getattr(config, attribute, None) for attribute in names]
    return min((int(window) for window in windows if window is not None), default=None)


def _check_noise(name: str, model: nn.Module, config: Any) -> None:
    # Ask modules and configuration: adapters add modules, and attention reads its rate from the other alone.
    rates = {f"dropout {module.p}": module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for key, value in vars(config).items():
        # Pass over classifier_dropout: it is of a head that a causal LM does not have.
        if isinstance(value, float) and key.endswith(_NOISE) and not key.startswith("classifier"):
            rates[f"{key} {value}"] = value
    worst = max(rates, key=lambda key: rates[key], default=None)
    if worst is not None and rates[worst] > 0:
        raise ModelError(
            f"{name} trains with {worst}: its loss would depend on how trajectories are packed, and its"
            " ratios to the behavior policy would be noise",
            hint="set it to 0: in the model's config.json, or in the arguments of an adapter",
        )


@dataclass(frozen=True)
class ForestExecutor:
    """Runs forests through the model that it was built for; ``build_executor`` makes it."""

    model: Any
    name: str
    """A key of ``EXECUTORS``, or ``auto``: the fastest exact one for each forest."""
    limits: MaskLimits
    has_flex: bool
    equal_calls: bool

    def __call__(self, forest: TokenForest) -> Tensor:
        """Return the last hidden states [N, H] of ``forest``, before the output head, with gradient.

        Each token sees its ancestors and itself, at positions that count from its root. Runs on the model's
        device. The model keeps the attention implementation that was used, because recomputed activations
        need it in the backward. Raises ModelError if the executor would not be exact on ``forest``.
        """
        return EXECUTORS[self.choose(forest)](self.model, forest)

    @property
    def rows(self) -> SequenceRows | None:
        """How forests run that no mask makes exact, as planning micro-batches needs it; None: all are."""
        if self.limits.state is None and self.limits.window is None:
            return None
        above = 0 if self.limits.state is not None else self.limits.window or 0
        return SequenceRows(above, padded=self._pads)

    @property
    def _pads(self) -> bool:
        """Run paths in one padded call: ranks need it, and an accelerator waits for the host at each call."""
        return self.equal_calls or self.model.device.type != "cpu"

    def choose(self, forest: TokenForest) -> str:
        """Return the name of the executor for ``forest``.

        ``auto`` is ``flex`` on a GPU; elsewhere ``varlen``, or ``sdpa`` for a small branching forest. A model
        that no mask makes exact runs each path alone, and one warning says why.
        """
        if forest.images is not None:
            return self._choose_for_images(forest)
        reason = self.limits.reason(forest.depth)
        model = type(self.model).__name__
        if self.name != "auto":
            if reason is not None and self.name not in _WITHOUT_MASK:
                raise ModelError(
                    f"{model} has {reason}: {self.name!r} would not be exact",
                    hint="use executor 'auto' or 'per_sequence', which run each sequence alone",
                )
            return self.name
        if reason is not None:
            _warn_once(f"{model} has {reason}: each sequence runs alone, without shared prefixes")
            return "per_sequence_padded" if self._pads else "per_sequence"
        if self.has_flex:
            return "flex"
        return _on_sdpa(forest)

    def _choose_for_images(self, forest: TokenForest) -> str:
        """Return ``varlen`` or ``sdpa``: the executors that pass images to the model."""
        reason = self.limits.reason(forest.depth)
        if reason is not None or self.name not in ("auto", *_WITH_IMAGES):
            what = f"{type(self.model).__name__} has {reason}" if reason else f"executor {self.name!r}"
            raise ModelError(
                f"{what}, and the data hold images: they run through {' and '.join(_WITH_IMAGES)} only",
                hint="use executor 'auto' and a model with full attention, or sample without images",
            )
        return _on_sdpa(forest) if self.name == "auto" else self.name

    def choices(self, forest: TokenForest) -> list[str]:
        """Return every executor that ``auto`` may choose for forests such as ``forest``."""
        if self.limits.reason(forest.depth) is not None:
            return list(_WITHOUT_MASK)
        return ["flex"] if self.has_flex else ["sdpa", "varlen"]


def build_executor(
    model: Any, name: str = "auto", *, trains: bool = True, equal_calls: bool = False
) -> ForestExecutor:
    """Check ``model``, which is on its device already, and return what runs forests through it.

    ``trains`` refuses dropout and other noise of the training mode. ``equal_calls`` is for ranks that shard
    the model's weights: each must call it equally often. Raises ConfigError for an unknown executor,
    ModelError for a model whose result depends on what its sequences are packed with.
    """
    if name not in ("auto", *EXECUTORS):
        raise ConfigError(f"attention executor {name!r}", hint=f"use auto, {' or '.join(EXECUTORS)}")
    check_compatibility(model, trains=trains)
    return ForestExecutor(model, name, MaskLimits.of(model), has_flex(model), equal_calls)


def _on_sdpa(forest: TokenForest) -> str:
    return "varlen" if forest.is_chains or forest.tokens > DENSE_TOKENS else "sdpa"


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
