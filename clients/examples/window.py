"""A window that shows a world at its rate and steers it by whatever holds keys. Needs pygame, the extra `window`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from clients.python import Frame, WorldClient

try:
    import pygame
except ModuleNotFoundError as error:
    raise SystemExit("this example needs pygame: pip install 'worldserve[window]'") from error

MIN_WIDTH = 960
"""Small worlds are shown enlarged, in whole steps."""


class Pad(Protocol):
    """What is used of a gamepad, `pygame.joystick.Joystick`."""

    def get_numaxes(self) -> int: ...

    def get_axis(self, axis_number: int, /) -> float: ...


class Window:
    """One window of one world. `is_open` ends with its close button and with Esc."""

    def __init__(self, title: str, *, width: int, height: int, fps: int) -> None:
        scale = max(1, -(-MIN_WIDTH // width))
        pygame.display.init()
        self._screen = pygame.display.set_mode((scale * width, scale * height))
        pygame.display.set_caption(title)
        self._frame_s = 1 / fps
        self._due_s = 0.0
        self.is_open = True

    async def show(self, frame: Frame) -> None:
        """Show a frame when it is due; frames that come late are shown at once."""
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s + self._frame_s, loop.time())
        await asyncio.sleep(self._due_s - loop.time())
        # pygame's surfaces are [width, height].
        picture = pygame.surfarray.make_surface(frame.image.swapaxes(0, 1))
        pygame.transform.scale(picture, self._screen.get_size(), self._screen)
        pygame.display.flip()
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                self.is_open = False


def pressed_keys(letters: str) -> tuple[str, ...]:
    """Return which of some letter keys are held on the keyboard."""
    pressed = pygame.key.get_pressed()
    return tuple(letter for letter in letters if pressed[pygame.key.key_code(letter)])


def first_pad() -> Pad:
    """Return the first gamepad. Ends the program if there is none."""
    pygame.joystick.init()
    if not pygame.joystick.get_count():
        raise SystemExit("no gamepad is connected")
    return pygame.joystick.Joystick(0)


async def walk(
    url: str, read_keys: Callable[[], tuple[str, ...]], *, max_frames: int | None = None, token: str | None = None
) -> int:
    """Show a world until its window is closed, or so many frames, and hold the keys read; returns how many."""
    num_shown = 0
    held: tuple[str, ...] = ()
    async with WorldClient(url, token=token) as world, asyncio.TaskGroup() as steering:
        session = world.session
        window = Window(session.prompt, width=session.width, height=session.height, fps=session.fps)
        async for frame in world.frames():
            await window.show(frame)
            num_shown += 1
            if not window.is_open or num_shown == max_frames:
                break
            if (keys := read_keys()) != held:
                held = keys
                # Not awaited here: the picture goes on while the server answers.
                steering.create_task(world.hold(*held))
    pygame.display.quit()
    return num_shown
