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

COSMOS = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2, rank=8, text_dim=12)
COSMOS25 = COSMOS | dict(text_dim=20, text_proj=12)

@pytest.mark.parametrize("name, spec, options", [
    ("cosmos2_t2i", "t2i_2b", COSMOS | dict(eps=1e-5)), ("cosmos25", "2.5_2b", COSMOS25 | dict(eps=1e-5)),
    ("fastgen_cosmos25", "2.5_2b", COSMOS25)])
def test_cosmos_equals_the_reference(name, spec, options):
    info, want, weights = golden_recipe.load(name)
    net = load(make_net(f"cosmos_predict2:{spec}", **options), weights, "fastgen" if "fast" in name else "public")
    x, text = golden_recipe.tensor("x", (2, 4, 3, 4, 6)), info["inputs"]["context"]
    text = golden_recipe.tensor("context", text[1] if "fast" in name else text)
    cond = dict(text=text) | ({} if name == "cosmos25" else dict(fps=torch.tensor([16.0, 16.0])))
    if name == "cosmos2_t2i":
        got = net(x, torch.tensor(info["inputs"]["t"]).double(), cond, taps=(0, 1))
    else:                                               # the two clips have their first frame at t = 0 and 0.1
        t = torch.tensor([[0, 0.75, 0.75], [0.1, 0.2, 0.2]]).double()
        cond |= dict(condition_mask=(torch.arange(3) == 0).float()[:, None, None].expand(2, 1, 3, 1, 1),
                     condition_frames=x)
        both = []
        for net.condition_t in (0.0, 0.1):
            both.append(net(x, t, cond, taps=(0, 1)))
        got = dict(out=torch.stack([each["out"][i] for i, each in enumerate(both)]),
                   taps=[torch.stack([a[0], b[1]]) for a, b in zip(*(each["taps"] for each in both))])
        assert not got["out"][:, :, 0].any()            # x is at the given frame already
        got["out"], want["out"] = got["out"][:, :, 1:], want["out"][:, :, 1:]
    assert near(got["out"], want["out"])
    for k, tap in enumerate(got["taps"]):
        feature = want.get(f"feat{k}", want.get(f"feat_block{k}"))
        assert near(tap.flatten(2).mT, feature.flatten(1, -2))
