"""A blocking peer of a shard's Admin service, for people's tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import grpc

from kvstore_client import TlsOptions
from kvstore_client.tls import tls_for
from kvstore_wire import errors
from kvstore_wire.methods import ADMIN_METHODS, ERROR_METADATA
from kvstore_wire.v1 import admin_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types

PAGE = 1000


class AdminPeer:
    """Calls of one shard's admin port. Raises KvStoreError."""

    def __init__(self, channel: grpc.Channel, target: str, *, deadline_s: float) -> None:
        self._channel, self._target, self._deadline_s = channel, target, deadline_s

    def stats(self) -> pb.Stats:
        return cast("pb.Stats", self._ask("GetStats", pb.GetStatsRequest()))

    def config(self) -> pb.GetConfigResponse:
        return cast("pb.GetConfigResponse", self._ask("GetConfig", pb.GetConfigRequest()))

    def namespaces(self) -> list[pb.NamespaceStatus]:
        """Returns all namespaces, page by page."""
        found: list[pb.NamespaceStatus] = []
        token = ""
        while True:
            request = pb.ListNamespacesRequest(page_size=PAGE, page_token=token)
            page = cast("pb.ListNamespacesResponse", self._ask("ListNamespaces", request))
            found.extend(page.namespaces)
            token = page.next_page_token
            if not token:
                return found

    def set_warm_tier(self, request: pb.SetWarmTierRequest) -> pb.WarmTierStatus:
        return cast("pb.WarmTierStatus", self._ask("SetWarmTier", request))

    def watch(self, interval_ms: int) -> Iterator[pb.Stats]:
        """Yields the stats now and at every interval, until the shard goes away."""
        method = ADMIN_METHODS["WatchStats"]
        call = self._channel.unary_stream(
            method.path, request_serializer=_encode, response_deserializer=method.response.FromString
        )
        try:
            yield from call(pb.WatchStatsRequest(interval_ms=interval_ms), wait_for_ready=False)
        except grpc.RpcError as error:
            raise _known(error, self._target) from None

    def _ask(self, name: str, request: Any) -> Any:
        method = ADMIN_METHODS[name]
        call = self._channel.unary_unary(
            method.path, request_serializer=_encode, response_deserializer=method.response.FromString
        )
        try:
            return call(request, timeout=self._deadline_s)
        except grpc.RpcError as error:
            raise _known(error, self._target) from None


@contextmanager
def admin_peer(target: str, *, tls: TlsOptions | None = None, deadline_s: float = 5.0) -> Iterator[AdminPeer]:
    """Opens a peer. Sends nothing yet."""
    with closing(_channel(target, tls_for(target, tls))) as channel:
        yield AdminPeer(channel, target, deadline_s=deadline_s)


def _channel(target: str, tls: TlsOptions | None) -> grpc.Channel:
    arguments: list[tuple[str, object]] = [("grpc.max_receive_message_length", -1)]
    if tls is None:
        return grpc.insecure_channel(target, options=arguments)
    return grpc.secure_channel(target, tls.grpc_credentials(), options=[*arguments, *tls.grpc_arguments()])


def _encode(message: Any) -> bytes:
    return cast("bytes", message.SerializeToString())


def _known(error: grpc.RpcError, target: str) -> errors.KvStoreError:
    """Returns the error that the shard described, or says that none answered."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA:
            return errors.from_detail(types.ErrorDetail.FromString(value))
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.Unreachable(f"no server answers at {target}: {error.details()}".rsplit("; last error", 1)[0])
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"the server at {target} did not answer in time")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.Unsupported(f"{target} has no admin service: give the admin port")
    return errors.Internal(f"{code.name}: {error.details()}")
