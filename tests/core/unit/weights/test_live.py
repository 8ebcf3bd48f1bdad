"""Weights in the trainer's memory: other processes map them or receive them, and nothing else."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from waiting import wait_until

from agentrl.documents.run import LiveShare
from agentrl.errors import PublishError
from agentrl.weights.live import (
    PREFIX,
    LiveHolder,
    WeightRequests,
    broadcast,
    connect,
    join_group,
    open_memory_file,
    write_memory_file,
)

CPU = torch.device("cpu")


def weights(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "norm": torch.randn(7, generator=made).bfloat16(),
        "layer": torch.randn(33, 5, generator=made),
        "scale": torch.randn((), generator=made).half(),
        "ids": torch.arange(9),
        "experts": torch.randn(2, 3, 4, generator=made).to(torch.float8_e4m3fn),
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())


@pytest.fixture
def holder() -> Iterator[LiveHolder]:
    holder = LiveHolder("tensor", CPU)
    yield holder
    holder.close()


@pytest.fixture
def sender() -> Iterator[LiveHolder]:
    sender = LiveHolder("distributed", CPU)
    yield sender
    sender.close()


def test_a_share_is_what_was_held(holder: LiveHolder) -> None:
    share = holder.hold(weights())
    mapped = open_memory_file(str(share.file), share.name)
    assert_equal(mapped.named(), weights())
    for limit in (1, 100, 10_000):
        buckets = list(mapped.buckets(limit))
        assert [item for bucket in buckets for item in bucket] == list(mapped.tensors)
        assert all(len(bucket) == 1 or bucket[-1].end - bucket[0].begin <= limit for bucket in buckets)


def test_the_two_newest_versions_are_held_and_no_number_of_a_descriptor_is_mistaken(
    holder: LiveHolder,
) -> None:
    shares = [holder.hold(weights(seed)) for seed in range(4)]
    assert shares[2].file in (shares[0].file, shares[1].file) or shares[3].file == shares[0].file
    for share in shares[:2]:
        with pytest.raises(PublishError, match=r"any more|No such file"):
            open_memory_file(str(share.file), share.name)
    for seed, share in enumerate(shares[2:], 2):
        assert_equal(open_memory_file(str(share.file), share.name).named(), weights(seed))


def test_weights_that_are_mapped_outlive_the_trainer_and_leave_nothing_behind(tmp_path: Path) -> None:
    script = """
        import signal, sys, torch
        from agentrl.weights.live import LiveHolder
        holder = LiveHolder("tensor", torch.device("cpu"))
        share = holder.hold({"a": torch.arange(1000)})
        print(share.file, share.name, flush=True)
        signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        file, name = trainer.stdout.readline().split()
        mapped = open_memory_file(file, name)
        trainer.send_signal(signal.SIGKILL)
    assert torch.equal(mapped.named()["a"], torch.arange(1000))
    with pytest.raises(PublishError, match="No such file"):
        open_memory_file(file, name)


def test_nothing_else_is_read(holder: LiveHolder, tmp_path: Path) -> None:
    share = holder.hold(weights())
    open_file = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
    reader, writer = os.pipe()
    unsealed = os.memfd_create(f"{PREFIX}mine", os.MFD_ALLOW_SEALING)
    own = f"/proc/{os.getpid()}/fd"
    for path, name in (
        ("/etc/hostname", "mine"), (f"{share.file}/../../environ", "mine"), (f"{own}/{open_file}", "mine"),
        (f"{own}/{reader}", "mine"), (f"{own}/{unsealed}", "mine"), (str(share.file), "mine"),
    ):  # fmt: skip
        with pytest.raises(PublishError, match="cannot be read"):
            open_memory_file(path, name)
    for descriptor in (open_file, reader, writer, unsealed):
        os.close(descriptor)


def test_a_damaged_header_is_refused() -> None:
    descriptor = write_memory_file("mine", {"a": torch.arange(4)})
    whole = os.pread(descriptor, 10_000, 0)
    for damaged in (whole[:20], whole[:-1], whole.replace(b"I64", b"I99"), whole.replace(b"[4]", b"[9]")):
        other = os.memfd_create(f"{PREFIX}mine", os.MFD_ALLOW_SEALING)
        os.write(other, damaged)
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        with pytest.raises(PublishError, match="cannot be read"):
            open_memory_file(f"/proc/{os.getpid()}/fd/{other}", "mine")
        os.close(other)
    os.close(descriptor)


class Receiver:
    """The end of an engine, with the group that it keeps."""

    def __init__(self, share: LiveShare) -> None:
        assert share.port is not None
        self.port = share.port
        self.requests = WeightRequests("127.0.0.1", share.port, "gloo")
        self.joined: object = None

    def receive(self, share: LiveShare) -> dict[str, Tensor]:
        transfer = self.requests.ask(share.name)
        assert transfer.is_new == (self.joined is None)
        if transfer.is_new:
            self.joined = join_group(connect("127.0.0.1", self.port), transfer.group, 1, "gloo")
        found: dict[str, Tensor] = {}
        for bucket in transfer.buckets:
            sizes = [torch.Size(shape).numel() * getattr(torch, kind).itemsize for _, kind, shape in bucket]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            broadcast(self.joined, flat)
            for (name, kind, shape), part in zip(bucket, flat.split(sizes), strict=True):
                found[name] = part.view(getattr(torch, kind)).view(shape)
        return found


def test_engines_receive_versions_at_any_time_and_one_that_dies_disturbs_no_other(
    sender: LiveHolder, caplog: pytest.LogCaptureFixture
) -> None:
    first = sender.hold(weights(1))
    early = Receiver(first)
    assert_equal(early.receive(first), weights(1))
    dying = """
        import os, sys
        from agentrl.weights.live import WeightRequests, connect, join_group
        port, name = int(sys.argv[1]), sys.argv[2]
        transfer = WeightRequests("127.0.0.1", port, "gloo").ask(name)
        group = join_group(connect("127.0.0.1", port), transfer.group, 1, "gloo")
        os._exit(9)
    """
    with caplog.at_level(logging.WARNING):
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(dying), str(first.port), first.name],
            timeout=60, check=False,
        )  # fmt: skip
        assert ended.returncode == 9
        second = sender.hold(weights(2))
        late = Receiver(second)
        assert_equal(late.receive(second), weights(2))
        assert_equal(early.receive(second), weights(2))
        assert_equal(late.receive(first), weights(1))
        wait_until(lambda: len(caplog.records) == 1)
    assert "did not receive" in caplog.text
    sender.hold(weights(3))
    with pytest.raises(PublishError, match="not held any more"):
        early.requests.ask(first.name)


def test_a_trainer_that_is_gone_is_named() -> None:
    sender = LiveHolder("distributed", CPU)
    port = sender.hold(weights()).port
    sender.close()
    assert port is not None
    with pytest.raises(PublishError, match=rf"127.0.0.1:{port}"):
        WeightRequests("127.0.0.1", port, "gloo").ask("anything")
