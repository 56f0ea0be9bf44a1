"""DreamZero transformer, golden cases 1 and 1b: prefill, draft, commit and draft again, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.support.dreamzero_golden import assert_close, tensors
from tests.support.dreamzero_network import cache_for, publish, transformer
from worldmodel.dreamzero.transformer import DreamZeroTransformer, FrameInputs, Velocity
from worldmodel.dreamzero.transformer_layers import Segment

CASES = {"i2v": ("dit", "weights", "dit_single"), "ti2v": ("dit_ti2v", "weights_ti2v", "dit_single_ti2v")}


@dataclass
class Forwards:
    """The four forwards of one case, with what they left in the cache."""

    network: DreamZeroTransformer
    golden: dict[str, Tensor]
    flows: dict[str, Velocity] = field(default_factory=dict)
    kv: dict[str, list[Tensor]] = field(default_factory=dict)
    modules: dict[str, Tensor] = field(default_factory=dict)

    def inputs(self, name: str) -> FrameInputs:
        start = int(self.golden[f"{name}/start_frame"])
        x_CFYX = self.golden[f"{name}/in_x"][0]
        condition = None
        if self.network.config.image_condition:
            condition = self.golden["y_all"][0, :, start : start + x_CFYX.shape[1]]
        is_draft = f"{name}/in_action" in self.golden
        return self.network.frame_inputs(
            condition,
            first_latent_frame=start,
            shape_FYX=tuple(x_CFYX.shape[1:]),
            state_A=self.golden["state"][0, 0] if is_draft else None,
        )

    def num_frames(self, name: str) -> int:
        return self.golden[f"{name}/in_x"].shape[2]

    def times(self, name: str) -> int:
        [timestep] = set(self.golden[f"{name}/in_timestep"].flatten().tolist())
        return timestep

    def run(self) -> None:
        golden, network = self.golden, self.network
        cache = cache_for(network, *golden["prefill/in_x"].shape[-2:])
        cache.open("a")
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk(self.num_frames("prefill"))
            publish(network, chunk, golden["context"][0], golden["clip_feature"][0])
            self.commit("prefill", chunk)
            self.draft("block0", chunk)
            chunk.commit()
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk(self.num_frames("commit1"))
            self.commit("commit1", chunk)
            self.draft("block1", chunk)
            chunk.commit()

    def commit(self, name: str, chunk) -> None:
        inputs, time = self.inputs(name), self.network.time_constants(self.times(name))
        x_CFYX = self.golden[f"{name}/in_x"][0]
        self.network.commit(x_CFYX, time, inputs, chunk)
        layers = range(self.network.config.num_layers)
        for branch in (0, 1):
            self.kv[f"{name}/{branch}"] = [torch.stack(chunk.visible(layer, branch=branch)) for layer in layers]
        # The served forward ends with the last layer's K and V; what it leaves out is compared all the same.
        h = self.network.embed_video(x_CFYX, inputs)[None]
        segments = (Segment(rows=slice(0, h.shape[1]), time=time),)
        for index in layers:
            h = self.network._run_layer(index, h, inputs, segments, chunk)
            self.modules[f"{name}/block{index}.out"] = h
        self.modules[f"{name}/head"] = self.network.head(h, time)
        video = self.network._video_flow(h, time, inputs)
        self.flows[name] = Velocity(video_BCFYX=video, action_NA=torch.empty(0))

    def draft(self, name: str, chunk) -> None:
        golden, network = self.golden, self.network
        [action_time] = set(golden[f"{name}/in_timestep_action"].flatten().tolist())
        video = network.time_constants(self.times(name))
        action = video if action_time == video.timestep else network.time_constants(action_time)
        self.flows[name] = network.velocity(
            golden[f"{name}/in_x"][0],
            golden[f"{name}/in_action"][0],
            network.step_time(video, action),
            self.inputs(name),
            chunk.draft(self.num_frames(name)),
        )


@pytest.fixture(scope="module", params=sorted(CASES))
def forwards(request: pytest.FixtureRequest) -> Iterator[Forwards]:
    case, weights, name = CASES[request.param]
    with torch.inference_mode():
        forwards = Forwards(transformer(case, weights), tensors(name))
        forwards.run()
        yield forwards


@pytest.mark.parametrize("name", ["prefill", "block0", "commit1", "block1"])
def test_dreamzero_video_flow_in_both_branches(forwards: Forwards, name: str) -> None:
    for got_CFYX in forwards.flows[name].video_BCFYX:
        assert_close(got_CFYX, forwards.golden[f"{name}/out_video"][0], name)


@pytest.mark.parametrize("name", ["block0", "block1"])
def test_dreamzero_action_flow(forwards: Forwards, name: str) -> None:
    assert_close(forwards.flows[name].action_NA, forwards.golden[f"{name}/out_action"][0], name)


@pytest.mark.parametrize("name", ["prefill", "commit1"])
@pytest.mark.parametrize("branch", [0, 1])
def test_dreamzero_committed_kv(forwards: Forwards, name: str, branch: int) -> None:
    for layer, got_2SHK in enumerate(forwards.kv[f"{name}/{branch}"]):
        want = forwards.golden[f"{name}/kv_after/layer{layer}"][:, 0]
        assert_close(got_2SHK, want, f"{name}, layer {layer}")


@pytest.mark.parametrize("name", ["prefill", "commit1"])
def test_dreamzero_modules_on_the_way(forwards: Forwards, name: str) -> None:
    found = [key for key in forwards.modules if f"{key.replace('/', '/mid/', 1)}" in forwards.golden]
    for key in found:
        for got_TD in forwards.modules[key]:
            if key.startswith(name):
                assert_close(got_TD, forwards.golden[key.replace("/", "/mid/", 1)][0], key)
    assert any(key.startswith("prefill") for key in found)


def test_dreamzero_embeddings(forwards: Forwards) -> None:
    network, golden = forwards.network, forwards.golden
    text_LD = network.text_embedding(golden["context"][0])
    assert_close(text_LD, golden["prefill/mid/text_embedding"][0], "text_embedding")
    assert_close(network.img_emb(golden["clip_feature"][0]), golden["prefill/mid/img_emb"][0], "img_emb")
    embedded_VD = network.embed_video(golden["prefill/in_x"][0], forwards.inputs("prefill"))
    want = golden["prefill/mid/patch_embedding"][0].flatten(1).T
    assert_close(embedded_VD, want, "patch_embedding")
