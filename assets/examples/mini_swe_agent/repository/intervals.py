"""Work with intervals of whole numbers, both ends included."""


def length(first: int, last: int) -> int:
    """Return how many numbers lie in an interval."""
    return last - first


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Return whether two intervals share a number."""
    return a[0] <= b[1] and b[0] <= a[1]
