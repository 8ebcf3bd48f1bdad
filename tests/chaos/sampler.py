"""``python -m chaos.sampler``: ``agentrl`` with a small document limit, so that GridFS is used."""

from __future__ import annotations

import sys

from agentrl.cli import main as cli
from agentrl.store import blobs

PACKED_LIMIT = 300
"""Packed bytes of a document beyond which they move to GridFS: more than some calls have, less than most."""

if __name__ == "__main__":
    blobs._LIMIT = PACKED_LIMIT
    sys.exit(cli.main())
