"""What all tests share: an example may take as long as a busy machine needs; pytest's own time limit still holds.

The garbage collector leaves alone what collecting the tests has made, half a million objects that stay: looking through
them again and again took a tenth of the time.
"""

import gc

from hypothesis import settings

settings.register_profile("worldserve", deadline=None)
settings.load_profile("worldserve")

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
