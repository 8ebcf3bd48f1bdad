"""Describe a container to Kubernetes as a Job of one pod, and read the state of the pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentrl.containers.base import ContainerSpec
from agentrl.errors import ConfigError
from agentrl.validation import Positive, Settings, Text, read_config

LABEL: Final = "agentrl-container"
_WAITING: Final = 'sleep "$1" & wait $!'
_KEPT_SECONDS: Final = 60
"""How long a Job that has ended stays for a look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(Settings):
    """``options`` of a container of Kubernetes."""

    namespace: Text | None = None
    """None: that of the service account or of the context."""
    kubeconfig: Text | None = None
    """None: the service account in a pod, else ``$KUBECONFIG`` or ``~/.kube/config``."""
    context: Text | None = None
    start_seconds: Positive = 600.0
    """Time for a node and the image."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the pod's ``spec``, such as ``imagePullSecrets`` and ``nodeSelector``."""


def options_of(spec: ContainerSpec, where: str) -> KubernetesOptions:
    """Return the options of a container. Raises ConfigError, which begins with ``where``."""
    hint = "docs/containers.md lists the keys"
    options = read_config(KubernetesOptions, dict(spec.options), f"{where}: container", hint=hint)
    if spec.user is not None and not all(part.isdigit() for part in spec.user.split(":")):
        raise ConfigError(f"{where}: user is {spec.user!r}", hint="Kubernetes takes UID or UID:GID")
    return options


def job_of(spec: ContainerSpec, name: str, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Job of a container; ``pod`` has further fields of the pod's spec."""
    limits = {"memory": f"{spec.memory_mb}Mi", "ephemeral-storage": f"{spec.storage_mb}Mi"}
    limits |= {} if spec.cpus is None else {"cpu": str(spec.cpus)}
    rights: dict[str, Any] = {}
    if spec.user is not None:
        user, _, group = spec.user.partition(":")
        rights |= {"runAsUser": int(user), "runAsGroup": int(group or user)}
    if spec.writable:
        rights |= {
            "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
    labels = {"app": LABEL, "agentrl-network": spec.network}
    main = {
        "name": "main", "image": spec.image, "securityContext": rights,
        "command": ["/bin/sh", "-c", _WAITING, "sh", f"{spec.seconds:.0f}"],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": f"w{at}", "mountPath": path} for at, path in enumerate(spec.writable)],
    }  # fmt: skip
    memory = {"medium": "Memory", "sizeLimit": f"{spec.storage_mb}Mi"}
    described = {
        "restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0, "containers": [main],
        "volumes": [{"name": f"w{at}", "emptyDir": memory} for at in range(len(spec.writable))],
        **pod,
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": int(spec.seconds),
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": described},
        },
    }  # fmt: skip


def state_of(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return the phase of a pod, and why its container waits or has ended."""
    status = pod.get("status", {})
    states = [one.get("state", {}) for one in status.get("containerStatuses", [])]
    reasons = [detail.get("reason") for state in states for detail in state.values()]
    ended = any("terminated" in state for state in states)
    phase = "Failed" if ended and status.get("phase") == "Running" else str(status.get("phase", "Pending"))
    return phase, str(status.get("reason") or next(filter(None, reasons), ""))
