"""From keys, thumbs, gamepads and the prompt box to events, and back to what is lit."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import StandIn

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}


NOTE_LIGHTS = """(selector) => {
  const key = document.querySelector(selector);
  const note = () => window.lights.push(['held', 'applied'].filter((name) => key.classList.contains(name)).join(' '));
  window.lights = [];
  new MutationObserver(note).observe(key, {attributeFilter: ['class']});
}"""
"""Each state of a key lasts for some chunks at the most, so they are noted as they come."""


def transitions(standin: StandIn) -> list[list[str]]:
    """Every held set that the page sent, in order."""
    return [
        transition["actions"]
        for event in standin.script.events
        for control in event.get("controls") or []
        for transition in control["data"]["transitions"]
    ]


def test_keys_steer_once_each_and_are_released_on_blur(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.down("w")
    page.page.keyboard.down("w")
    page.page.keyboard.down("l")
    page.page.evaluate("dispatchEvent(new Event('blur'))")
    page.until(lambda: transitions(standin)[-1:] == [[]])
    assert transitions(standin) == [["w"], ["w", "l"], []]


def test_a_pressed_key_is_lit_and_confirmed_when_its_frame_is_shown(page: WatchedPage) -> None:
    page.begin()
    page.page.evaluate(NOTE_LIGHTS, "[data-action=d]")
    page.page.keyboard.down("d")
    page.page.wait_for_selector("[data-action=d].held.applied")
    page.page.keyboard.up("d")
    page.page.wait_for_selector("[data-action=d]:not(.applied, .held)")
    assert page.page.evaluate("window.lights") == ["held", "held applied", "applied", ""]
    assert page.read("app.hud.figures.p50Ms") > 0


def test_what_the_server_refuses_is_said_again_or_taken_back(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.down("w")
    page.until(lambda: transitions(standin) == [["w"]])
    standin.script.refuse_events = 1
    page.page.keyboard.up("w")
    page.until(lambda: standin.script.refuse_events == 0 and transitions(standin) == [["w"], []])
    page.page.wait_for_selector("#toast >> text=64 events are waiting")
    standin.script.refuse_events = 1
    page.page.click("#prompts >> text=the town in night")
    page.until(lambda: standin.script.refuse_events == 0)
    page.wait("document.querySelector('#prompt').value === 'a small town, day'")
    assert page.read("app.world.prompt") == "a small town, day"
    page.page.click("#prompts >> text=the town in night")
    page.until(lambda: standin.world.prompt == "the town in night")


def test_a_prompt_that_finds_no_link_stays_in_its_box(page: WatchedPage) -> None:
    page.begin()
    page.read("app.connection.suspend()")
    page.page.fill("#prompt", "swirling lakes")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#toast >> text=the prompt was not sent")
    assert page.read("document.activeElement.id") == "prompt"
    assert page.read("app.world.prompt") == "a small town, day"


def test_a_key_that_comes_up_elsewhere_is_let_go(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.focus("[data-action=w]")
    page.page.keyboard.down("Space")
    page.page.focus("#share")
    page.page.keyboard.up("Space")
    page.until(lambda: transitions(standin)[-1:] == [[]])
    page.page.keyboard.down("i")
    page.page.keyboard.down("ArrowUp")
    page.page.keyboard.up("ArrowUp")
    page.page.keyboard.down("w")
    page.until(lambda: len(transitions(standin)) == 4)
    assert transitions(standin) == [["w"], [], ["i"], ["w", "i"]]


def test_typing_a_prompt_does_not_steer(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.press("t")
    page.page.fill("#prompt", "")
    page.page.type("#prompt", "swirling lakes")
    page.page.keyboard.press("Enter")
    page.until(lambda: any("prompt" in event for event in standin.script.events))
    assert transitions(standin) == []
    assert standin.script.events[-1]["prompt"] == "swirling lakes"
    page.page.keyboard.press("t")
    page.page.type("#prompt", "no")
    page.page.keyboard.press("Escape")
    assert page.page.input_value("#prompt") == "swirling lakes"


def test_help_opens_with_its_key_and_keeps_the_others_from_steering(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.press("?")
    page.page.wait_for_selector("#help[open]")
    page.page.keyboard.press("w")
    page.page.keyboard.press("r")
    page.page.keyboard.press("Escape")
    page.page.keyboard.down("s")
    page.until(lambda: transitions(standin))
    assert transitions(standin) == [["s"]]
    assert standin.world.run == 0


def test_a_gamepad_that_is_plugged_in_steers(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    plug: Any = """(axes) => {
      const pad = axes && {axes, buttons: []};
      navigator.getGamepads = () => [null, pad];
      dispatchEvent(new Event('gamepadconnected'));
    }"""
    page.page.evaluate(plug, [0, -1, 0.8, 0])
    page.until(lambda: transitions(standin)[-1:] == [["w", "l"]])
    assert page.page.text_content("#toast") == "The gamepad steers."
    page.page.evaluate(plug, None)
    page.until(lambda: transitions(standin)[-1:] == [[]])


def test_a_phone_has_room_for_all_and_a_thumb_between_two_keys_holds_both(standin: StandIn, browser: Browser) -> None:
    page = WatchedPage(browser, standin.url, viewport=PHONE, has_touch=True, is_mobile=True)
    page.begin()
    assert outside(page) == []
    page.resize(320, 568)
    assert outside(page) == []
    page.resize(PHONE["width"], PHONE["height"])
    up, right = (page.page.locator(f"[data-action={key}]").bounding_box() for key in "wd")
    assert up is not None
    assert right is not None
    x, y = up["x"] + up["width"] * 1.2, right["y"] - right["height"] * 0.2
    point = {"clientX": x, "clientY": y, "pointerType": "touch", "pointerId": 1, "bubbles": True, "button": 0}
    page.page.evaluate(
        """(point) => {
          const pad = document.querySelector('#pad-move');
          pad.setPointerCapture = () => {};
          pad.dispatchEvent(new PointerEvent('pointerdown', point));
        }""",
        point,
    )
    page.until(lambda: transitions(standin)[-1:] == [["w", "d"]])
    for card in ("#hud", "#map-card"):
        page.page.evaluate(f"document.querySelector('{card} summary').click()")
        page.page.wait_for_selector(f"{card}[open]")
    assert overlapping(page, ".cards", ".prompt, .pad") == []
    page.resize(PHONE["height"], PHONE["width"])
    page.page.click("#link")
    page.page.wait_for_function("() => document.getAnimations().every((each) => each.playState === 'finished')")
    assert overlapping(page, "#link-card", ".pad") == []
    assert overlapping(page, ".cards", ".prompt .field, .pad") == []
    # Half of a usual window: what is left of it at a zoom of 200 %.
    page.resize(640, 400)
    assert overlapping(page, ".prompt .field", ".pad") == []
    page.close()


def outside(page: WatchedPage) -> list[str]:
    """Return what can be used and is not in the window as a whole."""
    return page.read(
        """[...document.querySelectorAll('button, input, summary, video')]
          .filter((element) => element.checkVisibility() && element.closest('.chips') === null)
          .map((element) => [element.id || element.textContent.trim(), element.getBoundingClientRect()])
          .filter(([, box]) => box.left < 0 || box.top < 0 || box.right > innerWidth || box.bottom > innerHeight)
          .map(([name]) => name)"""
    )


def overlapping(page: WatchedPage, upper: str, lower: str) -> list[str]:
    """Return what of `lower` lies under an element of `upper`, as far as both are seen."""
    return page.read(
        f"""(() => {{
          const above = document.querySelector('{upper}').getBoundingClientRect();
          return [...document.querySelectorAll('{lower}')].filter((element) => {{
            const box = element.getBoundingClientRect();
            return box.left < above.right && above.left < box.right && box.top < above.bottom && above.top < box.bottom;
          }}).map((element) => element.id || element.className);
        }})()"""
    )
