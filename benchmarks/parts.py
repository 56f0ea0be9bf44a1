"""Time the parts of a full-size LingBot-World v2 chunk one by one against the roofline of the same device.

    python benchmarks/parts.py --groups roofline linear attention layer conv decode --json parts.json

Each part runs on random data. The median of CUDA event times is reported with the rates of arithmetic and of memory
that it means; the ceilings are those of a large bf16 matrix product and a large copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.arguments import new_file, require_cuda
from benchmarks.provenance import provenance
from kvcache.attention import Attention, PagedAttention, TorchAttention
from kvcache.attention_backends import AttentionBackend, AttentionShape, available_backends, choose_attention
from kvcache.pool import WritableRows
from training.demo_world.options import count
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.kernels.choice import create_ops
from worldmodel.kernels.layer_ops import LayerOps, PlainOps, Update
from worldmodel.kernels.linears import Fp8Linear, HighLinear
from worldmodel.kernels.names import LayerOperations
from worldmodel.lingbot.published import vae_config
from worldmodel.wan.pixels import to_yuv420
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE

TOKENS, WIDTH, HEADS, HEAD_DIM, FFN = 4680, 5120, 40, 128, 13824
TOKENS_PER_FRAME = 1560
KEYS, TEXT_ROWS, PROMPT_ROWS = 28080, 512, 121
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16

CONVS = (
    ("384 -> 384, 60x104, 3 frames", 384, 384, 3, 60, 104),
    ("384 -> 384, 120x208, 6 frames", 384, 384, 6, 120, 208),
    ("192 -> 384, 120x208, 6 frames", 192, 384, 6, 120, 208),
    ("192 -> 192, 240x416, 12 frames", 192, 192, 12, 240, 416),
    ("96 -> 96, 480x832, 12 frames", 96, 96, 12, 480, 832),
    ("96 -> 3, 480x832, 12 frames", 96, 3, 12, 480, 832),
)
"""The causal convolutions of a steady decode: input and output channels, frames, height, width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to time: the call, and what it computes and moves at least."""

    group: str
    name: str
    tflop: float
    gigabytes: float
    call: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    group: str
    name: str
    median_ms: float
    tflop_per_s: float
    gigabytes_per_s: float
    error: str = ""


def time_part(part: Part, repeats: int) -> Timed:
    """Return the median over single calls, after one round that warms up."""
    try:
        times_ms = _times_ms(part, repeats)
    except RuntimeError as error:
        first_line = (str(error).splitlines() or ["?"])[0]
        return Timed(
            group=part.group, name=part.name, median_ms=0, tflop_per_s=0, gigabytes_per_s=0, error=first_line[:120]
        )
    median_ms = statistics.median(times_ms)
    return Timed(
        group=part.group,
        name=part.name,
        median_ms=median_ms,
        tflop_per_s=1000 * part.tflop / median_ms,
        gigabytes_per_s=1000 * part.gigabytes / median_ms,
    )


def _times_ms(part: Part, repeats: int) -> list[float]:
    part.call()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in marks:
        before.record()
        part.call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in marks]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


# ------------------------------------------------------------ groups


def roofline_parts() -> Iterator[Part]:
    a, b = random(8192, 8192), random(8192, 8192)
    yield _part("roofline", "bf16 8192^3", 2 * 8192**3, 3 * a.nbytes, lambda: a @ b)
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    yield _part("roofline", "copy 4 GiB", 0, 2 * source.nbytes, lambda: target.copy_(source))


def linear_parts(ops: LayerOps) -> Iterator[Part]:
    for name, inputs, outputs in (
        ("qkv", WIDTH, 3 * WIDTH),
        ("q, k, v, o", WIDTH, WIDTH),
        ("ffn in", WIDTH, FFN),
        ("ffn out", FFN, WIDTH),
    ):
        x, weight, bias = random(TOKENS, inputs), random(outputs, inputs) * inputs**-0.5, random(outputs)
        flop, moved = 2 * TOKENS * inputs * outputs, 2 * (TOKENS * (inputs + outputs) + inputs * outputs)
        high, low = HighLinear(weight, bias), Fp8Linear(weight, bias, BF16)
        quantized = ops.quantize(x)
        yield _part("linear", f"{name}, bf16", flop, moved, lambda high=high, x=x: high(x))
        if name == "ffn in":
            yield _part("linear", f"{name} + gelu, bf16", flop, moved, lambda high=high, x=x: high.gelu(x))
        yield _part("linear", f"{name}, fp8 by row", flop, moved / 2, lambda low=low, x=quantized: low(x))


def attention_parts() -> Iterator[Part]:
    q, k, v = (random(tokens, HEADS, HEAD_DIM) for tokens in (TOKENS, KEYS, KEYS))
    flop, moved = 4 * TOKENS * KEYS * WIDTH, 2 * (2 * TOKENS + 2 * KEYS) * WIDTH
    shape = AttentionShape(
        num_queries=TOKENS, num_keys=KEYS, num_heads=HEADS, head_dim=HEAD_DIM, dtype=BF16, device=DEVICE
    )
    for backend in available_backends(shape):
        attention = choose_attention(backend, shape).attention
        name = f"self, {backend.value}"
        yield _part("attention", name, flop, moved, lambda attention=attention: attention(q, k, v))
    yield from _paged_parts(q, k, v, flop, moved, shape)
    yield from _flash3_parts(q, k, v, flop, moved)
    yield from _text_parts(q, shape)


def _paged_parts(q: Tensor, k: Tensor, v: Tensor, flop: float, moved: float, shape: AttentionShape) -> Iterator[Part]:
    """Time Triton over pages of one latent frame, and what gathering them costs the other backends."""
    pages_F = torch.randperm(KEYS // TOKENS_PER_FRAME, device=DEVICE)
    k_PTHD, v_PTHD = (x.unflatten(0, (-1, TOKENS_PER_FRAME)) for x in (k, v))
    paged = choose_attention(AttentionBackend.TRITON_PAGED, shape).attention
    assert isinstance(paged, PagedAttention)
    yield _part("attention", "self, triton_paged", flop, moved, lambda: paged.attend_pages(q, k_PTHD, v_PTHD, pages_F))

    def gather() -> object:
        return k_PTHD.index_select(0, pages_F), v_PTHD.index_select(0, pages_F)

    yield _part("attention", "pages gathered", 0.0, 4 * 2 * KEYS * WIDTH, gather)


def _flash3_parts(q: Tensor, k: Tensor, v: Tensor, flop: float, moved: float) -> Iterator[Part]:
    try:
        import fa3_fwd_interface as flash3
    except ImportError:
        return
    extent = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    length = torch.full((1,), KEYS, dtype=torch.int32, device=DEVICE)

    def in_place() -> object:
        return flash3.flash_attn_with_kvcache(
            q[None], k[None], v[None], cache_seqlens=length, cache_batch_idx=extent, num_splits=1
        )

    yield _part("attention", "self, flash3 with extent and length on the device", flop, moved, in_place)
    low = [x.to(torch.float8_e4m3fn)[None] for x in (q, k, v)]
    ones = torch.ones(1, HEADS, device=DEVICE)

    def fp8() -> object:
        return flash3.flash_attn_func(*low, q_descale=ones, k_descale=ones, v_descale=ones)

    yield _part("attention", "self, flash3 fp8", flop, moved / 2, fp8)


def _text_parts(q: Tensor, shape: AttentionShape) -> Iterator[Part]:
    for rows, has_bias in ((TEXT_ROWS, False), (PROMPT_ROWS, True)):
        k, v = random(rows, HEADS, HEAD_DIM), random(rows, HEADS, HEAD_DIM)
        bias = torch.zeros(rows, device=DEVICE) if has_bias else None
        flop, moved = 4 * TOKENS * rows * WIDTH, 4 * (TOKENS + rows) * WIDTH
        kernels: list[Attention] = [TorchAttention(), choose_attention(AttentionBackend.TRITON, shape).attention]
        if not has_bias and AttentionBackend.FLASH3 in available_backends(shape):
            kernels.append(choose_attention(AttentionBackend.FLASH3, shape).attention)
        for kernel in kernels:
            name = f"text, {rows} rows{' with bias' if has_bias else ''}, {kernel.name}"

            def call(kernel: Attention = kernel, k: Tensor = k, v: Tensor = v, bias: Tensor | None = bias) -> object:
                return kernel(q, k, v, logit_bias_S=bias)

            yield _part("attention", name, flop, moved, call)


def layer_parts(fused: LayerOps) -> Iterator[Part]:
    stream_bytes = 2 * TOKENS * WIDTH
    h, branch, camera_scale, camera_shift = (random(TOKENS, WIDTH) for _ in range(4))
    gate, scale, shift = random(WIDTH), random(WIDTH, dtype=torch.float32), random(WIDTH, dtype=torch.float32)
    qkv, hidden = random(TOKENS, 3 * WIDTH), random(TOKENS, FFN)
    angles = random(TOKENS, HEAD_DIM // 2, dtype=torch.float32)
    rotations = torch.stack([angles.cos(), angles.sin()], dim=-1)
    rows = WritableRows(
        k_XHD=random(KEYS, HEADS, HEAD_DIM),
        v_XHD=random(KEYS, HEADS, HEAD_DIM),
        first_rows_F=torch.tensor([14040, 15600, 17160], device=DEVICE),
        tokens_per_frame=1560,
    )
    small = Update(branch_TD=branch, gate_D=gate)
    full = Update(branch_TD=branch, gate_D=gate, camera_scale_TD=camera_scale, camera_shift_TD=camera_shift)
    for ops in (PlainOps(), fused):
        name = ops.name

        def norm(update: Update | None, ops: LayerOps = ops) -> object:
            return ops.residual_norm(h, update, scale, shift, 1e-6, BF16)

        def norm_fp8(ops: LayerOps = ops) -> object:
            return ops.residual_norm_fp8(h, small, scale, shift, 1e-6)

        def heads(ops: LayerOps = ops) -> object:
            return ops.heads_to_cache(qkv, gate, gate, rotations, 1e-6, rows)

        yield _part("layer", f"norm, {name}", 0, 2 * stream_bytes, lambda norm=norm: norm(None))
        yield _part("layer", f"gate + norm, {name}", 0, 4 * stream_bytes, lambda norm=norm: norm(small))
        yield _part("layer", f"gate + camera + norm, {name}", 0, 6 * stream_bytes, lambda norm=norm: norm(full))
        yield _part("layer", f"gate + norm to fp8, {name}", 0, 3.5 * stream_bytes, norm_fp8)
        yield _part("layer", f"q, k norm + rope + cache, {name}", 0, 6 * stream_bytes, heads)
        yield _part(
            "layer",
            f"q norm, {name}",
            0,
            2 * stream_bytes,
            lambda ops=ops: ops.rms_norm(branch, gate, 1e-6, branch.dtype),
        )
        yield _part("layer", f"quantize, {name}", 0, 1.5 * stream_bytes, lambda ops=ops: ops.quantize(branch))
        yield _part("layer", f"gelu to fp8, {name}", 0, 1.5 * hidden.nbytes, lambda ops=ops: ops.gelu_fp8(hidden))


def conv_parts() -> Iterator[Part]:
    torch.backends.cudnn.benchmark = True
    for name, inputs, outputs, frames, height, width in CONVS:
        weight = random(outputs, inputs, 3, 3, 3) * (27 * inputs) ** -0.5
        bias = random(outputs)
        x_BTHWC = random(1, frames + 2, height, width, inputs)
        flop = 2 * 27 * inputs * outputs * frames * height * width
        moved = 2 * frames * height * width * (inputs + outputs)
        yield _part("conv", f"{name}, 3d", flop, moved, _conv3d(x_BTHWC, weight, bias))
        yield _part("conv", f"{name}, taps as channels", flop, moved, _folded(x_BTHWC, weight, bias))
        yield _part("conv", f"{name}, three 2d", flop, moved, _three_convs(x_BTHWC, weight, bias))


def _conv3d(x_BTHWC: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
    last = weight.contiguous(memory_format=torch.channels_last_3d)
    return lambda: functional.conv3d(x_BTHWC.permute(0, 4, 1, 2, 3), last, bias, 1, (0, 1, 1))


def _folded(x_BTHWC: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
    folded = weight.permute(0, 2, 1, 3, 4).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    frames = x_BTHWC.shape[1] - 2

    def call() -> object:
        stacked = torch.cat([x_BTHWC[:, tap : tap + frames] for tap in range(3)], dim=-1)
        return functional.conv2d(stacked[0].permute(0, 3, 1, 2), folded, bias, 1, 1)

    return call


def _three_convs(x_BTHWC: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
    taps = [weight[:, :, tap].contiguous(memory_format=torch.channels_last) for tap in range(3)]
    frames, images = x_BTHWC.shape[1] - 2, x_BTHWC[0].permute(0, 3, 1, 2)

    def call() -> object:
        out = functional.conv2d(images[:frames], taps[0], bias, 1, 1)
        for tap in (1, 2):
            out += functional.conv2d(images[tap : tap + frames], taps[tap], None, 1, 1)
        return out

    return call


def decode_parts() -> Iterator[Part]:
    """The whole VAE on a steady chunk, with random weights, by convolution path; cuDNN with and without its search."""
    latents, frames = random(1, 16, 3, 60, 104), random(1, 3, 12, 480, 832)
    for path, dtype, searches in (
        (ConvPath.FOLDED, torch.float16, False),
        (ConvPath.FUSED, torch.float16, False),
        (ConvPath.FUSED, torch.float16, True),
        (ConvPath.FUSED, BF16, False),
    ):
        vae = _random_vae(path, dtype)
        torch.backends.cudnn.benchmark = searches
        _, decoder_cache = vae.decode(latents)
        _, encoder_cache = vae.encode(frames[:, :, :9])
        name = f"{path.value}, {str(dtype).removeprefix('torch.')}{', cuDNN searches' if searches else ''}"

        def decode(vae: WanVAE = vae, cache: VAECache = decoder_cache) -> object:
            return vae.decode(latents, cache)

        def encode(vae: WanVAE = vae, cache: VAECache = encoder_cache) -> object:
            return vae.encode(frames, cache)

        yield _part("decode", f"decode 12 frames, {name}", 40.65e12, 0, decode)
        yield _part("decode", f"encode 12 frames, {name}", 24.15e12, 0, encode)
    torch.backends.cudnn.benchmark = False
    yield _part("decode", "YUV of 12 frames", 0, 12 * 480 * 832 * 7.5, lambda: to_yuv420(frames[0]))


def _random_vae(path: ConvPath, dtype: torch.dtype) -> WanVAE:
    vae = WanVAE.from_config(dict(vae_config(base_dim=96)))
    fill_random(vae, RandomWeights(seed=5, device=DEVICE), dtype=dtype, device=DEVICE)
    vae = vae.to(DEVICE)
    vae.fold_weights(path)
    return vae


def _part(group: str, name: str, flop: float, moved_bytes: float, call: Callable[[], object]) -> Part:
    return Part(group=group, name=name, tflop=flop / 1e12, gigabytes=moved_bytes / 1e9, call=call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("roofline", "linear", "attention", "layer", "conv", "decode")
    parser.add_argument("--groups", nargs="+", choices=names, default=names, help="what to time (default all)")
    parser.add_argument("--repeats", type=count(least=1), default=20, help="timed calls of each part (default 20)")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    require_cuda(parser)
    ops = create_ops(LayerOperations.TRITON, DEVICE)
    assert ops is not None
    groups: dict[str, Callable[[], Iterator[Part]]] = {
        "roofline": roofline_parts,
        "linear": lambda: linear_parts(ops),
        "attention": attention_parts,
        "layer": lambda: layer_parts(ops),
        "conv": conv_parts,
        "decode": decode_parts,
    }
    results: list[Timed] = []
    for group in arguments.groups:
        for part in groups[group]():
            results.append(time_part(part, arguments.repeats))
            _show(results[-1])
        torch.cuda.empty_cache()
    if arguments.json:
        report = {**provenance(DEVICE), "parts": [asdict(timed) for timed in results]}
        arguments.json.write_text(json.dumps(report, indent=1))


def _show(timed: Timed) -> None:
    if timed.error:
        print(f"{timed.group:10} {timed.name:55} failed: {timed.error}", flush=True)
        return
    print(
        f"{timed.group:10} {timed.name:55} {timed.median_ms:9.3f} ms {timed.tflop_per_s:8.1f} TFLOP/s "
        f"{timed.gigabytes_per_s:8.1f} GB/s",
        flush=True,
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
