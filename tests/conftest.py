"""What all tests share: an example may take as long as a busy machine needs; pytest's own time limit still holds."""

from hypothesis import settings

settings.register_profile("worldserve", deadline=None)
settings.load_profile("worldserve")
