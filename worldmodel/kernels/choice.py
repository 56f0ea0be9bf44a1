"""Which implementation of the layer operations to use. Does not import Triton unless it is chosen."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from worldmodel.kernels.layer_ops import LayerOps, PlainOps
from worldmodel.kernels.names import LayerOperations
from worldmodel.kernels.vae_ops import PlainVaeOps, VaeOps


class OpsUnavailable(Exception):
    """Refuse layer operations that can't run here, with the reason."""


def create_ops(choice: LayerOperations, device: torch.device) -> LayerOps | None:
    """Return the operations of a choice, or None for UNFUSED. Raises OpsUnavailable for Triton where it can't run."""
    reason = _why_not_triton(device)
    if choice is LayerOperations.AUTO:
        choice = LayerOperations.UNFUSED if reason is not None else LayerOperations.TRITON
    match choice:
        case LayerOperations.TRITON:
            if reason is not None:
                raise OpsUnavailable(f"layer operations 'triton' can't be used: {reason}")
            ops: LayerOps = importlib.import_module("worldmodel.kernels.layer_ops_triton").TritonOps()
            return ops
        case LayerOperations.PLAIN:
            return PlainOps()
        case _:
            return None


def has_triton(device: torch.device) -> bool:
    """Tell whether Triton kernels run on a device."""
    return _why_not_triton(device) is None


def create_vae_ops(device: torch.device) -> VaeOps:
    """Return the fused operations of a VAE where they run, else their plain twin."""
    if not has_triton(device):
        return PlainVaeOps()
    ops: VaeOps = importlib.import_module("worldmodel.kernels.vae_ops_triton").TritonVaeOps()
    return ops


def _why_not_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"they need a CUDA device, the model is on {device.type!r}"
    return None if importlib.util.find_spec("triton") else "the package 'triton' is not installed"
