"""The command line: arguments -> configuration -> a verb. Errors are one sentence and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from server.argument_parser import VerbParser
from server.bench_arguments import add_bench_arguments, read_bench_arguments
from server.config import ServerConfig
from server.config_reading import load_config
from server.config_values import ConfigError
from server.conformance_verb import add_conformance_arguments, check_conformance
from server.model_check import check_model
from server.package_files import bundled_config
from server.settings_arguments import LIST_FLAG, add_settings, given_settings, unknown_arguments
from server.settings_list import list_settings
from server.tool_verbs import TOOLS, run_tool
from worldmodel.errors import LoadFailed, WorldModelError
from worldmodel.packages import check_package_origin


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output, `head` for example, has enough. Python would complain of the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] in TOOLS:
        return _tool(argv[0], argv[1:])
    try:
        if LIST_FLAG in argv and argv[0] in VERBS:
            list_settings(argv)
            return 0
        arguments, unknown = _parser().parse_known_args(argv, argparse.Namespace(argv=argv))
        if unknown:
            raise ConfigError(unknown_arguments(unknown))
        _check_installation()
        VERBS[arguments.verb](arguments)
    except ConfigError as error:
        return _fail(str(error), 2)
    except WorldModelError as error:
        return _fail(error.message, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _check_installation() -> None:
    try:
        check_package_origin()
    except LoadFailed as error:
        raise ConfigError(error.message) from error


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="worldserve", description="A realtime server for interactive neural world models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="serve the embedded demo world and open a browser")
    demo.add_argument("--no-browser", action="store_true", help="do not open a browser")
    serve = verbs.add_parser("serve", help="serve a model")
    serve.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, for example configs/demo.toml")
    generate = verbs.add_parser("generate", help="make a video from a start image, a prompt and a camera")
    _add_generate_arguments(generate)
    replay = verbs.add_parser("replay", help="make the chunks of a recorded session again, from its event log")
    _add_replay_arguments(replay)
    bench = verbs.add_parser("bench", help="measure a server, and the model without one")
    add_bench_arguments(bench)
    conformance = verbs.add_parser("conformance", help="check a running server against docs/protocol.md")
    add_conformance_arguments(conformance)
    check = verbs.add_parser("doctor", help="check whether this host can run a configuration")
    check.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, for example configs/demo.toml")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for verb_name, (_, line) in TOOLS.items():
        verbs.add_parser(verb_name, help=line)
    for verb in (demo, serve, generate, replay, bench, check):
        add_settings(verb)
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="a TOML file (default: the embedded demo world)")
    parser.add_argument("--image", required=True, help="a start image: a file, or a name the configuration offers")
    parser.add_argument("--prompt", help="what the world is (default: the prompt of the named start image)")
    parser.add_argument("--keys", default="", help='keys per latent frame, for example "w*6 wl*3 -*3"')
    parser.add_argument("--camera", type=Path, metavar="DIR", help="a camera path instead: poses.npy, intrinsics.npy")
    parser.add_argument("--frames", type=int, required=True, help="media frames: 9 + 12 k for chunks of 3")
    parser.add_argument("--trim", action="store_true", help="make fewer frames where --frames or the path do not fit")
    parser.add_argument(
        "--size", help='WIDTHxHEIGHT, or "official" to let the start image choose (default: configured)'
    )
    parser.add_argument("--seed", type=int, default=0, help="noise seed (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="the mp4 to write")
    parser.add_argument("--latents", type=Path, help="also write the latents as safetensors")


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="EVENTS.jsonl", help="the event log, with its images beside it")
    parser.add_argument("--config", type=Path, help="a TOML file (default: the embedded demo world)")
    parser.add_argument("--out", type=Path, help="the mp4 to write")
    parser.add_argument("--latents", type=Path, help="the latents to write, as safetensors")
    parser.add_argument(
        "--image", action="append", default=[], help="a start image that is not beside the log; may be repeated"
    )
    parser.add_argument("--seed", type=int, help="noise seed of a plain log (default 0); other logs have their own")
    parser.add_argument("--any-model", action="store_true", help="also if another model made the log")


def _load(arguments: argparse.Namespace, path: Path) -> ServerConfig:
    config = load_config(path, flags=given_settings(arguments))
    check_model(config)
    return config


def _demo(arguments: argparse.Namespace) -> None:
    _run_server(_load(arguments, bundled_config("demo")), open_browser=not arguments.no_browser)


def _serve(arguments: argparse.Namespace) -> None:
    _run_server(_load(arguments, arguments.config), open_browser=False)


def _generate(arguments: argparse.Namespace) -> None:
    _require_extras()
    from server.clip_arguments import ClipFiles
    from server.generate_verb import ClipRequest, make_clip

    config = _load(arguments, arguments.config or bundled_config("demo"))
    request = ClipRequest(
        image=arguments.image,
        prompt=arguments.prompt,
        keys=arguments.keys,
        num_media_frames=arguments.frames,
        seed=arguments.seed,
        files=ClipFiles(out=arguments.out, latents=arguments.latents),
        camera=arguments.camera,
        size=arguments.size,
        trims=arguments.trim,
    )
    _run_clip(lambda: make_clip(config, request))


def _replay(arguments: argparse.Namespace) -> None:
    _require_extras()
    from server.clip_arguments import ClipFiles
    from server.replay_verb import ReplayRequest, replay

    config = _load(arguments, arguments.config or bundled_config("demo"))
    request = ReplayRequest(
        log=arguments.log,
        images=tuple(arguments.image),
        seed=arguments.seed,
        any_model=arguments.any_model,
        files=ClipFiles(out=arguments.out, latents=arguments.latents),
    )
    _run_clip(lambda: replay(config, request))


def _bench(arguments: argparse.Namespace) -> None:
    from server.bench_verb import bench

    request = read_bench_arguments(arguments, given_settings(arguments), argv=arguments.argv)
    signal.signal(signal.SIGTERM, _leave)
    if request.config_file is None:
        bench(None, request)
    else:
        _require_extras()
        bench(_load(arguments, request.config_file), request)


def _conformance(arguments: argparse.Namespace) -> None:
    code = check_conformance(arguments)
    if code:
        raise SystemExit(code)


def _doctor(arguments: argparse.Namespace) -> None:
    from server.doctor_verb import doctor

    code = doctor(_load(arguments, arguments.config), as_json=arguments.json)
    if code:
        raise SystemExit(code)


def _tool(verb: str, arguments: Sequence[str]) -> int:
    """Hand a verb over to the program that does it; its own parser reads the arguments."""
    try:
        _check_installation()
        return run_tool(verb, arguments)
    except ConfigError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130


def _run_clip(make: Callable[[], None]) -> None:
    """Run a verb that writes files; SIGTERM takes the same way out as an error, so that nothing half-made stays."""
    from server.clip import ClipFailed

    signal.signal(signal.SIGTERM, _leave)
    try:
        make()
    except ClipFailed as error:
        raise WorldModelError(str(error)) from error


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _run_server(config: ServerConfig, *, open_browser: bool) -> None:
    # The web stack takes a second to import, so `worldserve --help` does without.
    from server.serving import ServeError, serve

    _require_extras()
    try:
        serve(config, open_browser=open_browser)
    except ServeError as error:
        raise ConfigError(str(error)) from error


def _require_extras() -> None:
    """Stop with the install command if the parts beyond the base package are missing. Raises `ConfigError`."""
    missing = [
        name for name in ("av", "torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(f"missing {', '.join(missing)}; install the extra parts: pip install 'worldserve[demo]'")


VERBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": _demo,
    "serve": _serve,
    "generate": _generate,
    "replay": _replay,
    "bench": _bench,
    "conformance": _conformance,
    "doctor": _doctor,
}


def _fail(message: str, code: int) -> int:
    print(f"worldserve: {message}", file=sys.stderr)
    return code
