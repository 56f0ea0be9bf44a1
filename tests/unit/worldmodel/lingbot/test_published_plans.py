"""What the published model streams on cards of known size: sizes alone, on the meta device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.residency import ResidencyPlan
from server.app import start_message
from server.config_reading import load_config
from tests.support.empty_models import lay_out_once
from worldmodel.checkpoint.inspection import CONTEXT_BYTES
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.streaming_plan import WORKING_BYTES
from worldmodel.messages import StartWorker
from worldmodel.offload_settings import OffloadSettings
from worldmodel.tools.doctor_offload import open_preview

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
GIB = 2**30
SMALL = {"camera_modulation": "per_layer", "decode": "per_latent_frame", "vae": "parked"}


@pytest.fixture(autouse=True)
def one_empty_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_once(monkeypatch)


def planned(start: StartWorker) -> ResidencyPlan:
    return open_preview(start).plan().residency


def start(precision: str, device_gib: float, **offload: Any) -> StartWorker:
    return StartWorker(
        model="lingbot_world_v2",
        checkpoint="random:lingbot-world-v2",
        width=832,
        height=480,
        fps=16,
        device="cuda:0",
        precision=precision,
        offload=OffloadSettings(weights="streamed", device_bytes=int(device_gib * GIB), **offload),
    )


@pytest.mark.parametrize(
    ("precision", "device_gib", "offload", "resident", "copied_gb"),
    [
        ("bf16", 48, {}, (18, 0, 1), 74.2),
        ("fp8", 48, {}, (40, 0, 1), 8.5),
        ("bf16", 40, {}, (3, 2, 1), 118.6),
        ("fp8_kv", 24, SMALL, (2, 0, 1), 98.9),
    ],
)
def test_layers_that_stay_on_a_card(
    precision: str, device_gib: float, offload: dict[str, str], resident: tuple[int, int, int], copied_gb: float
) -> None:
    """The table of `docs/offload.md`."""
    residency = planned(start(precision, device_gib, **offload))
    assert tuple(len(residency.parts[part].resident) for part in ("forward", "camera", "text")) == resident
    assert residency.copied_bytes_per_chunk / 1e9 == pytest.approx(copied_gb, abs=0.05)


def test_the_numbers_of_24_gib() -> None:
    """What `docs/offload.md` adds up, in bytes."""
    start_24 = start("fp8_kv", 24, **SMALL)
    before = open_preview(start_24)
    kv = before.kv
    frame_bytes = 96 * 480 * 832 * 2
    parts = {
        "context": CONTEXT_BYTES,
        "outside the layers": 226_038_016,
        "K/V": 18 * 1560 * 40 * 2 * 5120,
        "text K/V, twice": 2 * 40 * 512 * 2 * 5120,
        "session": kv.model_owned_bytes,
        "camera bases": 2 * 9 * 1560 * 5120 * 4,
        "VAE caches in flight": (944_286_720 + 560_701_440) * 2,
        "VAE at work": (5 * 4 + 2) * frame_bytes + 2 * 126_892_531,
        "working memory": WORKING_BYTES,
    }
    assert before.loaded_bytes == parts["outside the layers"]
    taken = sum(parts.values())
    assert kv.required_bytes(1) == taken - CONTEXT_BYTES - WORKING_BYTES - parts["outside the layers"]
    assert 24 * GIB - taken == 1_960_565_274
    assert planned(start_24).device_bytes <= 24 * GIB - taken


@pytest.mark.parametrize(
    ("device_gib", "offload", "others", "session"),
    [(20, SMALL, "0.21", "19.07"), (24, {}, "0.45", "21.69")],
)
def test_what_does_not_fit_is_refused_with_all_numbers(
    device_gib: float, offload: dict[str, str], others: str, session: str
) -> None:
    numbers = (
        f"device_bytes is {device_gib}.00 GiB, less 1.40 GiB of CUDA context, {others} GiB of other weights, "
        f"{session} GiB for one session"
    )
    with pytest.raises(LoadFailed, match=re.escape(numbers)):
        planned(start("fp8_kv", device_gib, **offload))


@pytest.mark.parametrize("card", [24, 48])
def test_the_shipped_configurations_of_small_cards_plan(card: int) -> None:
    config = load_config(CONFIGS / f"lingbot_world_v2_{card}gb.toml", environment={})
    shipped = replace(start_message(config), checkpoint="random:lingbot-world-v2")
    bounded = replace(shipped, offload=replace(shipped.offload, device_bytes=card * GIB))
    residency = planned(bounded)
    assert residency.host_bytes > 0
