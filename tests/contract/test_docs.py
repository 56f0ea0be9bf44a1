"""What the documents say about the tree is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.config_reading import load_config
from server.key_script import parse_key_script
from server.package_files import bundled_config
from worldmodel import catalog
from worldmodel.clips import ClipWish

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCE_PATH = re.compile(r"`((?:server|worldmodel|kvcache|offload|clients|configs|tests|docs|benchmarks)/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def test_there_are_documents():
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/protocol.md", "docs/operations.md"} <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_file_exists(document: Path):
    text = document.read_text(encoding="utf-8")
    missing = [name for name in SOURCE_PATH.findall(text) if not (ROOT / name.rstrip("/")).exists()]
    missing += [target for target in LINK.findall(text) if not (document.parent / target).exists()]
    assert not missing, f"{document.name} names files that are not there: {missing}"


def test_readme_has_exactly_two_set_up_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Two commands", 1)[1].split("\n## ", 1)[0]
    commands = [line.split("#")[0].strip() for line in re.findall(r"```\w*\n(.*?)```", section, re.S)[0].splitlines()]
    assert [command for command in commands if command] == ["make demo", "make test"]


def test_the_clip_of_the_readme_has_room_for_its_keys():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [(keys, frames)] = re.findall(r'^worldserve generate .*--keys "(.+)" --frames (\d+)', readme, re.M)
    config = load_config(bundled_config("demo"))
    wish = ClipWish(
        checkpoint=str(config.checkpoint_path),
        options=config.model.options,
        width=config.model.width,
        height=config.model.height,
        image_width=config.model.width,
        image_height=config.model.height,
        num_media_frames=int(frames),
    )
    plan = catalog.clip_planner(config.model.name)(wish)
    assert len(parse_key_script(keys)) == plan.num_chunks * plan.latent_frames_per_chunk


def test_our_times_in_the_readme_are_measured_ones():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = {"## Models and speed": 3, "## Beside other servers": 2}
    told = set()
    for heading, column in tables.items():
        rows = readme.split(heading, 1)[1].split("\n## ", 1)[0].splitlines()
        cells = [row.split("|")[column] for row in rows if row.startswith("|")]
        told |= {number for cell in cells for number in re.findall(r"\b\d{4}(?= ms)", cell)}
    assert len(told) == 3
    measured = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert [number for number in sorted(told) if f"**{number}**" not in measured] == []
