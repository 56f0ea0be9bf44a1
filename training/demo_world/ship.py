"""Assemble the checkpoint folder that is served: trained components, start images, and the world's layout.

    python -m training.demo_world.ship --run RUN --vae VAE_FOLDER --out worldmodel/data/demo_world

What does not come from the training, `model_index.json`, `scheduler/` and `tokenizer/`, must be in the folder already.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from training.demo_world import scene, trajectories
from training.demo_world.files import expect_whole, located, replacing, settle
from worldmodel.checkpoint.errors import CheckpointError

FIXED = ("model_index.json", "scheduler", "tokenizer")
"""What a checkpoint has that no training makes."""

STARTS: dict[str, tuple[float, float, float]] = {
    "day": (6.0, 6.0, 222.0),
    "night": (6.0, 8.6, 138.0),
    "snow": (4.2, 5.5, 318.0),
    "desert": (6.6, 6.8, 312.0),
    "sunset": (6.0, 4.6, 6.0),
    "autumn": (6.0, 9.0, 222.0),
}
"""Where the start image of each style is seen from: x and z in metres, heading in degrees, 0 north and 90 east."""

LANDMARKS: tuple[tuple[str, int, int], ...] = (
    ("lighthouse", 0, 0),
    ("house", 3, 4),
    ("great tree", 6, 6),
    ("tower", 7, 7),
    ("gate", 11, 11),
    ("pink tree", 13, 13),
    ("ball", 14, 14),
)
"""What a map shows: label, the row of `OBJECTS` that gives place and size, the row that gives the colour."""

POND = {"label": "pond", "x": 3.2, "z": 8.4, "radius": 1.05, "colour": "#3d99db"}
PLAZA = {"label": "plaza", "x": 6.0, "z": 6.0, "radius": 2.1, "colour": "#ccba99"}


def start_camera(name: str) -> trajectories.Cameras:
    """Return the camera of a start image, one walk of one latent frame."""
    x, z, heading = STARTS[name]
    return trajectories.Cameras(
        position=np.array([[[x, z]]]) / trajectories.METRES_PER_UNIT,
        yaw=np.array([[math.radians(heading)]]),
        pitch=np.zeros((1, 1)),
    )


def start_image(name: str) -> Image.Image:
    """Draw the start image of a style."""
    poses = trajectories.media_poses(start_camera(name))[0]
    frames = scene.render(poses, np.array([scene.STYLES.index(name)], np.int32))
    return Image.fromarray(frames[0].numpy())


def layout() -> dict[str, object]:
    """Describe the world for a map: metres, x to the east and z to the north, everything repeats every `period`."""
    objects = []
    for label, place, paint in LANDMARKS:
        row, colour = scene.OBJECTS[place], scene.OBJECTS[paint][7:10]
        x, z, radius = (round(float(value), 2) for value in (row[1], row[2], max(row[5], row[6])))
        hexadecimal = "#" + "".join(f"{round(255 * float(channel)):02x}" for channel in colour)
        objects.append({"label": label, "x": x, "z": z, "radius": radius, "colour": hexadecimal})
    starts = {name: {"x": x, "z": z, "heading_deg": heading} for name, (x, z, heading) in STARTS.items()}
    return {
        "period": scene.PERIOD_M,
        "metres_per_unit": trajectories.METRES_PER_UNIT,
        "objects": objects,
        "areas": [PLAZA, POND],
        "paths": {"width": 1.7, "x": [6.0], "z": [6.0]},
        "starts": starts,
    }


def assemble(run: Path, vae: Path, out: Path) -> None:
    """Replace the trained parts of a checkpoint folder, once all of them are known to be whole.

    A part that lies where it belongs already stays. Raises `CheckpointError` naming a source that has no config.json
    or whose weights are not all there, or what is missing in `out`; nothing is replaced then.
    """
    lacking = [name for name in FIXED if not (out / name).exists()]
    if lacking:
        raise CheckpointError(str(out), f"expected a checkpoint to put parts into, has no {', '.join(lacking)}")
    settle(out)
    sources = {name: located(run, name) for name in ("transformer", "text_encoder")} | {"vae": vae}
    for source in sources.values():
        if not (source / "config.json").is_file():
            raise CheckpointError(str(source), "expected a trained part, has no config.json")
        expect_whole(source)
    images = {name: start_image(name) for name in STARTS}
    with replacing(out) as unfinished:
        for name, source in sources.items():
            if source.resolve() != (out / name).resolve():
                _copy_part(source, unfinished / name)
    (out / "examples").mkdir(exist_ok=True)
    for name, image in images.items():
        image.save(out / "examples" / f"{name}.png", optimize=True)
    (out / "layout.json").write_text(json.dumps(layout(), indent=1) + "\n")


def _copy_part(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors" or file.name.endswith((".index.json", "config.json")):
            shutil.copyfile(file, target / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put trained parts into a checkpoint folder.")
    parser.add_argument("--run", type=Path, required=True, help="--out of a run of training.demo_world.transformer")
    parser.add_argument("--vae", type=Path, required=True, help="diffusers folder of the VAE it was trained with")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    arguments = parser.parse_args()
    try:
        assemble(arguments.run, arguments.vae, arguments.out)
    except CheckpointError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
