"""Whole workers of the tiny random model: whatever the section [offload] says, chunks have the same bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.lingbot_tiny import frozen_copy
from tests.support.offloaded_worker import run_chunks
from worldmodel.errors import LoadFailed
from worldmodel.offload_settings import OffloadSettings


@pytest.fixture(scope="module")
def expected() -> tuple[list[npt.NDArray[np.uint8]], str]:
    return run_chunks(OffloadSettings())


SETTINGS = {
    "streamed": OffloadSettings(weights="streamed", transfer="staged", resident_bytes=10**6),
    "parked": OffloadSettings(vae="parked"),
    "camera per layer": OffloadSettings(camera_modulation="per_layer"),
    "all": OffloadSettings(
        weights="streamed", transfer="staged", resident_bytes=10**6, vae="parked", camera_modulation="per_layer"
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_chunks_have_the_bits_of_a_worker_that_keeps_everything(
    name: str, expected: tuple[list[npt.NDArray[np.uint8]], str]
) -> None:
    settings = SETTINGS[name]
    chunks, description = run_chunks(settings)
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
