"""Who plays beside every row of one value size: the ceilings, and this store by its fastest way of each link."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.clients.work import Job
from bench.compare.conversation import ClientFailed, ClientSkips, Conversation
from bench.compare.figures import PUT
from bench.compare.peers import CEILINGS, HOST, OURS, ROWS, TCP, Link, Row
from bench.compare.processes import Processes, ServerFailed
from bench.compare.servers import Ground
from bench.rig import MIB, serving

PYTHON = Path(sys.executable)
OWN_CAPACITY = "1GiB"
FASTEST: Mapping[Link, str] = {TCP: "bulk", HOST: "shm"}
VALUE_COUNTS = {64 << 10: 3072, 640 << 10: 320, 2 * MIB: 128, 5 * MIB: 64}
FILL_BATCH = 16
OTHER_SET_BYTES, FEWEST_VALUES = 256 * MIB, 64


@dataclass(frozen=True)
class Work:
    """The set of one size, and the folder for logs and sockets."""

    size_bytes: int
    folder: Path

    @property
    def value_count(self) -> int:
        """192 to 320 MiB in all: warm in memory, not in a core's own caches."""
        return VALUE_COUNTS.get(self.size_bytes, max(FEWEST_VALUES, OTHER_SET_BYTES // self.size_bytes))

    @property
    def set_bytes(self) -> int:
        return self.size_bytes * self.value_count

    def ground(self, processes: Processes, *, programs: Path, put_rounds: int) -> Ground:
        return Ground(processes, self.folder, programs, self.set_bytes, put_rounds)

    def open(self, python: Path, *, module: str, address: str, variant: str = "") -> Conversation:
        """Starts a client. Raises ClientFailed or ClientSkips."""
        job = Job(self.size_bytes, self.value_count, address, variant)
        log = self.folder / f"{module}-{variant or 'client'}.log".replace(" ", "-")
        return Conversation(python, module=module, job=job, log=log)


@dataclass(frozen=True)
class Company:
    """Clients that stay for all rows of a size. `target` is this store's own server; empty if there is none."""

    work: Work
    ceilings: Mapping[str, Conversation]
    target: str = ""
    trouble: str = ""
    fastest: Mapping[Link, tuple[str, Conversation]] = field(default_factory=dict)


@contextmanager
def ceilings_of(work: Work) -> Iterator[Company]:
    """The ceilings alone."""
    with Processes(work.folder) as processes, ExitStack() as stack:
        ground = work.ground(processes, programs=PYTHON.parent, put_rounds=0)
        clients = {}
        for each in CEILINGS:
            client = work.open(PYTHON, module=each.client, address=each.serve(ground), variant=each.name)
            clients[each.name] = stack.enter_context(client)
        yield Company(work, clients)


@contextmanager
def company_of(work: Work, rows: Sequence[Row]) -> Iterator[Company]:
    """The ceilings, and where this store is compared its server and its fastest clients."""
    with ExitStack() as stack:
        base = stack.enter_context(ceilings_of(work))
        if not any(row.peer == OURS for row in rows):
            yield base
            return
        target = stack.enter_context(serving(OWN_CAPACITY)).target
        if not target:
            yield Company(work, base.ceilings, trouble="`kvstore serve` ended before it listened")
            return
        fastest = {}
        for link in {row.link for row in rows if row.peer != OURS}:
            found = _fastest(work, target, link)
            if found is not None:
                fastest[link] = found
                stack.enter_context(found[1])
        yield Company(work, base.ceilings, target, fastest=fastest)


def _fastest(work: Work, target: str, link: Link) -> tuple[str, Conversation] | None:
    """This store's client of a link; None where it has none, which its own row tells."""
    title = next(row.title for row in ROWS if row.peer == OURS and row.variant == FASTEST[link])
    try:
        with ExitStack() as stack:
            client = work.open(PYTHON, module="own_client", address=target, variant=FASTEST[link])
            stack.enter_context(client)
            client.round_s(PUT, FILL_BATCH)  # Beside rows that only read, nothing else would fill it.
            stack.pop_all()  # It stays open.
    except (ClientSkips, ClientFailed):
        return None
    return title, client


def serve_row(row: Row, company: Company, *, processes: Processes, programs: Path, put_rounds: int) -> str:
    """Starts the row's server, fresh for this size. Returns its address. Raises ServerFailed."""
    if row.peer != OURS:
        return row.serve(company.work.ground(processes, programs=programs, put_rounds=put_rounds))
    if company.trouble:
        raise ServerFailed(company.trouble)
    return company.target
