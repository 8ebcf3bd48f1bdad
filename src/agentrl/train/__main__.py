"""``python -m agentrl.train``: what ``accelerate launch -m agentrl.train`` starts."""

from __future__ import annotations

import sys

from agentrl.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
