"""Whole workers of the tiny random model: whatever the section [offload] says, chunks have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from offload.host_weights import HostPart
from offload.transports import StagedCopies
from tests.support.lingbot_tiny import frozen_copy
from tests.support.offloaded_worker import run_chunks
from worldmodel.errors import LoadFailed
from worldmodel.lingbot import empty_model
from worldmodel.lingbot.published import PublishedModel, published_model
from worldmodel.offload_settings import OffloadSettings

NUM_LAYERS = 5
"""More than the two buffers of each part hold: with the tiny model's own two layers nothing is ever copied again."""

RESIDENT_BYTES = 700_000
"""Leaves some layers resident and streams the others."""


@pytest.fixture(scope="module", autouse=True)
def num_copies() -> Iterator[Counter[str]]:
    """Give the tiny model more layers, and count what is copied."""
    copies: Counter[str] = Counter()

    def published(name: str) -> PublishedModel:
        model = published_model(name)
        return replace(model, transformer={**model.transformer, "num_layers": NUM_LAYERS})

    def copy(transfer: StagedCopies, part: HostPart, buffer: Tensor) -> None:
        copies["staged"] += 1
        plain_copy(transfer, part, buffer)

    plain_copy = StagedCopies.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(empty_model, "published_model", published)
        patch.setattr(StagedCopies, "copy", copy)
        yield copies


@pytest.fixture(scope="module")
def expected() -> tuple[list[npt.NDArray[np.uint8]], str]:
    return run_chunks(OffloadSettings())


SETTINGS = {
    "streamed": OffloadSettings(weights="streamed", transfer="staged", resident_bytes=RESIDENT_BYTES),
    "parked": OffloadSettings(vae="parked"),
    "camera per layer": OffloadSettings(camera_modulation="per_layer"),
    "all": OffloadSettings(
        weights="streamed",
        transfer="staged",
        resident_bytes=RESIDENT_BYTES,
        vae="parked",
        camera_modulation="per_layer",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_chunks_have_the_bits_of_a_worker_that_keeps_everything(
    name: str, expected: tuple[list[npt.NDArray[np.uint8]], str], num_copies: Counter[str]
) -> None:
    settings = SETTINGS[name]
    num_copies.clear()
    chunks, description = run_chunks(settings)
    assert (num_copies["staged"] > 10) == settings.streams
    assert frozen_copy(chunks) == frozen_copy(expected[0])
    assert ("weights streamed" in description) == settings.streams


def test_decoding_in_parts_differs_by_rounding_only(expected: tuple[list[npt.NDArray[np.uint8]], str]) -> None:
    chunks, _ = run_chunks(OffloadSettings(decode="per_latent_frame"))
    for index, (got, want) in enumerate(zip(chunks, expected[0], strict=True)):
        # Latents and pixels in turn; latents do not depend on decoding.
        largest = np.abs(got.astype(int) - want.astype(int)).max()
        assert largest <= (index % 2)


def test_weights_that_do_not_fit_stop_the_start() -> None:
    with pytest.raises(LoadFailed, match=r"streamed weights do not fit: .* resident_bytes is"):
        run_chunks(OffloadSettings(weights="streamed", transfer="staged", resident_bytes=0))
