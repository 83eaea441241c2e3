"""What unit tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shards import WAYS, at_most_few


@pytest.fixture(params=[WAYS[0], WAYS[2]], ids=["at once", "few one by one"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test both ways that a batch can be handled: few rows at once as well, and as it is."""
    with at_most_few(request.param):
        yield
