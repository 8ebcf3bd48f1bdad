"""Let a program without a network reach one address: its own loopback is forwarded there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from typing import Final

from agentrl.tools.sandbox import linux

HOST: Final = "127.0.0.1"
_CONNECT_SECONDS: Final = 10.0
_CHUNK: Final = 65536
_BACKLOG: Final = 128
_DESCRIPTORS: Final = 1024
_SET_FLAGS: Final = 0x8914
_UP: Final = 0x1 | 0x40


def start(target: tuple[str, int]) -> tuple[int, socket.socket]:
    """Fork a forwarder to ``target``; return its process, and where to send the socket that it serves."""
    own, passed = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.closerange(3, own.fileno())
            os.closerange(own.fileno() + 1, _DESCRIPTORS)
            _serve(own, target)
        finally:
            os._exit(0)
    own.close()
    return pid, passed


def listen(channel: socket.socket, port: int) -> None:
    """Listen on the loopback of this process's network, and pass the socket on. Raises OSError."""
    with socket.create_server((HOST, port), backlog=_BACKLOG) as listener:
        socket.send_fds(channel, [b"x"], [listener.fileno()])


def loopback_up() -> None:
    """Switch the loopback of this process's network on. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def _serve(channel: socket.socket, target: tuple[str, int]) -> None:
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return
    listener = socket.socket(fileno=descriptors[0])
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_relay, args=(client, target), daemon=True).start()


def _relay(client: socket.socket, target: tuple[str, int]) -> None:
    with client:
        try:
            server = socket.create_connection(target, _CONNECT_SECONDS)
        except OSError:
            return
        with server:
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
