"""The options of LingBot-World v2: which of the published variants to run, and limits. Torch-free.

`parse_options` checks the `[model.options]` table of a configuration file and gives JSON bytes for the worker, which
reads them back with `LingBotOptions.from_json`. Facts of the checkpoint (layers, heads) are not options;
`preset` and the four overrides it sets exist because the published command line and the published checkpoint disagree.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum

from worldmodel.json_checks import JsonReader
from worldmodel.kernels.names import AttentionChoice, GraphChoice, LayerOperations
from worldmodel.wan.precision_names import VaePrecision
from worldmodel.wan.text_names import TextCleaning, TextPlacement

OFFICIAL_WIDTH = 832
OFFICIAL_HEIGHT = 480
"""Image size that published intrinsics refer to (official code, wan/utils/cam_utils.py)."""

KEYBOARD_FOCAL_PX = 500.0
"""Focal length of keyboard control in pixels *of the target size* (vLLM-Omni 0.30.0, lingbot_world/actions.py)."""

MAX_TRAJECTORY_POSES = 1024
"""Most poses of one trajectory control: the longest clip the official code can place in its RoPE table."""

MAX_LATENT_FRAMES = 4096

MAX_NOISE_CLIP_LATENT_FRAMES = 1024
"""Longest clip whose noise is drawn at once: the official code can place no longer one in its RoPE table."""

MIN_FLOW_SHIFT = 0.01
MAX_FLOW_SHIFT = 100.0

MAX_PATH_CHARS = 4096

MIN_FOCAL_PX = 1e-3
MAX_PIXELS = 65536.0
"""Bounds of intrinsics in pixels, wherever they come from: options, controls, files."""

_READER = JsonReader(code="bad_options", root="options")


class Sampler(StrEnum):
    """Timesteps and sigmas of the four steps: round numbers, or the truncated integers of the official scheduler."""

    NOMINAL = "nominal"
    OFFICIAL = "official"


class CameraScale(StrEnum):
    """What translations of relative poses are divided by.

    CHUNK_MAX: the largest step of the chunk, so that any speed becomes 1.
    CLIP_MAX: the largest step of the whole trajectory, as in training; live controls use the largest step of the run
    so far.
    UNIT: the fixed 0.05 of one forward key step.
    """

    CHUNK_MAX = "chunk_max"
    CLIP_MAX = "clip_max"
    UNIT = "unit"


class NoiseLayout(StrEnum):
    """Order of draws from the session's generator. The same seed gives other noise in each.

    PER_CHUNK: for each chunk its first noise, then what re-noises it. OFFICIAL_WHOLE_CLIP: the first noise of all
    `noise_clip_latent_frames` at once, then for each chunk what re-noises it; chunks beyond the clip are drawn as
    PER_CHUNK does.
    """

    PER_CHUNK = "per_chunk"
    OFFICIAL_WHOLE_CLIP = "official_whole_clip"


class EventTiming(StrEnum):
    """Where in a chunk an event acts.

    CHUNK_START: at its start, as early as it can be seen; a key pressed and released between two chunks still shows for
    one latent frame. WITHIN_CHUNK: as far into the chunk as the event came into the time of the chunk before, so that a
    rhythm is kept, later by up to a chunk; what came earlier than a chunk's media last acts at latent frame 0.
    """

    CHUNK_START = "chunk_start"
    WITHIN_CHUNK = "within_chunk"


class Preset(StrEnum):
    """A published setting of the window and the flow shift.

    CHECKPOINT: the config files of the published checkpoint. COMMAND: the published command line.
    """

    CHECKPOINT = "checkpoint"
    COMMAND = "command"


PRESETS: dict[Preset, dict[str, float]] = {
    Preset.CHECKPOINT: {
        "latent_frames_per_chunk": 3,
        "sink_latent_frames": 9,
        "visible_latent_frames": 18,
        "flow_shift": 5.0,
    },
    Preset.COMMAND: {
        "latent_frames_per_chunk": 4,
        "sink_latent_frames": 6,
        "visible_latent_frames": 18,
        "flow_shift": 10.0,
    },
}
"""What each preset sets (LingBot-World v2 official code: run_fast.sh, generate.py and the checkpoint's configs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceIntrinsics:
    """A pinhole camera in pixels of an image of `width` x `height`."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def scaled_to(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return (fx, fy, cx, cy) for an image of another size that shows the same view."""
        scale_x, scale_y = width / self.width, height / self.height
        return self.fx * scale_x, self.fy * scale_y, self.cx * scale_x, self.cy * scale_y


@dataclass(frozen=True, slots=True, kw_only=True)
class LingBotOptions:
    """Everything about the model that a configuration file may choose.

    `flow_shift`, `sink_latent_frames`, `visible_latent_frames` (sink + window) and `latent_frames_per_chunk`: None
    takes the checkpoint's value; `preset` sets those of the four that are not given themselves.
    `noise_clip_latent_frames` is the length of the clip for the layout that needs one. `camera_scale`: None takes the
    rule of the control in force, which is `chunk_max` for keys and key scripts, `clip_max` for trajectories and camera
    folders, and `unit` for motions. `reference_intrinsics`: None means 500 px of focal length at the target size and a
    centred principal point. `text_encoder`: None keeps a small encoder on the device and streams a large one.
    `pad_text_exact` attends to 512 text rows one by one also where one weighted padding row is faster; equal, there to
    check the other. `max_trajectory_poses` bounds a trajectory. `camera_root` is the folder
    below which clients may name camera folders, None for none. `recache_on_prompt`: encode the visible history anew
    under a new prompt before the chunk that brings it, instead of keeping what the old prompt made of it. That chunk
    then costs one commit forward more for each chunk in sight (at the published geometry about the work of a whole
    chunk), and the worker reserves K/V storage of one session more. `graphs`: whether forwards are captured in CUDA
    graphs; off by default, since the published size is bound by the device and would give memory for nothing.
    `vae_precision`: None takes that of the precision plan.
    """

    preset: Preset | None = None
    sampler: Sampler = Sampler.NOMINAL
    flow_shift: float | None = None
    camera_scale: CameraScale | None = None
    reference_intrinsics: ReferenceIntrinsics | None = None
    event_timing: EventTiming = EventTiming.CHUNK_START
    camera_root: str | None = None
    noise_layout: NoiseLayout = NoiseLayout.PER_CHUNK
    noise_clip_latent_frames: int | None = None
    sink_latent_frames: int | None = None
    visible_latent_frames: int | None = None
    latent_frames_per_chunk: int | None = None
    text_cleaning: TextCleaning = TextCleaning.WHITESPACE
    text_encoder: TextPlacement | None = None
    pad_text_exact: bool = False
    max_trajectory_poses: int = MAX_TRAJECTORY_POSES
    recache_on_prompt: bool = False
    attention: AttentionChoice = AttentionChoice.AUTO
    layer_operations: LayerOperations = LayerOperations.AUTO
    graphs: GraphChoice = GraphChoice.OFF
    vae_precision: VaePrecision | None = None

    @classmethod
    def from_json(cls, data: bytes) -> LingBotOptions:
        """Read back what `parse_options` wrote. Raises `RequestRefused` for anything else."""
        try:
            options = json.loads(data)
        except ValueError as error:
            raise _READER.refusal("", "expected JSON") from error
        return _read_options(options)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True, allow_nan=False).encode()

    def for_worker(self) -> LingBotOptions:
        """Return these options if a model can be loaded with them: what `generate` adds to a clip is there, and so is
        the folder of the cameras.

        Raises `RequestRefused`.
        """
        if self.noise_layout is NoiseLayout.OFFICIAL_WHOLE_CLIP and self.noise_clip_latent_frames is None:
            raise _READER.refusal(
                "noise_clip_latent_frames",
                f"missing: noise_layout {self.noise_layout.value!r} needs the length of the whole clip",
            )
        if self.camera_root is not None and not os.path.isdir(self.camera_root):
            raise _READER.refusal("camera_root", f"there is no folder {self.camera_root}")
        return self

    def default_intrinsics(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return (fx, fy, cx, cy) in pixels of the target size for controls that bring no intrinsics."""
        if self.reference_intrinsics is None:
            return KEYBOARD_FOCAL_PX, KEYBOARD_FOCAL_PX, width / 2, height / 2
        return self.reference_intrinsics.scaled_to(width, height)


def parse_options(options: dict[str, object]) -> bytes:
    """Check the option table and return it complete, with defaults, as canonical JSON.

    Raises `RequestRefused` (code ``bad_options``) whose `field` is the offending key.
    """
    return _read_options(options).to_json()


def _read_options(value: object) -> LingBotOptions:
    options = _READER.read_object(value, "", known=tuple(LingBotOptions.__dataclass_fields__))
    defaults = LingBotOptions()
    preset = options.get("preset")
    if preset is not None:
        preset = Preset(_READER.read_choice(preset, "preset", [str(choice) for choice in Preset]))
        options = options | {key: value for key, value in PRESETS[preset].items() if options.get(key) is None}

    def word(key: str, default: str, choices: type[StrEnum]) -> str:
        return _READER.read_choice(options.get(key, default), key, [str(choice) for choice in choices])

    def frames(key: str, minimum: int, maximum: int = MAX_LATENT_FRAMES) -> int | None:
        given = options.get(key)
        return None if given is None else _READER.read_integer(given, key, minimum=minimum, maximum=maximum)

    placement, vae = options.get("text_encoder"), options.get("vae_precision")
    scale, shift, root = options.get("camera_scale"), options.get("flow_shift"), options.get("camera_root")
    result = LingBotOptions(
        preset=preset,
        sampler=Sampler(word("sampler", defaults.sampler, Sampler)),
        flow_shift=None if shift is None else _read_flow_shift(shift),
        camera_scale=None if scale is None else CameraScale(word("camera_scale", "", CameraScale)),
        reference_intrinsics=_read_intrinsics(options.get("reference_intrinsics")),
        event_timing=EventTiming(word("event_timing", defaults.event_timing, EventTiming)),
        camera_root=None if root is None else _read_path(root, "camera_root"),
        noise_layout=NoiseLayout(word("noise_layout", defaults.noise_layout, NoiseLayout)),
        noise_clip_latent_frames=frames("noise_clip_latent_frames", 1, MAX_NOISE_CLIP_LATENT_FRAMES),
        sink_latent_frames=frames("sink_latent_frames", 0),
        visible_latent_frames=frames("visible_latent_frames", 1),
        latent_frames_per_chunk=frames("latent_frames_per_chunk", 1),
        text_cleaning=TextCleaning(word("text_cleaning", defaults.text_cleaning, TextCleaning)),
        text_encoder=None if placement is None else TextPlacement(word("text_encoder", "", TextPlacement)),
        pad_text_exact=_READER.read_bool(options.get("pad_text_exact", defaults.pad_text_exact), "pad_text_exact"),
        max_trajectory_poses=_READER.read_integer(
            options.get("max_trajectory_poses", defaults.max_trajectory_poses),
            "max_trajectory_poses",
            minimum=1,
            maximum=MAX_TRAJECTORY_POSES,
        ),
        recache_on_prompt=_READER.read_bool(
            options.get("recache_on_prompt", defaults.recache_on_prompt), "recache_on_prompt"
        ),
        attention=AttentionChoice(word("attention", defaults.attention, AttentionChoice)),
        layer_operations=LayerOperations(word("layer_operations", defaults.layer_operations, LayerOperations)),
        graphs=GraphChoice(word("graphs", defaults.graphs, GraphChoice)),
        vae_precision=None if vae is None else VaePrecision(word("vae_precision", "", VaePrecision)),
    )
    _check_geometry(result)
    _check_noise(result)
    return result


def _read_flow_shift(value: object) -> float:
    return _READER.read_number(value, "flow_shift", minimum=MIN_FLOW_SHIFT, maximum=MAX_FLOW_SHIFT)


def _read_path(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or len(value) > MAX_PATH_CHARS or "\0" in value:
        raise _READER.expected(path, "an absolute path", value)
    return value


def _check_geometry(options: LingBotOptions) -> None:
    """Refuse overrides that contradict each other; against the checkpoint they are checked at load."""
    visible = options.visible_latent_frames
    needed = (options.sink_latent_frames or 0) + (options.latent_frames_per_chunk or 1)
    if visible is not None and visible < needed:
        raise _READER.refusal(
            "visible_latent_frames", f"expected at least {needed} (sink + one chunk in flight), got {visible}"
        )


def _check_noise(options: LingBotOptions) -> None:
    if options.noise_layout is NoiseLayout.PER_CHUNK and options.noise_clip_latent_frames is not None:
        raise _READER.refusal(
            "noise_clip_latent_frames", f"expected together with noise_layout {NoiseLayout.OFFICIAL_WHOLE_CLIP.value!r}"
        )


def _read_intrinsics(value: object) -> ReferenceIntrinsics | None:
    if value is None:
        return None
    path = "reference_intrinsics"
    keys = ("width", "height", "fx", "fy", "cx", "cy")
    table = _READER.read_object(value, path, known=keys, required=keys)

    def pixels(key: str) -> float:
        return _READER.read_number(table[key], f"{path}.{key}", minimum=-MAX_PIXELS, maximum=MAX_PIXELS)

    def positive(key: str) -> float:
        return _READER.read_number(table[key], f"{path}.{key}", minimum=MIN_FOCAL_PX, maximum=MAX_PIXELS)

    def side(key: str) -> int:
        return _READER.read_integer(table[key], f"{path}.{key}", minimum=1, maximum=int(MAX_PIXELS))

    return ReferenceIntrinsics(
        width=side("width"),
        height=side("height"),
        fx=positive("fx"),
        fy=positive("fy"),
        cx=pixels("cx"),
        cy=pixels("cy"),
    )
