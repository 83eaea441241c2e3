"""Values that are right one by one and impossible together. Every check names both sides with their sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product

from kvstore.config.address import Address
from kvstore.config.choices import Choice, Choices
from kvstore.config.faults import Fault
from kvstore.config.place_kinds import AUTO, OFF
from kvstore.config.schema import GRAIN_BYTES
from kvstore.config.sources import policy_key
from kvstore.config.units import KIB, format_size

# Room beside the payload of one piece for the message's other fields.
MESSAGE_ROOM_BYTES = 64 * KIB
# Room in a segment beside one part: header, namespaces, table and footer.
SEGMENT_ROOM_BYTES = 4 * GRAIN_BYTES
LEAST_SEGMENTS = 2
LISTENERS = ("server.listen", "server.admin_listen", "bulk.listen", "shm.socket")

AT_MOST = (
    ("hot.page", "hot.capacity", "the arena must hold a page"),
    ("limits.max_part", "hot.page", "a part must fit in a page"),
    ("limits.max_part", "limits.max_call_bytes", "a call must be able to move a part"),
    ("lease.default", "lease.max", "a lease of the default life must be allowed"),
    ("bulk.frame", "bulk.credit", "a client must be able to send a whole frame"),
    ("limits.max_part", "warm.queue", "a part must be able to wait to be written"),
    ("limits.max_part", "warm.promote_queue", "a part must be able to come from disk"),
    ("warm.queue", "hot.capacity", "what waits to be written lies in memory"),
    ("warm.promote_queue", "hot.capacity", "what comes from disk needs room in memory"),
)


def find_impossible(choices: Choices, *, namespaces: tuple[str, ...]) -> list[Fault]:
    """Every impossible pair among `choices`, which are resolved; a key that is absent is not judged."""
    return [
        *_over_their_limit(choices),
        *_chunk_over_message(choices),
        *_share_below_part(choices),
        *_overlapping_listeners(choices),
        *_advertised_nothing(choices),
        *_half_of_tls(choices),
        *_segment_below_part(choices),
        *_too_few_segments(choices),
        *_mapped_but_refused(choices),
        *_too_many_policies(choices, namespaces),
        *_bad_shares(choices, namespaces),
        *_quotas_over_capacity(choices, namespaces),
    ]


def _fault(*choices: Choice, problem: str) -> Fault:
    return Fault(
        key=" and ".join(choice.key for choice in choices),
        where=", ".join(dict.fromkeys(choice.where for choice in choices)),
        value=", ".join(choice.kind.show(choice.value) for choice in choices),
        problem=problem,
    )


def _over_their_limit(choices: Choices) -> Iterator[Fault]:
    for smaller_key, larger_key, reason in AT_MOST:
        smaller, larger = choices.get(smaller_key), choices.get(larger_key)
        if smaller is None or larger is None or smaller.worked_out or larger.worked_out:
            continue
        if smaller.value > larger.value:
            yield _fault(smaller, larger, problem=f"{smaller} is more than {larger}, but {reason}")


def _chunk_over_message(choices: Choices) -> Iterator[Fault]:
    chunk, message = choices.get("limits.chunk"), choices.get("server.max_message")
    if chunk is not None and message is not None and chunk.value + MESSAGE_ROOM_BYTES > message.value:
        room = format_size(MESSAGE_ROOM_BYTES)
        yield _fault(chunk, message, problem=f"{chunk} and {room} of other fields do not fit in {message}")


def _share_below_part(choices: Choices) -> Iterator[Fault]:
    share, capacity, part = (choices.get(key) for key in ("hot.max_leased_share", "hot.capacity", "limits.max_part"))
    if share is None or capacity is None or part is None:
        return
    pinned_bytes = int(share.value * capacity.value)
    if pinned_bytes < part.value:
        problem = f"{share} of {capacity} lets leases pin {pinned_bytes} bytes, less than one part of {part}"
        yield _fault(share, capacity, part, problem=problem)


def _segment_below_part(choices: Choices) -> Iterator[Fault]:
    part, segment = choices.get("limits.max_part"), choices.get("warm.segment")
    if part is None or segment is None:
        return
    taken_bytes = -(-part.value // GRAIN_BYTES) * GRAIN_BYTES + SEGMENT_ROOM_BYTES
    if taken_bytes > segment.value:
        room = format_size(SEGMENT_ROOM_BYTES)
        yield _fault(part, segment, problem=f"{part} and {room} for what describes it do not fit in {segment}")


def _too_few_segments(choices: Choices) -> Iterator[Fault]:
    segment, capacity = choices.get("warm.segment"), choices.get("warm.capacity")
    if segment is not None and capacity is not None and LEAST_SEGMENTS * segment.value > capacity.value:
        problem = f"{capacity} is less than two of {segment}, but one is written while others are read"
        yield _fault(segment, capacity, problem=problem)


def _overlapping_listeners(choices: Choices) -> Iterator[Fault]:
    listeners = [choices[key] for key in LISTENERS if key in choices]
    for one, other in combinations(listeners, 2):
        for address, taken in product(_addresses(one), _addresses(other)):
            if address.overlaps(taken):
                problem = f"{address} of {one.key} and {taken} of {other.key} cannot both be listened at"
                yield _fault(one, other, problem=problem)


def _addresses(listener: Choice) -> tuple[Address, ...]:
    """Where the choice listens: nowhere if it is off, nowhere known if it is auto."""
    if isinstance(listener.value, str):
        return () if listener.value in (AUTO, OFF) else (Address(host="", port=0, unix_path=listener.value),)
    return listener.value or ()


def _advertised_nothing(choices: Choices) -> Iterator[Fault]:
    advertise, listen = choices.get("bulk.advertise"), choices.get("bulk.listen")
    if advertise is not None and listen is not None and advertise.value and listen.value is None:
        yield _fault(advertise, listen, problem=f"{advertise} is told to clients, but {listen} opens no port")


def _half_of_tls(choices: Choices) -> Iterator[Fault]:
    """A certificate and its key go together, and an authority for clients needs both."""
    cert, key, client_ca = (choices.get(name) for name in ("tls.cert", "tls.key", "tls.client_ca"))
    if cert is not None and key is not None and bool(cert.value) != bool(key.value):
        there, lacking = (cert, key) if cert.value else (key, cert)
        problem = f"{there} is set and {lacking.key} is not: a certificate and its key go together"
        yield _fault(there, lacking, problem=problem)
    if cert is not None and client_ca is not None and client_ca.value and not cert.value:
        problem = f"{client_ca} is set and {cert.key} is not: clients can only show certificates over TLS"
        yield _fault(client_ca, cert, problem=problem)


def _mapped_but_refused(choices: Choices) -> Iterator[Fault]:
    """Whose clients get the arena must be able to connect. What `same` stands for is not known yet."""
    allowed, mapped = choices.get("shm.allow_uids"), choices.get("shm.map_uids")
    if allowed is None or mapped is None or allowed.value.listed is None or mapped.value.listed is None:
        return
    for uid in mapped.value.listed:
        if uid not in allowed.value.listed:
            problem = f"{uid} of {mapped} may not connect: it is not in {allowed}"
            yield _fault(mapped, allowed, problem=problem)


def _too_many_policies(choices: Choices, namespaces: tuple[str, ...]) -> Iterator[Fault]:
    most = choices.get("server.max_namespaces")
    if most is not None and len(namespaces) > most.value:
        problem = f"the file has policies for {len(namespaces)} namespaces, more than {most}"
        yield Fault(key=most.key, where=most.where, value=str(most.value), problem=problem)


def _bad_shares(choices: Choices, namespaces: tuple[str, ...]) -> Iterator[Fault]:
    """Each namespace's limit must leave room for one grain, and for what its quota promises."""
    for quota, most in _shares(choices, namespaces):
        # A namespace that inherits both sides would only repeat the fault of the defaults.
        inherits_all = all(side is None or side.inherited for side in (quota, most))
        if most is not None and most.value is not None and not inherits_all:
            yield from _bad_share(quota, most)


def _bad_share(quota: Choice | None, most: Choice) -> Iterator[Fault]:
    if most.value < GRAIN_BYTES:
        yield _fault(most, problem=f"{most} is less than {format_size(GRAIN_BYTES)}, the smallest part")
    if quota is not None and quota.value is not None and quota.value > most.value:
        yield _fault(quota, most, problem=f"{quota} promises more than {most} allows")


def _shares(choices: Choices, namespaces: Iterable[str]) -> Iterator[tuple[Choice | None, Choice | None]]:
    yield choices.get("namespaces.default_quota"), choices.get("namespaces.default_max_bytes")
    for name in namespaces:
        yield choices.get(policy_key(name, "quota")), choices.get(policy_key(name, "max_bytes"))


def _quotas_over_capacity(choices: Choices, namespaces: tuple[str, ...]) -> Iterator[Fault]:
    """The named namespaces' quotas, and one namespace of the default quota, must all fit at once."""
    capacity = choices.get("hot.capacity")
    quotas = [quota for quota, _ in _shares(choices, namespaces) if quota is not None and quota.value]
    total_bytes = sum(quota.value for quota in quotas)
    if capacity is not None and total_bytes > capacity.value:
        added = " + ".join(str(quota) for quota in quotas)
        problem = f"the quotas promise {total_bytes} bytes, more than {capacity} of {capacity.value} bytes: {added}"
        yield _fault(*quotas, capacity, problem=problem)
