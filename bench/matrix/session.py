"""One run of the matrix. Of each size: ceilings, all cells, ceilings again.

Rules: client processes stay for the whole run; each size has a fresh server. A cell that fails is recorded with its
reason and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bench.bare import bare_server
from bench.ceilings import BARE_CHUNK_BYTES
from bench.compare.machine import machine
from bench.crew import Crew, WorkerFailed, crew_of
from bench.jobs import BARE_GRPC, CEILINGS, MEMCPY, RAW_TCP, RAW_UNIX, Job
from bench.matrix.figures import CEILING_OF, EXCHANGE_OF, Figure, Report, Round, Skip, ceiling_key, figure_of, together
from bench.matrix.plan import ROUND_CALLS, Group, Plan, available_bytes
from bench.raw import raw_server
from bench.rig import cpu_s, serving
from bench.worker import GET, MATCH, MIXED
from kvstore.config.units import format_size

FEWEST_ROUNDS, MOST_ROUNDS = 2, 50
MOST_CALL_BYTES = 1 << 30  # The server's own default.

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """The other side of a player: its address and its process, 0 where there is none."""

    address: str
    pid: int = 0


class Session:
    """Measures a plan into a report."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan, self._tell = plan, tell
        self.report = Report(machine())

    def run(self) -> Report:
        """Measures all of it."""
        with crew_of(max(self._plan.clients)) as crew:
            for size_bytes in self._plan.sizes:
                groups, left_out = self._plan.groups(size_bytes, available_bytes())
                for clients, batch, reason in left_out:
                    self.report.skips.append(Skip(_named("all", size_bytes, batch, clients), reason))
                if groups:
                    self._size(crew, size_bytes, groups)
        self.report.cells = beside(self.report)
        return self.report

    def _size(self, crew: Crew, size_bytes: int, groups: Sequence[Group]) -> None:
        self._tell(f"{format_size(size_bytes)}: ceilings")
        self.report.ceilings_before += self._ceilings(crew, groups)
        capacity = max(group.arena_bytes for group in groups)
        call_bytes = max(MOST_CALL_BYTES, size_bytes * max(self._plan.batches))
        flags = ("--hot.max_leased_share", "1.0", "--limits.max_call_bytes", f"{call_bytes}B")
        with serving(f"{capacity}B", *flags) as running:
            if not running.target:
                self.report.skips.append(Skip(format_size(size_bytes), "`kvstore serve` ended before it listened"))
                return
            for group in groups:
                part = Crew(crew.workers[: group.clients])
                self._own(part, group, Peer(running.target, running.pid))
        self._tell(f"{format_size(size_bytes)}: ceilings again")
        self.report.ceilings_after += self._ceilings(crew, groups)

    def _ceilings(self, crew: Crew, groups: Sequence[Group]) -> list[Figure]:
        """The ceilings of what the plan's transports do."""
        made: list[Figure] = []
        with (
            raw_server(max(group.set_bytes for group in groups)) as raw,
            bare_server(BARE_CHUNK_BYTES) as bare,
        ):
            peers = {
                MEMCPY: Peer(""),
                RAW_TCP: Peer(raw.tcp, raw.pid),
                RAW_UNIX: Peer(raw.unix, raw.pid),
                BARE_GRPC: Peer(bare),
            }
            for group in groups:
                part = Crew(crew.workers[: group.clients])
                for kind in self._kinds():
                    self._opened(part, group, kind, peers[kind])
                    made += self._cells(part, group, kind, self._ceiling_workloads(kind, group), peers[kind].pid)
            crew.each({"do": "shut"})
        return made

    def _kinds(self) -> list[str]:
        """Ceilings that a transport of the plan has, and the raw Unix socket, for scale."""
        named = {CEILING_OF[t] for t in self._plan.transports if t in CEILING_OF} | {MEMCPY, RAW_TCP, RAW_UNIX}
        return [kind for kind in CEILINGS if kind in named]

    def _ceiling_workloads(self, kind: str, group: Group) -> list[str]:
        wanted = {GET if workload == MIXED else workload for workload in self._plan.workloads}
        if kind not in EXCHANGE_OF.values() or group.part_bytes != min(self._plan.sizes):
            wanted.discard(MATCH)
        return sorted(wanted)

    def _own(self, crew: Crew, group: Group, peer: Peer) -> None:
        """All cells of a group; its parts are stored before and removed after."""
        self._tell(f"{format_size(group.part_bytes)}, {group.clients} clients")
        cells, filled = self._plan.cells(group.part_bytes), False
        for transport in dict.fromkeys(transport for transport, _ in cells):
            try:
                self._opened(crew, group, transport, peer)
                if not filled:
                    crew.each({"do": "fill"})
                    filled = True
            except WorkerFailed as error:
                self.report.skips.append(Skip(_named(transport, group.part_bytes, 0, group.clients), str(error)))
                continue
            workloads = [workload for name, workload in cells if name == transport]
            self.report.cells += self._cells(crew, group, transport, workloads, peer.pid)
        with suppress(WorkerFailed):  # No player is open.
            crew.each({"do": "clean"})
        crew.each({"do": "shut"})

    def _opened(self, crew: Crew, group: Group, kind: str, peer: Peer) -> None:
        fresh = group.fresh_count if MIXED in self._plan.workloads else 0
        crew.open(
            [
                Job(
                    kind,
                    peer.address,
                    group.part_bytes,
                    group.part_count,
                    owner=owner,
                    fresh_count=fresh,
                    round_calls=ROUND_CALLS,
                )
                for owner in range(group.clients)
            ]
        )

    def _cells(self, crew: Crew, group: Group, kind: str, workloads: Sequence[str], pid: int) -> list[Figure]:
        made = []
        for workload in workloads:
            for batch in group.batches:
                try:
                    rounds = self._rounds(crew, workload, batch, pid)
                except WorkerFailed as error:
                    what = _named(f"{kind} {workload}", group.part_bytes, batch, group.clients)
                    self.report.skips.append(Skip(what, str(error)))
                    continue
                made.append(
                    figure_of(
                        kind,
                        workload,
                        part_bytes=group.part_bytes,
                        batch=batch,
                        clients=group.clients,
                        rounds=rounds,
                    )
                )
        return made

    def _rounds(self, crew: Crew, workload: str, batch: int, pid: int) -> list[Round]:
        """Rounds until they lasted long enough, after one that does not count."""
        crew.round(workload, batch)
        rounds: list[Round] = []
        while len(rounds) < MOST_ROUNDS:
            crew.prepare(workload, batch)
            before = cpu_s(pid) if pid else 0.0
            played = crew.play(workload, batch)
            rounds.append(together(played, cpu_s(pid) - before if pid else 0.0))
            if len(rounds) >= FEWEST_ROUNDS and sum(each.wall_s for each in rounds) >= self._plan.seconds:
                break
        return rounds


def beside(report: Report) -> list[Figure]:
    """The cells of a report, each with its ceiling of the same run."""
    before = {(f.name, f.workload, f.shape): f.rate for f in report.ceilings_before}
    after = {(f.name, f.workload, f.shape): f.rate for f in report.ceilings_after}
    made = []
    for cell in report.cells:
        key = ceiling_key(cell)
        if key is None or key not in before or key not in after:
            made.append(cell)
            continue
        ceiling = (before[key] + after[key]) / 2
        made.append(
            replace(
                cell,
                ceiling_name=key[0],
                ceiling=ceiling,
                ceiling_before=before[key],
                ceiling_after=after[key],
                ratio=cell.rate / ceiling,
            )
        )
    return made


def _named(what: str, size_bytes: int, batch: int, clients: int) -> str:
    calls = f" x {batch}" if batch else ""
    return f"{what}, {format_size(size_bytes)}{calls}, {clients} client{'s' if clients > 1 else ''}"
