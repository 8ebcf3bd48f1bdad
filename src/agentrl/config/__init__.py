"""The configuration of a run: dataclasses in ``schema``, parsing in ``load``; nothing heavy is imported."""
