"""Settings that all tests share: how long Hypothesis searches.

HYPOTHESIS_PROFILE=long searches at random and for long; without it a short search is the same on every run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile(
    "short",
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=SLOW_IS_FINE,
)
settings.register_profile(
    "long",
    max_examples=1500,
    stateful_step_count=120,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW_IS_FINE,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
