"""Record the trainer and the samplers of a run: Python imports this file if PYTHONPATH names its folder."""

import os
import sys
from importlib import import_module

_COMMANDS = ("train", "sample")
_folder = os.environ.get("WALK_TRACES")
_words = sys.orig_argv[1:4]  # python -m agentrl COMMAND
if _folder and _words[:2] == ["-m", "agentrl"] and _words[2:] and _words[2] in _COMMANDS:
    import_module("walk_recorder").record(_words[2], _folder)
