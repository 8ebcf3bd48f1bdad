"""Kubernetes' Jobs on a stand-in of its API server: what they hold, what is removed, what is an outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest
import yaml
from fake_kubernetes import TOKEN, FakeKubernetes
from rootfs_here import make_rootfs, rootfs_problem

from agentrl.base.processes import owned_name
from agentrl.errors import ConfigError, DependencyKind, ToolServerError
from agentrl.worlds.containers import kubernetes
from agentrl.worlds.containers.container import ContainerSpec
from agentrl.worlds.containers.kubernetes import KubernetesContainer, job_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason="this machine has no namespaces"),
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeKubernetes]:
    fake = FakeKubernetes(tmp_path, make_rootfs(tmp_path / "root"))
    await fake.start()
    kubernetes._cleaned.clear()
    yield fake
    await fake.stop()


def spec(server: FakeKubernetes, **changed: Any) -> ContainerSpec:
    options = {"kubeconfig": str(server.folder / "kubeconfig"), **changed.pop("options", {})}
    return ContainerSpec(**{"name": "test", "image": "image:1", "seconds": 60, "options": options, **changed})


async def test_no_secret_is_in_an_address(server: FakeKubernetes) -> None:
    async with KubernetesContainer(spec(server)) as box:
        done = await box.run(["/bin/sh", "-c", "echo $KEY"], seconds=10, environment={"KEY": "it's secret"})
    assert done.stdout == "it's secret\n"
    assert [call for call in server.calls if "secret" in unquote_plus(call) or TOKEN in call] == []


async def test_jobs_of_ended_processes_are_removed(
    server: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "has_ended", lambda owner: True)
    left = owned_name("agentrl-test")
    for name in (left, "agentrl-of-another-machine"):
        server.jobs[name] = {"metadata": {"name": name}}
    async with KubernetesContainer(spec(server)):
        assert left not in server.jobs
        assert len(server.jobs) == 2


async def test_memory_and_lost_pods_are_told_apart(server: FakeKubernetes) -> None:
    async with KubernetesContainer(spec(server)) as box:
        (job,) = server.jobs
        server.ended[job] = "OOMKilled"
        assert (await box.run(["/bin/sh", "-c", "exit 137"], seconds=10)).exceeded == "memory"
        server.ended[job] = "NodeLost"
        with pytest.raises(ToolServerError, match="has ended: NodeLost") as caught:
            await box.run(["/bin/sh", "-c", "exit 137"], seconds=10)
        assert caught.value.outage is None


async def test_a_server_that_is_away_is_an_outage(server: FakeKubernetes) -> None:
    box = KubernetesContainer(spec(server))
    await box.start()
    await server.stop()
    for call in (box.run(["true"], seconds=10), KubernetesContainer(spec(server)).start()):
        with pytest.raises(ToolServerError) as caught:
            await call
        assert caught.value.outage is not None
        assert caught.value.outage.kind is DependencyKind.CONTAINERS
    await box.stop()
    with pytest.raises(ConfigError, match="does not answer"):
        await asyncio.to_thread(KubernetesContainer.check, spec(server), "h.yml")


async def test_what_cannot_be_used_is_named(server: FakeKubernetes, tmp_path: Path) -> None:
    async def check(one: ContainerSpec, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            await asyncio.to_thread(KubernetesContainer.check, one, "h.yml")

    await asyncio.to_thread(KubernetesContainer.check, spec(server), "h.yml")
    await check(spec(server, image=None), "needs an image")
    await check(spec(server, user="root"), "user is 'root'")
    await check(spec(server, options={"namespac": "x"}), "unknown key 'namespac'")
    await check(spec(server, options={"kubeconfig": str(tmp_path / "none")}), "cannot be used")
    content = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    for user, text in (({"token": "wrong"}, "refuses Jobs"), ({"exec": {}}, "logs in by a program")):
        content["users"][0]["user"] = user
        (tmp_path / "other").write_text(yaml.safe_dump(content))
        await check(spec(server, options={"kubeconfig": str(tmp_path / "other")}), text)


def test_a_job_has_limits_and_no_rights() -> None:
    made = ContainerSpec(
        name="test", image="i", user="1000:1000", writable=("/sandbox",), memory_mb=64, storage_mb=32,
        cpus=0.5, seconds=99.0, network="gateway",
    )  # fmt: skip
    job = job_of(made, "name", {"imagePullSecrets": [{"name": "s"}]})
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 99)
    assert job["metadata"]["labels"]["agentrl-network"] == "gateway"
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert pod["imagePullSecrets"] == [{"name": "s"}]
    (main,) = pod["containers"]
    assert main["resources"]["limits"] == {"memory": "64Mi", "ephemeral-storage": "32Mi", "cpu": "0.5"}
    rights = main["securityContext"]
    assert (rights["runAsUser"], rights["readOnlyRootFilesystem"]) == (1000, True)
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert main["volumeMounts"] == [{"name": "w0", "mountPath": "/sandbox"}]
    assert pod["volumes"] == [{"name": "w0", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}}]
