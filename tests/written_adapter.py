"""Write an adapter's folder as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from agentrl.model.lora import Adapter, ServedAdapter
from agentrl.weights.folder import ADAPTER_WEIGHTS
from agentrl.weights.snapshot import Snapshot, Written, write_beside, write_share


def write_adapter(adapter: Adapter, folder: Path, weights: Mapping[str, Tensor] | None = None) -> Written:
    """Write peft's files into ``folder``, which exists; ``weights`` are those of the adapter, or a part."""
    content = adapter.convert(
        {name: value.detach() for name, value in (weights or adapter.weights()).items()}
    )
    written = write_share(folder, Snapshot({ADAPTER_WEIGHTS: content}))
    write_beside(folder, written, adapter.configuration())
    return written


def write_served(adapter: Adapter, folder: Path) -> Written:
    """Write what engines load of ``adapter`` into ``folder``, which exists, as a version holds it."""
    source = ServedAdapter(adapter)
    content = source.convert({part.name: part.make() for part in source.parts()})
    written = write_share(folder, Snapshot({ADAPTER_WEIGHTS: content}))
    write_beside(folder, written, source.configuration())
    return written
