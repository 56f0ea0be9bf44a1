"""The published LingBot-World v2 checkpoint as sizes and settings, full and reduced. Torch-free.

Serves what has no files: random models, test checkpoints, and what the original layout leaves unsaid. Values are those
of the published component configs (robbyant/lingbot-world-v2-14b-causal-fast-diffusers); the reduced model keeps every
name and structure and shrinks widths and layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PIPELINE_CLASS = "LingBotWorldCausalDMDPipeline"
TRANSFORMER_CLASS = "CausalLingBotWorldTransformer3DModel"
VAE_CLASS = "AutoencoderKLWan"
TEXT_ENCODER_CLASS = "UMT5EncoderModel"

Config = Mapping[str, object]

LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
"""Statistics of the Wan 2.1 latents by channel (official code, wan/modules/vae2_1.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One published model: the content of every component's config file, and of `model_index.json`.

    `tensors_per_shard` is how many tensors of the transformer one file holds.
    """

    name: str
    transformer: Config
    vae: Config
    text_encoder: Config
    scheduler: Config
    tokenizer_class: str
    tensors_per_shard: int

    @property
    def model_index(self) -> dict[str, object]:
        """Content of `model_index.json`."""
        return {
            "_class_name": PIPELINE_CLASS,
            "_diffusers_version": "0.35.0.dev0",
            "boundary_ratio": 0.9,
            "image_encoder": [None, None],
            "image_processor": [None, None],
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", TEXT_ENCODER_CLASS],
            "tokenizer": ["transformers", self.tokenizer_class],
            "transformer": ["diffusers", TRANSFORMER_CLASS],
            "transformer_2": [None, None],
            "vae": ["diffusers", VAE_CLASS],
        }


RANDOM_GAINS: Mapping[str, Mapping[str, float]] = {
    "transformer": {
        "blocks.*.self_attn.o.weight": 0.5,
        "blocks.*.cross_attn.o.weight": 0.2,
        "blocks.*.ffn.2.weight": 0.5,
        "blocks.*.cam_scale_layer.weight": 0.02,
        "blocks.*.cam_shift_layer.weight": 0.05,
        "blocks.*.modulation": 0.3,
        "time_projection.1.weight": 0.5,
    },
    "vae": {},
    # The encoder does not divide attention logits by sqrt(head size), so queries are small.
    "text_encoder": {
        "shared.weight": 64.0,
        "encoder.block.*.SelfAttention.q.weight": 0.125,
        "encoder.block.*.SelfAttention.o.weight": 0.5,
        "encoder.block.*.DenseReluDense.wo.weight": 0.5,
        "encoder.block.*.relative_attention_bias.weight": 4.0,
    },
}
"""Factors on the spread 1 / sqrt(inputs) of random weights, by component and parameter name.

They keep the activations of a random model in a range where all of its parts do real work.
"""


def _transformer(*, num_layers: int, num_heads: int, head_dim: int, ffn_dim: int, text_dim: int) -> Config:
    return {
        "_class_name": TRANSFORMER_CLASS,
        "_diffusers_version": "0.35.0.dev0",
        "patch_size": [1, 2, 2],
        "num_attention_heads": num_heads,
        "attention_head_dim": head_dim,
        "in_channels": 36,
        "out_channels": 16,
        "text_dim": text_dim,
        "freq_dim": 256,
        "ffn_dim": ffn_dim,
        "num_layers": num_layers,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "sink_size": 9,
        "num_frames_per_block": 3,
        "sliding_window_num_frames": 18,
        "local_attn_size": -1,
    }


def vae_config(*, base_dim: int, num_res_blocks: int = 2) -> Config:
    """Return the config of a Wan 2.1 VAE; only its width was ever published as anything but 96."""
    return {
        "_class_name": VAE_CLASS,
        "_diffusers_version": "0.35.0.dev0",
        "attn_scales": [],
        "base_dim": base_dim,
        "dim_mult": [1, 2, 4, 4],
        "dropout": 0.0,
        "latents_mean": list(LATENTS_MEAN),
        "latents_std": list(LATENTS_STD),
        "num_res_blocks": num_res_blocks,
        "temperal_downsample": [False, True, True],
        "z_dim": 16,
    }


def text_encoder_config(
    *, d_model: int, d_ff: int, d_kv: int, num_heads: int, num_layers: int, vocab_size: int
) -> Config:
    """Return the config of a UMT5 encoder."""
    return {
        "architectures": [TEXT_ENCODER_CLASS],
        "classifier_dropout": 0.0,
        "d_ff": d_ff,
        "d_kv": d_kv,
        "d_model": d_model,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "umt5",
        "num_decoder_layers": num_layers,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "scalable_attention": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


SCHEDULER: Config = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.35.0.dev0",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "flow_shift": 5.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "steps_offset": 0,
    "thresholding": False,
    "time_shift_type": "exponential",
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}

FULL = PublishedModel(
    name="lingbot-world-v2",
    transformer=_transformer(num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, text_dim=4096),
    vae=vae_config(base_dim=96),
    text_encoder=text_encoder_config(d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, vocab_size=256384),
    scheduler=SCHEDULER,
    tokenizer_class="T5TokenizerFast",
    tensors_per_shard=180,
)
"""18.54 B parameters in the transformer, 0.13 B in the VAE, 5.68 B in the text encoder."""

TINY = PublishedModel(
    name="lingbot-world-v2-tiny",
    transformer=_transformer(num_layers=2, num_heads=2, head_dim=32, ffn_dim=96, text_dim=32),
    vae=vae_config(base_dim=4),
    text_encoder=text_encoder_config(d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, vocab_size=512),
    scheduler=SCHEDULER,
    tokenizer_class="T5TokenizerFast",
    tensors_per_shard=12,
)
"""The same names and structure, small enough to be written and loaded in a second."""

MODELS: tuple[PublishedModel, ...] = (FULL, TINY)


def published_model(name: str) -> PublishedModel:
    """Look a model up by name. Raises ValueError naming the known ones."""
    for model in MODELS:
        if model.name == name:
            return model
    raise ValueError(f"unknown model {name!r}: expected one of {', '.join(model.name for model in MODELS)}")
