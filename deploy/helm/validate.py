"""Lint and render the chart with several sets of values; check the objects against the schemas of Kubernetes.

    .venv-deploy/bin/python deploy/helm/validate.py [FOLDER]

With a folder, the rendered objects are written there. scripts/validate_deploy.sh makes the venv.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

CHART = Path(__file__).parent / "agentrl"
KUBERNETES = "1.33"
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "mcpServers": {"search": {"url": "http://search:8765/mcp"}},
        "imagePullSecrets": [{"name": "registry"}],
        "mongodb": {
            "operator": {"enabled": True},
            "cidrs": ["10.0.0.0/8"],
            "podSelector": {"matchLabels": {"a": "b"}},
        },
        "gateway": {"enabled": True},
        "dashboard": {"allowedHosts": ["dashboard.example"]},
        "engines": {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
        "samplers": {"envFrom": [{"secretRef": {"name": "judge"}}], "args": ["--max_turns", "4"]},
        "networkPolicy": {"dashboardFrom": [{"podSelector": {"matchLabels": {"app": "ingress"}}}]},
        "trainer": {
            "nodes": 4,
            "args": ["--tp_size", "2"],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    },
    "pytorchjob": {"trainer": {"kind": "PyTorchJob", "nodes": 2}},
    "job": {"trainer": {"kind": "Job"}, "samplers": {"keda": {"enabled": False}}},
    "least": {
        "trainer": {"enabled": False},
        "dashboard": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "images": {"sampler": {"tag": "sha256:" + 64 * "0"}},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "an unknown value": {"sampler": {"replicas": 2}},
    "a run name with a slash": {"runName": "a/b"},
    "a password among the flags": {"flags": {"db_connection_string": "mongodb://…"}},
    "a Job on two nodes": {"trainer": {"kind": "Job", "nodes": 2}},
    "the tag latest": {"images": {"engine": {"tag": "latest"}}},
}
KUBEFLOW = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
UNKNOWN = {"ScaledObject", "TriggerAuthentication", "PyTorchJob", "MongoDBCommunity"}
"""Kinds whose schema no package has."""


def main(arguments: list[str]) -> int:
    """Return 0 if everything is as it should be; print what is not."""
    problems = [f"lint: {finding}" for finding in findings()]
    with helm_python.Chart.load(str(CHART)) as chart:
        for name, values in CASES.items():
            objects = rendered(chart, values)
            problems += [f"{name}: {problem}" for each in objects for problem in problems_of(each)]
            if arguments:
                text = yaml.safe_dump_all(objects, sort_keys=False)
                (Path(arguments[0]) / f"{name}.yaml").write_text(text, encoding="utf-8")
        for name, values in REFUSED.items():
            try:
                chart.validate_schema(values)
            except helm_python.HelmError:
                continue
            problems.append(f"values.schema.json accepts {name}")
    print("\n".join(problems) or f"{len(CASES)} sets of values; no schema for {', '.join(sorted(UNKNOWN))}")
    return int(bool(problems))


def findings() -> list[str]:
    """Return what ``helm lint`` finds, except hints."""
    result: Any = helm_python.lint(str(CHART))
    messages = result.get("messages", []) if isinstance(result, dict) else result
    return [str(each) for each in messages if "icon" not in str(each)]


def rendered(chart: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of one set of values."""
    files = chart.render(copy.deepcopy(values), name="demo", namespace="rl")
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def problems_of(content: dict[str, Any]) -> list[str]:
    """Return what the schema of an object's kind refuses."""
    kind = content["kind"]
    where = f"{kind} {content['metadata']['name']}"
    if kind in UNKNOWN:
        return []
    if kind in KUBEFLOW:
        read = KUBEFLOW[kind].from_dict(content)
        return [] if read is None else [f"{where}: unknown {path}" for path in lost(content, read.to_dict())]
    try:
        kubernetes_validate.validate(content, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Return the paths that a model dropped, because it has no such field."""
    if isinstance(given, dict):
        kept = kept if isinstance(kept, dict) else {}
        missing = [f"{path}.{key}" for key in given if key not in kept]
        return missing + [
            each
            for key in given.keys() & kept.keys()
            for each in lost(given[key], kept[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(kept, list):
        return [
            each
            for index, (a, b) in enumerate(zip(given, kept, strict=True))
            for each in lost(a, b, f"{path}[{index}]")
        ]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
