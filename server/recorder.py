"""What of a session goes into its recording, and in which form. The files are `server/recording.py`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from server.chunks import CommittedChunk
from server.event_log import (
    LoggedImage,
    LoggedReset,
    LogLine,
    LogReset,
    encode_line,
    image_file_name,
    start_line,
    tick_line,
)
from server.media.formats import EncodedChunk, StreamEncoder
from server.media.mp4_file import MP4_FORMATS, Mp4Assembler
from server.recording import LOG_FILE, MP4_FILE, Recordings, SessionRecording
from server.wire.messages import StreamFormat
from worldmodel.messages import ModelInfo, SessionId, Tick


class ImageFile(Protocol):
    """A start image as a file, and the SHA-256 of its bytes."""

    @property
    def file(self) -> bytes: ...

    @property
    def sha256(self) -> str: ...


class SessionRecorder:
    """Turns what happens to one session into appends. No call waits or fails."""

    def __init__(self, recording: SessionRecording, assembler: Mp4Assembler | None) -> None:
        self._recording = recording
        self._assembler = assembler

    @property
    def active(self) -> bool:
        return self._recording.active

    def committed(self, tick: Tick, chunk: CommittedChunk) -> None:
        self.log(tick_line(tick, chunk))

    def reset(self, *, run: int, prompt: str, seed: int, image: ImageFile | None) -> None:
        """Note that run `run` begins; `image` None keeps the one before."""
        logged = None if image is None else self.keep_image(image, run=run)
        self.log(LogReset(run=run, reset=LoggedReset(prompt=prompt, seed=seed, image=logged)))

    def encoded(self, encoded: EncodedChunk) -> None:
        """Add a chunk's pictures to the video, if the session's format can be one."""
        if self._assembler is None or not self.active:
            return
        try:
            self._recording.append(MP4_FILE, self._assembler.add(encoded))
        except ValueError as error:
            self._recording.stop(error)

    def keep_image(self, image: ImageFile, *, run: int) -> LoggedImage:
        name = image_file_name(image.file, run=run)
        self._recording.append(name, image.file)
        return LoggedImage(file=name, sha256=image.sha256)

    def log(self, line: LogLine) -> None:
        self._recording.append(LOG_FILE, encode_line(line))

    async def close(self, *, within_s: float | None) -> None:
        """Finish the files, waiting for the disk so long, None: as long as it takes."""
        await self._recording.close(within_s=within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorders:
    """Begins recordings. `model_options` is the JSON object that the worker was given, `version` ours."""

    recordings: Recordings
    model_options: bytes
    version: str

    def begin(
        self,
        *,
        session_id: SessionId,
        owner: str | None,
        info: ModelInfo,
        encoder: StreamEncoder,
        format: StreamFormat,
        prompt: str,
        seed: int,
        image: ImageFile,
    ) -> SessionRecorder | None:
        """Begin to record a session that has just been opened; None where recording is off."""
        recording = self.recordings.begin(session_id, owner)
        if recording is None:
            return None
        assembler = None
        if format in MP4_FORMATS:
            own_muxer = encoder.new_epoch() if format is StreamFormat.FMP4 else None
            assembler = Mp4Assembler(width=info.width, height=info.height, fps=info.fps, own_muxer=own_muxer)
        recorder = SessionRecorder(recording, assembler)
        recorder.log(
            start_line(
                info,
                session_id=session_id,
                created_at=recording.created_at,
                model_options=self.model_options,
                version=self.version,
                prompt=prompt,
                seed=seed,
                image=recorder.keep_image(image, run=0),
            )
        )
        return recorder
