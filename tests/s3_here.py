"""An S3 server of this process, and an empty bucket in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentrl.weights import storage


@contextmanager
def s3_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a folder in a new bucket, which fsspec finds by the environment."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    storage._system.cache_clear()
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(f"bucket-{port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield f"s3://bucket-{port}/run"
    storage._system.cache_clear()
    server.stop()
