"""Forward pass of the local engine: a transformers model over a flat batch of chunks and a KV cache."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.chat.chat_format import Vision, read_vision
from agentrl.data.forest import ForestImages, common_prefix, images_of_spans, rope_positions
from agentrl.documents.images import Image, ImageSpan
from agentrl.documents.model_call import ExpertShape
from agentrl.errors import ImageError, ModelError
from agentrl.local.engine.linears import (
    AdaptedLinear,
    AdapterRows,
    LoadedAdapter,
    PackedLinear,
    Patch,
    Places,
    find_places,
    load_adapter,
    pack_linears,
    read_patch,
    round_to_fp8,
)
from agentrl.model.attention import set_attention
from agentrl.model.flops import ModelShape, bfloat16_speed
from agentrl.model.load import ONE_BUILD, check_report
from agentrl.model.routing import record_choices
from agentrl.model.vision import PixelReader, image_features
from agentrl.weights.folder import expert_shape, stored_dtype

_ROUND = 64
_KEEP = 256


@dataclass(slots=True, eq=False)
class CacheSlot:
    """One sequence in the cache: rows from ``start`` on hold keys and values of ``tokens[:computed]``."""

    tokens: NDArray[np.int32]
    adapter: LoadedAdapter | None = None
    """The adapter that computed the rows; no request of another one reuses them."""
    computed: int = 0
    start: int = 0
    capacity: int = 0
    busy: bool = True
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """``length`` tokens of a prompt are cached in ``slot``; ``pending`` after the running prefills."""

    slot: CacheSlot | None
    length: int
    pending: int


class KVCache:
    """Keys and values of ``max_tokens`` tokens: two tensors [max_tokens, kv_heads, head_dim] per layer.

    The rows of a slot are contiguous, so that attention reads them without a gather; a slot that needs more
    rows moves. The lowest free rows are used first, because the system allocates memory at the first write.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        experts: ExpertShape | None = None,
    ) -> None:
        self._shape = (max_tokens, num_kv_heads, head_dim)
        self._layers, self._dtype, self._device = num_layers, dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.experts: Tensor | None = None
        """int16 [max_tokens, layers, k], the experts of each row's token, in a mixture."""
        if experts is not None:
            size = (max_tokens, experts.layers, experts.top_k)
            self.experts = torch.zeros(size, dtype=torch.int16, device=device)
        self.max_tokens = max_tokens
        self._slots: list[CacheSlot] = []
        self._clock = 0
        self.allocate()

    def allocate(self) -> None:
        """Allocate the tensors, unless they are there."""
        while len(self.keys) < self._layers:
            for tensors in (self.keys, self.values):
                tensors.append(torch.empty(self._shape, dtype=self._dtype, device=self._device))

    def free(self) -> None:
        """Drop the tensors; no sequence may be busy."""
        self.drop_idle()
        self.keys.clear()
        self.values.clear()

    @property
    def usage(self) -> float:
        """Share of the rows that running sequences hold."""
        return sum(slot.capacity for slot in self._slots if slot.busy) / self.max_tokens

    def match(self, prompt: NDArray[np.int32], adapter: LoadedAdapter | None) -> PrefixMatch:
        """Return the slot of ``adapter`` with the longest computed prefix of ``prompt`` without its end."""
        best, length, pending = None, 0, 0
        for slot in self._slots:
            if slot.adapter is not adapter:
                continue
            common = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
            pending = max(pending, common)
            ready = min(common, slot.computed)
            if ready > length or (ready == length > 0 and best is not None and best.busy and not slot.busy):
                best, length = slot, ready
        return PrefixMatch(best, length, pending)

    def acquire(
        self, prompt: NDArray[np.int32], match: PrefixMatch, rows: int, adapter: LoadedAdapter | None
    ) -> CacheSlot | None:
        """Return a busy slot of ``rows`` rows that holds the match; None if running sequences need the space.

        A finished sequence with few tokens beyond the match is continued in place; otherwise the match is
        copied.
        """
        source, length = match.slot, match.length
        if source is not None and not source.busy and source.computed - length <= max(16, length // 4):
            source.tokens, source.computed, source.busy = prompt, length, True
            if self.grow(source, rows):
                return source
            source.busy = False
            source.tokens = prompt[:length]
            return None
        slot = CacheSlot(prompt, adapter)
        if not self._place(slot, rows, keep=source):
            source = None
            if not self._place(slot, rows, keep=None):
                return None
        if source is not None:
            self._copy(source.start, slot.start, length)
            slot.computed = length
        self._slots.append(slot)
        return slot

    def grow(self, slot: CacheSlot, rows: int) -> bool:
        """Give a busy slot at least ``rows`` rows; return False if running sequences need the space."""
        if rows <= slot.capacity:
            return True
        start, capacity = slot.start, slot.capacity
        slot.capacity = 0
        if not self._place(
            slot, max(rows, min(rows * 3 // 2, self.max_tokens)), keep=None
        ) and not self._place(slot, rows, keep=None):
            slot.start, slot.capacity = start, capacity
            return False
        if slot.start != start:
            self._copy(start, slot.start, slot.computed)
        return True

    def chosen_experts(self, slot: CacheSlot, start: int, end: int) -> NDArray[np.int32] | None:
        """Return the experts [n, layers, k] of tokens ``[start, end)``; None if one is not computed."""
        if self.experts is None or not start < end <= slot.computed:
            return None
        return self.experts[slot.start + start : slot.start + end].cpu().numpy().astype("<i4")

    def release(self, slot: CacheSlot, tokens: NDArray[np.int32]) -> None:
        """Release a slot; its computed part of ``tokens`` stays for reuse until the rows are needed."""
        self._clock += 1
        slot.tokens = tokens[: slot.computed].copy()
        slot.busy, slot.used_at = False, self._clock
        idle = [item for item in self._slots if not item.busy]
        if slot.computed == 0 or len(idle) > _KEEP:
            self._slots.remove(min(idle, key=lambda item: (item.computed > 0, item.used_at)))

    def drop_idle(self, adapter: LoadedAdapter | None = None) -> None:
        """Drop every idle sequence, or those of ``adapter``."""
        self._slots = [slot for slot in self._slots if slot.busy or adapter not in (None, slot.adapter)]

    def _place(self, slot: CacheSlot, rows: int, keep: CacheSlot | None) -> bool:
        """Assign the lowest free range of ``rows`` rows to ``slot``; drop idle sequences as needed."""
        rows = min(-(-rows // _ROUND) * _ROUND, self.max_tokens)
        while True:
            start = self._lowest_free(rows)
            if start is not None:
                slot.start, slot.capacity = start, rows
                return True
            idle = [item for item in self._slots if not item.busy and item is not keep]
            if not idle:
                return False
            self._slots.remove(min(idle, key=lambda item: item.used_at))

    def _lowest_free(self, rows: int) -> int | None:
        end = 0
        for start, capacity in sorted((slot.start, slot.capacity) for slot in self._slots if slot.capacity):
            if start - end >= rows:
                return end
            end = start + capacity
        return end if self.max_tokens - end >= rows else None

    def _copy(self, source: int, target: int, length: int) -> None:
        overlap = abs(source - target) < length
        for tensor in (*self.keys, *self.values, *([] if self.experts is None else [self.experts])):
            rows = tensor[source : source + length]
            tensor[target : target + length] = rows.clone() if overlap else rows


ATTENTION = "agentrl_slots"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """The attention of one chunk: queries [begin, end) of the batch over cache rows [first, last)."""

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SlotBatch:
    cache: KVCache
    rows: Tensor
    segments: tuple[BatchSegment, ...]


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slot_batch: SlotBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the KV cache; each layer calls it with query [1, heads, n, dim] of the batch.

    The query heads of one key head become additional query rows, so that keys and values are read once and
    never repeated.
    """
    named = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if slot_batch is None or named:
        raise ModelError(f"the local engine's attention does not support {named or 'a call without a batch'}")
    layer = cast("int", module.layer_idx)
    cache = slot_batch.cache
    layer_keys, layer_values = cache.keys[layer], cache.values[layer]
    layer_keys.index_copy_(0, slot_batch.rows, key[0].transpose(0, 1))
    layer_values.index_copy_(0, slot_batch.rows, value[0].transpose(0, 1))
    heads, count, dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.view(kv_heads, group, count, dim)
    output = query.new_empty(count, kv_heads, group, dim)
    for segment in slot_batch.segments:
        keys = layer_keys[segment.first : segment.last].transpose(0, 1)
        values = layer_values[segment.first : segment.last].transpose(0, 1)
        n = segment.end - segment.begin
        rows = grouped[:, :, segment.begin : segment.end].reshape(kv_heads, group * n, dim)
        mixed = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=segment.mask, scale=scaling
        )
        output[segment.begin : segment.end] = mixed.view(kv_heads, group, n, dim).permute(2, 0, 1, 3)
    return output.view(1, count, heads, dim), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _slot_attention)


@dataclass(slots=True, eq=False)
class RequestImages:
    """The images of one request, and the positions of its tokens."""

    images: ForestImages
    """Of the prompt's tokens."""
    positions: NDArray[np.int64]
    """int64[3, prompt tokens]."""
    _features: tuple[Any, Tensor, list[Tensor] | None] | None = field(default=None)

    def positions_of(self, start: int, end: int) -> NDArray[np.int64]:
        """Return int64[3, end − start]; generated tokens go on behind the prompt's last position."""
        known = self.positions.shape[1]
        shift = known - 1 - int(self.positions[:, -1].max())
        behind = np.arange(max(start, known), max(end, known)) - shift
        return np.concatenate([self.positions[:, start:end], np.tile(behind, (3, 1))], axis=1)

    def rows(self, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the tokens [start, end) belong to an image, and their rows of the features."""
        image, offset = self.images.image[start:end], self.images.offset[start:end]
        begins = np.concatenate([[0], np.cumsum([item.tokens for item in self.images.images])])
        here = np.flatnonzero(image >= 0)
        return here, begins[image[here]] + offset[here]

    def features(self, model: Any) -> tuple[Tensor, list[Tensor] | None]:
        """Return the features by the weights of ``model``: they are computed again after a weight update."""
        if self._features is None or self._features[0] is not model:
            self._features = (model, *image_features(model, self.images))
        return self._features[1], self._features[2]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence to compute, at positions ``start …`` of the sequence in ``slot``."""

    slot: CacheSlot
    start: int
    token_ids: NDArray[np.int32]
    wants_logits: bool
    images: RequestImages | None = None


def read_request_images(
    ids: Sequence[int], images: Sequence[Image], vision: Vision, reader: PixelReader
) -> tuple[NDArray[np.int32], RequestImages]:
    """Return the prompt with a negative id for each image token, and its images.

    The ids differ between images, so that the KV cache reuses no prefix with another image. Raises ImageError
    unless the prompt has as many image tokens as the images.
    """
    tokens = np.asarray(ids, np.int32)
    pads = np.flatnonzero(tokens == vision.image_token)
    spans, pixels = [], {}
    offset = 0
    for image in images:
        pixels[image.id], grid = reader.read(image)
        count = vision.tokens(image.ref)
        start = int(pads[offset]) if offset < len(pads) else len(tokens)
        spans.append(ImageSpan(sha256=image.id, start=start, tokens=count, grid=grid))
        offset += count
    if offset != len(pads):
        raise ImageError(
            f"the prompt has {len(pads)} image tokens, and its {len(images)} images have {offset}"
        )
    try:
        located = images_of_spans(spans, len(tokens), np.arange(len(tokens)))
    except ValueError as error:
        raise ImageError(f"the image tokens of the prompt do not fit its images: {error}") from error
    assert located is not None
    for span in spans:
        digest = hashlib.sha256(bytes.fromhex(span.sha256)).digest()
        first = int.from_bytes(digest[:4], "big") % 2**30
        tokens[span.start : span.start + span.tokens] = -1 - first - np.arange(span.tokens)
    whole = np.full(len(tokens), len(tokens))
    positions = rope_positions(located, np.arange(len(tokens)), whole)
    return tokens, RequestImages(located.with_pixels(pixels), positions)


def vision_inputs(
    model: Any, chunks: Sequence[Chunk], ids: NDArray[np.int32], device: torch.device
) -> dict[str, Any]:
    """Return the decoder's inputs: embeddings with the features of images, and positions [3, 1, n]."""
    embeds = model.get_input_embeddings()(torch.from_numpy(ids.astype(np.int64)).to(device))
    mask = torch.zeros(len(ids), dtype=torch.bool, device=device)
    positions, deep = [], []
    begin = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        if chunk.images is None:
            positions.append(np.tile(np.arange(chunk.start, end), (3, 1)))
        else:
            positions.append(chunk.images.positions_of(chunk.start, end))
            here, rows = chunk.images.rows(chunk.start, end)
            features, layers = chunk.images.features(model)
            embeds[begin + here] = features[rows].to(embeds.dtype)
            mask[begin + here] = True
            deep.append([layer[rows] for layer in layers or ()])
        begin += len(chunk.token_ids)
    inputs: dict[str, Any] = {
        "inputs_embeds": embeds[None],
        "position_ids": torch.from_numpy(np.concatenate(positions, axis=1)).to(device)[:, None],
    }
    if mask.any() and deep and deep[0]:
        inputs["visual_pos_masks"] = mask[None]
        inputs["deepstack_visual_embeds"] = [torch.cat(layer) for layer in zip(*deep, strict=True)]
    return inputs


logger = logging.getLogger(__name__)


class LocalModel:
    """A causal language model with full attention, loaded for inference."""

    def __init__(
        self, folder: str, *, dtype: torch.dtype | None, device: torch.device, fp8: bool = False
    ) -> None:
        """Load ``folder``; ModelError if it is not a model folder or its attention is not supported.

        The weights are rounded to ``dtype`` and multiplied in it. None: they keep the dtype that the folder
        names, and a CPU multiplies them in its faster one. With ``fp8`` they are rounded to that.
        """
        self._config = config = load_config(folder)
        self._rounded_to = dtype
        self._fp8 = fp8
        dtype = dtype or getattr(torch, stored_dtype(Path(folder)))
        self.folder = folder
        self.device = device
        self.vision = read_vision(folder, config.to_dict())
        self.pixels = None if self.vision is None else PixelReader(folder)
        config = config.get_text_config()
        self.dtype = _held_dtype(dtype, device, config.hidden_size, is_exact=self._rounded_to is not None)
        self.vocab_size: int = config.vocab_size
        self.max_position: int = config.max_position_embeddings
        self.eos_ids = _eos_ids(folder, config)
        self._model: Any = _load(folder, dtype, device).to(self.dtype)  # type: ignore[arg-type]
        self._experts = expert_shape(config.to_dict())
        self._chosen = record_choices(self._model) if self._experts else {}
        self._shape = ModelShape.of(config)
        self._adapted = AdapterRows()
        self._places: Places | None = None
        self._check_against_plain_attention()
        self._settle()

    def updated(self, folder: str) -> LocalModel:
        """Return a model with the weights in ``folder``. This model stays as it is.

        Raises ModelError if the weights do not fit. A folder of this model's configuration is read without
        the checks of a new model.
        """
        if _content(load_config(folder)) != _content(self._config):
            model = LocalModel(folder, dtype=self._rounded_to, device=self.device, fp8=self._fp8)
            for name in ("vocabulary", "layers", "kv_heads", "head_dim"):  # of the cache, which stays
                ours, theirs = getattr(self._shape, name), getattr(model._shape, name)
                if ours != theirs:
                    raise ModelError(f"{folder} has another shape: {name} {theirs} instead of {ours}")
            return model
        return self._with(folder, self._rounded_to or getattr(torch, stored_dtype(Path(folder))))

    def updated_from(self, tensors: Mapping[str, Tensor]) -> LocalModel:
        """Return a model with ``tensors``, under their names in files. See ``updated``."""
        return self._with(dict(tensors), self._rounded_to or next(iter(tensors.values())).dtype)

    def read_patch(self, deltas: Sequence[Path]) -> Patch:
        """Return what ``deltas``, oldest first, change in this model, which is unchanged until ``apply``.

        Raises ModelError if it cannot be changed in place, and PublishError if a delta is damaged.
        """
        if self._fp8 or not self.is_loaded:
            why = "its weights are rounded by rows" if self._fp8 else "its memory is released"
            raise ModelError(f"elements of the served model cannot be changed: {why}")
        self._places = self._places or find_places(self._model)
        return read_patch(self._places, deltas, self._rounded_to)

    def _with(self, source: str | dict[str, Tensor], dtype: torch.dtype) -> LocalModel:
        model = copy.copy(self)
        model._places = None
        if isinstance(source, str):
            model.folder = source
        model._model = _load(source, dtype, self.device, self._model)
        model._chosen = record_choices(model._model) if self._experts else {}
        model._settle()
        return model

    def _settle(self) -> None:
        """Round to fp8. On a CPU, pack linear layers, and copy what lies in a file: it may change later."""
        if self._fp8 or self.device.type != "cpu":
            self._model.to(self.dtype)
        if self._fp8:
            round_to_fp8(self._model)
        if self.device.type != "cpu":
            return
        pack_linears(self._model, self.dtype)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = tensor.data.to(
                self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True
            )

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return bool(self._model.device.type != "meta")

    def unload(self) -> None:
        """Drop the weights; ``updated`` returns a model that has some again."""
        with ONE_BUILD, torch.device("meta"):
            self._model = type(self._model)(self._model.config)

    def new_cache(self, max_tokens: int) -> KVCache:
        """Return an empty cache of the model's shape."""
        return KVCache(
            num_layers=self._shape.layers,
            max_tokens=max_tokens,
            num_kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_dim,
            dtype=self.dtype,
            device=self.device,
            experts=self._experts if self._chosen else None,
        )

    def forward(self, chunks: Sequence[Chunk], cache: KVCache) -> Tensor:
        """Compute ``chunks``, at most one per sequence, and store their keys and values.

        Returns float32 logits [chunks with ``wants_logits``, vocab] at the last token of each such chunk.
        """
        ids = np.concatenate([chunk.token_ids for chunk in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + len(c.token_ids)) for c in chunks])
        counts = [len(chunk.token_ids) for chunk in chunks]
        starts = np.repeat([chunk.slot.start for chunk in chunks], counts)
        ends = np.cumsum(counts)
        wanted = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.wants_logits]
        self._adapted.assign([chunk.slot.adapter for chunk in chunks], counts)
        batch = SlotBatch(
            cache=cache,
            rows=torch.from_numpy(starts + positions).to(self.device),
            segments=tuple(self._segment(c, int(end)) for c, end in zip(chunks, ends, strict=True)),
        )
        if self.vision is not None:
            inputs = vision_inputs(self._model, chunks, np.maximum(ids, 0), self.device)
            model: Any = self._model
            output = model.get_decoder()(**inputs, use_cache=False, slot_batch=batch)
            logits = model.get_output_embeddings()(output.last_hidden_state[0, wanted])
        else:
            logits = self._model(
                input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(self.device),
                position_ids=torch.from_numpy(positions)[None].to(self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
                slot_batch=batch,
            ).logits[0]
        if cache.experts is not None:
            for layer, chosen in self._chosen.items():
                cache.experts[batch.rows, layer] = chosen.to(torch.int16)
        return cast("Tensor", logits.float())

    def read_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Return the adapter in ``folder`` for this model, which is unchanged until ``adapt``."""
        if self.vision is not None:
            raise ModelError(f"{self.folder} reads images, and the local engine adapts text models only")
        return load_adapter(name, folder, self._linears(), self.dtype, self.device)

    def adapt(self, adapter: LoadedAdapter) -> None:
        """Let the layers of ``adapter`` add it to the rows of its sequences; between two forwards only."""
        self._places = None
        for name in adapter.layers:
            parent, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(parent)
            module = getattr(owner, leaf)
            if not isinstance(module, AdaptedLinear):
                setattr(owner, leaf, AdaptedLinear(name, module, self._adapted))

    def _linears(self) -> dict[str, tuple[int, int]]:
        """Return the outputs and inputs of each linear layer but the output head, by name."""
        head = self._model.get_output_embeddings()
        return {
            name.removesuffix(".base"): (module.out_features, module.in_features)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear | PackedLinear) and module is not head
        }

    def _segment(self, chunk: Chunk, end: int) -> BatchSegment:
        count = len(chunk.token_ids)
        length = chunk.start + count
        mask = None
        if count > 1:
            keys = torch.arange(length, device=self.device)
            queries = torch.arange(chunk.start, length, device=self.device)
            mask = (keys[None, :] <= queries[:, None]).repeat(self._shape.heads // self._shape.kv_heads, 1)
        first = chunk.slot.start
        return BatchSegment(end - count, end, first, first + length, mask)

    @torch.inference_mode()
    def _check_against_plain_attention(self) -> None:
        """Raise ModelError unless the cached forward, in two chunks, agrees with the model's own forward."""
        ids = np.arange(24, dtype=np.int32) * 7919 % self.vocab_size
        cache = self.new_cache(max_tokens=2 * len(ids))
        slot = CacheSlot(ids, start=len(ids))
        self.forward([Chunk(slot, 0, ids[:11], True)], cache)
        ours = self.forward([Chunk(slot, 11, ids[11:], True)], cache)
        set_attention(self._model, "sdpa")
        plain = self._model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(self.device))
        set_attention(self._model, ATTENTION)
        gaps = (ours[0].log_softmax(-1) - plain.logits[0, -1].float().log_softmax(-1)).abs()
        # bfloat16 rounds a few of tens of thousands of ids far: the mean says whether the forward is right.
        is_exact = self.dtype == torch.float32
        gap, limit = (gaps.max().item(), 1e-3) if is_exact else (gaps.mean().item(), 0.15)
        if not gap <= limit:
            raise ModelError(
                f"{self.folder}: the local engine's logprobs differ from the plain model's by {gap:.2g}",
                hint="serve this model with --engine sglang",
            )


def load_config(folder: str) -> Any:
    """Return the configuration of a model folder. Raises ModelError if it is missing or not supported."""
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json",
            hint="give the folder of a Hugging Face model",
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the configuration in {folder} cannot be used: {error}") from error
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"{folder}: the local engine supports only full attention, not {', '.join(sorted(kinds))}",
            hint="serve it with --engine sglang",
        )
    return config


def _load(
    source: str | dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    like: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Load a folder; or tensors by their names in its files, into a model like ``like``."""
    folder, tensors = (source, None) if isinstance(source, str) else (None, source)
    kind: Any = type(like)
    if like is None:
        is_vision = hasattr(load_config(str(folder)), "vision_config")
        kind = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    where = folder or "the update"
    given = {} if like is None else {"config": like.config, "state_dict": tensors}
    try:
        with ONE_BUILD:
            loaded: Any = kind.from_pretrained(
                folder, **given, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the weights in {where} cannot be loaded: {error}") from error
    model, report = loaded
    check_report(where, model, report)
    set_attention(model, ATTENTION)
    return cast("PreTrainedModel", model.eval().requires_grad_(False).to(device))


def _content(config: Any) -> dict[str, Any]:
    """Return what a configuration says about the forward pass."""
    content = config.to_dict()
    for key in ("dtype", "transformers_version", "_name_or_path"):
        content.pop(key, None)
    return cast("dict[str, Any]", content)


def _held_dtype(dtype: torch.dtype, device: torch.device, hidden_size: int, *, is_exact: bool) -> torch.dtype:
    """Return the dtype in which weights of ``dtype`` are held and multiplied.

    A CPU that multiplies bfloat16 faster holds bfloat16, as the trainer there multiplies (``--autocast_bf16
    auto``), but float16 and, if ``is_exact``, float32 in float32. Other CPUs hold all in float32.
    """
    if device.type != "cpu" or (is_exact and dtype == torch.float32):
        return dtype
    is_fast, reason = bfloat16_speed(device, hidden_size)
    held = torch.bfloat16 if is_fast and dtype != torch.float16 else torch.float32
    logger.info("%s weights are multiplied in %s: %s", dtype, held, reason)
    return held


def _eos_ids(folder: str, config: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the configuration and of generation_config.json."""
    values = [getattr(config, "eos_token_id", None)]
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        values.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return frozenset(item for item in flat if item is not None)
