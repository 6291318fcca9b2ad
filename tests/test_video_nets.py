"""Networks of public video models against golden outputs, the installed diffusers classes and pipelines."""
import pytest
import torch
from einops import rearrange

import golden_recipe
from common import make_net
from nets import cogvideox
from run import refused
from test_public_nets import load, near

# ---- CogVideoX, Cosmos-Predict2
COG = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2, time_dim=12, text_dim=10)

def tokens(x):
    return rearrange(x, "b c t (h p) (w q) -> b (t h w) (c p q)", p=2, q=2)

@pytest.mark.parametrize("name", ["2b", "5b"])
def test_cogvideox_equals_the_reference(name):
    info, want, weights = golden_recipe.load(f"cogvideox{name}")
    net = load(make_net(f"cogvideox:{name}", **COG), weights)
    x, text = golden_recipe.tensor("x", (2, 3, 4, 4, 6)), golden_recipe.tensor("context", (2, 5, 10))
    t = torch.tensor(info["inputs"]["t"]).double() / 1000
    got = net(x.transpose(1, 2), t, dict(text=text), taps=(0, 1))
    assert near(got["out"].transpose(1, 2), want["out"])
    for k, tap in enumerate(got["taps"]):
        assert near(tokens(tap), want[f"feat_block{k}"])
