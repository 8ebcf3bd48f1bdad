"""``python -m agentrl COMMAND``: the same as the ``agentrl`` command."""

import sys

from agentrl.cli.main import main

sys.exit(main())
