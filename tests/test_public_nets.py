"""Networks of public models against golden outputs of the reference, through their key maps."""
import re

import pytest
import torch

import golden_recipe
from common import make_net

def near(a, b, tolerance=2e-5):
    return a.shape == b.shape and (a - b).abs().max() <= tolerance

def renamed(net, layout):
    """{their key: ours}."""
    def theirs(key):
        for ours, their in net.layouts[layout]:
            key = re.sub(ours, their, key)
        return key
    return {theirs(key): key for key in net.state_dict()}

def load(net, weights, layout="public"):
    names = renamed(net, layout)
    net.load_state_dict({names[key]: v for key, v in weights.items()}, strict=False)
    assert {k for k in names if k not in weights} <= {"pos_embed"}
    return net.eval()

DIT = dict(x_shape=(4, 8, 8), dim=32, depth=3, heads=4, label_dim=10)

@pytest.mark.parametrize("name, size, options, time, sign", [
    ("dit", "dit_s2", {}, lambda t: t / 1000, 1), ("sit", "sit_s2", {}, lambda t: 1 - t, -1),
    ("fastgen_dit_r_abs", "dit_s2", dict(learn_sigma=False, r=True, logvar=True), lambda t: t, 1),
    ("fastgen_dit_r_diff", "dit_s2", dict(learn_sigma=False, r=True, logvar=True, r_kind="diff"), lambda t: t, 1)])
def test_dit_and_sit_equal_the_reference(name, size, options, time, sign):
    info, want, weights = golden_recipe.load(name)
    net = load(make_net(f"dit:{size}", **DIT | options), weights, "fastgen" if "fastgen" in name else "public")
    x, inputs = golden_recipe.tensor("x", (2, 4, 8, 8)), info["inputs"]
    t = torch.tensor(inputs["t"]).double()              # the reference had float32
    kw = dict(r=torch.tensor(inputs["r"]).double(), logvar=True) if "r" in inputs else {}
    label = torch.tensor([3, -1])
    got = net(x, time(t), dict(label=label), taps=tuple(range(3)), **kw)
    assert near(sign * got["out"], want["out"][:, :4])
    for k, tap in enumerate(got["taps"]):
        for key in (f"feat_block{k}", f"feat{k}"):
            assert key not in want or near(tap.flatten(2).mT, want[key])
    assert "logvar" not in want or near(got["logvar"][:, None], want["logvar"])
    assert "pos_embed" not in want or near(net.pos_embed, want["pos_embed"], 1e-6)
