"""Run ``agentrl train`` as a module, for ``accelerate launch -m agentrl.train``."""

from __future__ import annotations

import sys

from agentrl.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
