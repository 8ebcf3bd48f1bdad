"""Lets a benchmark import the package ``demo`` of ``assets``, which the quickstart runs as programs."""

from __future__ import annotations

import sys

from agentrl.base.installation import shipped_files

sys.path.append(str(shipped_files()))
