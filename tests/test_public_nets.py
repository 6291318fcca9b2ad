"""Networks of public models against golden outputs of the reference, through their key maps."""
import copy
import json
import math
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from einops import rearrange
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import golden_recipe
import shard
from common import make_net
from nets import dit, edm2, flux, qwen_image, sd
from nets.discriminators import Head, ImageDiTHead, UNetHead, VideoDiTHead
from nets.layers import dynamic_mu, sigma_grid
from run import refused

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
SD = dict(x_shape=(4, 8, 8), width=32, mult=(1, 2, 2), text_dim=24, groups=8)
SDS = dict(sd15=SD | dict(depths=(1, 1, 0), heads=(4, 4, 4)),
           sdxl=SD | dict(depths=(0, 2, 3), heads=(2, 4, 8), pooled_dim=16, id_dim=8))
ROPE = dict(heads=2, dim=32, axes=(4, 6, 6), text_dim=24)
FLOW = dict(flux=("flux:dev", dict(x_shape=(4, 4, 6), depth=2, single_depth=2, pooled_dim=20) | ROPE),
            qwen=("qwen_image:base", dict(x_shape=(4, 6, 10), depth=3) | ROPE))
FASTGEN = DIT | dict(learn_sigma=False, r=True, logvar=True)
GOLDEN = dict(                           # and the taps of which a fixture holds the features
    dit=("dit:dit_s2", DIT, (0, 1, 2)), sit=("dit:sit_s2", DIT, (0, 1, 2)),
    fastgen_dit_r_abs=("dit:dit_s2", FASTGEN, (0, 2)),
    fastgen_dit_r_diff=("dit:dit_s2", FASTGEN | dict(r_kind="diff"), (0, 2)),
    sd15=("sd:sd15", SDS["sd15"], (0, 1, 2, 3)), sd15_mask=("sd:sd15", SDS["sd15"], (3,)),
    sdxl=("sd:sdxl", SDS["sdxl"], (0, 1, 2, 3)), flux=(*FLOW["flux"], (0, 1, 2, 3)),
    qwen=(*FLOW["qwen"], (0, 1, 2)))

def tokens(x):
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)

@pytest.mark.parametrize("name", GOLDEN)
def test_nets_of_images_equal_the_reference(name):
    (info, want, weights), (spec, options, taps) = golden_recipe.load(name), GOLDEN[name]
    net = load(make_net(spec, **options), weights, "fastgen" if "fastgen" in name else "public")
    given, draw, length = info["inputs"], golden_recipe.tensor, 7 if "sd" in name else 5
    t = torch.tensor(given["t"]).double()               # the references count it in their own way
    t = 1 - t if name == "sit" else t / 1000 if t.max() > 1 else t
    cond = dict(label=torch.tensor([3, -1]), guidance=torch.tensor([3.5, 1.0]),
                text=draw("context", (2, length, 24)))
    cond["pooled"] = draw("pooled", (2, options.get("pooled_dim", 0)))
    if name not in ("sd15", "sdxl"):                    # flux does not look at it
        cond["text_mask"] = torch.arange(length) < torch.tensor([[length], [length // 2 + 1]])
    cond |= {key: torch.tensor(given[key]) for key in ("time_ids",) if key in given}
    kw = dict(r=torch.tensor(given["r"]).double(), logvar=True) if "r" in given else {}
    got = net(draw("x", (2, *net.x_shape)), t, cond, taps=taps, **kw)
    # flux: guidance 3.5 makes angles of 3500, where exp's last digit counts: diffusers itself is 2.5e-5 off
    tolerance = 5e-5 if name == "flux" else 2e-5
    out = tokens(got["out"]) if name in FLOW else -got["out"] if name == "sit" else got["out"]
    assert near(out, want["out"] if name in FLOW else want["out"][:, :4], tolerance)
    for tap, v in zip(got["taps"], [v for key, v in want.items() if "feat" in key], strict=True):
        assert near(tap, v if v.ndim == 4 else v.mT.reshape(tap.shape), tolerance)
    assert "logvar" not in want or near(got["logvar"][:, None], want["logvar"])
    assert "pos_embed" not in want or near(net.pos_embed, want["pos_embed"], 1e-6)

@pytest.mark.parametrize("steps, guidance", [(1, 1.0), (7, 1.0), (7, 4.0)])
@torch.no_grad()
def test_dit_teacher_samples_as_the_public_scheduler(steps, guidance):
    diffusers = pytest.importorskip("diffusers")
    net = load(make_net("dit:dit_s2", **DIT), golden_recipe.load("dit")[2])
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=False)
    scheduler.set_timesteps(steps)
    z, cond, uncond = torch.randn(2, 4, 8, 8), *(dict(label=torch.tensor(v)) for v in ([1, 5], [-1, -1]))
    x = z
    for t in scheduler.timesteps:
        eps, empty = (net(x, (t / 1000).double().expand(2), c) for c in (cond, uncond))
        x = scheduler.step(empty + guidance * (eps - empty), t, x).prev_sample
    got = dit.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance)
    assert near(got, x, 1e-5 * x.abs().max())           # of a random net they reach 100

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
    net.unet.register_forward_hook(lambda module, args, out: raw.append(out))
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
def test_heads_equal_the_reference_and_those_of_public_models_have_its_sizes():
    for name, kind in (("disc_edm", UNetHead), ("disc_image_dit", ImageDiTHead),
                       ("disc_video_dit_simple_conv3d", VideoDiTHead)):
        info, want, weights = golden_recipe.load(name)
        head = kind([shape[1:] for shape in info["feats"]])
        head.load_state_dict(weights)
        features = [golden_recipe.tensor(f"feat{i}", shape) for i, shape in enumerate(info["feats"])]
        assert near(head(features), want["logits"])
        refused(head, features * 2, says=["tap_shapes"])
    with torch.device("meta"):      # SD 1.5 and SDXL at their last taps, Flux, Wan; millions as FastGen's
        for kind, shape, millions in ((UNetHead, (1280, 8, 8), 52.4), (UNetHead, (1280, 32, 32), 104.9),
                                      (ImageDiTHead, (3072, 64, 64), 75.5),
                                      (VideoDiTHead, (384, 21, 60, 104), 2.4)):
            head = kind([shape])
            assert abs(sum(p.numel() for p in head.parameters()) / 1e6 - millions) < 0.1
            assert [type(head.get_submodule(name)) for name in head.blocks] == [Head]

# ---- Stable Diffusion 1.5 and XL
def unet(size, mult=(1, 2, 2), **options):
    """The module diffusers, its net with random weights, ours with the same."""
    diffusers, config = pytest.importorskip("diffusers"), golden_recipe.load(size)[0]["config"]
    torch.manual_seed(0)
    reference = diffusers.UNet2DConditionModel(
        **config | dict(block_out_channels=[32 * m for m in mult], sample_size=8))
    net = make_net(f"sd:{size}", **SDS[size] | dict(mult=mult) | options)
    net.load_state_dict(reference.state_dict())
    return diffusers, reference.eval(), net.eval()

@pytest.mark.parametrize("size, mult, shape", [("sd15", (1, 3, 2), (12, 20)), ("sdxl", (1, 3, 4), (7, 13))])
@torch.no_grad()
def test_sd_equals_diffusers_at_another_size_and_each_condition_counts(size, mult, shape):
    _, reference, net = unet(size, mult)
    x, t = torch.randn(3, 4, *shape), torch.tensor([0.0, 0.5005, 0.999]).double()
    cond = dict(text=torch.randn(3, 9, 24), text_mask=(torch.rand(3, 9) < 0.6).long())
    cond |= dict(pooled=torch.randn(3, 16), time_ids=torch.randint(2000, (3, 6))) if size == "sdxl" else {}
    added = dict(text_embeds=cond.get("pooled"), time_ids=cond.get("time_ids"))
    out = net(x, t, cond)
    assert near(out, reference(x, 1000 * t, cond["text"], encoder_attention_mask=cond["text_mask"],
                               added_cond_kwargs=added).sample)
    for key in cond:
        less = {k: v for k, v in cond.items() if k != key}
        less |= {key: cond[key] + 1} if key in ("text", "pooled") else {}
        assert not near(net(x, t, less), out, 1e-3)
    if size == "sdxl":                                  # which no bfloat16 tells apart
        sizes = [cond | dict(time_ids=torch.full((3, 6), pixels)) for pixels in (1023.0, 1024.0)]
        assert not torch.equal(*(net.bfloat16()(x, t, c) for c in sizes))

def scheduler(name, **changes):
    """That of the public pipeline."""
    betas = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
                 timestep_spacing="leading")
    shift, flow = dict(use_dynamic_shifting=True, base_shift=0.5), "FlowMatchEulerDiscreteScheduler"
    kind, own = dict(
        sd15=("PNDMScheduler", betas | dict(skip_prk_steps=True, set_alpha_to_one=False)),
        sdxl=("EulerDiscreteScheduler", betas), flux=(flow, shift | dict(max_shift=1.15)),
        qwen=(flow, shift | dict(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)))[name]
    return getattr(pytest.importorskip("diffusers"), kind)(**own | changes)

@pytest.mark.parametrize("size, pred, steps, guidance", [
    ("sd15", "eps", 1, 1.0), ("sd15", "eps", 3, 1.0), ("sd15", "eps", 7, 5.0), ("sd15", "v", 6, 3.0),
    ("sdxl", "eps", 3, 1.0), ("sdxl", "eps", 7, 5.0), ("sdxl", "v", 6, 3.0)])
@torch.no_grad()
def test_sd_teacher_samples_as_the_public_pipeline(size, pred, steps, guidance):
    diffusers, reference, net = unet(size, pred=pred)
    kind = dict(eps="epsilon", v="v_prediction")[pred]
    draw = lambda: dict(prompt_embeds=torch.randn(2, 7, 24), pooled_prompt_embeds=torch.randn(2, 16))
    z, absent, given, negative = torch.randn(2, 4, 8, 8), ["vae", "text_encoder", "tokenizer"], draw(), draw()
    cond, uncond = (dict(zip(("text", "pooled"), each.values())) for each in (given, negative))
    if size == "sd15":
        make, absent = diffusers.StableDiffusionPipeline, absent + ["safety_checker", "feature_extractor"]
        del given["pooled_prompt_embeds"], negative["pooled_prompt_embeds"]
    else:
        make, absent = diffusers.StableDiffusionXLPipeline, absent + ["text_encoder_2", "tokenizer_2"]
    pipeline = make(**dict.fromkeys(absent), unet=reference, scheduler=scheduler(size, prediction_type=kind))
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(**given, **{f"negative_{k}": v for k, v in negative.items()}, latents=z.clone(),
                    num_inference_steps=steps, guidance_scale=guidance, output_type="latent").images
    assert near(sd.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance), want, 1e-4)

@pytest.mark.parametrize("name, spec", [
    ("flux", "flux:dev"), ("qwen", "qwen_image:base"), ("sd15", "sd:sd15"), ("sdxl", "sd:sdxl"),
    ("cog2b", "cogvideox:2b"), ("cog5b", "cogvideox:5b"), ("cosmos2-2b-t2i", "cosmos_predict2:t2i_2b"),
    ("cosmos2-14b-v2w", "cosmos_predict2:v2w_14b"), ("cosmos25-2b", "cosmos_predict2:2.5_2b"),
    ("cosmos25-14b", "cosmos_predict2:2.5_14b"),
    ("wan1.3b", "wan:t2v_1_3b"), ("wan14b", "wan:t2v_14b"), ("wan5b", "wan:ti2v_5b"),
    ("wani2v14b", "wan:i2v_14b"), ("vace1.3b", "wan:vace_1_3b"), ("vace14b", "wan:vace_14b")])
def test_full_sizes_have_the_public_keys(name, spec):
    with torch.device("meta"):
        net = make_net(spec)
    want, own = json.loads((golden_recipe.folder / "full_size_keys.json").read_text())[name], net.state_dict()
    assert sum(p.numel() for p in net.parameters()) == want["params"]
    kind, wanted, names = re.compile(r"\.(\d+|{i})(?=\.)"), Counter(), renamed(net, "public")
    for key, shape, n in want["keys"]:
        wanted[kind.sub(".#", key), tuple(shape)] += n
    assert Counter((kind.sub(".#", key), tuple(own[ours].shape)) for key, ours in names.items()) == wanted
    assert len(names) == want["tensors"]

# ---- Flux, Qwen-Image
PAIR = dict(x_shape=(8, 4, 4), dim=48, heads=3, axes=(4, 4, 8), text_dim=20)
PAIRS = dict(flux=PAIR | dict(depth=1, single_depth=3, pooled_dim=12), qwen=PAIR | dict(depth=2))

def pair(name):
    """Of diffusers, with random weights: the transformer, a pipeline around it; ours with these weights."""
    diffusers, heads = pytest.importorskip("diffusers"), dict(attention_head_dim=16, num_attention_heads=3)
    sizes = dict(joint_attention_dim=20, axes_dims_rope=(4, 4, 8), in_channels=32, **heads)
    torch.manual_seed(0)
    if name == "flux":
        ref = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=3, pooled_projection_dim=12,
                                               guidance_embeds=True, **sizes)
        pipe = diffusers.FluxPipeline(None, None, None, None, None, None, ref)
    else:
        ref = diffusers.QwenImageTransformer2DModel(num_layers=2, out_channels=8, **sizes)
        pipe = diffusers.QwenImagePipeline(None, None, None, None, ref)
    pipe.scheduler = scheduler(name)
    pipe.set_progress_bar_config(disable=True)
    for p in ref.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    net = make_net(FLOW[name][0], **PAIRS[name])
    net.load_state_dict(ref.state_dict())
    return ref.eval(), pipe, net.eval()

def prompt(length=7):
    return dict(text=torch.randn(3, length, 20), pooled=torch.randn(3, 12),
                text_mask=torch.arange(length) < torch.tensor([[length], [1], [4]]),
                guidance=torch.tensor([1.0, 3.5, 9.0]))

@pytest.mark.parametrize("height, width", [(6, 14), (10, 4)])
@pytest.mark.parametrize("name", FLOW)
def test_flux_and_qwen_image_equal_diffusers_at_other_sizes(name, height, width):
    (ref, _, net), cond, h, w = pair(name), prompt(), height // 2, width // 2
    x, t = torch.randn(3, 8, height, width), torch.tensor([1.0, 0.62, 0.01])
    ids = torch.tensor([[0.0, i, j] for i in range(h) for j in range(w)])
    kw = dict(txt_ids=torch.zeros(7, 3), img_ids=ids, pooled_projections=cond["pooled"],
              guidance=cond["guidance"])
    if name == "qwen":
        kw = dict(img_shapes=[[(1, h, w)]] * 3, encoder_hidden_states_mask=cond["text_mask"])
    want = ref(tokens(x), cond["text"], timestep=t, **kw).sample
    assert near(tokens(net(x, t.double(), cond)), want)

@pytest.mark.parametrize("steps, guidance", [(2, 1.0), (2, 4.0), (7, 2.5)])
@pytest.mark.parametrize("name, module", [("flux", flux), ("qwen", qwen_image)])
def test_teacher_of_flux_and_qwen_image_samples_as_the_pipeline(name, module, steps, guidance):
    (_, pipe, net), cond, uncond = pair(name), prompt(), prompt(7 if name == "flux" else 4)
    z, kw = torch.randn(3, 8, 12, 20), {}
    if name == "flux":
        net.embed_guidance = kw["guidance_scale"] = 2.0
        del cond["guidance"], uncond["guidance"]
    second = ("pooled", "pooled_prompt_embeds") if name == "flux" else ("text_mask", "prompt_embeds_mask")
    for key, theirs in (("text", "prompt_embeds"), second):
        kw |= {theirs: cond[key], f"negative_{theirs}": uncond[key]}
    want = pipe(latents=tokens(z), height=96, width=160, num_inference_steps=steps, output_type="latent",
                true_cfg_scale=guidance, **kw).images
    got = module.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance)
    assert near(tokens(got), want, 1e-4) and not near(tokens(got), tokens(z), 0.1)

def test_times_of_the_flow_samplers_in_closed_form():
    assert sigma_grid(4) == [1, 0.75, 0.5, 0.25, 0] and sigma_grid(1, 3.0, 0.02) == [1, 0]
    assert sigma_grid(2, math.log(3)) == pytest.approx([1, 0.75, 0])            # 3 s / (1 + 2 s)
    assert sigma_grid(4, 0.0, 0.1) == pytest.approx([1, 0.7, 0.4, 0.1, 0])      # linear: stays so
    assert sigma_grid(2, 0.9, 0.02) == pytest.approx([1, 0.02, 0])
    assert [dynamic_mu(n, (256, 0.5), (4096, 1.15)) for n in (256, 2176, 4096)] == [0.5, 0.825, 1.15]
