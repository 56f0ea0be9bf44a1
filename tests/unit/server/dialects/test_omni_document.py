"""What docs/protocol.md says of the `omni` dialect is what its models say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from server.config import LimitsSection, OmniSection
from server.dialects import omni
from server.dialects.omni_messages import parse_client_message, plan_interaction, plan_start
from server.wire.messages import WireModel
from server.wire.omni_messages import OmniClientMessage, OmniInteraction, OmniServerMessage, OmniStart
from tests.support.server_worker import model_info
from worldmodel import catalog

TEXT = (Path(__file__).resolve().parents[4] / "docs/protocol.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Clients of vLLM-Omni\n")[1].split("\n## ")[0]
PROSE = re.sub(r"^```.*?^```$", "", SECTION, flags=re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"^```json omni=(\S+)\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
MODELS: dict[str, type[WireModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in (*get_args(OmniClientMessage), *get_args(OmniServerMessage))
}
PARSE = catalog.control_parser("lingbot_world_v2")


def test_every_message_has_an_example_and_nothing_else_has() -> None:
    assert {name for name, _ in EXAMPLES} == MODELS.keys()


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_examples_are_what_the_models_take(name: str, example: str) -> None:
    MODELS[name].model_validate(json.loads(example))
    if MODELS[name] in get_args(OmniClientMessage):
        message = parse_client_message(example, LimitsSection())
        if isinstance(message, OmniStart):
            info = model_info(width=832, height=480, fps=16)
            names = OmniSection().model_names
            plan = plan_start(message, info, model="lingbot_world_v2", aliases=names, parse_control=PARSE)
            assert plan.max_chunks == 7
        if isinstance(message, OmniInteraction):
            assert plan_interaction(message.interaction, PARSE).controls


@pytest.mark.parametrize("name", MODELS)
def test_every_field_is_named(name: str) -> None:
    shown: set[str] = set()
    for example_name, example in EXAMPLES:
        if example_name == name:
            shown |= json.loads(example).keys()
    unnamed = {field for field in MODELS[name].model_fields if f"`{field}`" not in PROSE and field not in shown}
    assert not unnamed - {"type"}


def test_codes_and_keys_are_those_of_the_server() -> None:
    for word in (omni.INTERACTION_FAILED, omni.EVENT_ID_CONFLICT, "session.queued"):
        assert f"`{word}`" in PROSE
    assert set(re.findall(r"`omni\.(\w+)", PROSE)) == set(OmniSection.__dataclass_fields__)
