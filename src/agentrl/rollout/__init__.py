"""Sample trajectories: from a claim to a score.

A sampler process: ``setup``, ``preflight``, ``load_tasks`` → ``sampler``, ``held_claims``, ``housekeeping``,
``scoring``. One trajectory: ``worker`` → ``agents`` → ``rollout``, ``agent_io``, ``tool_calls``, ``context``,
``histories``. One model call: ``prompts``, then ``trajectory_calls``. While a service is down: ``outages``.
"""
