"""The TLS of a kubeconfig, against a server whose authority is made here by ``openssl``."""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.errors import ConfigError
from agentrl.worlds.containers.container import ContainerSpec
from agentrl.worlds.containers.kubernetes import KubernetesContainer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Jobs(BaseHTTPRequestHandler):
    """Answers who asks: only a client that shows a certificate, or a token, sees an empty list of Jobs."""

    def do_GET(self) -> None:
        assert isinstance(self.connection, ssl.SSLSocket)
        shown = bool(self.connection.getpeercert()) or self.headers["Authorization"] == "Bearer sesame"
        body = b'{"items": []}' if shown else b'{"message": "who are you?"}'
        self.send_response(200 if shown else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an authority ``ca``, and ``server`` and ``client`` that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=30)

    openssl(f"req -x509 {NEW_KEY} -keyout ca.key -out ca.crt -subj /CN=authority -days 2")
    (folder / "extensions").write_text("subjectAltName = IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(f"req {NEW_KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signed = f"-CA ca.crt -CAkey ca.key -CAcreateserial -extfile extensions -days 2 -out {name}.crt"
        openssl(f"x509 -req -in {name}.csr {signed}")
    return folder


@pytest.fixture
def url(certificates: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    context.load_verify_locations(certificates / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    with HTTPServer(("127.0.0.1", 0), Jobs) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join(10)


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("way", ["files", "data", "insecure", "token", "token_file"])
def test_a_kubeconfig_says_whom_to_trust_and_who_asks(certificates: Path, url: str, way: str) -> None:
    def check(cluster: dict[str, Any], user: dict[str, Any]) -> None:
        path = certificates / "kubeconfig"
        path.write_text(yaml.safe_dump({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": url, **cluster}}],
            "users": [{"name": "u", "user": user}],
        }))  # fmt: skip
        options = {"kubeconfig": str(path)}
        KubernetesContainer.check(ContainerSpec(name="t", image="i", seconds=9, options=options), "h.yml")

    trusted = {"certificate-authority": "ca.crt"}
    client = {"client-certificate": "client.crt", "client-key": "client.key"}
    match way:
        case "files":
            check(trusted, client)
            with pytest.raises(ConfigError, match=r"does not answer.*certificate verify failed"):
                check({}, client)
            with pytest.raises(ConfigError, match=r"refuses Jobs.*who are you"):
                check(trusted, {})
            with pytest.raises(ConfigError, match=r"kubeconfig .* cannot be used: FileNotFoundError"):
                check({"certificate-authority": "none.crt"}, client)
        case "data":
            encoded = {f"{name}-data": data(certificates / file) for name, file in client.items()}
            check({"certificate-authority-data": data(certificates / "ca.crt")}, encoded)
            with pytest.raises(ConfigError, match="cannot be used"):
                check({"certificate-authority-data": "no base64"}, encoded)
        case "insecure":
            check({"insecure-skip-tls-verify": True}, client)
        case "token":
            check(trusted, {"token": "sesame"})
        case "token_file":
            (certificates / "token").write_text("sesame\n")
            check(trusted, {"tokenFile": "token"})
