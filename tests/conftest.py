"""Property tests draw the same examples every time, and none of them fails for being slow on a busy machine.
`KERNELGEN_TEST_SEED` draws others: a property must hold for any. Hosts without Hypothesis run the tests without it.
"""

from __future__ import annotations

import importlib.util
import os


def steady() -> None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "steady",
        deadline=None,
        derandomize="KERNELGEN_TEST_SEED" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("steady")


if importlib.util.find_spec("hypothesis"):
    steady()
