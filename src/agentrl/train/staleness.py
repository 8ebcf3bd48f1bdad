"""The age of a step's tokens in optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def staleness_metrics(store: Store, metrics: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return mean, maximum and histogram of the age of a step's tokens, in optimizer steps.

    The step starts from the weights after step ``start``. A token of a version that was published after step
    s is ``start`` − s steps old, however few versions were published since. Empty without tokens.
    """
    fractions: Mapping[str, float] = metrics.get("version_fractions") or {}
    versions = await store.policies.of([int(version) for version in fractions])
    steps = {str(version.id): version.step for version in versions}
    if not fractions or any(version not in steps for version in fractions):
        return {}
    tokens = sum(metrics["staleness_histogram"].values())
    shares: dict[int, float] = {}
    for version, share in fractions.items():
        age = max(0, start - steps[version])
        shares[age] = shares.get(age, 0.0) + share
    return {
        "staleness_mean": sum(age * share for age, share in shares.items()),
        "staleness_max": float(max(shares)),
        "staleness_histogram": {str(age): float(round(shares[age] * tokens)) for age in sorted(shares)},
    }
