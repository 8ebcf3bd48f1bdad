"""Fill in values of stored trajectories under a lease: scores, and a teacher's logprobs.

``pool`` claims what waits, renews the leases, and hands back what is left. ``scores`` and ``teacher`` say
what is claimed and how it is filled in. ``outages`` holds both back while what they need is down.
"""
