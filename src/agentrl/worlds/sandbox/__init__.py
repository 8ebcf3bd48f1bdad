"""Run Python that a model wrote, within bounds: in namespaces, with limits alone, or in Docker."""
