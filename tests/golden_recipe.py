"""Golden fixtures: golden/NAME.json (reference keys, shapes, inputs), NAME.npz (the reference's outputs).

Weights and inputs are not stored: element i of tensor `key` is an integer hash of i and CRC32 of key, scaled
by a rule. A net gets them under the reference's key names, so its rename map is tested too.
"""
import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch

folder = Path(__file__).parent / "golden"

def symmetric(key, shape):
    """Float64 numbers in [-1, 1): murmur3's finaliser of the index, seeded by the key's CRC32."""
    n = int(np.prod(shape, dtype=np.int64))
    x = (np.arange(n, dtype=np.uint64) * 0x9E3779B1 + zlib.crc32(key.encode())) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (2 * (x / 2**32) - 1).reshape(shape)

rules = dict(
    mat=lambda s: s * math.sqrt(3 / np.prod(s.shape[1:])), normw=lambda s: 1 + 0.25 * s,
    vec=lambda s: 0.25 * s, table=lambda s: 0.25 * s, gain=lambda s: 0.5 + 0.25 * s,
    freqs=lambda s: 2 * math.pi * s, phases=lambda s: math.pi * (1 + s), edm_freqs=lambda s: 16 * s,
)

def load(name):
    """(json as a dict, outputs, weights under the reference's keys without rule `keep`); float32 tensors."""
    info = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as f:
        outputs = {k: torch.from_numpy(f[k]) for k in f.files}
    weights = {key: torch.tensor(rules[rule](symmetric(key, shape)), dtype=torch.float32)
               for key, shape, rule in info["state_dict"] if rule != "keep"}
    return info, outputs, weights

def tensor(name, shape, factor=math.sqrt(3)):
    """The fixture's input of that name, float32; unit variance unless the json says another factor."""
    return torch.tensor(symmetric(f"input:{name}", shape) * factor, dtype=torch.float32)
