"""From samples to the report, its JSON form, its picture and its table."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import jsonschema
import msgspec
import pytest
from rich.console import Console

from clients.bench import words
from clients.bench.keys import key_presses
from clients.bench.plot import MARGIN, WIDTH, draw, ticks
from clients.bench.plot_svg import BOLD, BOLD_EM, REGULAR_EM
from clients.bench.provenance import Host, Provenance, commit_of_checkout
from clients.bench.report import SCHEMA, Report, Workload, json_schema, make_report, to_json
from clients.bench.samples import ChunkSample, EventSample, MemorySample, Run, SessionSamples
from clients.bench.table import show

ROOT = Path(__file__).resolve().parents[3]
TIMINGS = {"queue": 1.0, "denoise": 1500.0, "commit": 300.0, "decode": 100.0, "transfer": 5.0, "encode": 20.0}


def make_session(
    *, num_chunks: int, interval_s: float, events: list[EventSample] | None = None, ended: str | None = None
) -> SessionSamples:
    """A session whose chunks come at a steady pace, the first after one second."""
    return SessionSamples(
        began_s=100.0,
        started_s=100.1,
        fps=16,
        width=832,
        height=480,
        latent_frames_per_chunk=3,
        chunks=[
            ChunkSample(
                chunk_index=index,
                arrived_s=101.0 + index * interval_s,
                num_frames=12 if index else 9,
                num_bytes=1000 * index,
                timings_ms=TIMINGS,
            )
            for index in range(num_chunks)
        ],
        events=events or [],
        ended=ended,
    )


def make_run(*sessions: SessionSamples) -> Run:
    return Run(
        sessions=list(sessions),
        memory=[
            MemorySample(at_s=1.0, server_bytes=90, worker_bytes=700, device_bytes=None),
            MemorySample(at_s=2.0, server_bytes=100, worker_bytes=600, device_bytes=5),
        ],
        model={"name": "lingbot_world_v2", "device": "cuda:0", "precision": "bf16", "attention_backend": "sdpa"},
        versions={"torch": "2.11", "device_name": "A <fast> card", "driver": "580.1"},
        capacity_sessions=3,
    )


def report_of(served: Run | None, in_process: Run | None = None, *, pacing: str = "free") -> Report:
    workload = Workload(
        num_sessions=1, num_chunks=20, pacing=pacing, events_per_second=1.0, seed=0, start_image="synthetic"
    )
    host = Host(
        system="Linux", cpu="A CPU", num_cpus=2, memory_bytes=1, load_average_before=0.1, load_average_after=0.2
    )
    provenance = Provenance(
        date="2026-01-01T00:00:00+00:00",
        command="worldserve bench & more",
        commit="abc",
        server_version="0.1",
        device="cuda:0",
        device_name="A <fast> card",
        driver="580.1",
        precision="bf16",
        attention_backend="sdpa",
        versions={"torch": "2.11"},
        model={"name": "lingbot_world_v2"},
        host=host,
    )
    return make_report(served, in_process, workload, provenance)


# ---------------------------------------------------------------- numbers


def test_a_steady_run():
    report = report_of(make_run(make_session(num_chunks=20, interval_s=2.0)))
    served = report.served
    assert served is not None
    assert served.first_chunk_ms is not None
    assert served.first_chunk_ms.median == pytest.approx(1000)
    assert [window.after_chunk for window in served.windows] == [0, 6, 12]
    assert [window.interval_ms.count for window in served.windows if window.interval_ms] == [19, 13, 7]
    assert served.headline_after_chunk == 12
    assert served.headline.media_fps == pytest.approx(6.0)
    assert served.headline.realtime_factor == pytest.approx({"12": 0.5, "16": 0.375})
    assert served.headline.stages_ms == TIMINGS
    assert served.headline.bytes_per_chunk == 16000
    assert [viewer.fps for viewer in served.viewers] == [12, 16]
    assert served.viewers[0].deadline_attainment == 0
    assert (served.memory.server_bytes, served.memory.worker_bytes, served.memory.device_bytes) == (100, 700, 5)
    assert report.complete
    assert report.verdict == "0.50x real time at 12 fps: 6.0 frames a second, a chunk every 2000 ms (p95 2000)"


def test_a_run_faster_than_real_time_says_at_which_rate():
    assert report_of(make_run(make_session(num_chunks=20, interval_s=0.8))).verdict.startswith(
        "Real time at 12 fps (1.25x): 15.0 frames a second"
    )


def test_a_short_run_has_an_earlier_headline():
    served = report_of(make_run(make_session(num_chunks=11, interval_s=2.0))).served
    assert served is not None
    assert served.headline_after_chunk == 6
    assert served.windows[2].interval_ms is None
    assert served.windows[2].media_fps is None


def test_a_single_chunk_is_still_a_report():
    report = report_of(make_run(make_session(num_chunks=1, interval_s=1.0, ended="cut")))
    assert report.verdict == "PARTIAL: No second chunk came, so there is no rate to speak of"
    assert draw(report)


def test_two_sessions():
    run = make_run(make_session(num_chunks=20, interval_s=2.0), make_session(num_chunks=20, interval_s=4.0))
    served = report_of(run).served
    assert served is not None
    assert served.headline.media_fps == pytest.approx(4.0)
    assert served.headline.total_media_fps == pytest.approx(8.0)


def test_a_lost_session_makes_the_report_partial():
    run = make_run(make_session(num_chunks=20, interval_s=2.0), make_session(num_chunks=5, interval_s=2.0, ended="cut"))
    report = report_of(run)
    assert not report.complete
    assert report.problems == ["served: cut"]
    assert report.verdict.startswith("PARTIAL: ")


def test_served_over_in_process():
    served, alone = (make_run(make_session(num_chunks=20, interval_s=each)) for each in (2.1, 2.0))
    report = report_of(served, alone)
    assert report.served_over_in_process == pytest.approx(1.05)
    assert report_of(served).served_over_in_process is None
    short = make_run(make_session(num_chunks=9, interval_s=1.0))
    assert report_of(served, short).served_over_in_process == pytest.approx(2.1)


@pytest.mark.parametrize(("pacing", "to_frame_ms"), [("free", 1500 + 250), ("playback", 1500 + 62.5 + 250)])
def test_an_event_is_followed_to_its_frame(pacing: str, to_frame_ms: float):
    # Chunk 0 comes at 101 and plays for 9 / 16 s; chunk 1 is here at 101.5 and on screen at 101.5625.
    event = EventSample(event_id=0, sent_s=100.0, chunk_index=1, latent_frame=1, wait_ms=30.0)
    unanswered = EventSample(event_id=1, sent_s=101.2)
    run = make_run(make_session(num_chunks=4, interval_s=0.5, events=[event, unanswered]))
    served = report_of(run, pacing=pacing).served
    assert served is not None
    events = served.events
    assert (events.num_applied, events.num_open, events.num_refused) == (1, 1, 0)
    assert events.wait_ms is not None
    assert events.wait_ms.median == 30
    assert events.to_chunk_ms is not None
    assert events.to_chunk_ms.median == pytest.approx(1500)
    assert events.to_frame_ms is not None
    assert events.to_frame_ms.median == pytest.approx(to_frame_ms)
    assert events.chunks_later is not None
    assert events.chunks_later.median == 2


def test_no_run_is_no_report():
    with pytest.raises(ValueError, match="expected a run"):
        report_of(None)


# ---------------------------------------------------------------- forms


def full_report() -> Report:
    return report_of(
        make_run(make_session(num_chunks=20, interval_s=2.1)), make_run(make_session(num_chunks=20, interval_s=2.0))
    )


def test_the_json_form_fits_its_schema_and_comes_back():
    report = full_report()
    document = json.loads(to_json(report))
    assert document["schema"] == SCHEMA
    jsonschema.validate(document, json_schema())
    assert msgspec.json.decode(to_json(report), type=Report) == report


def test_the_published_schema_is_up_to_date():
    published = json.loads((ROOT / "docs/bench_report.schema.json").read_text(encoding="utf-8"))
    assert published == json_schema(), "run: python -m clients.bench.report > docs/bench_report.schema.json"


def test_the_picture_is_whole_and_escaped():
    text = draw(full_report())
    root = ElementTree.fromstring(text)
    written = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("A <fast> card" in line for line in written)
    assert any("0.48x real time at 12 fps" in line for line in written)
    assert "in process" in written
    # One dot for each interval of the served run.
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 19


def test_the_picture_follows_the_theme_of_its_viewer():
    """Every colour is a class with a rule for each theme, and none is written at a shape."""
    text = draw(full_report())
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    used = {name for names in re.findall(r'class="([^"]+)"', text) for name in names.split()}
    assert used == set(re.findall(r"^\.(\S+) \{", light, re.MULTILINE))
    assert used == set(re.findall(r"^\.(\S+) \{", dark, re.MULTILINE))
    assert "fill: #ffffff" in light
    assert not re.search(r'(fill|stroke)="#', text)


def test_a_late_chunk_far_above_the_others_is_marked_with_its_value():
    run = make_run(make_session(num_chunks=40, interval_s=1.0))
    chunks = run.sessions[0].chunks
    chunks.append(ChunkSample(chunk_index=40, arrived_s=chunks[-1].arrived_s + 30.0, num_frames=12, num_bytes=1))
    written = [element.text for element in ElementTree.fromstring(draw(report_of(run))).iter() if element.text]
    assert "30000" in written


def texts(report: Report) -> dict[str, dict[str, float]]:
    """Place, size and room needed of every text of a picture; where it begins, whatever its anchor."""
    found = {}
    for element in ElementTree.fromstring(draw(report)).iter("{http://www.w3.org/2000/svg}text"):
        text, size = element.text or "", float(element.attrib["font-size"])
        em = BOLD_EM if float(element.attrib["font-weight"]) >= BOLD else REGULAR_EM
        width = len(text) * size * em
        left = float(element.attrib["x"]) - {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]] * width
        found[text] = {"left": left, "right": left + width, "y": float(element.attrib["y"]), "size": size}
    return found


def test_no_words_of_the_picture_leave_their_place():
    """Two slow sessions have the longest verdict, and tails of four digits."""
    sessions = [make_session(num_chunks=20, interval_s=interval_s) for interval_s in (6.026, 5.503)]
    report = report_of(make_run(*sessions), make_run(make_session(num_chunks=20, interval_s=1.96)))
    written = texts(report)
    assert len(report.verdict) > 80
    assert max(each["right"] for each in written.values()) <= WIDTH - MARGIN + 1
    tail = written["6026 / 6026"]
    assert tail["right"] <= written["media rate each"]["left"] - 16


def test_words_of_near_lines_of_real_time_do_not_touch():
    written = texts(report_of(make_run(make_session(num_chunks=20, interval_s=6.0))))
    above, below = written["real time at 12 fps: 1000 ms"], written["real time at 16 fps: 750 ms"]
    assert below["y"] - above["y"] > above["size"]
    usual = texts(report_of(make_run(make_session(num_chunks=20, interval_s=1.0))))
    # Far enough from each other, both have their words above them.
    assert usual["real time at 16 fps: 750 ms"]["y"] - usual["real time at 12 fps: 1000 ms"]["y"] > 40


def test_the_sum_of_the_stages_stands_beside_the_mark():
    """The interval is a little longer than the stages, so its mark would cross the words."""
    root = ElementTree.fromstring(draw(report_of(make_run(make_session(num_chunks=20, interval_s=2.0)))))
    marks = [
        float(each.attrib["x1"])
        for each in root.iter("{http://www.w3.org/2000/svg}line")
        if each.attrib["x1"] == each.attrib["x2"]
    ]
    (total,) = [
        float(each.attrib["x"]) for each in root.iter("{http://www.w3.org/2000/svg}text") if each.text == "1926 ms"
    ]
    assert marks == [pytest.approx(total - 12, abs=0.1)]


def test_the_table_has_both_runs():
    out = io.StringIO()
    show(full_report(), Console(file=out, width=120))
    text = out.getvalue()
    for part in ("served", "in process", "interval after chunk 12", "2100 ms", "1.050x", "A <fast> card", "commit"):
        assert part in text, part


@pytest.mark.parametrize(
    ("top", "wanted", "expected"),
    [
        (10.0, 5, [0, 2, 4, 6, 8, 10]),
        (134.0, 5, [0, 50, 100]),
        (2.8, 10, [0, 0.5, 1, 1.5, 2, 2.5]),
        (0.0, 5, [0]),
        (3900.0, 5, [0, 1000, 2000, 3000]),
    ],
)
def test_ticks(top: float, wanted: int, expected: list[float]):
    assert ticks(top, wanted) == expected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.milliseconds(None), "-"),
        (words.milliseconds(3.14), "3.1 ms"),
        (words.milliseconds(992.4), "992 ms"),
        (words.milliseconds(12_340.0), "12.3 s"),
        (words.share(0.0), "0 %"),
        (words.share(1.0), "100 %"),
        (words.share(0.9999), "> 99.9 %"),
        (words.share(0.0001), "< 0.1 %"),
        (words.share(0.125), "12.5 %"),
        (words.size(999), "999 bytes"),
        (words.size(5_120), "5.1 kB"),
        (words.size(143_000_000_000), "143 GB"),
        (words.count(3.0), "3"),
    ],
)
def test_words(shown: str, expected: str):
    assert shown == expected


# ---------------------------------------------------------------- keys and commit


def test_keys_come_from_the_seed():
    def some(seed: int, session: int) -> list[object]:
        presses = key_presses(events_per_second=2.0, seed=seed, session=session)
        return [next(presses) for _ in range(200)]

    assert some(1, 0) == some(1, 0)
    assert some(1, 0) != some(2, 0)
    assert some(1, 0) != some(1, 1)


def test_keys_change_with_every_press_and_keep_the_rate():
    presses = key_presses(events_per_second=2.0, seed=0, session=0)
    taken = [next(presses) for _ in range(4000)]
    assert all(before.keys != after.keys for before, after in pairwise(taken))
    assert sum(press.wait_s for press in taken) / len(taken) == pytest.approx(0.5, rel=0.05)


def test_no_commit_outside_a_checkout(tmp_path: Path):
    assert commit_of_checkout(tmp_path) is None
