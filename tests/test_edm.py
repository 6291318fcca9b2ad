"""nets/edm.py, nets/edm2.py and tools/convert_edm.py; what every net must do is in test_nets.py."""
import copy
import os
import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import golden_recipe
import shard
from common import make_net
from families import FAMILIES, f64, load, make, near
from nets import edm2
from nets.discriminators import UNetHead, group_norm
from run import differing, refused
from tools import convert_edm

def count(net):
    return sum(p.numel() for p in net.parameters())

def test_public_sizes_have_the_published_parameter_counts_taps_and_dropout():
    with torch.device("meta"):
        cifar, digits = make_net("edm:cifar10", logvar=True), make_net("edm:digits")
        assert count(cifar) == 55_735_428 and 4.2e5 < count(digits) < 4.8e5     # FastGen's, with the head
        assert count(make_net("edm:imagenet64", logvar=True)) == 295_899_460
        assert count(make_net("edm:cifar10,label_dim=0", logvar=True)) == 55_734_020
        assert 9.4e6 < count(UNetHead(cifar.tap_shapes((0, 1, 2)))) < 9.5e6             # FastGen: 9.44 M
        assert cifar.tap_shapes((2, 0)) == [(256, 32, 32), (256, 8, 8)] and digits.sigma_data == 0.75
        assert [count(make_net(f"edm2:{size}")) for size in edm2.sizes] == [
            280_209_253, 497_803_045, 777_492_197, 1_119_276_709]
        net = make_net("edm2:imagenet64_s,dropout=0.4,dropout_res=16")
    assert net.tap_shapes(range(4)) == [(192, 64, 64), (384, 32, 32), (576, 16, 16), (768, 8, 8)]
    assert {name.split(".")[2].split("x")[0] for name in net.blocks if net.get_submodule(name).dropout} == {
        "16", "8"}

def test_a_source_with_augmentation_fills_a_net_without():
    _, want, weights = golden_recipe.load("edm_ddpmpp")
    net = load(make(FAMILIES["edm_ddpmpp"], augment_dim=0), weights)        # its weights are dropped
    x, t = golden_recipe.tensor("x", (2, 3, 8, 8)), torch.tensor([0.3, 5.0], dtype=f64)
    assert near(net(x, t, dict(augment=torch.ones(2, 9))), want["D_uncond"])

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
    adm = make(FAMILIES["edm_adm"]).model
    block = adm.enc["8x8_block0"]
    assert bound(block.conv0.weight, (9 * 64) ** -0.5) and 0.9 < adm.map_label.weight.std() < 1.1
    assert not any(w.any() for w in (block.conv1.weight, block.proj.weight, adm.out_conv.bias))
    assert [group_norm(c).num_groups for c in (8, 48, 64, 768)] == [2, 12, 16, 32]
    for bandwidth in (1.0, 0.1):
        wave = make(FAMILIES["edm2"], width=64, bandwidth=bandwidth).unet.emb_fourier
        assert 0.7 < wave.freqs.std() / (2 * torch.pi * bandwidth) < 1.3
        assert 0 < wave.phases.min() < wave.phases.max() < 2 * torch.pi

@pytest.mark.parametrize("world", [1, 2])
def test_forced_weight_normalization_gives_every_row_unit_size_whole_or_in_shards(world):
    torch.manual_seed(0)
    net = make(FAMILIES["edm2"], r=True, logvar=True)
    start, huge = copy.deepcopy(net.state_dict()), torch.full((1, 32, 4, 4), 1e4)
    assert net.unet.dec["4x4_in1"](huge, torch.ones(1, 32)).max() == 256
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)    # no one to talk to
    try:
        if world > 1:
            fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
        net.post_step()
        for key, v in net.state_dict().items():
            assert shard.sharded(v) == (world > 1 and key in dict(net.named_parameters()))
            mine = start[key][slice(*shard.rows(v))] if shard.sharded(v) else start[key]
            size = mine.square().flatten(1).mean(1).sqrt() + 1e-4 if key.endswith("weight") else mine ** 0
            assert near(shard.local(v), mine / size.reshape(-1, *[1] * (mine.ndim - 1)), 1e-5), key
    finally:
        dist.destroy_process_group()

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
