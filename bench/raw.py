"""The ceiling of whatever crosses a socket: a request of a range, its bytes in one answer, and nothing else.

As a program, it is the server: `python -m bench.raw SIZE_BYTES FOLDER`, one thread a connection, all of them out of
one warm buffer, over TCP as the machine has it, over TCP that is not paced, and over a Unix socket. It prints the
addresses. Requests and answers are as large as those of the store beside it: `batch` parts in one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.compare.clients.raw_socket import LOCALHOST, connect, receive
from bench.rig import warm
from kvstore_wire.pacing import unpace_within_host

REQUEST = struct.Struct("<cQQ")
GET, PUT, ASK, STORED = b"G", b"P", b"A", b"S"
MAX_ASK_BYTES = 1 << 20


@dataclass(frozen=True)
class RawServer:
    """A server process and its addresses: two ports, a path."""

    tcp: str
    unpaced: str
    unix: str
    pid: int


class RawClient:
    """One connection to a raw server."""

    def __init__(self, address: str, *, unpaced: bool = False) -> None:
        self._socket = connect(address)
        if unpaced:
            unpace_within_host(self._socket)

    def get(self, start: int, into: memoryview) -> None:
        """Fills a buffer with the server's bytes from `start` on."""
        self._socket.sendall(REQUEST.pack(GET, start, len(into)))
        receive(self._socket, into)

    def put(self, start: int, piece: memoryview) -> None:
        """Stores bytes at `start`; waits for the acknowledgement."""
        # With the head, so that the server wakes once.
        sent = self._socket.sendmsg([REQUEST.pack(PUT, start, len(piece)), piece]) - REQUEST.size
        self._socket.sendall(piece[max(0, sent) :])
        receive(self._socket, memoryview(bytearray(1)))

    def ask(self, question: bytes, into: memoryview) -> None:
        """Sends a question and takes an answer of the buffer's size."""
        self._socket.sendall(REQUEST.pack(ASK, len(question), len(into)) + question)
        receive(self._socket, into)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def raw_server(size_bytes: int) -> Iterator[RawServer]:
    """Runs the raw server in its own process."""
    with tempfile.TemporaryDirectory(prefix="bench-raw-") as folder:
        command = [sys.executable, "-m", "bench.raw", str(size_bytes), folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            tcp, unpaced, unix = process.stdout.readline().split()
            yield RawServer(tcp, unpaced, unix, process.pid)
        finally:
            process.terminate()
            process.wait(timeout=30)


def serve_connection(connection: socket.socket, held: memoryview) -> None:
    """Answers requests until the other side ends."""
    head, question = memoryview(bytearray(REQUEST.size)), memoryview(bytearray(MAX_ASK_BYTES))
    with connection, contextlib.suppress(ConnectionError):
        while True:
            receive(connection, head)
            what, first, second = REQUEST.unpack(head)
            if what == GET:
                connection.sendall(held[first : first + second])
            elif what == PUT:
                receive(connection, held[first : first + second])
                connection.sendall(STORED)
            else:
                receive(connection, question[:first])
                connection.sendall(held[:second])


def _accept(listener: socket.socket, held: memoryview, *, unpaced: bool = False) -> None:
    while True:
        connection = listener.accept()[0]
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if unpaced:
            unpace_within_host(connection)
        threading.Thread(target=serve_connection, args=(connection, held), daemon=True).start()


def _serve(size_bytes: int, folder: Path) -> None:
    held = warm(size_bytes)
    tcp, unpaced = socket.create_server((LOCALHOST, 0)), socket.create_server((LOCALHOST, 0))
    unix = socket.socket(socket.AF_UNIX)
    path = folder / "raw.sock"
    unix.bind(str(path))
    unix.listen()
    threading.Thread(target=_accept, args=(unix, held), daemon=True).start()
    threading.Thread(target=_accept, args=(unpaced, held), kwargs={"unpaced": True}, daemon=True).start()
    print(tcp.getsockname()[1], unpaced.getsockname()[1], path, flush=True)
    _accept(tcp, held)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
