"""REST for robots and reinforcement-learning loops: create, step, reset, close, status. Errors as in `server/rest.py`.

A step is JSON, or the MessagePack map of the WebSocket with a `step_id`; it is answered in the form that `Accept` asks
for, JSON unless that names MessagePack.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.context import ServerContext
from server.dialects.robot import make_observation, robot_config, taken_arrays
from server.errors import BadInput, ErrorCode, ServerError
from server.ids import new_session_id
from server.rest_requests import (
    ERRORS,
    authorize,
    body_of,
    content_type_of,
    context_of,
    parse_model,
    read_body,
    read_model,
    require_content_type,
)
from server.robot_actor import RobotActor
from server.robot_session import Observation
from server.summaries import DescribedRoute
from server.wire.robot_messages import (
    InferRequest,
    MalformedRequest,
    StepAnswer,
    config_map,
    pack_step_answer,
    read_request,
    row_lists,
)
from server.wire.robot_rest import (
    CreateRobotSession,
    RobotActivity,
    RobotActivityView,
    RobotDescription,
    RobotSessionList,
    RobotSessionView,
    RobotStateInput,
    RobotStep,
    RobotStepResult,
    read_step_arrays,
)

JSON_TYPE = "application/json"
MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack")

_MSGPACK_SCHEMA = {"schema": {"type": "string", "format": "binary"}}

router = APIRouter(responses=ERRORS, route_class=DescribedRoute)
# A robot's own name for its session may hold slashes: `path` in the addresses below. What may follow a name comes
# before the name alone, and an address that ends where a name would begin is that of all sessions.


class RestHolder:
    """Stands for the REST interface as the holder of a session; who is taken over finds out with the next request."""

    title = "the REST interface"

    def taken_over(self, actor: RobotActor) -> None:
        return


_REST = RestHolder()


def _step_bodies() -> dict[str, Any]:
    """Describe both forms of a step, and both of its answer."""
    bodies = body_of(RobotStep)
    content = bodies["requestBody"]["content"]
    content[MSGPACK_TYPES[0]] = _MSGPACK_SCHEMA
    return bodies


@router.get("/v1/robot")
async def describe_robot(request: Request) -> RobotDescription:
    """Return what the served model takes and gives; `config` is what a WebSocket is sent first."""
    context = context_of(request)
    authorize(request)
    info = context.table.require_worker()
    if info.robot is None:
        raise BadInput(ErrorCode.UNSUPPORTED, "the model takes no observations")
    robot = info.robot
    return RobotDescription(
        model=info.model,
        embodiment=robot.embodiment,
        cameras=list(robot.cameras),
        states=[RobotStateInput(name=state.name, num_dims=state.num_dims) for state in robot.states],
        max_request_frames=robot.max_request_frames,
        action_horizon=robot.action_horizon,
        action_dims=robot.action_dims,
        config=config_map(robot_config(robot)),
    )


@router.post("/v1/robot/sessions/", status_code=HTTPStatus.CREATED, include_in_schema=False)
@router.post(
    "/v1/robot/sessions", status_code=HTTPStatus.CREATED, openapi_extra=body_of(CreateRobotSession, required=False)
)
async def create_robot_session(request: Request) -> RobotSessionView:
    """Begin a session, with a place in the worker. It ends when it is unused for `rest_idle_s`."""
    context, owner = context_of(request), authorize(request)
    body = await read_model(request, CreateRobotSession, may_be_empty=True)
    name = body.session_id or new_session_id()
    actor = context.robots.begin(name, owner=owner, holder=_REST, idle_s=context.config.robot.rest_idle_s)
    try:
        await actor.open()
    except ServerError:
        actor.begin_close("refused")
        raise
    return _view(actor, context)


@router.get("/v1/robot/sessions/", include_in_schema=False)
@router.get("/v1/robot/sessions")
async def list_robot_sessions(request: Request) -> RobotSessionList:
    """List the caller's sessions that have a name, those of WebSockets too."""
    context, owner = context_of(request), authorize(request)
    named = [actor for actor in context.robots.owned_by(owner) if actor.name is not None]
    return RobotSessionList(sessions=[_view(actor, context) for actor in named])


@router.get("/v1/robot/activity")
async def watch_robots(request: Request) -> RobotActivity:
    """Tell what the caller's robots do: their latest calls and last actions, also of sessions without a name."""
    context, owner = context_of(request), authorize(request)
    now = context.clock()
    return RobotActivity(
        num_connections=context.robots.num_connections,
        robots=[_activity(actor, now) for actor in context.robots.owned_by(owner)],
    )


@router.post(
    "/v1/robot/sessions/{session_id:path}/step",
    openapi_extra=_step_bodies(),
    responses={200: {"model": RobotStepResult, "content": {MSGPACK_TYPES[0]: _MSGPACK_SCHEMA}}},
    response_model=None,
)
async def step_robot_session(session_id: str, request: Request) -> RobotStepResult | Response:
    """Compute the actions that follow an observation. Steps of a session are computed in order.

    The last step may be sent again, with the same id: it is answered as before and not computed twice.
    """
    context, owner = context_of(request), authorize(request)
    actor = _rest_session(context, session_id, owner)
    async with actor.arrivals.arrival() as wait_for_earlier:
        step_id, run, observation = await _read_step(request, context, session_id)
        await wait_for_earlier()
        submission = actor.submit(observation, step_id=step_id, run=run)
    answer = await submission.answer()
    if _wants_msgpack(request):
        packed = pack_step_answer(
            StepAnswer(
                session_id=session_id,
                run=answer.run,
                step_id=step_id,
                actions=answer.actions,
                server_timing=answer.server_timing,
            )
        )
        return Response(packed, media_type=MSGPACK_TYPES[0])
    return RobotStepResult(
        session_id=session_id,
        run=answer.run,
        step_id=step_id,
        actions=[list(row) for row in row_lists(answer.actions)],
        server_timing=dict(answer.server_timing),
    )


@router.post("/v1/robot/sessions/{session_id:path}/reset")
async def reset_robot_session(session_id: str, request: Request) -> RobotSessionView:
    """Begin a new run, in which step ids may begin anew; answers when the worker has forgotten the old one."""
    context, owner = context_of(request), authorize(request)
    actor = _rest_session(context, session_id, owner)
    await asyncio.shield(actor.begin_reset())
    return _view(actor, context)


@router.get("/v1/robot/sessions/{session_id:path}")
async def get_robot_session(session_id: str, request: Request) -> RobotSessionView:
    """Return where a session is: its state, run and calls."""
    context, owner = context_of(request), authorize(request)
    return _view(context.robots.find(session_id, owner), context)


@router.delete("/v1/robot/sessions/{session_id:path}", status_code=HTTPStatus.NO_CONTENT)
async def close_robot_session(session_id: str, request: Request) -> Response:
    """Close a session, also one that a WebSocket speaks for; closing it again succeeds."""
    context, owner = context_of(request), authorize(request)
    if not context.robots.has_ended(session_id, owner):
        await asyncio.shield(context.robots.find(session_id, owner).begin_close("deleted"))
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _rest_session(context: ServerContext, session_id: str, owner: str | None) -> RobotActor:
    """Return a session that REST speaks for. Raises `UnknownId`, `BadInput`."""
    actor = context.robots.find(session_id, owner)
    if actor.holder is not _REST:
        raise BadInput(ErrorCode.SESSION_IN_USE, f"session {session_id[:64]!r} belongs to a WebSocket connection")
    return actor


def _view(actor: RobotActor, context: ServerContext) -> RobotSessionView:
    session = actor.session
    assert actor.name is not None
    return RobotSessionView(
        session_id=actor.name,
        state=session.phase,
        run=session.run,
        num_steps=actor.num_steps,
        last_step_id=session.last_step_id,
        waiting=session.num_waiting,
        connected=actor.holder is not _REST,
        age_s=round(context.clock() - actor.created_at, 3),
    )


def _activity(actor: RobotActor, now: float) -> RobotActivityView:
    session, history, times = actor.session, actor.history, actor.history.times
    return RobotActivityView(
        key=actor.session_id,
        session_id=actor.name,
        state=session.phase,
        run=session.run,
        num_steps=actor.num_steps,
        waiting=session.num_waiting,
        connected=actor.holder is not _REST,
        age_s=round(now - actor.created_at, 3),
        quiet_s=round(now - actor.active_at, 3),
        prompt=history.prompt,
        last_ms=None if times is None else times.last_ms,
        median_ms=None if times is None else times.median_ms,
        p95_ms=None if times is None else times.p95_ms,
        recent_ms=list(history.recent_ms),
        actions=None if history.actions is None else [list(row) for row in row_lists(history.actions)],
    )


# ---------------------------------------------------------------- bodies


async def _read_step(request: Request, context: ServerContext, session_id: str) -> tuple[int, int | None, Observation]:
    """Return step id, run and observation of a step in either form. Raises `ServerError`."""
    require_content_type(request, JSON_TYPE, *MSGPACK_TYPES)
    limits, taken = context.config.limits, taken_arrays(context)
    body = await read_body(request, context.config.robot.max_message_bytes, "robot.max_message_bytes")
    try:
        if content_type_of(request) == JSON_TYPE:
            step = await parse_model(body, RobotStep, limits)
            arrays = await asyncio.to_thread(read_step_arrays, step, taken)
            return step.step_id, step.run, make_observation(step.prompt, arrays, limits.max_prompt_chars)
        packed = await asyncio.to_thread(read_request, body, taken)
    except MalformedRequest as error:
        raise BadInput(ErrorCode.BAD_MESSAGE, str(error), field=error.field) from error
    if not isinstance(packed, InferRequest):
        raise BadInput(ErrorCode.BAD_MESSAGE, "endpoint: a reset has an address of its own", field="endpoint")
    if packed.session_id not in (None, session_id):
        text = f"session_id: the step is for {packed.session_id!r}, its address for {session_id!r}"
        raise BadInput(ErrorCode.BAD_MESSAGE, text, field="session_id")
    if packed.step_id is None:
        raise BadInput(ErrorCode.BAD_MESSAGE, "step_id: a step needs one", field="step_id")
    return packed.step_id, packed.run, make_observation(packed.prompt, packed.arrays, limits.max_prompt_chars)


def _wants_msgpack(request: Request) -> bool:
    accepted = request.headers.get("accept", "").lower()
    return any(kind in accepted for kind in MSGPACK_TYPES)
