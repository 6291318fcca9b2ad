"""Networks of public models against golden outputs of the reference, through their key maps."""
import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import golden_recipe
import run
import shard
from common import make_net
from nets import dit, edm2
from nets.discriminators import ImageDiTHead, UNetHead
from test_methods import one_step

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

# ---- EDM2
EDM2 = dict(x_shape=(3, 8, 8), label_dim=4, width=16, mult=(1, 2), blocks=3, attn=(4,), head_dim=8,
            logvar=True, logvar_dim=16)

def test_edm2_equals_the_reference_before_and_after_forced_weight_normalization():
    info, want, weights = golden_recipe.load("edm2")
    net, raw = make_net("edm2:imagenet64_s", **EDM2).eval(), []
    assert net.unet.out_gain.shape == (1,) and weights["unet.out_gain"].shape == ()
    net.load_state_dict({key: net.adapt(key, v) for key, v in weights.items()})         # all keys, no other
    x, t, cond = golden_recipe.tensor("x", (2, 3, 8, 8)), info["inputs"]["sigma"], torch.tensor([1, 3])
    t, cond = torch.tensor(t).double(), dict(label=cond)
    huge = net.unet.dec["4x4_in1"](torch.full((1, 32, 4, 4), 1e4), torch.ones(1, 32))
    assert huge.max() == 256
    net.unet.register_forward_hook(lambda module, args, out: raw.append(out[0]))
    got = net(x, t, cond, taps=(0, 1), logvar=True)
    assert near(got["out"], want["D"]) and near(raw[0], want["F"]) and near(net(x, t), want["D_uncond"])
    assert near(got["logvar"], want["logvar"].flatten())
    assert near(got["taps"][0], want["feat_8x8_block2"]) and near(got["taps"][1], want["feat_4x4_block2"])
    net.post_step()
    assert near(net.unet.enc["8x8_conv"].weight, want["fwn_8x8_conv_weight"])
    assert near(net(x, t, cond), want["D_after_fwn"]) and not near(want["D"], want["D_after_fwn"])
    net = make_net("edm2:imagenet64_s", **EDM2 | dict(logvar=False))
    assert {k for k, v in weights.items() if net.adapt(k, v) is None} == {k for k in weights if "logvar" in k}

def test_edm2_has_the_published_sizes_and_options_of_recipes():
    count = lambda spec: sum(p.numel() for p in make_net(spec).parameters())
    with torch.device("meta"):
        assert {size: count(f"edm2:{size}") for size in edm2.sizes} == dict(
            imagenet64_s=280_209_253, imagenet64_m=497_803_045, imagenet64_l=777_492_197,
            imagenet64_xl=1_119_276_709)
        net = make_net("edm2:imagenet64_s,dropout=0.4,dropout_res=16")
        assert net.tap_shapes(range(4)) == [(192, 64, 64), (384, 32, 32), (576, 16, 16), (768, 8, 8)]
        apart = {name.split(".")[2].split("x")[0] for name in net.blocks if net.get_submodule(name).dropout}
        assert apart == {"16", "8"}
    for bandwidth in (1.0, 0.1):
        net = make_net(f"edm2:imagenet64_s,bandwidth={bandwidth}", **EDM2 | dict(width=64))
        assert 0.7 < net.unet.emb_fourier.freqs.std() / (2 * torch.pi * bandwidth) < 1.3
        assert 0 < net.unet.emb_fourier.phases.min() < net.unet.emb_fourier.phases.max() < 2 * torch.pi

@pytest.mark.parametrize("world", [1, 2])
def test_forced_weight_normalization_gives_every_row_unit_size_whole_or_in_shards(world):
    torch.manual_seed(0)
    net = make_net("edm2:imagenet64_s", **EDM2, r=True)
    start = copy.deepcopy(net.state_dict())
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

# ---- heads of discriminators
def test_heads_for_transformers_equal_the_reference_and_the_public_models_heads_have_its_sizes():
    info, want, weights = golden_recipe.load("disc_image_dit")
    head = ImageDiTHead([shape[1:] for shape in info["feats"]])
    head.load_state_dict(weights)
    features = [golden_recipe.tensor(f"feat{i}", shape) for i, shape in enumerate(info["feats"])]
    assert near(head(features), want["logits"])
    run.refused(head, features * 2, says=["tap_shapes"])
    with torch.device("meta"):      # SD 1.5 and SDXL at their last taps, Flux; millions as FastGen's
        for kind, shape, millions in ((UNetHead, (1280, 8, 8), 52.4), (UNetHead, (1280, 32, 32), 104.9),
                                      (ImageDiTHead, (3072, 64, 64), 75.5)):
            head = kind([shape])
            assert abs(sum(p.numel() for p in head.parameters()) / 1e6 - millions) < 0.1
            assert [type(head.get_submodule(name)) for name in head.blocks] == [torch.nn.Sequential]

@pytest.mark.parametrize("name", ["dmd2", "f_distill", "ladd"])
def test_methods_with_a_discriminator_take_steps_on_a_transformer_and_on_edm2(name, monkeypatch):
    monkeypatch.setitem(dit.sizes, "steps", dit.sizes["dit_s2"] | DIT | dict(x_shape=(1, 8, 8)))
    monkeypatch.setitem(edm2.sizes, "steps", EDM2 | dict(x_shape=(1, 8, 8), logvar=False))
    for net, kind in (("dit:steps", "cls_pred_heads"), ("edm2:steps", "discriminator_heads")):
        free = dict(t_list=(), t_min=0.0, t_max=0.0, dm_t_min=0.0, dm_t_max=0.0, t_dist="uniform",
                    dm_t_dist="uniform")
        method = run.load(name)
        cfg = run.config(method, net=net, **{k: v for k, v in free.items() if k in method.config})
        nets = run.nets_of(method, cfg)
        assert hasattr(nets["discriminator"], kind)
        for phase, it in run.phases(method, cfg).items():
            loss, logs, grads = one_step(method, nets, cfg, it)
            assert loss.isfinite() and grads and all(g.isfinite().all() for g in grads.values())
            assert any(g.any() for k, g in grads.items() if ("discriminator" in k) == (phase != "student"))
