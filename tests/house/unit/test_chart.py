"""The Helm chart without Helm: its values fit their schema, its flags are real, its pods have no rights."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentrl.config.agreement import require_trainable
from agentrl.config.load import parse
from agentrl.config.schema import GROUPS, RunConfig, TaskConfig
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.store.mechanics.connection import TASK

CHART = Path(__file__).parents[3] / "deploy/helm/agentrl"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir()}
NOT_OURS = {"nnodes", "nproc_per_node", "namespace", "allowed_hosts", "token_file"}
"""Flags of torchrun, kubectl and the dashboard."""


def test_the_values_fit_their_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    assert VALUES.keys() == SCHEMA["properties"].keys() - {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"runName": "admin"},
        {"runName": "a.b"},
        {"flags": {**VALUES["flags"], "db_connection_string": "mongodb://db"}},
        {"sampler": {}},
        {"engines": {**VALUES["engines"], "replicas": -1}},
        {"trainer": {**VALUES["trainer"], "kind": "Job", "nodes": 2}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**VALUES, **wrong}, SCHEMA)


def test_the_flags_of_the_run_are_real(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(VALUES["flags"]), encoding="utf-8")
    words = ["--config", str(file), "--run_name", VALUES["runName"], "--engine", VALUES["engines"]["engine"]]
    configs = parse(words, command="agentrl sample", description="", shown=(), validate=require_trainable)
    assert configs[RunConfig].run_name == VALUES["runName"]
    assert configs[TaskConfig].train_file == "/data/tasks/train.jsonl"


def test_the_flags_in_the_templates_are_real() -> None:
    known = {field.name for group in GROUPS for field in fields(group)}
    used = {name for text in TEMPLATES.values() for name in re.findall(r"\s--([a-z_]+)", text)}
    assert used - known - {"config", "host", "port"} - NOT_OURS == set()
    assert used >= {"run_name", "gateway_host", "inf_tp_size", "engine_start_seconds"}


def test_the_scaler_counts_open_slots_by_their_real_names() -> None:
    text = TEMPLATES["samplers.yaml"]
    assert f"collection: {TASK}\n" in text
    query = json.loads(re.findall(r"query: '(.*)'", text)[0])
    assert query["split"] == "train"
    assert set(query["status"]["$in"]) == {TaskStatus.CREATED, TaskStatus.RUNNING}
    assert set(query["slots.status"]["$in"]) == {SlotStatus.OPEN, SlotStatus.RUNNING, SlotStatus.SAMPLED}


@pytest.mark.parametrize(
    "name", ["samplers.yaml", "engines.yaml", "gateway.yaml", "dashboard.yaml", "_trainer.tpl"]
)
def test_a_pod_has_no_rights(name: str) -> None:
    text = TEMPLATES[name]
    assert "automountServiceAccountToken: false" in text
    assert 'include "agentrl.podSecurity"' in text
    assert 'include "agentrl.containerSecurity"' in text
    assert "resources:" in text
    for part in ("runAsNonRoot: true", "readOnlyRootFilesystem: true", "drop: [ALL]", "RuntimeDefault"):
        assert part in TEMPLATES["_helpers.tpl"]


def test_no_connection_string_is_a_value_or_a_variable() -> None:
    for name, text in TEMPLATES.items():
        assert "MONGO_URI," not in text, name
        assert "mongodb://" not in text, name
    assert "value: /secrets/uri" in TEMPLATES["_helpers.tpl"]
