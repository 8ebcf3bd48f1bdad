"""Hand a bucket of tensors to SGLang's ``/update_weights_from_tensor``: shared memory, named by a pickle."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.weights.memory_file import MemoryFile, StoredTensor


def pickled_bucket(weights: MemoryFile, bucket: tuple[StoredTensor, ...]) -> tuple[Tensor, bytes]:
    """Copy neighbouring tensors into shared memory; return it, and the ``flattened_bucket`` that names it.

    Keep the first until SGLang has answered. The pickle needs ``file_system`` sharing: with descriptors,
    which are torch's default, the server would have to authenticate as a child of this process.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    first = bucket[0].begin
    count = bucket[-1].end - first
    shared = torch.empty(0, dtype=torch.uint8)
    shared.set_(torch.UntypedStorage._new_shared(count))  # type: ignore[no-untyped-call]
    shared.copy_(weights.data[first : bucket[-1].end])
    metadata = [
        SimpleNamespace(
            name=item.name, shape=torch.Size(item.shape), dtype=item.dtype,
            start_idx=item.begin - first, end_idx=item.end - first, numel=item.end - item.begin,
        )
        for item in bucket
    ]  # fmt: skip
    written = io.BytesIO()
    ForkingPickler(written).dump({"flattened_tensor": shared, "metadata": metadata})
    return shared, written.getvalue()
