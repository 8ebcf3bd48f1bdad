"""Run the chaos test: ``python -m chaos``."""

import sys

from agentrl.cli.main import run
from chaos.main import main

if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:]), "chaos"))
