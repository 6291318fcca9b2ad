"""nets/edm.py, nets/discriminators.py and tools/convert_edm.py; what every net must do is in test_nets.py."""
import os
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import golden_recipe
from common import make_net
from nets import edm
from nets.discriminators import UNetHead, group_norm
from run import differing, refused
from tools import convert_edm

f64 = torch.float64

def golden(name, same=True, **options):
    """(our net for a fixture's constructor arguments, the reference's outputs, x, t, cond, r). The net is
    filled as the trainer does it: through adapt; what the recipe keeps (resample filters) stays as built."""
    info, want, weights = golden_recipe.load(name)
    c, given, size = info["config"], info["inputs"], info["config"]["img_resolution"]
    kw = dict(x_shape=(c["img_channels"], size, size), width=c["model_channels"], mult=c["channel_mult"],
              blocks=c["num_blocks"], attn=c["attn_resolutions"], dropout=c["dropout"],
              label_dim=c["label_dim"], augment_dim=c["augment_dim"])
    kw |= dict(adm=True, emb_mult=c["channel_mult_emb"]) if c["model_type"] == "DhariwalUNet" else dict(
        noise_mult=c["channel_mult_noise"], fourier=c["embedding_type"] == "fourier",
        residual=c["encoder_type"] == "residual", resample=c["resample_filter"])
    net = edm.EDM(**kw | options).eval()
    fit = {key: a for key, w in weights.items() if (a := net.adapt(key, w)) is not None}
    left, unknown = net.load_state_dict(fit, strict=False)
    assert not unknown and all(key.endswith("resample_filter") for key in left)
    shapes = {key: list(v.shape) for key, v in net.state_dict().items()}
    assert not same or shapes == {key: shape for key, shape, _ in info["state_dict"]}
    t, r = (torch.tensor(v, dtype=f64) for v in (given.get("sigma") or given["t"], given.get("r", 0)))
    cond = dict(label=torch.tensor([1, 3]))
    if given.get("augment_labels"):
        cond["augment"] = golden_recipe.tensor("aug", (2, 9), 1.0)
    return net, want, golden_recipe.tensor("x", (2, 3, 8, 8)), t, cond, r

def near(a, b):
    return a.shape == b.shape and (a - b).abs().max() <= 2e-5

@pytest.mark.parametrize("name", ["edm_ddpmpp", "edm_ncsnpp", "edm_adm"])
def test_outputs_equal_the_reference(name):
    net, want, x, t, cond, _ = golden(name)
    taps, raw = tuple(range(net.n_taps)), []
    net.model.register_forward_hook(lambda module, args, out: raw.append(out[0]))
    got = net(x, t, cond, taps=taps)
    features = [v for key, v in want.items() if key.startswith("feat_")]
    assert near(got["out"], want["D"]) and near(raw[0], want["F"]) and near(net(x, t), want["D_uncond"])
    assert len(features) == len(taps) and all(map(near, got["taps"], features))

def test_outputs_with_r_and_logvar_or_without_augment_equal_the_reference():
    net, want, x, t, cond, r = golden("fastgen_edm_ddpmpp_r", r=True, logvar=True)
    got = net(x, t, cond, r=r, taps=(0, 1), logvar=True)
    assert near(got["out"], want["D"]) and near(got["logvar"], want["logvar"][:, 0])
    assert near(got["taps"][0], want["feat0"]) and near(got["taps"][1], want["feat1"])
    assert near(net(x, t, cond, r=r, taps=(1,), stop=True)["taps"][0], want["early1"])
    net, want, x, t, cond, _ = golden("edm_ddpmpp", same=False, augment_dim=0)      # its weights are dropped
    assert near(net(x, t, dict(augment=cond["augment"])), want["D_uncond"])

def test_public_sizes_have_the_published_parameter_counts():
    count = lambda net: sum(p.numel() for p in net.parameters())
    with torch.device("meta"):
        cifar, digits = make_net("edm:cifar10", logvar=True), make_net("edm:digits")
        assert count(cifar) == 55_735_428 and 4.2e5 < count(digits) < 4.8e5     # FastGen's, with the head
        assert count(make_net("edm:imagenet64", logvar=True)) == 295_899_460
        assert count(make_net("edm:cifar10,label_dim=0", logvar=True)) == 55_734_020
        assert 9.4e6 < count(UNetHead(cifar.tap_shapes((0, 1, 2)))) < 9.5e6             # FastGen: 9.44 M
    assert cifar.tap_shapes((2, 0)) == [(256, 32, 32), (256, 8, 8)] and digits.sigma_data == 0.75

def test_weights_start_as_published_and_a_label_beyond_the_classes_is_refused():
    bound = lambda w, b: 0.9 * b < w.abs().max() <= b * (1 + 1e-6)
    net = make_net("edm:digits")
    block = net.model.enc["4x4_block0"]                                     # 32 -> 48 channels
    assert bound(block.conv0.weight, (6 / (9 * 32 + 9 * 48)) ** 0.5) and not block.conv0.bias.any()
    assert bound(block.conv1.weight, 1e-5 * (6 / (9 * 48 * 2)) ** 0.5)
    assert bound(block.qkv.weight, (0.2 * 6 / (48 + 144)) ** 0.5)
    x, t, times = torch.randn(2, 1, 8, 8), torch.tensor([0.1, 5.0], dtype=f64), []
    c_skip = (0.75 ** 2 / (t ** 2 + 0.75 ** 2)).float()[:, None, None, None]
    assert (net(x, t) - c_skip * x).abs().max() < 1e-4                      # F starts at 0
    net.model.map_noise.register_forward_hook(lambda module, args, out: times.append(args[0]))
    assert (net.bfloat16()(x, t) - c_skip * x).abs().max() < 1e-4           # no type of weights rounds x_t,
    assert (times[0] - t.log() / 4).abs().max() < 1e-6                      # or t
    refused(net, x, t, dict(label=torch.tensor([0, 10])), says=["label 10 is not below"])
    adm = edm.EDM((3, 8, 8), label_dim=4, width=64, mult=(1,), blocks=1, attn=(8,), adm=True).model
    block = adm.enc["8x8_block0"]
    assert bound(block.conv0.weight, (9 * 64) ** -0.5) and 0.9 < adm.map_label.weight.std() < 1.1
    assert not any(w.any() for w in (block.conv1.weight, block.proj.weight, adm.out_conv.bias))
    assert [group_norm(c).num_groups for c in (8, 48, 64, 768)] == [2, 12, 16, 32]

# ---- the converter; pickles are made as torch_utils.persistence makes them, with every trap we know of
class Runs:
    """A pickle of it calls `function` when plainly loaded."""
    def __init__(self, function, argument):
        self.call = function, (argument,)
    def __reduce__(self):
        return self.call

def reference(monkeypatch, tmp_path):
    """(network as in NVIDIA's releases, files that exist only if something of the pickle was run)."""
    flags = [tmp_path / name for name in ("eval", "module_src")]
    def _reconstruct_persistent_obj(meta):
        exec(meta.module_src, {})
    class EasyDict(dict):
        __getattr__ = dict.__getitem__
    class Persistent(nn.Module):
        def __reduce__(self):
            meta = EasyDict(type="class", version=6, module_src=f"open({str(flags[1])!r}, 'w')",
                            class_name="Net", state=self.__dict__)
            return _reconstruct_persistent_obj, (meta,), None
    for name, thing in ("torch_utils.persistence", _reconstruct_persistent_obj), ("dnnlib.util", EasyDict):
        thing.__module__, thing.__qualname__ = name, thing.__name__
        monkeypatch.setitem(sys.modules, name.split(".")[0], types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{thing.__name__: thing}))
    net, part = Persistent(), Persistent()
    part.weight = nn.Parameter(torch.randn(3, 2))
    part.register_parameter("absent", None)
    part.register_buffer("resample_filter", torch.randn(1, 1, 2, 2))
    part.register_buffer("scratch", torch.randn(2), persistent=False)
    net.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float16))
    net.enc = nn.ModuleDict({"8x8_conv": part, "8x8_block0": nn.Linear(2, 2)})
    net.sigma_max, net.where, net.kind = np.float64(80), torch.device("cpu"), torch.int
    net.evil = [Runs(eval, f"open({str(flags[0])!r}, 'w')")]
    return net, flags

def test_converted_weights_equal_the_state_dict_and_nothing_runs(monkeypatch, tmp_path, capsys):
    net, flags = reference(monkeypatch, tmp_path)
    file, target = tmp_path / "net.pkl", str(tmp_path / "net.pth")
    for protocol, content in (3, dict(loss_fn=net.evil, ema=net, model=None)), (4, net):
        file.write_bytes(pickle.dumps(content, protocol))
        convert_edm.main([str(file), target])
        said, weights = capsys.readouterr().out, torch.load(target)
        assert "5 tensors" in said and "builtins.eval" in said
        assert "enc.8x8_conv.weight" in weights and "enc.8x8_conv.scratch" not in weights
        assert differing(weights, dict(net.state_dict())) == [] and not any(flag.exists() for flag in flags)
    pickle.loads(file.read_bytes())
    assert all(flag.exists() for flag in flags)     # the traps work: a plain load runs them

def test_what_cannot_be_converted_is_one_sentence(tmp_path):
    trap = Runs(torch.storage._load_from_bytes, pickle.dumps(Runs(os.getcwd, None)))
    half = pickle.dumps(dict(ema=list(range(1000))))[:500]
    for content, says in ((half, "is not readable"), (pickle.dumps(trap), "is not readable"),
                          (pickle.dumps(dict(a=1)), "holds no network")):
        (tmp_path / "x.pkl").write_bytes(content)
        refused(convert_edm.read, tmp_path / "x.pkl", says=["x.pkl " + says])
