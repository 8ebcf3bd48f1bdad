"""The names of the collections, as people query them in Compass."""

from __future__ import annotations

from typing import Final

TASK: Final = "Task"
RECORD: Final = "Record"
CALL: Final = "DispatchedSamplingTask"
DATA: Final = "DBRecordData"
VERSION: Final = "PolicyVersion"
SERVICE: Final = "InferenceService"
STEP: Final = "TrainStep"
RUN: Final = "Run"
"""Facts about the run that only administrators change."""
GATE: Final = "Admission"
"""What samplers write to admit groups."""
EPOCH: Final = "Epoch"
"""What samplers write to open epochs."""
IMPORTS: Final = "Imports"
"""What samplers may import; only administrators write it."""
LEASE: Final = "TrainerLease"
"""What trainers write to exclude each other."""
SETTINGS: Final = "Settings"
"""What a run was begun with: the first process that starts inserts it, and only administrators change it."""
COLLECTIONS: Final = (
    TASK,
    RECORD,
    CALL,
    DATA,
    VERSION,
    SERVICE,
    STEP,
    RUN,
    GATE,
    EPOCH,
    LEASE,
    SETTINGS,
    IMPORTS,
)

SCHEMA_VERSION: Final = 4
"""Version of the shape that this code reads and writes. A database without one in ``Run`` has version 1."""
