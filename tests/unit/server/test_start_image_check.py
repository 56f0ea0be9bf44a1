"""Start images that cannot be shown are found when the server starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from server import serving
from server.config import LimitsSection, ServerConfig, StartImageConfig
from server.config_values import ConfigError
from server.start_image_check import check_start_images, start_image_problems
from tests.support.server_client import fake_config, png


def offering(folder: Path, *files: str) -> ServerConfig:
    config = fake_config()
    images = tuple(StartImageConfig(name=file, file=file, prompt="a town") for file in files)
    return replace(config, model=replace(config.model, checkpoint=str(folder), start_images=images))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.png").write_bytes(png(16, 8))
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    (tmp_path / "cut.png").write_bytes(png(16, 8)[:50])
    (tmp_path / "folder.png").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("absent.png", "No such file or directory"),
        ("text.png", "the image is no PNG, JPEG or WebP"),
        ("cut.png", "the image is damaged and can't be decoded"),
        ("folder.png", "expected a PNG, JPEG or WebP file"),
    ],
)
def test_a_start_image_that_cannot_be_shown_is_named_with_its_reason(folder: Path, file: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_start_images(offering(folder, "good.png", file))
    assert str(caught.value) == f"model.start_images[1].file: {folder / file}: {reason}"
    assert caught.value.key == "model.start_images[1].file"


def test_an_image_above_the_limits_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read"))
    config = replace(offering(folder, "good.png"), limits=LimitsSection(max_image_bytes=10))
    [(_, reason)] = start_image_problems(config)
    assert "expected at most 10 (limits.max_image_bytes)" in reason


def test_all_problems_can_be_listed_and_good_images_have_none(folder: Path) -> None:
    check_start_images(offering(folder, "good.png"))
    keys = [key for key, _ in start_image_problems(offering(folder, "text.png", "good.png", "absent.png"))]
    assert keys == ["model.start_images[0].file", "model.start_images[2].file"]


def test_a_missing_checkpoint_is_left_to_the_worker(tmp_path: Path) -> None:
    check_start_images(offering(tmp_path / "nowhere", "day.png"))


def test_random_weights_bring_no_images() -> None:
    config = offering(Path(), "day.png")
    config = replace(config, model=replace(config.model, checkpoint="random:lingbot-world-v2"))
    with pytest.raises(
        ConfigError, match=r"^model\.start_images\[0\]\.file: random:lingbot-world-v2/day\.png: No such"
    ):
        check_start_images(config)


async def test_the_server_does_not_start_with_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> NoReturn:
        raise AssertionError("an application, and with it a worker, was made")

    monkeypatch.setattr(serving, "create_app", started)
    config = offering(folder, "cut.png")
    with (
        serving.bind(replace(config.server, port=0), stall_timeout_s=1.0) as listener,
        pytest.raises(ConfigError, match=r"model\.start_images\[0\]\.file: .*cut\.png: the image is damaged"),
    ):
        await serving._serve(config, listener, open_browser=False)
