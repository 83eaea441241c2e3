"""Attach: the handshake on version, namespace and limits."""

from __future__ import annotations

import pytest

from kvstore_wire.errors import (
    InvalidArgument,
    NamespaceMismatch,
    TableFull,
    UnknownNamespace,
    UnknownSession,
    VersionMismatch,
)
from kvstore_wire.limits import MAX_CLIENT_BYTES, MAX_FEATURES, MAX_NAMESPACES_PER_SESSION, PROTOCOL_VERSION
from kvstore_wire.v1 import block_store_pb2 as pb
from kvstore_wire.v1 import types_pb2 as types
from tests.contract.caller import HOT, MISSING, Caller, as_stream, attach_request, value
from tests.contract.conftest import OpenShard, Shard
from tests.integration.server_process import until
from tests.shards import key, kv_spec, opaque_spec


async def test_attach_tells_session_limits_and_what_the_shard_offers(shard: Shard) -> None:
    answer = (await shard.caller()).attached
    assert answer.version == PROTOCOL_VERSION
    assert len(answer.session) == 16
    assert answer.generation
    assert answer.namespace > 0
    assert answer.digest == kv_spec("a").digest
    assert [t.name for t in answer.transports] == ["shm", "bulk", "grpc"]
    assert (answer.transports[0].address[:1], answer.transports[1].address[:1], answer.transports[2].address) == (
        "/",
        ":",
        "",
    )
    limits = answer.limits
    assert (limits.max_match_blocks, limits.max_blocks, limits.max_parts_per_block) == (16, 8, 4)
    assert (limits.max_part_bytes, limits.max_call_bytes) == (256 << 10, 1 << 20)
    assert (limits.max_wait_ms, limits.default_lease_ms, limits.max_lease_ms) == (5000, 10_000, 20_000)
    assert (limits.max_message_bytes, limits.chunk_bytes, limits.session_open_ms) == (256 << 10, 64 << 10, 10_000)


async def test_same_fields_share_blocks_whatever_the_name(shard: Shard) -> None:
    first, second = await shard.caller(kv_spec("a")), await shard.caller(kv_spec("a"))
    renamed = kv_spec("a").to_message()
    renamed.name = "another"
    request = pb.AttachRequest(min_version=1, max_version=1, session=second.session, namespace=renamed)
    handle = (await second.door.call("Attach", request)).namespace
    await first.put([key(1)], [value(1, 4096)])
    assert await second.match([key(1)]) == [HOT]
    answer = await second.door.call("Match", second.match_request([key(1)], namespace=handle))
    assert list(answer.states) == [HOT]


@pytest.mark.parametrize(("low", "high"), [(2, 3), (0, 0)])
async def test_no_version_in_common(shard: Shard, low: int, high: int) -> None:
    request = attach_request(kv_spec("a"))
    request.min_version, request.max_version = low, high
    with pytest.raises(VersionMismatch) as caught:
        await shard.door().call("Attach", request)
    assert caught.value.limit == "1"


async def test_a_name_is_bound_to_one_spec(shard: Shard) -> None:
    await shard.caller(kv_spec("a"))
    with pytest.raises(NamespaceMismatch) as caught:
        await shard.door().call("Attach", attach_request(kv_spec("a", part_bytes=8192)))
    assert caught.value.field == "namespace.part_bytes"
    # Another tenant's name is another name.
    await shard.caller(kv_spec("a", part_bytes=8192, tenant="other"))


async def test_a_digest_of_other_fields_is_refused(shard: Shard) -> None:
    with pytest.raises(NamespaceMismatch) as caught:
        await shard.door().call("Attach", attach_request(kv_spec("a"), digest=bytes(32)))
    assert caught.value.field == "digest"
    assert shard.local.gauge("sessions") == 1, "only the probe's: a refused Attach leaves no session behind"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": types.NAMESPACE_KIND_UNSPECIFIED}, "kind"),
        ({"kind": types.NAMESPACE_KIND_OPAQUE}, "geometry"),
        ({"name": ""}, "name"),
        ({"name": "n" * 256}, "name"),
        ({"tenant": "t" * 256}, "tenant"),
        ({"model": ""}, "model"),
        ({"model": "m" * 4097}, "model"),
        ({"weights_revision": "w" * 256}, "weights_revision"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"part_bytes": (256 << 10) + 1}, "namespace.part_bytes"),
        ({"key_scheme": ""}, "key_scheme"),
        ({"key_scheme": "k" * 65}, "key_scheme"),
        ({"chains": 9}, "chains"),
    ],
)
async def test_fields_out_of_their_limits(shard: Shard, change: dict[str, object], field: str) -> None:
    request = attach_request(kv_spec("a"), digest=b"")
    for name, changed in change.items():
        setattr(request.namespace, name, changed)
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Attach", request)
    assert caught.value.field == "namespace." + field.removeprefix("namespace.")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("block_tokens", 0),
        ("block_tokens", 65537),
        ("dtype", ""),
        ("dtype", "d" * 33),
        ("layers", 0),
        ("layers", 65536),
        ("kv_heads", 0),
        ("head_dim", 65536),
        ("attention", types.ATTENTION_KIND_UNSPECIFIED),
        ("layout", "l" * 65),
        ("layer_groups", 2),
        ("head_shards", 2),
    ],
)
async def test_geometries_out_of_their_limits(shard: Shard, name: str, changed: object) -> None:
    request = attach_request(kv_spec("a"), digest=b"")
    setattr(request.namespace.geometry, name, changed)
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Attach", request)
    assert caught.value.field == f"namespace.geometry.{name}"


async def test_parts_per_block_at_and_above_the_limit(shard: Shard) -> None:
    await shard.caller(kv_spec("four", layer_groups=4))
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Attach", attach_request(kv_spec("five", layer_groups=5)))
    assert (caught.value.field, caught.value.limit) == ("namespace.geometry", "4")


async def test_facts_are_few_and_unique_and_their_order_does_not_matter(shard: Shard) -> None:
    one, two = types.Fact(name="x", value="1"), types.Fact(name="y", value="2")
    digests = []
    for facts in ([one, two], [two, one]):
        request = attach_request(kv_spec("facts"), digest=b"")
        request.namespace.facts.extend(facts)
        digests.append((await shard.door().call("Attach", request)).digest)
    assert digests[0] == digests[1] != kv_spec("facts").digest
    for wrong in ([one, one], [types.Fact(name=f"f{i}") for i in range(65)]):
        request = attach_request(kv_spec("wrong"), digest=b"")
        request.namespace.facts.extend(wrong)
        with pytest.raises(InvalidArgument) as caught:
            await shard.door().call("Attach", request)
        assert caught.value.field == "namespace.facts"


async def test_client_text_and_features_at_and_above_their_limits(shard: Shard) -> None:
    request = attach_request(kv_spec("a"))
    request.client = "c" * MAX_CLIENT_BYTES
    request.features.extend(["f"] * MAX_FEATURES)
    await shard.door().call("Attach", request)
    request.client += "c"
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Attach", request)
    assert (caught.value.field, caught.value.limit) == ("client", "255 bytes")
    request.client = ""
    request.features.append("f")
    with pytest.raises(InvalidArgument) as caught:
        await shard.door().call("Attach", request)
    assert (caught.value.field, caught.value.limit) == ("features", "32")


async def test_a_session_takes_as_many_namespaces_as_the_limit_says(shard: Shard) -> None:
    caller = await shard.caller(opaque_spec("0"))
    handles = {caller.namespace}
    for i in range(1, MAX_NAMESPACES_PER_SESSION):
        handles.add(await caller.add(opaque_spec(f"{i}")))
    assert len(handles) == MAX_NAMESPACES_PER_SESSION
    assert await caller.add(opaque_spec("0")) == caller.namespace, "attached again, it is the same handle"
    with pytest.raises(InvalidArgument) as caught:
        await caller.add(opaque_spec("one more"))
    assert (caught.value.field, caught.value.limit) == ("session", "64")


async def test_tables_of_sessions_and_namespaces_are_bounded(open_shard: OpenShard) -> None:
    shard = await open_shard({"server.max_sessions": "3", "server.max_namespaces": "3"})
    first, _ = await shard.caller(kv_spec("a")), await shard.caller(kv_spec("b"))  # The probe has one of each, too.
    with pytest.raises(TableFull) as caught:
        await shard.door().call("Attach", attach_request(kv_spec("a")))
    assert (caught.value.field, caught.value.limit, caught.value.retryable) == ("session", "3", True)
    with pytest.raises(TableFull) as caught:
        await first.add(kv_spec("c"))
    assert (caught.value.field, caught.value.limit) == ("namespace", "3")
    await first.close()
    await shard.local.until_idle()
    third = await shard.caller(kv_spec("c"))
    assert await third.match([key(1)]) == [MISSING], "what a closed session held is free for the next one"


async def test_unknown_sessions_and_handles(shard: Shard) -> None:
    caller = await shard.caller()
    for session in (b"", bytes(16), b"short"):
        with pytest.raises(UnknownSession) as caught:
            await caller.door.call("Match", pb.MatchRequest(session=session, namespace=caller.namespace))
        assert caught.value.retryable
    with pytest.raises(UnknownSession):
        await caller.door.call("Attach", attach_request(kv_spec("a"), session=bytes(16)))
    for handle in (0, caller.namespace + 1):
        with pytest.raises(UnknownNamespace) as unknown:
            await caller.door.call("Match", caller.match_request([key(1)], namespace=handle))
        assert unknown.value.field == "namespace"


async def test_a_session_that_is_never_opened_ends(open_shard: OpenShard) -> None:
    shard = await open_shard({"lease.session_open_timeout": "100ms"})
    door = shard.door()
    answer = await door.call("Attach", attach_request(kv_spec("a")))
    unopened = Caller(door, answer, door.talk("Session", as_stream([])))
    assert await unopened.match([key(1)]) == [MISSING]
    await until(lambda: shard.local.gauge("sessions") == 1, "the session was not ended")
    with pytest.raises(UnknownSession):
        await unopened.match([key(1)])
