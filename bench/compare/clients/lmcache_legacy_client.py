"""LMCache's single-process server, in its own protocol, with a caller that receives into its buffer.

The protocol has no batch and no answer to a put: gets are a loop, and a batch of puts ends with one question whether
the last of them exists.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, ServerMetaMessage

from bench.compare.clients.raw_socket import connect, receive
from bench.compare.clients.work import Job, Store, Values, serve


class LMCacheLegacy(Store):
    def __init__(self, port: str, values: Values) -> None:
        self._socket = connect(port)
        self._values = values
        self._keys: list[Any] = [CacheEngineKey("model", 1, 0, i + 1, torch.uint8) for i in range(values.count)]
        self._head = memoryview(bytearray(ServerMetaMessage.packlength()))

    def put(self, first: int, last: int) -> None:
        size_bytes = self._values.size_bytes
        for i in range(first, last):
            self._socket.sendall(self._request(ClientCommand.PUT, i, size_bytes=size_bytes))
            self._socket.sendall(self._values.sources[i])
        self._socket.sendall(self._request(ClientCommand.EXIST, last - 1, size_bytes=0))
        receive(self._socket, self._head)

    def get(self, first: int, last: int) -> None:
        for i in range(first, last):
            self._socket.sendall(self._request(ClientCommand.GET, i, size_bytes=0))
            receive(self._socket, self._head)
            found: Any = ServerMetaMessage.deserialize(bytes(self._head))
            if found.length != self._values.size_bytes:
                raise RuntimeError(f"a get answered {found.length} bytes")
            receive(self._socket, self._values.targets[i])

    def close(self) -> None:
        self._socket.close()

    def _request(self, command: Any, index: int, *, size_bytes: int) -> bytes:
        shape = torch.Size((size_bytes, 1, 1, 1))
        message: Any = ClientMetaMessage(command, self._keys[index], size_bytes, MemoryFormat(1), torch.uint8, shape)
        made: bytes = message.serialize()
        return made


def open_lmcache(job: Job, values: Values) -> Store:
    return LMCacheLegacy(job.address, values)


if __name__ == "__main__":
    serve(open_lmcache)
