"""Run ``agentrl`` with a small document limit, so that GridFS is used: ``python -m chaos.sampler``."""

from __future__ import annotations

import sys

from agentrl.cli import main as cli
from agentrl.store.mechanics import blobs

PACKED_LIMIT = 300
"""Packed bytes above which a document's arrays move to GridFS; most model calls have more."""

if __name__ == "__main__":
    blobs._LIMIT = PACKED_LIMIT
    sys.exit(cli.main())
