"""One run: ceilings, every row at every size, ceilings again.

Rules: a row that fails is recorded with its reason and the run goes on. Whatever was started for a row has ended
before the next row starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.compare import lmcache_bench
from bench.compare.company import PYTHON, Company, Work, ceilings_of, company_of, serve_row
from bench.compare.conversation import ClientFailed, ClientSkips
from bench.compare.environments import ENVIRONMENTS, python_of
from bench.compare.figures import GET, PUT, Figure, Report, Skip
from bench.compare.measure import Table, check_bytes, own_bench, played, table_of
from bench.compare.peers import Row
from bench.compare.plan import LATENCY_SIZES, Plan
from bench.compare.processes import Processes, ServerFailed
from bench.compare.servers import redhare_reader
from bench.compare.turn import Seat

HOLDER_BATCH = 16
FEW_REQUESTS = 16
SEQUENCES_APART = 100_000

Tell = Callable[[str], None]


class Session:
    """Measures a plan into a report."""

    def __init__(self, plan: Plan, *, folder: Path, tell: Tell) -> None:
        self._plan, self._folder, self._tell = plan, folder, tell

    def run(self, report: Report) -> None:
        """Measures all of it; what was measured before an interruption stays in the report."""
        self._tell("ceilings, before")
        report.ceilings_before += self._ceilings("before")
        for size_bytes in self._plan.sizes:
            with company_of(self._work(size_bytes, "rows"), self._plan.rows) as company:
                for row in self._plan.rows:
                    self._row(row, company=company, report=report)
        self._tell("ceilings, after")
        report.ceilings_after += self._ceilings("after")

    def _work(self, size_bytes: int, name: str) -> Work:
        folder = self._folder / f"{name}-{size_bytes}"
        folder.mkdir()
        return Work(size_bytes, folder)

    def _ceilings(self, when: str) -> list[Figure]:
        made: list[Figure] = []
        for size_bytes in self._plan.sizes:
            with ceilings_of(self._work(size_bytes, when)) as company:
                for name, client in company.ceilings.items():
                    made += played(Table(company.work, name, (Seat(name, client),)), self._plan, ops=(PUT, GET))
                    check_bytes(client)
        return made

    def _row(self, row: Row, *, company: Company, report: Report) -> None:
        size_bytes = company.work.size_bytes
        try:
            found = self._played(row, company) if row.client else self._own_bench(row, company)
        except (ServerFailed, ClientFailed, ClientSkips, ValueError, OSError) as error:
            report.skips.append(Skip(row.title, str(error), size_bytes))
            self._tell(f"{row.title}, {size_bytes >> 10} KiB: skipped, {error}")
            return
        report.figures += found
        shown = ", ".join(f"{f.op} x{f.batch} {f.value:.3g} {f.unit}" for f in found)
        self._tell(f"{row.title}, {size_bytes >> 10} KiB: {shown}")

    def _played(self, row: Row, company: Company) -> list[Figure]:
        """A row whose client plays rounds beside the ceiling and this store."""
        work, python = company.work, self._python(row)
        with Processes(work.folder) as processes, ExitStack() as stack:
            rounds = self._plan.put_rounds(row)
            address = serve_row(row, company, processes=processes, programs=python.parent, put_rounds=rounds)
            if row.reads_from_holder:
                holder = work.open(python, module=row.client, address=address, variant="holder")
                stack.enter_context(holder).round_s(PUT, HOLDER_BATCH)
                address = redhare_reader(address)
            client = stack.enter_context(work.open(python, module=row.client, address=address, variant=row.variant))
            table = table_of(row, company, [Seat(row.title, client, row.warm_up_rounds)])
            found = list(played(table, self._plan, ops=(GET,) if row.reads_from_holder else (PUT, GET)))
            check_bytes(client)
        return found

    def _own_bench(self, row: Row, company: Company) -> list[Figure]:
        """A row that its maker's benchmark measures."""
        work, programs = company.work, self._python(row).parent
        table = table_of(row, company, [])
        found: list[Figure] = []
        with Processes(work.folder) as processes:
            address = serve_row(row, company, processes=processes, programs=programs, put_rounds=0)
            # The largest batch first: at 1 the many requests of the latency would push out what others stored.
            for i, batch in enumerate(sorted(self._plan.batches, reverse=True), 1):
                timed = batch == 1 and work.size_bytes in LATENCY_SIZES
                requests = lmcache_bench.run(
                    programs / "lmcache",
                    address=address,
                    size_bytes=work.size_bytes,
                    batch=batch,
                    request_count=self._plan.latency_calls if timed else FEW_REQUESTS,
                    first_sequence=i * SEQUENCES_APART,
                )
                found += own_bench(table, self._plan, batch=batch, found=requests)
        return found

    def _python(self, row: Row) -> Path:
        return python_of(self._plan.venvs, ENVIRONMENTS[row.environment]) if row.environment else PYTHON
