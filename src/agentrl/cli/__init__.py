"""Commands that serve a run without being one of its processes."""
