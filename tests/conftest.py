"""What all tests share: an example may take as long as a busy machine needs; pytest's own time limit still holds.

For the same reason nobody hears of a turn of the event loop that took long, of which its debug mode warns: tests that
look at what was logged would find it there.

The garbage collector leaves alone what collecting the tests has made, half a million objects that stay: looking through
them again and again took a tenth of the time.
"""

import gc
import logging

from hypothesis import settings

settings.register_profile("worldserve", deadline=None)
settings.load_profile("worldserve")

logging.getLogger("asyncio").addFilter(lambda record: record.msg != "Executing %s took %.3f seconds")

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
