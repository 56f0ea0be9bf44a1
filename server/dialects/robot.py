"""The `robot` dialect: one robot client's connection, and the sessions it speaks for.

    config map ──> request ──> answer ──> request ──> answer ──> ...        the client asks, one thing at a time

A request that comes while another is unanswered means that its client has given up on the first one. Then only the last
is answered: an answer that comes late would be taken for the answer to the wrong observation. A session belongs to its
connection and ends with it; a connection that gives no `session_id` has one of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket

from server.context import ServerContext
from server.dialects.opening import serve_accepted
from server.endpoint import BinaryFrame, Outbox, TextFrame
from server.errors import BadInput, CloseCode, ErrorCode, NotAllowed, ServerError, Unavailable, UnknownId, from_worker
from server.limits import check_prompt
from server.robot_actor import EVICTED, REPLACED, RobotActor
from server.robot_calls import Submission
from server.robot_session import Observation, RobotAnswer
from server.tasks import TaskSet
from server.wire.robot_arrays import Array, pack_message
from server.wire.robot_messages import (
    InferRequest,
    MalformedRequest,
    ResetRequest,
    RobotConfig,
    RobotForm,
    RobotRequest,
    StepAnswer,
    config_map,
    error_reply,
    pack_actions,
    pack_step_answer,
    read_request,
    reset_reply,
    unsupported_reply,
)
from worldmodel.errors import RequestRefused, WorkerUnavailable
from worldmodel.messages import RobotInfo
from worldmodel.observations import pack_arrays

LARGE_REQUEST_BYTES = 4 * 1024 * 1024
"""Requests above this are read in a thread: looking for NaN in that many floats takes milliseconds."""

MAX_REASON_BYTES = 120
"""A close frame holds 123 bytes of reason (RFC 6455 section 5.5)."""

MAX_GIVEN_UP_NAMES = 64
"""Sessions of one connection that are remembered as given up; a name for every episode would fill any list."""

_ROBOT_GOES_ON = frozenset({ErrorCode.CAPACITY, ErrorCode.TOO_MANY_SESSIONS, ErrorCode.WORKER_UNAVAILABLE})
"""Errors that end a world's socket, but after which a robot asks again on the same one."""


async def robot_endpoint(websocket: WebSocket, context: ServerContext, form: RobotForm) -> None:
    """Serve one robot connection. Without the right it is refused with an HTTP status, which clients can show."""
    try:
        context.auth.check_origin(websocket.headers, scheme=websocket.url.scheme)
        owner = context.auth.authenticate(websocket.headers)
    except NotAllowed as error:
        context.metrics.errors.labels(error.code).inc()
        text = f"{error.code}: {error.message}\n"
        await websocket.send_denial_response(PlainTextResponse(text, status_code=error.kind.http_status))
        return
    await websocket.accept()
    outbox = Outbox()
    dialog = RobotDialog(context, outbox, form=form, owner=owner)
    dialog.open()
    await serve_accepted(websocket, context, dialog, outbox)


async def unsupported_endpoint(websocket: WebSocket, context: ServerContext) -> None:
    """Tell a robot that no robot model is served here."""
    context.metrics.errors.labels(ErrorCode.UNSUPPORTED).inc()
    await websocket.accept()
    await websocket.send_text(unsupported_reply(f"the model {context.config.model.name} takes no observations"))
    await websocket.close(CloseCode.POLICY, ErrorCode.UNSUPPORTED)


def robot_config(info: RobotInfo) -> RobotConfig:
    """Return what robots are told of the model first."""
    return RobotConfig(
        image_height=info.image_height,
        image_width=info.image_width,
        needs_wrist_camera=info.needs_wrist_camera,
        num_external_cameras=info.num_external_cameras,
        needs_stereo_camera=info.needs_stereo_camera,
        action_space=info.action_space,
    )


def taken_arrays(context: ServerContext) -> Collection[str] | None:
    """Return the names of the arrays that the model takes, None before it is known."""
    info = context.worker.info
    if info is None or info.robot is None:
        return None
    return (*info.robot.cameras, *(state.name for state in info.robot.states))


def make_observation(prompt: str, arrays: Mapping[str, Array], max_prompt_chars: int) -> Observation:
    """Check an observation as far as the server can and pack it for the worker. Raises `BadInput`."""
    check_prompt(prompt, max_chars=max_prompt_chars)
    try:
        parts, payload = pack_arrays(arrays)
    except RequestRefused as error:
        raise from_worker(error, fallback=ErrorCode.BAD_OBSERVATION) from error
    return Observation(prompt=prompt, arrays=parts, payload=tuple(payload))


@dataclass(slots=True, eq=False)
class _Pending:
    """The request that is still to be answered. `actor` and `submission` None: a reset."""

    actor: RobotActor | None = None
    submission: Submission | None = None

    def give_up(self) -> None:
        if self.actor is not None and self.submission is not None:
            self.actor.withdraw(self.submission.call)


class RobotDialog:
    """Maps requests to sessions and back. The holder of its sessions."""

    title = "another connection"

    def __init__(self, context: ServerContext, outbox: Outbox, *, form: RobotForm, owner: str | None) -> None:
        self._context = context
        self._outbox = outbox
        self._form = form
        self._owner = owner
        self._actors: OrderedDict[str | None, RobotActor] = OrderedDict()
        self._pending: _Pending | None = None
        self._given_up: OrderedDict[str | None, ServerError] = OrderedDict()
        self._tasks = TaskSet("robot dialog")
        self._idle_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ beginning and end

    def open(self) -> None:
        """Send the config map as soon as the model is known."""
        self._context.robots.add_connection(self)
        self._tasks.spawn(self._send_config())

    async def _send_config(self) -> None:
        worker = self._context.worker
        if worker.info is None:
            try:
                await worker.wait_ready()
            except WorkerUnavailable as error:
                self.send_error(Unavailable(ErrorCode.WORKER_UNAVAILABLE, error.message))
                self._close(CloseCode.TRY_LATER, error.message)
                return
        robot = None if worker.info is None else worker.info.robot
        if robot is None:
            self._send(unsupported_reply("the model takes no observations"))
            self._close(CloseCode.POLICY, ErrorCode.UNSUPPORTED)
            return
        self._send(pack_message(config_map(robot_config(robot), self._form)))
        self._watch_idle()

    def say_goodbye(self) -> None:
        self.send_error(Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))

    def on_lost(self) -> None:
        self._context.robots.remove_connection(self)
        self._tasks.cancel()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for actor in self._actors.values():
            actor.begin_close("disconnected")
        self._actors.clear()

    def taken_over(self, actor: RobotActor) -> None:
        self._actors = OrderedDict((name, other) for name, other in self._actors.items() if other is not actor)
        text = f"another connection took the session {actor.name!r} over (robot.same_session)"
        self.send_error(ServerError(ErrorCode.TAKEN_OVER, text))

    def _watch_idle(self) -> None:
        """Close the connection if nothing is asked for a while from now on."""
        idle_s = self._context.config.robot.idle_s
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if idle_s is not None and not self._outbox.closed:
            self._idle_timer = asyncio.get_running_loop().call_later(idle_s, self._idle_expired, idle_s)

    def _idle_expired(self, idle_s: float) -> None:
        if self._pending is not None:
            # The client waits for us; its time begins with the answer.
            self._watch_idle()
            return
        self.send_error(BadInput(ErrorCode.IDLE_TIMEOUT, f"nothing was asked for {idle_s:g} s (robot.idle_s)"))

    # ------------------------------------------------------------ requests

    async def on_text(self, text: str) -> None:
        self._withdraw()
        raise BadInput(ErrorCode.BAD_MESSAGE, "robots send binary frames: one MessagePack map each")

    async def on_binary(self, data: bytes) -> None:
        self._withdraw()
        request = await _read(data, taken_arrays(self._context))
        match request:
            case ResetRequest():
                self._reset(request)
            case InferRequest():
                self._infer(request)

    def _withdraw(self) -> None:
        """Give up what was asked before: what is sent from now on answers the newest frame."""
        given_up, self._pending = self._pending, None
        if given_up is not None:
            given_up.give_up()
        self._watch_idle()

    def _infer(self, request: InferRequest) -> None:
        limits = self._context.config.limits
        observation = make_observation(request.prompt, request.arrays, limits.max_prompt_chars)
        actor = self._actor_of(request.session_id)
        submission = actor.submit(observation, step_id=request.step_id, run=request.run)
        self._pending = pending = _Pending(actor, submission)
        self._tasks.spawn(self._answer(pending, submission, request))

    async def _answer(self, pending: _Pending, submission: Submission, request: InferRequest) -> None:
        try:
            answer = await submission.answer()
        except ServerError as error:
            if self._is_answered_by(pending):
                self.send_error(error)
            return
        if self._is_answered_by(pending):
            self._send(_pack(answer, request))
        else:
            self._context.robots.metrics.calls.labels("superseded").inc()

    def _is_answered_by(self, pending: _Pending) -> bool:
        """Return whether the client still waits for this, and no longer from now on."""
        if self._pending is not pending:
            return False
        self._pending = None
        self._watch_idle()
        return True

    def _reset(self, request: ResetRequest) -> None:
        """Reset the session that is named, or all of this connection. What has not begun is as good as reset.

        So is what has ended without its client: who asks to begin anew need not be told of it any more.
        Raises `ServerError` if another connection has a session of that name and keeps it.
        """
        self._forget_ended(request.session_id)
        actors = self._actors.values() if request.session_id is None else self._named(request.session_id)
        resets = [actor.begin_reset() for actor in actors]
        pending = _Pending()
        self._pending = pending
        self._tasks.spawn(self._answer_reset(pending, resets))

    def _forget_ended(self, name: str | None) -> None:
        """Forget the ended session of this name, or all that ended."""
        if name is None:
            self._given_up.clear()
        else:
            self._given_up.pop(name, None)
        for ended in [each for each, actor in self._actors.items() if _is_over(actor) and name in (None, each)]:
            del self._actors[ended]

    def _named(self, name: str) -> list[RobotActor]:
        """Return the session of this name, none if nobody has it; that of another connection is taken over."""
        actor = self._actors.get(name)
        if actor is None and self._context.robots.is_in_use(name, self._owner):
            actor = self._begin(name)
        return [] if actor is None else [actor]

    async def _answer_reset(self, pending: _Pending, resets: list[asyncio.Task[None]]) -> None:
        ends = await asyncio.gather(*map(asyncio.shield, resets), return_exceptions=True)
        error = next((end for end in ends if isinstance(end, BaseException)), None)
        if error is not None and not isinstance(error, ServerError):
            raise error
        if not self._is_answered_by(pending):
            return
        if error is None:
            self._send(reset_reply(self._form))
        else:
            self.send_error(error)

    # ------------------------------------------------------------ sessions

    def _actor_of(self, name: str | None) -> RobotActor:
        """Return the session of this name, begun if need be. Raises `ServerError`."""
        actor = self._actors.get(name)
        if actor is not None and _is_over(actor):
            self._give_up(name)
            actor = None
        if (ending := self._given_up.pop(name, None)) is not None:
            raise ending
        if actor is None:
            actor = self._begin(name)
        self._actors.move_to_end(name)
        for other in self._actors.values():
            other.is_standby = other is not actor
        return actor

    def _begin(self, name: str | None) -> RobotActor:
        """Begin a session that holds nothing yet. Raises `ServerError`."""
        left = tuple(self._actors.values())
        actor = self._context.robots.begin(name, owner=self._owner, holder=self, left=left)
        self._actors[name] = actor
        self._give_up_oldest()
        return actor

    def _give_up_oldest(self) -> None:
        while len(self._actors) > self._context.config.robot.max_sessions_per_connection:
            name = next(iter(self._actors))
            self._actors[name].begin_close(REPLACED)
            self._give_up(name)

    def _give_up(self, name: str | None) -> None:
        """Forget a session that ended without its client, which is told when it comes back to it."""
        self._given_up[name] = _ending(self._actors.pop(name))
        while len(self._given_up) > MAX_GIVEN_UP_NAMES:
            self._given_up.popitem(last=False)

    # ------------------------------------------------------------ answers

    def send_error(self, error: ServerError) -> None:
        self._context.metrics.errors.labels(error.code).inc()
        self._send(error_reply(self._form, error.code, error.message))
        if error.kind.close_code is not None and error.code not in _ROBOT_GOES_ON:
            self._close(error.kind.close_code, f"{error.code}: {error.message}")

    def _send(self, frame: str | bytes) -> None:
        if isinstance(frame, str):
            self._outbox.put(TextFrame(text=frame))
        else:
            self._outbox.put(BinaryFrame(build=lambda: frame, sent=self._count_bytes))

    def _count_bytes(self, num_bytes: int) -> None:
        self._context.metrics.sent_bytes.inc(num_bytes)

    def _close(self, code: int, reason: str) -> None:
        self._outbox.close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))


def _is_over(actor: RobotActor) -> bool:
    return actor.close_reason is not None


def _ending(actor: RobotActor) -> ServerError:
    """Return what the client of a session that ended without it is told."""
    if actor.close_reason in (EVICTED, REPLACED):
        text = f"the session {actor.name!r} gave its place to another; ask again to begin anew"
        return UnknownId(ErrorCode.SESSION_EVICTED, text)
    text = f"the session {actor.name!r} has ended: {actor.close_reason}; ask again to begin anew"
    return UnknownId(ErrorCode.SESSION_LOST, text)


async def _read(data: bytes, taken: Collection[str] | None) -> RobotRequest:
    try:
        if len(data) > LARGE_REQUEST_BYTES:
            return await asyncio.to_thread(read_request, data, taken)
        return read_request(data, taken)
    except MalformedRequest as error:
        raise BadInput(ErrorCode.BAD_MESSAGE, str(error), field=error.field) from error


def _pack(answer: RobotAnswer, request: InferRequest) -> bytes:
    if request.step_id is None:
        return pack_actions(answer.actions)
    return pack_step_answer(
        StepAnswer(
            session_id=request.session_id,
            run=answer.run,
            step_id=request.step_id,
            actions=answer.actions,
            server_timing=answer.server_timing,
        )
    )
