"""The states of the random generators that training draws from: of Python, NumPy, torch and its GPUs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def read() -> dict[str, Any]:
    """Return the states of this process; ``torch.load`` reads them with ``weights_only``."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(states: dict[str, Any]) -> None:
    """Set the states that ``read`` returned; those of GPUs only where there are as many."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
