"""Cut what does not fit into one query, request or transaction into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

S = TypeVar("S", bound=Sequence[Any])
T = TypeVar("T")


def batches(items: S, size: int) -> Iterator[S]:
    """Yield slices of up to ``size`` items, of the same type as ``items``; none of an empty sequence."""
    return (cast("S", items[start : start + size]) for start in range(0, len(items), size))


def weighed_batches(
    items: Iterable[T], weigh: Callable[[T], int], heaviest: int, size: int | None = None
) -> Iterator[list[T]]:
    """Yield up to ``size`` items at a time that weigh ``heaviest`` together at most; a heavier one alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        weight = weigh(item)
        if batch and (total + weight > heaviest or len(batch) == size):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch
