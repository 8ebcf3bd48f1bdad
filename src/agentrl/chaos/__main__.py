"""``python -m agentrl.chaos``."""

import sys

from agentrl.chaos.main import main
from agentrl.cli import run

if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:]), "chaos"))
