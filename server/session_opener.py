"""How a session begins: an encoder, its state in the worker, and the actor that owns both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from server.actor import SessionActor
from server.actor_services import ActorServices
from server.admission import Place
from server.config import ServerConfig
from server.errors import ErrorCode, ServerError, open_failed
from server.ids import new_resume_token, new_session_id, new_watch_token
from server.media.encoder import EncoderFailed
from server.media.formats import StreamEncoder, create_stream_encoder
from server.orphans import Orphans
from server.recorder import Recorders, SessionRecorder
from server.session import Session, SessionRules
from server.uploads import RawImage, StartImage
from server.wire.messages import Pacing, StreamFormat
from worldmodel.errors import OutcomeUnknown, WorldModelError
from worldmodel.messages import ModelInfo, OpenSession, RequestId, SessionId

log = logging.getLogger(__name__)


class CheckedImage:
    """A start image that was decoded once. While its session waits only the file is kept, a hundredth of the pixels."""

    def __init__(self, image: StartImage) -> None:
        self.file = image.file
        self.sha256 = image.sha256
        self.name = image.name
        self._raw: RawImage | None = image.raw

    @property
    def is_decoded(self) -> bool:
        return self._raw is not None

    def put_away(self) -> None:
        """Forget the pixels; whoever takes them decodes the file again."""
        self._raw = None

    async def take(self, decode: Callable[[bytes], RawImage]) -> RawImage:
        """Hand the pixels over, decoded in a thread by `decode` if they were put away."""
        raw, self._raw = self._raw, None
        return await asyncio.to_thread(decode, self.file) if raw is None else raw


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A checked request for a session. `max_chunks`: how many chunks a run has at most, None for no limit."""

    prompt: str
    seed: int
    image: CheckedImage
    format: StreamFormat
    pacing: Pacing
    first_event_id: int
    max_chunks: int | None = None


class SessionOpener:
    """Makes sessions of one server. `require_worker` gives the model, or raises `Unavailable`."""

    def __init__(
        self,
        config: ServerConfig,
        services: ActorServices,
        *,
        recorders: Recorders | None,
        orphans: Orphans,
        require_worker: Callable[[], ModelInfo],
    ) -> None:
        """`recorders` None: nothing is recorded."""
        self._config = config
        self._services = services
        self._recorders = recorders
        self._orphans = orphans
        self._require_worker = require_worker
        self._rules = SessionRules(
            max_pending_events=config.session.max_pending_events,
            lead_chunks=config.session.lead_chunks,
            retry_rolled_back_ticks=config.session.retry_rolled_back_ticks,
        )

    async def open(self, request: NewSession, place: Place, owner: str | None) -> SessionActor:
        """Open in the worker and return the actor. Raises `ServerError`; then the place is free, if need be later."""
        session_id, generation = new_session_id(), self._services.worker.generation
        encoder: StreamEncoder | None = None
        try:
            info = self._require_worker()
            encoder = await self._create_encoder(request.format, info)
            await self._open_in_worker(session_id, request, encoder)
            self._require_worker()
        except OutcomeUnknown as error:
            if encoder is not None:
                encoder.close()
            await self._orphans.close(session_id, place, generation=generation)
            raise open_failed(error) from error
        except BaseException:
            place.release()
            if encoder is not None:
                encoder.close()
            raise
        return SessionActor(
            session=Session(
                session_id=session_id,
                prompt=request.prompt,
                seed=request.seed,
                pacing=request.pacing,
                fps=info.fps,
                first_event_id=request.first_event_id,
                rules=self._rules,
                max_chunks=request.max_chunks,
                start_image=request.image.name,
            ),
            encoder=encoder,
            place=place,
            info=info,
            format=request.format,
            image_file=request.image.file,
            resume_token=new_resume_token(),
            watch_token=new_watch_token(),
            owner=owner,
            recorder=self._begin_recording(session_id, request, owner, info, encoder),
            services=self._services,
        )

    def _begin_recording(
        self, session_id: SessionId, request: NewSession, owner: str | None, info: ModelInfo, encoder: StreamEncoder
    ) -> SessionRecorder | None:
        if self._recorders is None:
            return None
        return self._recorders.begin(
            session_id=session_id,
            owner=owner,
            info=info,
            encoder=encoder,
            format=request.format,
            prompt=request.prompt,
            seed=request.seed,
            image=request.image,
        )

    async def _create_encoder(self, format: StreamFormat, info: ModelInfo) -> StreamEncoder:
        create = partial(
            create_stream_encoder,
            format,
            width=info.width,
            height=info.height,
            fps=info.fps,
            media=self._config.media,
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._services.encode_pool, create)
        except (EncoderFailed, ValueError) as error:
            log.exception("no encoder for %s", format)
            raise ServerError(ErrorCode.MEDIA_FAILED, f"format {format} can't be encoded: {error}") from error

    async def _open_in_worker(self, session_id: SessionId, request: NewSession, encoder: StreamEncoder) -> None:
        raw = await request.image.take(self._services.load_image)
        message = OpenSession(
            request_id=RequestId(f"{session_id}-open"),
            session_id=session_id,
            prompt=request.prompt,
            seed=request.seed,
            image=raw.size,
            outputs=encoder.outputs,
        )
        try:
            await self._services.worker.open_session(message, raw.pixels)
        except OutcomeUnknown:
            raise
        except WorldModelError as error:
            raise open_failed(error) from error
