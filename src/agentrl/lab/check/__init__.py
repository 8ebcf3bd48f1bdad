"""``agentrl db check``: verifies the invariants of a run, while other processes write it."""
