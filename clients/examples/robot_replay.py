"""Be a robot for some calls and draw what it was told: `python -m clients.examples.robot_replay [URL] [--out FILE]`.

The arm of this robot is a number for each joint, and its cameras see coloured discs that move with it. The first call
sends one frame, every later one four frames of the 24 control steps before it, as DROID clients do. Actions are
followed to the last row, so that what the model says next depends on what it said before. The drawing is an SVG: one
strip for each dimension of the actions, one colour for each call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from server.wire.robot_arrays import pack_message, unpack_message

FRAME_STEPS = (0, 7, 15, 23)
"""Which of 24 control steps a call shows, as the official clients have it."""

COLOURS = ("#2a6fdb", "#d9482b", "#2f9e5f", "#8a4fd0", "#c98a00", "#008a99")
STRIP_HEIGHT, WIDTH, LEFT, TOP = 64, 960, 190, 56
FIRST_LABEL_GAP = 70
"""Pixels that the label of a call needs; labels that would touch are left out."""

_HTTP_SCHEMES = {"ws": "http", "wss": "https"}

REASONS = {
    401: "the server wants a token, or another one: --token",
    403: "the server does not allow it",
    404: "no robot model is served there, or not at this path",
}
"""What a refusal by its status means here, in front of the server's own words."""

Actions = npt.NDArray[np.float32]
Picture = npt.NDArray[np.uint8]


class ReplayFailed(Exception):
    """Say in one line why there is nothing to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robot:
    """What the server says of its model."""

    cameras: tuple[str, ...]
    states: tuple[tuple[str, int], ...]
    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One answer and how long it took, in milliseconds."""

    actions: Actions
    total_ms: float
    server_timing: dict[str, float]


def describe(url: str, token: str | None) -> Robot:
    """Ask the server what its robot model takes. `url` is the WebSocket's. Raises `ReplayFailed`."""
    parts = urlsplit(url)
    request = urllib.request.Request(f"{_HTTP_SCHEMES[parts.scheme]}://{parts.netloc}/v1/robot")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return _robot(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(error.code, error.read()) from error
    except (ValueError, KeyError, TypeError, HTTPException) as error:
        raise ReplayFailed(f"what answers at {parts.netloc} is no worldserve") from error
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise ReplayFailed(f"nothing answers at {parts.netloc}: {reason or cause}") from error


def _robot(told: dict[str, Any]) -> Robot:
    height, width = told["config"]["image_resolution"]
    return Robot(
        cameras=tuple(told["cameras"]),
        states=tuple((state["name"], state["num_dims"]) for state in told["states"]),
        height=height,
        width=width,
    )


def look(robot: Robot, camera: int, pose: npt.NDArray[np.float64]) -> Picture:
    """Draw what a camera sees [H, W, 3]: a disc for each joint, its place the joint's value, on a floor of its own."""
    y, x = np.mgrid[0 : robot.height, 0 : robot.width]
    picture = np.stack([60 + 40 * camera + 0 * x, 90 + 60 * y // robot.height, 120 + 60 * x // robot.width], axis=-1)
    radius = max(1, robot.height // 10)
    for joint, value in enumerate(pose):
        centre_x = robot.width * (0.5 + 0.4 * np.tanh(value))
        centre_y = robot.height * (joint + 0.5) / len(pose)
        disc = (x - centre_x) ** 2 + (y - centre_y) ** 2 <= radius**2
        picture[disc] = (255 - 25 * joint, 40 + 25 * joint, 200 if camera % 2 else 60)
    return picture.astype(np.uint8)


def observe(robot: Robot, poses: Sequence[npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of a request that shows these poses; the last one is the state."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        name: np.stack([look(robot, index, pose) for pose in poses]) for index, name in enumerate(robot.cameras)
    }
    start = 0
    for name, num_dims in robot.states:
        arrays[name] = np.resize(poses[-1][start : start + num_dims], num_dims).astype(np.float32)
        start += num_dims
    return arrays


def replay(url: str, *, num_calls: int, prompt: str, token: str | None = None) -> list[Call]:
    """Run the robot in an episode of its own and return its calls. Raises `ReplayFailed` with what the server said."""
    robot = describe(url, token)
    try:
        return _calls(url, robot, num_calls=num_calls, prompt=prompt, token=token)
    except InvalidStatus as error:
        raise _refused(error.response.status_code, bytes(error.response.body or b"")) from error
    except (WebSocketException, OSError) as error:
        raise ReplayFailed(f"the connection to {url} broke: {error}") from error


def _calls(url: str, robot: Robot, *, num_calls: int, prompt: str, token: str | None) -> list[Call]:
    headers = {} if token is None else {"Authorization": f"Api-Key {token}"}
    poses = [np.zeros(sum(num_dims for _, num_dims in robot.states))]
    calls: list[Call] = []
    session_id = f"replay-{uuid.uuid4()}"
    with connect(url, compression=None, max_size=None, additional_headers=headers) as socket:
        _read(socket.recv())
        for step_id in range(num_calls):
            request = {**observe(robot, poses), "prompt": prompt, "session_id": session_id, "step_id": step_id}
            started_s = time.perf_counter()
            socket.send(pack_message(request))
            answer = _read(socket.recv())
            actions: Actions = answer["actions"]
            total_ms = 1000 * (time.perf_counter() - started_s)
            calls.append(Call(actions=actions, total_ms=total_ms, server_timing=answer["server_timing"]))
            size = len(poses[-1])
            rows = [min(step, len(actions) - 1) for step in FRAME_STEPS]
            poses = [np.resize(actions[row], size).astype(np.float64) for row in rows]
    return calls


def _read(frame: str | bytes) -> Any:
    message = frame if isinstance(frame, str) else unpack_message(frame)
    if isinstance(message, str) or (isinstance(message, dict) and message.get("type") == "error"):
        raise ReplayFailed(f"the server said: {message if isinstance(message, str) else message['message']}")
    return message


def _refused(status: int, body: bytes) -> ReplayFailed:
    """Put a refusal into one line: what the status means here, and the message of an error of ours, if it is one."""
    text = body.decode(errors="replace").strip()
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = "" if text.startswith("<") else text.partition("\n")[0][:200]
    reason = REASONS.get(status, "the server refused")
    return ReplayFailed(f"{reason} (HTTP {status}{': ' if said else ''}{said})")


# ---------------------------------------------------------------- the drawing


def draw(calls: Sequence[Call], title: str) -> str:
    """Return an SVG of the actions of all calls, one after the other."""
    num_dims = calls[0].actions.shape[1]
    num_steps = sum(len(call.actions) for call in calls)
    scale_x = (WIDTH - LEFT - 24) / max(1, num_steps - 1)
    height = TOP + num_dims * STRIP_HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="24" y="24" font-size="15" font-weight="600">{_escaped(title)}</text>',
    ]
    for dim in range(num_dims):
        parts += _strip(calls, dim, top=TOP + dim * STRIP_HEIGHT, scale_x=scale_x)
    parts += _call_marks(calls, bottom=TOP + num_dims * STRIP_HEIGHT, scale_x=scale_x)
    parts.append(f'<text x="{LEFT}" y="{height - 12}">control step, {num_steps} in all</text>')
    return "\n".join([*parts, "</svg>\n"])


def _strip(calls: Sequence[Call], dim: int, *, top: float, scale_x: float) -> list[str]:
    values = np.concatenate([call.actions[:, dim] for call in calls])
    low, high = float(values.min()), float(values.max())
    room = STRIP_HEIGHT - 16
    scale_y = room / (high - low) if high > low else 0.0
    middle = top + STRIP_HEIGHT / 2
    parts = [
        f'<text x="24" y="{middle + 4:.1f}" font-weight="600">action {dim}</text>',
        f'<text x="{LEFT - 10}" y="{top + 14:.1f}" text-anchor="end" fill="#888">{high:.3f}</text>',
        f'<text x="{LEFT - 10}" y="{top + STRIP_HEIGHT - 6:.1f}" text-anchor="end" fill="#888">{low:.3f}</text>',
        f'<line x1="{LEFT}" x2="{WIDTH - 24}" y1="{top + STRIP_HEIGHT:.1f}" y2="{top + STRIP_HEIGHT:.1f}" '
        'stroke="#ddd"/>',
    ]
    step = 0
    for index, call in enumerate(calls):
        points = []
        for value in call.actions[:, dim]:
            y = top + 8 + (high - float(value)) * scale_y if scale_y else middle
            points.append(f"{LEFT + step * scale_x:.1f},{y:.1f}")
            step += 1
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return parts


def _call_marks(calls: Sequence[Call], *, bottom: float, scale_x: float) -> list[str]:
    """Draw where each call begins and how long it took, as far as labels fit beside each other."""
    parts, step, free_from = [], 0, 0.0
    for index, call in enumerate(calls):
        x = LEFT + step * scale_x
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}" stroke="{colour}" opacity="0.35"/>')
        if x >= free_from:
            label = f"{call.total_ms:.0f} ms"
            parts.append(f'<text x="{x + 3:.1f}" y="{TOP - 6}" fill="{colour}">{label}</text>')
            free_from = x + FIRST_LABEL_GAP
        step += len(call.actions)
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _websocket_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        # Reading the port checks it. A name and a password before the host are not for us.
        is_one = parts.scheme in _HTTP_SCHEMES and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"expected ws://HOST:PORT/PATH or wss://..., got {text!r}")
    return text


def _token(text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError("expected printable ASCII characters")
    return text


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def _writable(text: str) -> Path:
    """Refuse a file that can't be written now, and not after all calls were made."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written")
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and draw. Returns the exit code: 0, or 1 with a line on standard error that says why nothing was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", type=_websocket_url, default="ws://127.0.0.1:8000/v1/robot")
    parser.add_argument("--calls", type=_positive, default=8)
    parser.add_argument("--prompt", default="put the cup on the plate")
    parser.add_argument("--token", type=_token)
    parser.add_argument("--out", type=_writable, default="actions.svg")
    chosen = parser.parse_args(arguments)
    try:
        calls = replay(chosen.url, num_calls=chosen.calls, prompt=chosen.prompt, token=chosen.token)
        _report(calls, chosen.prompt, chosen.out)
    except (ReplayFailed, OSError) as error:
        print(f"robot_replay: {error}", file=sys.stderr)
        return 1
    return 0


def _report(calls: Sequence[Call], prompt: str, out: Path) -> None:
    for index, call in enumerate(calls):
        timing = call.server_timing
        print(
            f"call {index}: {call.actions.shape[0]} actions in {call.total_ms:.0f} ms "
            f"(queue {timing['queue_ms']:.0f}, worker {timing['infer_ms']:.0f})"
        )
    out.write_text(draw(calls, f"{len(calls)} calls: {prompt}"), encoding="utf-8")
    print(f"drawn in {out}")


if __name__ == "__main__":
    sys.exit(main())
