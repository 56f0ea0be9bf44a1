"""What `benchmarks/removals.py` measures: a loaded model at one size, a session with a full window, made-up inputs.

Shapes: L text rows, C channels, F latent frames, H height, W width, Y and X latent rows and columns, n latent frames of
a chunk, 4 rows or columns of a pose or (fx, fy, cx, cy), 3 colours.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.transaction import ChunkTransaction
from server.config_reading import load_config
from server.package_files import bundled_config
from worldmodel.catalog import options_parser
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.lingbot.acceleration import accelerate, merges_padding
from worldmodel.lingbot.camera import CameraEmbedding, Float64Array
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.published import FULL, RANDOM_GAINS, TINY
from worldmodel.lingbot.transformer import ChunkInputs, LingBotTransformer, kv_geometry
from worldmodel.lingbot.transformer_config import read_transformer_config
from worldmodel.lingbot.weights import load_model
from worldmodel.messages import LoadStage
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.vae import WanVAE

MODEL = "lingbot_world_v2"
PROMPT_ROWS = {"tiny": 5, "demo": 8, "full": 400}
"""Rows of the prompt by scale, without padding."""
PICTURE_SIZES = {"tiny": (32, 64), "full": (480, 832)}
"""Height and width where no configuration says them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """A loaded model at one picture size, what computes its forwards, and one session's cache."""

    transformer: LingBotTransformer
    vae: WanVAE
    forward: Forward
    cache: KVCache
    options: LingBotOptions
    rows_LC: Tensor
    merges_padding: bool
    height: int
    width: int

    @property
    def rounding(self) -> float:
        return 1e-5 if self.transformer.plan.linear == torch.float32 else 2e-2


def build_world(scale: str, device: torch.device, precision: str) -> World:
    """Load the demo world, or fill another size with random weights; `full` and `tiny` make one layer for all."""
    plan = precision_plan(precision, device=device)
    if scale == "demo":
        config = load_config(bundled_config("demo"), environment={})
        section = config.model
        options = LingBotOptions.from_json(options_parser(MODEL)(section.options))
        model = load_model(config.checkpoint_path, options, plan, device, _ignore_progress)
        transformer, vae, height, width = model.transformer, model.vae, section.height, section.width
    else:
        options = LingBotOptions()
        height, width = PICTURE_SIZES[scale]
        transformer, vae = _random_model(scale, device, plan)
    kv = kv_geometry(transformer.config, plan, latent_height=height // 8, latent_width=width // 8)
    accelerated = accelerate(transformer, options, kv)
    if scale != "demo":
        num_layers = read_transformer_config((TINY if scale == "tiny" else FULL).transformer).num_layers
        _repeat_layer(transformer, accelerated.forward, num_layers)
        kv = replace(kv, num_layers=num_layers)
    cache = KVCache(kv, capacity=1, device=device, dtype=plan.kv, attention=accelerated.attention)
    generator = torch.Generator().manual_seed(3)
    rows_LC = torch.randn(PROMPT_ROWS[scale], transformer.config.text_dim, generator=generator).to(device)
    return World(
        transformer=transformer,
        vae=vae,
        forward=accelerated.forward,
        cache=cache,
        options=options,
        rows_LC=rows_LC,
        merges_padding=merges_padding(options, accelerated.attention.name, device),
        height=height,
        width=width,
    )


def _ignore_progress(stage: LoadStage, fraction: float, detail: str) -> None:
    """Loading is not what is timed here."""


def _random_model(scale: str, device: torch.device, plan: PrecisionPlan) -> tuple[LingBotTransformer, WanVAE]:
    published = TINY if scale == "tiny" else FULL
    weights = RandomWeights(seed=5, device=device, gains=RANDOM_GAINS["transformer"])
    with torch.device("meta"):
        transformer = LingBotTransformer(replace(read_transformer_config(published.transformer), num_layers=1))
    fill_random(transformer, weights, dtype=plan.linear, device=device)
    transformer.apply_precision(plan)
    vae = WanVAE.from_config(dict(published.vae))
    fill_random(vae, weights.with_gains(RANDOM_GAINS["vae"]), dtype=plan.vae, device=device)
    vae = vae.to(device)
    vae.fold_weights()
    return transformer.eval(), vae.eval()


def _repeat_layer(transformer: LingBotTransformer, forward: Forward, num_layers: int) -> None:
    """Let the one layer stand for all; the number of weights that a kernel reads stays what it is."""
    transformer.layers *= num_layers
    if isinstance(forward, FusedForward):
        forward._layers *= num_layers


def latents(world: World, seed: int) -> Tensor:
    config = world.transformer.config
    shape = (config.out_channels, config.latent_frames_per_chunk, world.height // 8, world.width // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(world.transformer.device)


def walk(world: World) -> tuple[Float64Array, Float64Array]:
    """Return relative poses of a turn and a step, and intrinsics, float64."""
    num_frames, angle = world.transformer.config.latent_frames_per_chunk, 0.05
    pose_44 = np.eye(4)
    pose_44[0, :3] = math.cos(angle), 0.0, math.sin(angle)
    pose_44[2, :3] = -math.sin(angle), 0.0, math.cos(angle)
    pose_44[:3, 3] = 0.02, 0.0, 1.0
    row_4 = np.array(world.options.default_intrinsics(world.width, world.height))
    return np.tile(pose_44, (num_frames, 1, 1)), np.tile(row_4, (num_frames, 1))


def street(height: int, width: int) -> npt.NDArray[np.uint8]:
    y_H1, x_1W = np.mgrid[0:height, 0:width].astype(np.float64)
    colours = [128 + 100 * np.sin(y_H1 / 31 + x_1W / (23 + 9 * colour)) for colour in range(3)]
    return np.stack(colours, axis=-1).astype(np.uint8)


def drawn_png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(street(height, width)).save(file, "PNG")
    return file.getvalue()


def fill_window(world: World, session: str) -> None:
    """Store chunks of history until the next one sees a full window."""
    config, model = world.transformer.config, world.transformer
    visible = config.sink_latent_frames + (config.window_latent_frames or 0)
    constants = model.time_constants(COMMIT_TIMESTEP)
    for index in range(math.ceil(visible / config.latent_frames_per_chunk)):
        with world.cache.lease(session) as lease:
            chunk = lease.begin_chunk()
            if index == 0:
                model.publish_text(world.rows_LC, chunk, merge_padding=world.merges_padding)
            world.forward.store_clean(latents(world, index), constants, inputs_of(world, chunk), chunk)
            chunk.commit()


def inputs_of(world: World, chunk: ChunkTransaction) -> ChunkInputs:
    linear = world.transformer.patch_embedding_wancamctrl
    exact = CameraEmbedding(linear.weight, linear.bias, world.height, world.width, max_bases=0)
    condition_CFYX = torch.cat([latents(world, 7)[:4] * 0, latents(world, 8)])
    return world.transformer.chunk_inputs(condition_CFYX, exact.tokens(*walk(world)), chunk.first_latent_frame)
