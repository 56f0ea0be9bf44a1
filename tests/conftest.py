"""What all tests share: an example may take as long as a busy machine needs; pytest's own time limit still holds.

Examples are the same in every run, so that a change is not stopped by what it has nothing to do with. The long tests of
the slow set draw new ones, and so do all with `--hypothesis-profile=explore`.

For the same reason nobody hears of a turn of the event loop that took long, of which its debug mode warns: tests that
look at what was logged would find it there.

The garbage collector leaves alone what collecting the tests has made, half a million objects that stay: looking through
them again and again took a tenth of the time.
"""

import gc
import logging

from hypothesis import HealthCheck, settings

settings.register_profile("worldserve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("worldserve"), derandomize=False)
settings.load_profile("worldserve")

logging.getLogger("asyncio").addFilter(lambda record: record.msg != "Executing %s took %.3f seconds")

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
