"""Forward pass of the local engine: a transformers model over a flat batch of chunks and a KV cache."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from agentrl.chat.vision import read_vision
from agentrl.errors import ModelError
from agentrl.inference.engines.local.adapters import AdaptedLinear, AdapterRows, LoadedAdapter, load_adapter
from agentrl.inference.engines.local.attention import ATTENTION, Segment, SlotBatch
from agentrl.inference.engines.local.cache import KVCache, Slot
from agentrl.inference.engines.local.linears import PackedLinear, pack_linears, round_to_fp8
from agentrl.inference.engines.local.patch import Patch, Places, find_places, read_patch
from agentrl.inference.engines.local.vision import Chunk, vision_inputs
from agentrl.model.attention.sdpa import set_attention
from agentrl.model.flops import ModelShape
from agentrl.model.precision import bfloat16_speed
from agentrl.model.routing import record_choices
from agentrl.model.stored_weights import check_report
from agentrl.model.vision import PixelReader
from agentrl.weights.folder import expert_shape, stored_dtype

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
            self._check_same_shape(model)
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
        with torch.device("meta"):
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

    def _check_same_shape(self, other: LocalModel) -> None:
        """Raise ModelError unless ``other`` can replace this model on the same cache."""
        for name in ("vocabulary", "layers", "kv_heads", "head_dim"):
            ours, theirs = getattr(self._shape, name), getattr(other._shape, name)
            if ours != theirs:
                raise ModelError(f"{other.folder} has another shape: {name} {theirs} instead of {ours}")

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

    def _segment(self, chunk: Chunk, end: int) -> Segment:
        count = len(chunk.token_ids)
        length = chunk.start + count
        mask = None
        if count > 1:
            keys = torch.arange(length, device=self.device)
            queries = torch.arange(chunk.start, length, device=self.device)
            mask = (keys[None, :] <= queries[:, None]).repeat(self._shape.heads // self._shape.kv_heads, 1)
        first = chunk.slot.start
        return Segment(end - count, end, first, first + length, mask)

    @torch.inference_mode()
    def _check_against_plain_attention(self) -> None:
        """Raise ModelError unless the cached forward, in two chunks, agrees with the model's own forward."""
        ids = np.arange(24, dtype=np.int32) * 7919 % self.vocab_size
        cache = self.new_cache(max_tokens=2 * len(ids))
        slot = Slot(ids, start=len(ids))
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
