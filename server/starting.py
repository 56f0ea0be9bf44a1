"""Everything about a session's start that can be checked before a place in the worker is asked for."""

from __future__ import annotations

from server.context import ServerContext
from server.errors import BadInput, ErrorCode
from server.ids import new_seed
from server.session_opener import CheckedImage, NewSession
from server.wire.messages import SessionStart, StreamFormat
from server.wire.rest import CreateSession


async def check_start(
    message: SessionStart | CreateSession, context: ServerContext, *, owner: str | None
) -> NewSession:
    """Check and complete a request for a session. Raises `ServerError` that names the field, cheap checks first."""
    config = context.config
    if message.model is not None and message.model != config.model.name:
        raise BadInput(
            ErrorCode.UNKNOWN_MODEL,
            f"model: this server has {config.model.name!r}, got {message.model[:64]!r}",
            field="model",
        )
    if message.format is StreamFormat.LATENT and not config.session.allow_latents:
        raise BadInput(
            ErrorCode.FORMAT_NOT_ALLOWED,
            "format: latents are not given away by this server (session.allow_latents)",
            field="format",
        )
    info = context.table.require_worker()
    size = f"{info.width}x{info.height}"
    if message.size is not None and message.size != size:
        raise BadInput(ErrorCode.BAD_SIZE, f"size: this server makes {size}, got {message.size}", field="size")
    return NewSession(
        prompt=message.prompt,
        seed=new_seed() if message.seed is None else message.seed,
        image=CheckedImage(await context.images.read(message.image, owner=owner)),
        format=message.format,
        pacing=message.pacing,
        first_event_id=message.event_base,
    )
