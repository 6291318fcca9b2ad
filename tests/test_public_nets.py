"""Networks of public models: golden outputs of the references, diffusers' classes, their pipelines, sizes."""
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

import fill
import golden_recipe
from common import make_net, predict
from families import FAMILIES, draws, f64, load, make, near, pair, shake
from nets.discriminators import Head, ImageDiTHead, UNetHead, VideoDiTHead
from nets.layers import unpack
from run import refused

FIRST = torch.tensor([1.0, 0, 0])[:, None, None].expand(2, 1, 3, 1, 1)      # a condition_mask
FASTGEN, ABS = dict(learn_sigma=False, r=True, logvar=True), dict(r=True, r_kind="abs")
GOLDEN = {name: (name, "public", {}) for name in FAMILIES if (golden_recipe.folder / f"{name}.npz").exists()}
GOLDEN |= dict(                          # file[/output]: family, layout of its keys, more options
    edm2=("edm2", "public", dict(logvar=True)), sd15_mask=("sd15", "public", {}),
    fastgen_dit_r_abs=("dit", "fastgen", FASTGEN),
    fastgen_dit_r_diff=("dit", "fastgen", FASTGEN | dict(r_kind="diff")),
    fastgen_edm_ddpmpp_r=("edm_ddpmpp", "public", dict(r=True, logvar=True)),
    wan_orig_t2v=("wan_t2v", "original", {}), wan_orig_i2v=("wan_i2v", "original", dict(image_dim=1280)),
    fastgen_cosmos25=("cosmos25", "fastgen", dict(eps=1e-6)))
GOLDEN |= {f"fastgen_wan_r/{key}": ("wan_t2v", "public", options) for key, options in dict(
    diff=dict(r=True, logvar=True), abs=ABS, no_r_skip1={}, abs_skip1=ABS,
    abs_normtemb=ABS | dict(norm_temb=True)).items()}

def inputs(given, net, name):
    """x, t, the condition and r of a fixture."""
    draw, cond = golden_recipe.tensor, {}
    for key, theirs in dict(text="context", pooled="pooled", control="control", image="image",
                            augment="augment_labels").items():
        if given.get(theirs):                           # shape, or name, shape, factor
            own, shape, *_ = given[theirs] if type(given[theirs][0]) is str else (theirs, given[theirs])
            cond[key] = draw(own.removeprefix("input:"), shape, *[1.0] * (key == "augment"))
    cond |= {key: torch.tensor(given[key]) for key in ("guidance", "time_ids") if key in given}
    cond["label"] = torch.tensor([3, -1] if "dit" in name or name == "sit" else [1, 3])
    if name in ("flux", "qwen", "sd15_mask"):           # flux does not look at it
        n = cond["text"].shape[1]
        cond["text_mask"] = torch.arange(n) < torch.tensor([[n], [n // 2 + 1]])
    if given.get("fps"):
        cond["fps"] = torch.tensor([given["fps"]] * 2)
    t = given.get("t", given.get("sigma"))
    if name == "wan22_ti2v" or "cosmos25" in name:      # said in words: a time per frame
        t = [[0, 0.999, 0.999], [0.2505] * 3] if "wan" in name else [0.75, 0.2]
    t, r = (None if v is None else torch.tensor(v, dtype=f64) for v in (t, given.get("r")))
    t, r = (v / 1000 if v is not None and t.max() > 10 else v for v in (t, r))      # they count it their way
    x = draw("x", (2, *net.x_shape))
    if "cog" in name:
        x = draw("x", (2, 3, 4, 4, 6)).transpose(1, 2)
    if "_i2v" in name:                                  # random channels beside x, even of the mask
        if name == "wan_i2v":
            x, y = draw("x", (2, 12, 3, 4, 6)).split([4, 8], dim=1)
        else:
            y, cond["image"] = draw("y", (2, 8, 3, 4, 6)), draw("clip", (2, 257, 1280))
        cond["first_frame"] = y[:, 4:]
        net.patch_embedding.register_forward_pre_hook(lambda _, args: (torch.cat([args[0][:, :4], y], 1),))
    if "cosmos25" in name:                              # their first frames have times of their own
        cond |= dict(condition_frames=x, condition_mask=FIRST)
        net.condition_t = torch.tensor([[0.0], [0.1]], dtype=f64)
    return x, 1 - t if name == "sit" else t, cond, r

def feature(v, tap, name):
    """A reference's feature (B, N, D), (B, T, h, w, D) or (B, D, H, W) in the shape of our tap."""
    order = "(p q c)" if "wan" in name else "(c p q)"
    if "wan" in name or "cog" in name:
        return rearrange(v, f"b (t h w) {order} -> b c t (h p) (w q)", h=2, w=3, p=2, q=2)
    return v if v.shape == tap.shape else v.flatten(1, -2).mT.reshape(tap.shape)

@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_nets_equal_their_references(name):
    (family, layout, options), (file, _, key) = GOLDEN[name], name.partition("/")
    info, want, weights = golden_recipe.load(file)
    net = load(make(FAMILIES[family], **options), weights, layout)
    x, t, cond, r = inputs(info["inputs"], net, file)
    if key:
        want = {k[len(key) + 1:] or "out": v for k, v in want.items() if k.startswith(key)}
    feats = {k: v for k, v in want.items() if "feat" in k and k != "feat_vace1" and name != "sd15_mask"}
    if name == "wan_vace":                              # its second hint counts half; features lack hints
        for p in net.vace_blocks[1].proj_out.parameters():
            p.data.mul_(0.5)
        feats["feat_block0"] += feats.pop("feat_vace0")
        feats["feat_block2"] += want["feat_vace1"] / 2
    taps = [int(k[-1]) if re.search(r"feat\d$", k) else i for i, k in enumerate(feats)]
    got = net(x, t, cond, r=r if "r" in options else None, taps=taps, logvar="logvar" in options,
              skip=(1,) if "skip" in key else ())
    got = got if type(got) is dict else dict(out=got)
    # flux: guidance 3.5 makes angles of 3500, where exp's last digit counts: diffusers itself is 2.5e-5 off
    tolerance, out, ref = 5e-5 if name == "flux" else 2e-5, got["out"], want.get("out", want.get("D"))
    if name in ("flux", "qwen"):
        ref = unpack(ref, x.shape[2] // 2)
    out, ref = -out if name == "sit" else out, ref.transpose(1, 2) if "cog" in name else ref[:, :x.shape[1]]
    if "cosmos25" in name:                              # but for the given frames
        out, ref = out[:, :, 1:], ref[:, :, 1:]
    assert near(out, ref, tolerance)
    assert all(near(tap, feature(v, tap, name), tolerance)
               for tap, v in zip(got.get("taps", ()), feats.values(), strict=True))
    assert "logvar" not in want or near(got["logvar"], want["logvar"].flatten())
    assert "D_uncond" not in want or near(net(x, t), want["D_uncond"])
    assert "pos_embed" not in want or near(net.pos_embed, want["pos_embed"], 1e-6)
    if "D_after_fwn" in want:                           # EDM2's forced weight normalization
        net.post_step()
        assert near(net(x, t, cond), want["D_after_fwn"]) and not near(want["D"], want["D_after_fwn"])

# ---- diffusers' classes with fresh weights at other sizes, in pipelines; of images: test_text_to_image.py
class Part:
    """In the place of a VAE, which gives these latents, and of a safety checker."""
    dtype, temperal_downsample = torch.float32, (False, True, True)
    config = SimpleNamespace(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, z_dim=4)
    latents = torch.randn(1, 4, 3, 6, 10, generator=torch.Generator().manual_seed(3))
    to = encode = lambda self, _: self

def pipeline(name, ref, shift, z, cond, monkeypatch):
    """The official one around a transformer, what it is called with besides texts, what ours is."""
    import diffusers
    flow = dict(prediction_type="flow_prediction", use_flow_sigmas=True)
    if "cog" in name:
        return diffusers.CogVideoXPipeline(None, None, None, ref, diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
            snr_shift_scale=3.0 if "2b" in name else 1.0)), dict(latents=z.transpose(1, 2)), {}
    if "cosmos" in name:
        kind = dict(cosmos2_t2i="2TextToImage", cosmos2_v2w="2VideoToWorld", cosmos25="2_5_PredictBase")[name]
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
        if name == "cosmos25":
            scheduler = diffusers.UniPCMultistepScheduler(use_karras_sigmas=True, sigma_min=0.01,
                                                          sigma_max=200.0, **flow)
        fake = SimpleNamespace(resize=lambda mask, size, interpolation: mask.new_zeros(1, 1, *size))
        fake.functional = fake.InterpolationMode = fake.NEAREST = fake          # torchvision may be missing
        monkeypatch.setattr(sys.modules[type(ref).__module__], "transforms", fake, raising=False)
        pipe = getattr(diffusers, f"Cosmos{kind}Pipeline")(None, None, ref, Part(), scheduler, Part())
        if "t2i" in name:
            return pipe, {}, {}
        video = torch.rand((1, 3, 5, 48, 80) if name == "cosmos25" else (1, 5, 3, 48, 80))
        keep = dict(condition_frames=Part.latents, condition_mask=1 - FIRST[:1].flip(2))    # two latents
        keep |= {} if name == "cosmos25" else dict(fps=torch.tensor([16.0]))
        return pipe, dict(num_frames=9, video=video), keep
    scheduler = diffusers.UniPCMultistepScheduler(flow_shift=shift, **flow)
    if name == "wan_t2v":
        return diffusers.WanPipeline(None, None, None, scheduler, ref), dict(num_frames=9), {}
    pipe = diffusers.WanImageToVideoPipeline(None, None, None, scheduler, None, None, ref,
                                             expand_timesteps="ti2v" in name)
    first, later = cond["first_frame"], (torch.arange(3) > 0)[:, None, None].expand(1, 1, 3, 6, 10).float()
    beside = torch.cat([1 - later.expand(-1, 4, -1, -1, -1), first.expand_as(z)], dim=1)   # under its mask
    pipe.prepare_latents = lambda *_: (z, first, later) if "ti2v" in name else (z, beside)
    pipe.encode_image, pipe.vae = lambda *_: cond["image"], Part()
    return pipe, dict(num_frames=9, image=torch.rand(1, 3, 48, 80)), cond

@pytest.mark.parametrize("name, steps, guidance", [
    (name, *each) for name in "wan_t2v wan22_ti2v wan_i2v cogvideox2b cogvideox5b cosmos2_t2i cosmos2_v2w "
                              "cosmos25".split()
    for each in ((2, 1.0), (7, 4.0), (48, 1.0)) if "wan" not in name or each[0] < 48])
@torch.no_grad()
def test_teachers_of_videos_sample_as_the_pipelines(name, steps, guidance, monkeypatch):
    (ref, net), cog, family = pair(name), "cog" in name, FAMILIES[name]
    cond, z = draws(family, 1), torch.randn(1, 4, 1 if "t2i" in name else 3, 6, 10)
    text, negative = cond.pop("text"), torch.randn(1, *family.cond["text"])
    cond["first_frame"] = torch.randn(1, 4, 1 if "ti2v" in name else 3, 6, 10)
    pipe, kw, keep = pipeline(name, ref, getattr(net, "shift", 0), z, cond, monkeypatch)
    pipe.set_progress_bar_config(disable=True)
    want, = pipe(**dict(latents=z) | kw, num_inference_steps=steps, height=48, width=80, prompt_embeds=text,
                 negative_prompt_embeds=negative, output_type="latent", return_dict=False,
                 guidance_scale=guidance - (guidance > 1 and "cosmos" in name))
    want = want.transpose(1, 2) if cog else want.view(z.shape)
    cond, uncond = (dict(text=v, **keep) for v in (text, negative))
    got = sys.modules[type(net).__module__].teacher_sample(net, lambda k: z, cond, steps, uncond, guidance)
    if name == "cosmos25":                              # the pipeline leaves noise on these
        assert near(got[:, :, :2], Part.latents[:, :, :2], 1e-4)
        got[:, :, :2] += (z - got)[:, :, :2] / 201
    assert near(got, want, 5e-5 * want.abs().max().clamp(min=1)) and not near(got, z, 0.1)

@torch.no_grad()
def test_vace_equals_diffusers_at_another_size():
    (ref, net), text = pair("wan_vace"), torch.randn(2, 8, 16)
    x, control, t = torch.randn(2, 4, 5, 6, 10), torch.randn(2, 24, 5, 6, 10), torch.rand(2)
    assert near(net(x, t.double(), dict(text=text, control=control)),
                ref(x, 1000 * t, text, control_hidden_states=control).sample)

def test_cosmos_takes_given_frames_for_the_clean_ones_and_looks_at_nothing_else_of_them():
    net, (x, clean, other) = shake(make(FAMILIES["cosmos25"])), torch.randn(3, 2, 4, 3, 4, 6)
    t = torch.tensor([0.3, 0.9]).double()
    cond = dict(text=torch.randn(2, 7, 20), condition_frames=clean, condition_mask=FIRST)
    x0 = predict(net, x, t, cond)
    assert near(predict(net, torch.where(FIRST > 0, other, x), t, cond), x0)
    assert near(predict(net, x, t, cond | dict(condition_frames=torch.where(FIRST > 0, clean, other))), x0)
    refused(net, x, t, cond | dict(condition_mask=FIRST[:, :, :2]), says=["condition_mask", "(2, 1, 3)"])
    assert near(predict(net.bfloat16(), x, t, cond)[:, :, 0], clean[:, :, 0])
    assert {*fill.theirs(net, "nvidia")} == {f"net.{key}" for key in fill.theirs(net, "fastgen")}
    assert net.adapt("net.pos_embedder.seq", x) is net.adapt("net.blocks.0._extra_state", x) is None
    image = make(FAMILIES["cosmos2_t2i"])
    refused(sys.modules[type(net).__module__].teacher_sample, image, None, {}, 1, says=["2"])

@pytest.mark.parametrize("steps, guidance", [(1, 1.0), (7, 4.0)])
@torch.no_grad()
def test_dit_teacher_samples_as_the_public_scheduler(steps, guidance):
    diffusers = pytest.importorskip("diffusers")
    net = load(make(FAMILIES["dit"]), golden_recipe.load("dit")[2])
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=False)
    scheduler.set_timesteps(steps)
    z, cond, uncond = torch.randn(2, 4, 8, 8), *(dict(label=torch.tensor(v)) for v in ([1, 5], [-1, -1]))
    x = z
    for t in scheduler.timesteps:
        eps, empty = (net(x, (t / 1000).double().expand(2), c) for c in (cond, uncond))
        x = scheduler.step(empty + guidance * (eps - empty), t, x).prev_sample
    got = sys.modules[type(net).__module__].teacher_sample(net, lambda k: z, cond, steps, uncond, guidance)
    assert near(got, x, 1e-5 * x.abs().max())           # of a random net they reach 100

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

# ---- full sizes
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
    kind, wanted, names = re.compile(r"\.(\d+|{i})(?=\.)"), Counter(), fill.theirs(net, "public")
    for key, shape, n in want["keys"]:
        wanted[kind.sub(".#", key), tuple(shape)] += n
    assert Counter((kind.sub(".#", key), tuple(own[ours].shape)) for key, ours in names.items()) == wanted
    assert len(names) == want["tensors"]
