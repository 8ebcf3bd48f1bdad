"""``agentrl db check``: the invariants of a run, proved on its documents while others write them."""
