"""Find the API server of Kubernetes and what it accepts: a service account's token, a kubeconfig's user."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from agentrl.errors import ConfigError

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server."""

    url: str
    namespace: str
    ssl: ssl.SSLContext | bool
    """False for http://."""
    token: str | Path | None
    """A token, or its file, which is read for each request: such tokens change."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        token = self.token.read_text(encoding="utf-8").strip() if isinstance(self.token, Path) else self.token
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def open_cluster(kubeconfig: str | None, context: str | None, namespace: str | None, where: str) -> Cluster:
    """Return the cluster of a kubeconfig, or the one in which this process runs. Raises ConfigError."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and host is not None and (_ACCOUNT / "token").exists():
        own = (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        trusted = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return Cluster(f"https://{host}:{port}", namespace or own, trusted, _ACCOUNT / "token")
    given = kubeconfig or os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0]
    path = Path(os.path.expanduser(given))  # Path.expanduser raises for a user without a home
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        chosen = _named(content, "contexts", context or content["current-context"])["context"]
        cluster = _named(content, "clusters", chosen["cluster"])["cluster"]
        user = _named(content, "users", chosen["user"])["user"]
        url = str(cluster["server"]).rstrip("/")
        if "exec" in user or "auth-provider" in user:
            raise ConfigError(
                f"{where}: the user of {path} logs in by a program, which is not run here",
                hint="use a service account's token: kubectl create token ACCOUNT",
            )
        security: ssl.SSLContext | bool = (
            _ssl(cluster, user, path.parent) if url.startswith("https") else False
        )
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: the kubeconfig {path} cannot be used: {type(error).__name__}: {error}",
            hint="give kubeconfig and context, or run in a pod with a service account",
        ) from error
    file = user.get("tokenFile")
    token = (path.parent / file) if file is not None else user.get("token")
    return Cluster(url, namespace or chosen.get("namespace", "default"), security, token)


def _named(content: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for item in content[kind]:
        if item["name"] == name:
            found: Mapping[str, Any] = item
            return found
    raise LookupError(f"it has no {name!r} in {kind}")


def _ssl(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    """Return what checks the server, and shows it the user's certificate."""
    authority = cluster.get("certificate-authority")
    context = ssl.create_default_context(
        cafile=None if authority is None else str(folder / authority),
        cadata=_decoded(cluster.get("certificate-authority-data")),
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    names = ("client-certificate", "client-key")
    if f"{names[0]}-data" in user:
        with tempfile.TemporaryDirectory() as private:  # OpenSSL reads files only
            for name in names:
                (Path(private) / name).write_text(_decoded(user[f"{name}-data"]) or "", encoding="ascii")
            context.load_cert_chain(Path(private) / names[0], Path(private) / names[1])
    elif names[0] in user:
        context.load_cert_chain(folder / user[names[0]], folder / user[names[1]])
    return context


def _decoded(text: str | None) -> str | None:
    return None if text is None else base64.b64decode(text).decode("ascii")
