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
COLLECTIONS: Final = (TASK, RECORD, CALL, DATA, VERSION, SERVICE, STEP)
