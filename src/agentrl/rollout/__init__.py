"""Sample trajectories: from a claim to a score.

A sampler process: ``setup``, ``preflight``, ``load_tasks`` → ``sampler``, ``housekeeping``. One trajectory:
``worker`` → ``agents`` → ``rollout``, ``agent_io``; its model calls are made in ``agentrl.calls``. Claims are
held, scores filled in and outages waited out in ``agentrl.columns``.
"""
