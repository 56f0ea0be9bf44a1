"""Which picture sizes a checkpoint can be served at. Sizes are (height, width)."""

from __future__ import annotations

from worldmodel.dreamzero.sizes import Sizes
from worldmodel.errors import LoadFailed
from worldmodel.wan.layers import PATCH


def latent_size(
    sizes: Sizes,
    trained_view: tuple[int, int] | None,
    *,
    width: int,
    height: int,
    spatial_factor: int,
) -> tuple[int, int]:
    """Return rows and columns of a latent for a tiled picture of `width` x `height` pixels.

    `trained_view`: a camera's view in the training run, None if the checkpoint does not say. `spatial_factor` is that
    of the VAE. Raises `LoadFailed` if the sizes do not fit each other.
    """
    _check_view(trained_view, width=width, height=height)
    picture = sizes.picture_size or (height, width)
    step = spatial_factor * PATCH
    for name, pixels in (("width", picture[1]), ("height", picture[0])):
        if pixels < step or pixels % step:
            raise LoadFailed(f"{name} of the encoded picture must be a multiple of {step}, got {pixels}", field=name)
    rows, columns = picture[0] // spatial_factor, picture[1] // spatial_factor
    tokens, expected = (rows // PATCH) * (columns // PATCH), sizes.frame_tokens
    if expected is not None and tokens != expected:
        raise LoadFailed(
            f"a picture of {picture[1]} x {picture[0]} has {tokens} tokens, the checkpoint is for {expected}: set "
            "width and height of the tiled picture to those it was trained with",
            field="width",
        )
    return rows, columns


def _check_view(trained_view: tuple[int, int] | None, *, width: int, height: int) -> None:
    for name, pixels in (("width", width), ("height", height)):
        if pixels < 2 or pixels % 2:
            raise LoadFailed(f"{name} must be even, a tiled picture has two views beside each other", field=name)
    if trained_view is not None and trained_view != (height // 2, width // 2):
        rows, columns = trained_view
        raise LoadFailed(
            f"the checkpoint was trained with views of {columns} x {rows}: set width to {2 * columns} and height to "
            f"{2 * rows}",
            field="width",
        )
