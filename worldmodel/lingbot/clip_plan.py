"""A clip of LingBot-World v2 before anything is loaded: its size, its length, its camera path. Torch-free.

The lengths of the official code (wan/image2video.py) and of a session are the same where both exist:

    media frames   1 + 4 * (latent frames - 1), for whole chunks of n latent frames: 4 n - 3 + 4 n k
    trimming       latent frames are cut to whole chunks; a camera path is stretched over what is left
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worldmodel.checkpoint.errors import CheckpointError, naming
from worldmodel.checkpoint.json_file import read_json_object
from worldmodel.clips import MAX_CLIP_MEDIA_FRAMES, RANDOM_SCHEME, ClipPlan, ClipWish
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.config import (
    MAX_LATENT_FRAMES,
    MAX_NOISE_CLIP_LATENT_FRAMES,
    LingBotOptions,
    NoiseLayout,
    parse_options,
)
from worldmodel.lingbot.controls import CAMERA_TRACK, TRAJECTORY_SCHEMA, parse_control
from worldmodel.lingbot.published import FULL
from worldmodel.lingbot.sizes import TOKEN_SIDE_PX, official_size
from worldmodel.lingbot.trajectory import (
    MEDIA_FRAMES_PER_LATENT_FRAME,
    CameraClip,
    load_clip,
    num_latent_frames,
    resample,
    trajectory_control,
)
from worldmodel.messages import Control


def plan_clip(wish: ClipWish) -> ClipPlan:
    """Plan a clip for a checkpoint, of which at most its config file is read. Raises `RequestRefused`."""
    options = LingBotOptions.from_json(parse_options(wish.options))
    length = options.latent_frames_per_chunk or stored_latent_frames_per_chunk(wish.checkpoint)
    return plan_with(wish, options, latent_frames_per_chunk=length)


def plan_with(wish: ClipWish, options: LingBotOptions, *, latent_frames_per_chunk: int) -> ClipPlan:
    """Plan a clip for chunks of a known length. Raises `RequestRefused`."""
    if wish.num_media_frames > MAX_CLIP_MEDIA_FRAMES:
        raise _refusal("num_media_frames", f"expected at most {MAX_CLIP_MEDIA_FRAMES}, got {wish.num_media_frames}")
    width, height = _size(wish)
    num_poses = wish.num_media_frames
    clip = None
    if wish.camera_folder is not None:
        clip = _load_clip(wish.camera_folder)
        num_poses = len(clip.poses_n44)
    count = num_latent_frames(wish.num_media_frames, num_poses, latent_frames_per_chunk)
    num_media_frames = MEDIA_FRAMES_PER_LATENT_FRAME * (count - 1) + 1
    _check_length(wish, num_media_frames, num_poses, latent_frames_per_chunk)
    if options.noise_layout is NoiseLayout.OFFICIAL_WHOLE_CLIP:
        _check_noise(count, latent_frames_per_chunk)
    controls: tuple[Control, ...] = ()
    if clip is not None:
        _check_poses(count, options)
        data = trajectory_control(resample(clip, wish.num_media_frames, latent_frames_per_chunk))
        canonical = parse_control(CAMERA_TRACK, TRAJECTORY_SCHEMA, data)
        controls = (Control(track=CAMERA_TRACK, schema=TRAJECTORY_SCHEMA, data=canonical),)
    chosen = dict(wish.options)
    if options.noise_layout is NoiseLayout.OFFICIAL_WHOLE_CLIP:
        chosen["noise_clip_latent_frames"] = count
    return ClipPlan(
        width=width,
        height=height,
        num_media_frames=num_media_frames,
        num_chunks=count // latent_frames_per_chunk,
        latent_frames_per_chunk=latent_frames_per_chunk,
        options=chosen,
        controls=controls,
    )


def stored_latent_frames_per_chunk(checkpoint: str) -> int:
    """Read the length of a chunk from a checkpoint's config file. Raises `RequestRefused`.

    The original layout need not say it; then it is the published one, as for random weights.
    """
    published = FULL.transformer["num_frames_per_block"]
    content: dict[str, Any] = {}
    if not checkpoint.startswith(RANDOM_SCHEME):
        content = _transformer_config(Path(checkpoint))
    value = content.get("num_frames_per_block", published)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LATENT_FRAMES:
        raise _refusal(
            "checkpoint",
            f"the transformer's config.json: expected num_frames_per_block as a number from 1 to {MAX_LATENT_FRAMES}",
        )
    return value


def _transformer_config(folder: Path) -> dict[str, Any]:
    for name in ("transformer", "transformers"):
        file = folder / name / "config.json"
        try:
            with naming(file, "read"):
                is_there = file.exists()
            if is_there:
                return read_json_object(file)
        except CheckpointError as error:
            raise _refusal("checkpoint", str(error)) from error
    raise _refusal(
        "checkpoint", f"{folder}: expected a folder with transformer/config.json or transformers/config.json"
    )


def _size(wish: ClipWish) -> tuple[int, int]:
    """Return (width, height): the configured one, or what the official rule makes of the image in its area."""
    for name, pixels in (("width", wish.width), ("height", wish.height)):
        if pixels < TOKEN_SIDE_PX or pixels % TOKEN_SIDE_PX:
            raise _refusal(name, f"expected a multiple of {TOKEN_SIDE_PX} pixels, got {pixels}")
    if not wish.follows_image:
        return wish.width, wish.height
    try:
        height, width = official_size(wish.image_height, wish.image_width, max_area=wish.width * wish.height)
    except ValueError as error:
        raise _refusal("image", str(error)) from error
    return width, height


def _check_noise(count: int, chunk_frames: int) -> None:
    """Refuse more latent frames than noise is drawn for at once."""
    if count > MAX_NOISE_CLIP_LATENT_FRAMES:
        longest = MAX_NOISE_CLIP_LATENT_FRAMES - MAX_NOISE_CLIP_LATENT_FRAMES % chunk_frames
        raise _refusal(
            "num_media_frames",
            f"expected at most {MEDIA_FRAMES_PER_LATENT_FRAME * (longest - 1) + 1} with noise_layout "
            f"{NoiseLayout.OFFICIAL_WHOLE_CLIP.value!r}, got {MEDIA_FRAMES_PER_LATENT_FRAME * (count - 1) + 1}",
        )


def _load_clip(folder: Path) -> CameraClip:
    """Read the folder of a wish. Raises `RequestRefused` that names the folder, and the file in it if that is wrong."""
    try:
        return load_clip(folder, follows_links=True)
    except RequestRefused as error:
        raise _refusal("camera_folder", f"{folder}: {error.message.removeprefix('folder: ')}") from error


def _check_length(wish: ClipWish, num_media_frames: int, num_poses: int, chunk_frames: int) -> None:
    """Refuse a length that whole chunks do not give, unless the wish is to trim it."""
    further = MEDIA_FRAMES_PER_LATENT_FRAME * chunk_frames
    first = further - MEDIA_FRAMES_PER_LATENT_FRAME + 1
    if wish.num_media_frames < first:
        raise _refusal("num_media_frames", f"expected at least {first}, the first chunk, got {wish.num_media_frames}")
    if num_poses < first:
        raise _refusal("camera_folder", f"expected at least {first} poses, the first chunk, got {num_poses}")
    if wish.trims:
        return
    below = first + (wish.num_media_frames - first) // further * further
    if below != wish.num_media_frames:
        raise _refusal(
            "num_media_frames",
            f"expected {first} + {further} k, for example {below} or {below + further}, got {wish.num_media_frames}",
        )
    if num_media_frames < wish.num_media_frames:
        raise _refusal(
            "camera_folder", f"expected at least {wish.num_media_frames} poses, one a frame, got {num_poses}"
        )


def _check_poses(count: int, options: LingBotOptions) -> None:
    if count > options.max_trajectory_poses:
        raise _refusal(
            "num_media_frames",
            f"a camera path holds at most {options.max_trajectory_poses} latent frames (max_trajectory_poses), "
            f"these are {count}",
        )


def _refusal(field: str, text: str) -> RequestRefused:
    return RequestRefused(f"{field}: {text}", code="bad_clip", field=field)
