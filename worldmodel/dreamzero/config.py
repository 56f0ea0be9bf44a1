"""The options of DreamZero: which robot, how many steps run the network, which noise. Torch-free.

`parse_options` checks the `[model.options]` table of a configuration file and gives JSON bytes for the worker, which
reads them back with `DreamZeroOptions.from_json`. Facts of the checkpoint are not options.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from worldmodel.dreamzero.embodiments import EMBODIMENTS
from worldmodel.json_checks import JsonReader
from worldmodel.kernels.names import AttentionChoice, GraphChoice, LayerOperations
from worldmodel.wan.precision_names import VaePrecision

COMPUTED_STEPS = (5, 6, 7, 8, 16)
"""Of the 16 sampler steps, how many may run the network."""

OFFICIAL_SEED = 1140
MAX_SEED = 2**53 - 1
MAX_TEMPLATE_CHARS = 4000
MAX_PATH_CHARS = 4096
MIN_STRENGTH, MAX_STRENGTH = 0.01, 100.0
MAX_CAMERAS, MAX_NAME_CHARS = 4, 128

_READER = JsonReader(code="bad_options", root="options")


class StepSkipping(StrEnum):
    """Which sampler steps run the network: always the same ones, or as few as the velocity allows."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamZeroOptions:
    """Everything about the model that a configuration file may choose.

    `cameras`: video keys of the checkpoint in the order their views are tiled in, for a robot whose checkpoint does not
    say; None takes what it says.
    `tokenizer`: folder of the text encoder's tokenizer; None takes the folder `tokenizer` of the checkpoint.
    `computed_steps` belongs to static skipping. `noise_seed`: the seed of every call; None takes the session's own.
    `guidance`: how far the video is pushed away from the negative branch. `shift`: how much of the steps is spent at
    high noise.
    `prompt_template`: what a prompt is put into, at `{prompt}`; None takes the robot's.
    `graphs`: whether forwards are captured in CUDA graphs.
    `vae_precision`: None takes that of the precision plan.
    """

    embodiment: str = "oxe_droid"
    cameras: tuple[str, ...] | None = None
    tokenizer: str | None = None
    step_skipping: StepSkipping = StepSkipping.STATIC
    computed_steps: int = 8
    noise_seed: int | None = OFFICIAL_SEED
    guidance: float = 5.0
    shift: float = 5.0
    prompt_template: str | None = None
    attention: AttentionChoice = AttentionChoice.AUTO
    layer_operations: LayerOperations = LayerOperations.AUTO
    graphs: GraphChoice = GraphChoice.AUTO
    vae_precision: VaePrecision | None = None

    @classmethod
    def from_json(cls, data: bytes) -> DreamZeroOptions:
        """Read back what `parse_options` wrote. Raises `RequestRefused` for anything else."""
        try:
            options = json.loads(data)
        except ValueError as error:
            raise _READER.refusal("", "expected JSON") from error
        return _read_options(options)

    def to_json(self) -> bytes:
        content = asdict(self) | {"noise_seed": "session" if self.noise_seed is None else self.noise_seed}
        return json.dumps(content, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def parse_options(options: dict[str, object]) -> bytes:
    """Check the option table and return it complete, with defaults, as canonical JSON.

    Raises `RequestRefused` (code ``bad_options``) whose `field` is the offending key.
    """
    return _read_options(options).to_json()


def _read_options(value: object) -> DreamZeroOptions:
    options = _READER.read_object(value, "", known=tuple(DreamZeroOptions.__dataclass_fields__))
    defaults = DreamZeroOptions()

    def word(key: str, choices: type[StrEnum]) -> str:
        default = str(getattr(defaults, key))
        return _READER.read_choice(options.get(key, default), key, [str(each) for each in choices])

    return DreamZeroOptions(
        embodiment=_READER.read_choice(
            options.get("embodiment", defaults.embodiment), "embodiment", [entry.tag for entry in EMBODIMENTS]
        ),
        cameras=_cameras(options),
        tokenizer=_text(options, "tokenizer", MAX_PATH_CHARS),
        step_skipping=StepSkipping(word("step_skipping", StepSkipping)),
        computed_steps=_computed_steps(options.get("computed_steps", defaults.computed_steps)),
        noise_seed=_noise_seed(options.get("noise_seed", defaults.noise_seed)),
        guidance=_strength(options, "guidance", defaults.guidance),
        shift=_strength(options, "shift", defaults.shift),
        prompt_template=_template(options),
        attention=AttentionChoice(word("attention", AttentionChoice)),
        layer_operations=LayerOperations(word("layer_operations", LayerOperations)),
        graphs=GraphChoice(word("graphs", GraphChoice)),
        vae_precision=None
        if options.get("vae_precision") is None
        else VaePrecision(word("vae_precision", VaePrecision)),
    )


def _cameras(options: dict[str, object]) -> tuple[str, ...] | None:
    value = options.get("cameras")
    if value is None:
        return None
    names = _READER.read_list(value, "cameras", minimum=1, maximum=MAX_CAMERAS, of="names")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise _READER.expected(f"cameras[{index}]", f"a text of 1 to {MAX_NAME_CHARS} characters", name)
        if name in names[:index]:
            raise _READER.refusal(f"cameras[{index}]", f"expected each camera once, got {name!r} twice")
    return tuple(map(str, names))


def _computed_steps(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in COMPUTED_STEPS:
        raise _READER.expected("computed_steps", f"one of {', '.join(map(str, COMPUTED_STEPS))}", value)
    return value


def _noise_seed(value: object) -> int | None:
    if value == "session":
        return None
    return _READER.read_integer(value, "noise_seed", minimum=0, maximum=MAX_SEED)


def _strength(options: dict[str, object], key: str, default: float) -> float:
    return _READER.read_number(options.get(key, default), key, minimum=MIN_STRENGTH, maximum=MAX_STRENGTH)


def _text(options: dict[str, object], key: str, max_chars: int) -> str | None:
    value = options.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= max_chars:
        raise _READER.expected(key, f"a text of 1 to {max_chars} characters", value)
    return value


def _template(options: dict[str, object]) -> str | None:
    template = _text(options, "prompt_template", MAX_TEMPLATE_CHARS)
    if template is not None and "{prompt}" not in template:
        raise _READER.refusal("prompt_template", "expected a text with {prompt} in it")
    return template
