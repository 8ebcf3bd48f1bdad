"""An advantage estimator of your own: groups of hard questions count more than those of easy ones.

Name it on every sampler, no registration needed; the folder must be on PYTHONPATH::

    agentrl sample --run_name my_run --advantage custom_advantage:difficulty_weighted …
"""

import statistics
from collections.abc import Sequence

from agentrl import advantage


@advantage("difficulty_weighted")
def difficulty_weighted(rewards: Sequence[float]) -> list[float]:
    """Return (reward − mean)·(1.5 − mean), for rewards in [0, 1] of the trajectories of one group."""
    mean = statistics.fmean(rewards)
    return [(reward - mean) * (1.5 - mean) for reward in rewards]
