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
COLLECTIONS: Final = (TASK, RECORD, CALL, DATA, VERSION, SERVICE, STEP, RUN)

SCHEMA_VERSION: Final = 2
"""Version of the shape that this code reads and writes. A database without one in ``Run`` has version 1."""
