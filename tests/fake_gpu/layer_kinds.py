"""Simulate few layers of each kind, and extrapolate the memory of a step linearly to all of them.

Layers of one kind have equal parameters and equal attention. Within a segment of the step, such as the
backward of the middle layers in one micro-batch, the peak is linear in the number of layers of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from agentrl.distributed.mesh import Layout
from agentrl.distributed.pipeline_stages import assign_model_layers
from agentrl.model.check_model import list_kinds
from fake_gpu.memory_tracker import Peak, Segment

Depth = tuple[int, ...]
"""Layers of each kind that are simulated."""
Peaks = Mapping[Segment, Peak]

_ONE_KIND, _SEVERAL_KINDS = 3, 2
"""Layers of each kind in the smallest model: a first, a middle and a last one."""
_MOST_KINDS = 3


def stage_layers(model: Any, layout: Layout) -> list[range]:
    """Return the layers of each pipeline stage."""
    if layout.pp == 1:
        return [range(len(model.get_decoder().layers))]
    return assign_model_layers(model, layout.pp)


def keep_layers(model: Any, layout: Layout, stage: int, depth: Depth) -> list[range]:
    """Remove layers of ``model`` until ``stage`` has ``depth`` of each kind and other stages one layer.

    Returns the layers of each stage that are left. The first and last layers of a kind are kept.
    """
    decoder, config, kinds = model.get_decoder(), model.config.get_text_config(), list_kinds(model)
    kept: list[int] = []
    stages: list[range] = []
    for place, layers in enumerate(stage_layers(model, layout)):
        chosen = _choose(layers, kinds, depth) if place == stage else [layers[0]]
        stages.append(range(len(kept), len(kept) + len(chosen)))
        kept += chosen
    decoder.layers = nn.ModuleList([decoder.layers[place] for place in kept])
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[place] for place in kept]
    config.num_hidden_layers = len(kept)
    return stages


def extrapolate(kinds: Sequence[int], simulate: Callable[[Depth | None], Peaks]) -> Peaks:
    """Return the peaks of a step of layers of ``kinds``.

    ``simulate`` returns those of a step with so many layers of each kind, or with all of them for None. It is
    called with small numbers, and with one more of each kind. Many kinds are simulated as they are.
    """
    counts = Counter(kinds)
    numbers = range(max(kinds, default=-1) + 1)
    small = _ONE_KIND if len(counts) == 1 else _SEVERAL_KINDS
    depth = tuple(min(small, counts[kind]) for kind in numbers)
    growing = [kind for kind in numbers if counts[kind] > depth[kind]]
    if not growing or len(counts) > _MOST_KINDS or len(kinds) <= sum(depth) + 1:
        return simulate(None)
    base = simulate(depth)
    found: dict[Segment, dict[str, int]] = {segment: dict(peak.parts) for segment, peak in base.items()}
    for kind in growing:
        larger = simulate(tuple(count + (place == kind) for place, count in enumerate(depth)))
        for segment, parts in found.items():
            _add(parts, base[segment], larger[segment], counts[kind] - depth[kind])
    return {segment: Peak(parts, base[segment].phase) for segment, parts in found.items()}


def _add(parts: dict[str, int], base: Peak, larger: Peak, layers: int) -> None:
    for part in {*base.parts, *larger.parts}:
        growth = larger.parts.get(part, 0) - base.parts.get(part, 0)
        parts[part] = parts.get(part, 0) + layers * growth


def _choose(layers: range, kinds: Sequence[int], depth: Depth) -> list[int]:
    """Return the places of ``depth`` layers of each kind, from both ends of those in ``layers``."""
    chosen: list[int] = []
    for kind, count in enumerate(depth):
        places = [place for place in layers if kinds[place] == kind]
        chosen += places[: count - count // 2] + places[len(places) - count // 2 :]
    return sorted(chosen)
