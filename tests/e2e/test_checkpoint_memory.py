"""Host memory while a checkpoint is loaded: below 1.3 shards and the reduced result, measured in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from worldmodel.checkpoint.plan import PlannedTensor, shard
from worldmodel.checkpoint.writer import RandomSource, write_file

ROOT = Path(__file__).resolve().parents[2]
SIDE, NUM_LAYERS, LAYERS_PER_SHARD = 2048, 16, 8
LAYER_BYTES = 4 * SIDE * SIDE
SHARD_BYTES = LAYERS_PER_SHARD * LAYER_BYTES
RESULT_BYTES = NUM_LAYERS * LAYER_BYTES // 2

CHILD = f"""
import json, re, sys
from pathlib import Path
import torch
from torch import nn
from worldmodel.checkpoint.diffusers import open_checkpoint

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
with torch.device("meta"):
    net = nn.ModuleList(nn.Linear({SIDE}, {SIDE}, bias=False) for _ in range({NUM_LAYERS}))
component = open_checkpoint(sys.argv[1]).component("net")
torch.zeros(1000).bfloat16()
before = kilobytes("VmRSS")
component.load_into(net, dtype=torch.bfloat16)
peak_bytes = 1024 * (kilobytes("VmHWM") - before)
print(json.dumps({{"peak_bytes": peak_bytes, "sum": int(net[3].weight.view(torch.int16).long().sum())}}))
"""


def test_loading_takes_little_more_than_its_result(tmp_path: Path) -> None:
    tensors = [
        PlannedTensor(name=f"{number}.weight", key=f"{number}", shape=(SIDE, SIDE), dtype="F32")
        for number in range(NUM_LAYERS)
    ]
    files, index = shard(tensors, "net", "model", gains={}, tensors_per_shard=LAYERS_PER_SHARD)
    source = RandomSource(seed=0)
    for file in files:
        assert write_file(file, tmp_path, source).stat().st_size > SHARD_BYTES
    contents = {**index, "net/config.json": {}, "model_index.json": {"net": ["here", "Net"]}}
    for path, content in contents.items():
        (tmp_path / path).write_text(json.dumps(content))
    child = [sys.executable, "-c", CHILD, str(tmp_path)]
    ended = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(ended.stdout)
    assert found["peak_bytes"] >= RESULT_BYTES
    assert found["peak_bytes"] < 1.3 * SHARD_BYTES + RESULT_BYTES
    # Of the bits: a sum of floats depends on the number of threads.
    expected = source.tensor(tensors[3], {}).bfloat16().view(torch.int16).long().sum()
    assert found["sum"] == int(expected)
