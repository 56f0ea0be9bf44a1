"""Which kernels are chosen on a CPU, and that a wish that can't be met is an error."""

from __future__ import annotations

import pytest
import torch

from worldmodel.kernels.choice import OpsUnavailable, create_ops, create_vae_ops, has_triton
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.kernels.names import LayerOperations
from worldmodel.kernels.vae_ops import PlainVaeOps

CPU = torch.device("cpu")


def test_a_cpu_runs_layers_as_written_unless_told_otherwise() -> None:
    assert create_ops(LayerOperations.AUTO, CPU) is None
    assert create_ops(LayerOperations.UNFUSED, CPU) is None
    assert isinstance(create_ops(LayerOperations.PLAIN, CPU), PlainOps)


def test_triton_by_name_is_refused_with_the_reason() -> None:
    with pytest.raises(
        OpsUnavailable, match=r"layer operations 'triton' can't be used: they need a CUDA device.*'cpu'"
    ):
        create_ops(LayerOperations.TRITON, CPU)


def test_a_cpu_has_the_plain_vae_operations() -> None:
    assert not has_triton(CPU)
    assert isinstance(create_vae_ops(CPU), PlainVaeOps)
