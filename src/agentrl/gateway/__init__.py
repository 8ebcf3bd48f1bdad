"""Serve model APIs in front of rollouts, so that any agent or harness can be trained."""
