"""What is beside the picture: settings, themes, map, the crop of one's own image, names and the order of focus."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import WATCH_TOKEN, StandIn

pytestmark = pytest.mark.browser

GROUND = "getComputedStyle(document.body).backgroundColor"
LIGHTHOUSE = """() => {
  const map = document.querySelector('#map');
  const {data} = map.getContext('2d').getImageData(0, 0, map.width, map.height / 2);
  const {colour} = window.worldserve.viewer.map.layout.objects.find(({label}) => label === 'lighthouse');
  const [red, green] = [1, 3].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return data.filter((_, at) => at % 4 === 0 && data[at] === red && data[at + 1] === green).length;
}"""
"""How many pixels of the upper half of the map have its colour."""
ON_THE_WAY = f"""() => {{
  const {{x, z}} = window.worldserve.world.walk.place;
  return z > 0.15 && x > 0.02 && {{
    text: document.querySelector('#map-place').value,
    lighthouse: ({LIGHTHOUSE})(),
  }};
}}"""
"""What the map shows at a moment when both keys have moved the camera; it goes on moving."""
DARK, LIGHT = "rgb(8, 9, 12)", "rgb(233, 231, 226)"


def test_settings_act_at_once_and_outlive_a_reload(page: WatchedPage) -> None:
    page.begin()
    page.page.click("#settings-open")
    page.page.click("#settings >> text=Dark")
    assert page.read(GROUND) == DARK
    page.page.click("#settings >> text=Light")
    assert page.read(GROUND) == LIGHT
    page.page.click("#settings >> text=WebCodecs")
    page.page.uncheck("#settings [name=keys]")
    page.page.click("#settings >> text=Done")
    assert page.page.locator("#pad-move").is_hidden()
    page.page.click("#hud summary")
    page.wait("!app.viewer.settings.values.numbers")
    page.page.reload()
    page.wait_for_picture()
    assert page.read(GROUND) == LIGHT
    assert page.read("app.viewer.settings.values") == {
        "theme": "light",
        "format": "h264",
        "keys": False,
        "map": True,
        "numbers": False,
    }
    assert page.read("[document.querySelector('#hud').open, document.querySelector('#map-card').open]") == [False, True]
    page.page.keyboard.press("n")
    assert page.read("document.querySelector('#hud').open")


def test_cards_that_are_closed_at_once_stay_closed(page: WatchedPage) -> None:
    """On a busy machine the second click may be there before the first card has told of its own."""
    page.begin()
    cards = "[...document.querySelectorAll('#hud, #map-card')]"
    page.page.evaluate(f"{cards}.forEach((card) => card.querySelector('summary').click())")
    page.wait("!app.viewer.settings.values.numbers && !app.viewer.settings.values.map")
    assert page.read(f"{cards}.map((card) => card.open)") == [False, False]


def test_the_page_follows_the_system_in_light_and_in_stillness(standin: StandIn, context: BrowserContext) -> None:
    page = WatchedPage(context, standin.url)
    page.page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.page.wait_for_selector("#chooser")
    assert page.read(GROUND) == LIGHT
    assert page.read("getComputedStyle(document.querySelector('#chooser')).animationDuration") == "0.001s"
    page.close()


def test_where_webcodecs_is_missing_the_choice_is_off_and_says_why(standin: StandIn, context: BrowserContext) -> None:
    chosen = """
      delete window.VideoDecoder;
      localStorage.setItem('worldserve.preferences', '{"format": "h264"}');
    """
    page = WatchedPage(context, standin.url, before=chosen)
    page.begin()
    page.page.click("#settings-open")
    assert page.page.is_disabled("#settings [value=h264]")
    assert page.page.inner_text("#format-note").startswith("This browser has no VideoDecoder.")
    assert standin.script.starts[0]["format"] == "fmp4"
    page.close()


def test_the_map_shows_where_the_camera_is_to_spectators_too(
    standin: StandIn, page: WatchedPage, context: BrowserContext
) -> None:
    page.begin()
    page.page.keyboard.down("w")
    page.page.keyboard.down("l")
    seen = page.page.wait_for_function(ON_THE_WAY).json_value()
    x, z, degrees = re.findall(r"-?[\d.]+", seen["text"])
    assert float(x) > 0
    assert float(z) > 0.1
    # To the right of where the start image looks, south-west.
    assert 0 < (float(degrees) - 222) % 360 < 180
    # The run begins with a look at the lighthouse, so it is above the middle.
    assert seen["lighthouse"] > 50
    page.page.keyboard.up("w")
    page.page.keyboard.up("l")
    page.page.wait_for_selector("[data-action=w]:not(.held, .applied)")
    page.page.wait_for_selector("[data-action=l]:not(.held, .applied)")
    watching = WatchedPage(context, f"{standin.url}/#watch={WATCH_TOKEN}")
    watching.wait_for_picture()
    watching.wait("document.querySelector('#map-place').value === argument", page.page.inner_text("#map-place"))
    page.page.keyboard.press("r")
    page.wait("app.world.shown.run === 1 && app.world.walk.place.z === 0")
    watching.wait("app.world.shown.run === 1 && app.world.walk.place.z === 0")
    watching.page.wait_for_function(f"() => ({LIGHTHOUSE})() > 50")
    watching.close()


def test_the_map_of_a_world_that_repeats_stays_small_however_far_the_way(page: WatchedPage) -> None:
    """Every repeat of the world is drawn, and their number grows with the square of how far the map reaches."""
    page.begin()
    page.read("app.world.walk.trail.unshift({x: 0, z: -500})")
    periods = "app.viewer.map._reach * app.viewer.map.layout.metres_per_unit / app.viewer.map.layout.period"
    page.wait(f"{periods} > 1.9")
    assert page.read(periods) <= 2


def png(left: str, right: str) -> bytes:
    image = Image.new("RGB", (640, 192), left)
    image.paste(right, (320, 0, 640, 192))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_part_of_an_image_that_is_seen_is_what_is_sent(standin: StandIn, page: WatchedPage) -> None:
    page.page.wait_for_selector("#chooser")
    page.page.set_input_files("#upload", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    page.page.wait_for_selector("text=a.txt is no picture that this browser can read.")
    page.page.set_input_files("#upload", {"name": "a.png", "mimeType": "image/png", "buffer": png("red", "blue")})
    page.page.wait_for_selector("#crop[open]")
    for _ in range(20):
        page.page.keyboard.press("ArrowRight")
    page.page.click("#crop-use")
    page.page.wait_for_selector(".tile.own[aria-checked=true] img")
    page.begin()
    assert standin.script.starts[0]["image"] == {"upload_id": "u-1"}
    with Image.open(io.BytesIO(standin.script.uploads[0])) as sent:
        assert sent.size == (320, 192)
        left, right = sent.getpixel((5, 96)), sent.getpixel((310, 96))
    # The window was in the middle, red and blue; it went to the right edge.
    assert isinstance(left, tuple)
    assert isinstance(right, tuple)
    assert min(left[2], right[2]) > 240


def test_everything_that_can_be_used_has_a_name_and_is_reached_in_order(page: WatchedPage) -> None:
    page.begin()
    assert 'button "Pause"' in _tree(page)
    page.page.click("#pause")
    # The name says what the button does now; a pressed "Go on" would be the opposite.
    assert re.search(r'button "Go on"(?! \[pressed)', _tree(page))
    page.page.click("#pause")
    for opener in ("link", "settings-open"):
        page.page.click(f"#{opener}")
    nameless = re.findall(r"^\s*- (?:button|textbox|radio|checkbox|slider|link)(?: \[.*\])?:?$", _tree(page), re.M)
    assert nameless == []
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("Escape")
    page.page.evaluate("document.activeElement.blur()")
    page.page.evaluate(
        "document.querySelector('.top').prepend(Object.assign(document.createElement('i'), {tabIndex: 0}))"
    )
    page.page.evaluate("document.querySelector('.top i').focus()")
    order = []
    for _ in range(12):
        page.page.keyboard.press("Tab")
        order.append(page.read("document.activeElement.id || document.activeElement.parentElement.id"))
    bar = ["link", "pause", "reset", "worlds", "share", "save", "settings-open", "close"]
    assert order == [*bar, "map-card", "hud", "pad-move", "pad-move"]


def _luminance(colour: str) -> float:
    """Relative luminance of `rgb(...)` (WCAG 2.2)."""
    shares = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_words_on_the_main_button_can_be_read(page: WatchedPage, theme: str) -> None:
    page.page.wait_for_selector("#chooser")
    page.read(f"app.viewer.settings.set('theme', '{theme}')")
    style = "getComputedStyle(document.querySelector('#begin'))"
    page.page.wait_for_function("() => document.getAnimations().length === 0")
    dark, light = sorted(_luminance(page.read(f"{style}.{name}")) for name in ("color", "backgroundColor"))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_numbers_that_change_all_the_time_are_not_read_aloud(page: WatchedPage) -> None:
    """An `output` is a live region of its own accord."""
    page.begin()
    spoken = "[...document.querySelectorAll('output, [role=status]')].filter((each) => each.ariaLive !== 'off')"
    assert set(page.read(f"{spoken}.map((each) => each.id)")) == {"link-text", "waiting-lead", "toast"}


def _tree(page: WatchedPage) -> str:
    return page.page.locator("body").aria_snapshot()
