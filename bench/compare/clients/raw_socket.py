"""The ceiling of whatever crosses a socket: a request of a range, its bytes in one answer, and nothing else.

Client: `... raw_socket JOB`, its address a TCP port of this host or a path.
Server: `... raw_socket ADDRESS SIZE_BYTES`; it serves one connection out of one
warm buffer, so that what was put can be read back and checked.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

import numpy as np

from bench.compare.clients.work import Job, Store, Values, serve

LOCALHOST = "127.0.0.1"
REQUEST = struct.Struct("<cQQ")
GET, PUT, STORED = b"G", b"P", b"S"


class RawSocket(Store):
    def __init__(self, address: str, values: Values) -> None:
        self._socket = connect(address)
        self._size_bytes = values.size_bytes
        self._source, self._target = values.source.data, values.target.data

    def put(self, first: int, last: int) -> None:
        start, end = first * self._size_bytes, last * self._size_bytes
        piece = self._source[start:end]
        # With the head, so that the server wakes once.
        sent = self._socket.sendmsg([REQUEST.pack(PUT, start, end), piece]) - REQUEST.size
        self._socket.sendall(piece[sent:])
        if self._socket.recv(1) != STORED:
            raise ConnectionError("the server did not store")

    def get(self, first: int, last: int) -> None:
        start, end = first * self._size_bytes, last * self._size_bytes
        self._socket.sendall(REQUEST.pack(GET, start, end))
        receive(self._socket, self._target[start:end])

    def close(self) -> None:
        self._socket.close()


def connect(address: str) -> socket.socket:
    """Connects to a port of this host (digits) or to a Unix socket (a path)."""
    if not address.isdigit():
        made = socket.socket(socket.AF_UNIX)
        made.connect(address)
        return made
    made = socket.create_connection((LOCALHOST, int(address)))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def receive(source: socket.socket, into: memoryview) -> None:
    """Fills the whole view. Raises ConnectionError if the other side ends first."""
    done = 0
    while done < len(into):
        count = source.recv_into(into[done:])
        if not count:
            raise ConnectionError("the other side closed")
        done += count


def serve_one(address: str, size_bytes: int) -> None:
    """Serves one connection until it ends."""
    held = np.ones(size_bytes, np.uint8).data
    head = memoryview(bytearray(REQUEST.size))
    with _listener(address) as listener:
        connection = listener.accept()[0]
    if address.isdigit():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, contextlib.suppress(ConnectionError):
        while True:
            receive(connection, head)
            what, start, end = REQUEST.unpack(head)
            if what == GET:
                connection.sendall(held[start:end])
            else:
                receive(connection, held[start:end])
                connection.sendall(STORED)


def _listener(address: str) -> socket.socket:
    if address.isdigit():
        made = socket.create_server((LOCALHOST, int(address)))
    else:
        made = socket.socket(socket.AF_UNIX)
        made.bind(address)
        made.listen()
    print("listening", flush=True)
    return made


def open_socket(job: Job, values: Values) -> Store:
    return RawSocket(job.address, values)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        try:
            serve_one(sys.argv[1], int(sys.argv[2]))
        finally:
            if not sys.argv[1].isdigit():
                os.unlink(sys.argv[1])
    else:
        serve(open_socket)
