"""Wrong calls of the programs behind `inspect`, `make-checkpoint` and `cache`: one sentence and exit code 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from worldmodel.tools import cache, inspect, make_checkpoint


@pytest.mark.parametrize(
    ("main", "arguments", "sentence"),
    [
        (inspect.main, [], "inspect: the following arguments are required: PATH (see worldserve inspect --help)"),
        (
            inspect.main,
            ["tiny", "--widht", "3"],
            "inspect: unknown arguments: --widht 3 (did you mean '--width'?) (see worldserve inspect --help)",
        ),
        (inspect.main, ["tiny", "3"], "inspect: unknown arguments: 3 (see worldserve inspect --help)"),
        (
            inspect.main,
            ["tiny", "--wid=3"],
            "inspect: unknown arguments: --wid=3 (did you mean '--width'?) (see worldserve inspect --help)",
        ),
        (
            inspect.main,
            ["tiny", "--width", "x"],
            "inspect: --width: invalid int value: 'x' (see worldserve inspect --help)",
        ),
        (
            make_checkpoint.main,
            ["--like", "dreamzero-droid"],
            "make-checkpoint: the following arguments are required: OUT (see worldserve make-checkpoint --help)",
        ),
        (cache.main, [], "cache: the following arguments are required: ACTION (see worldserve cache --help)"),
        (
            cache.main,
            ["prune", "x", "--max-bytes", "-1.5"],
            "cache: --max-bytes: expected bytes from 0, got '-1.5' (see worldserve cache prune --help)",
        ),
        (cache.main, ["list", "x", "--max-b"], "cache: unknown arguments: --max-b (see worldserve cache --help)"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    main: Callable[[Sequence[str]], int], arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [sentence]
