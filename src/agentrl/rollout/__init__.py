"""Sample trajectories: from a claim to a score.

A sampler process: ``setup``, ``preflight``, ``load_tasks`` → ``sampler``, ``held_claims``, ``housekeeping``,
``scoring``. One trajectory: ``worker`` → ``agents`` → ``rollout``, ``agent_io``, ``context``; its model calls
are made in ``agentrl.calls``. While a service is down: ``outages``.
"""
