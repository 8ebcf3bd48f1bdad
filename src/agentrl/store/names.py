"""Names of the collections, and the version of the schema."""

from __future__ import annotations

from typing import Final

TASK: Final = "Task"
RECORD: Final = "Record"
MODEL_CALL: Final = "DispatchedSamplingTask"
DATA: Final = "DBRecordData"
VERSION: Final = "PolicyVersion"
SERVICE: Final = "InferenceService"
STEP: Final = "TrainStep"
RUN: Final = "Run"
"""AgreedSettings about the run, which only administrators change."""
GATE: Final = "Admission"
"""Written by samplers that admit groups."""
EPOCH: Final = "Epoch"
"""Written by samplers that open epochs."""
OUTAGE: Final = "Outage"
"""Dependencies that samplers find down."""
IMPORTS: Final = "Imports"
"""The functions that samplers may import; only administrators write it."""
GATEWAY_SESSION: Final = "GatewaySession"
"""The base URLs of trajectories."""
GATEWAY_CALL: Final = "GatewayCall"
"""The requests to gateways."""
LEASE: Final = "TrainerLease"
"""The lease by which trainers exclude each other."""
SETTINGS: Final = "Settings"
"""The settings of the run's first process; only administrators change them."""
IMAGE: Final = "Image"
"""The images of tasks, tool results and requests, by the hash of their bytes."""
EVALUATION: Final = "Evaluation"
"""Evaluations of policies, with their results."""
LABEL: Final = "Label"
"""What people say of trajectories."""
TOKEN_STATISTICS: Final = "TokenStatistics"
"""Importance ratios and entropies of trained tokens, by step."""
COLUMN: Final = "Column"
"""Values of trajectories that other processes fill in, such as the logprobs of a teacher."""
RETRACTION: Final = "Retraction"
"""The calls of ``agentrl retract``."""
TOMBSTONE: Final = "Tombstone"
"""The ids of what they withdrew."""
COLLECTIONS: Final = (
    TASK, RECORD, MODEL_CALL, DATA, VERSION, SERVICE, STEP, RUN, GATE, EPOCH, LEASE, SETTINGS, IMPORTS,
    OUTAGE, EVALUATION, IMAGE, GATEWAY_SESSION, GATEWAY_CALL, LABEL, TOKEN_STATISTICS, COLUMN,
    RETRACTION, TOMBSTONE,
)  # fmt: skip

SCHEMA_VERSION: Final = 1
"""Version of the schema that this code reads and writes, stored in ``Run``."""
