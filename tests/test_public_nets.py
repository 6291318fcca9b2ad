"""Networks of public models against golden outputs of the reference, through their key maps."""
import collections
import json
import re

import pytest
import torch

import golden_recipe
from common import make_net
from nets import sd
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

def patterns(shapes):
    """{(key without its numbers, shape): how many} of triples (key, shape, how many)."""
    counts = collections.Counter()
    for key, shape, n in shapes:
        counts[re.sub(r"\.(\d+|{i})(?=\.)", ".#", key), tuple(shape)] += n
    return counts

# ---- Stable Diffusion 1.5 and XL
SD = dict(x_shape=(4, 8, 8), width=32, mult=(1, 2, 2), text_dim=24, groups=8)
SDS = dict(sd15=SD | dict(depths=(1, 1, 0), heads=(4, 4, 4)),
           sdxl=SD | dict(depths=(0, 2, 3), heads=(2, 4, 8), pooled_dim=16, id_dim=8))

def unet(size, mult=(1, 2, 2), **options):
    """The module diffusers, its net with random weights, ours with the same."""
    diffusers, config = pytest.importorskip("diffusers"), golden_recipe.load(size)[0]["config"]
    torch.manual_seed(0)
    reference = diffusers.UNet2DConditionModel(
        **config | dict(block_out_channels=[32 * m for m in mult], sample_size=128))
    net = make_net(f"sd:{size}", **SDS[size] | dict(mult=mult) | options)
    net.load_state_dict(reference.state_dict())
    return diffusers, reference.eval(), net.eval()

@pytest.mark.parametrize("name", ["sd15", "sd15_mask", "sdxl"])
def test_sd_equals_the_reference(name):
    info, want, weights = golden_recipe.load(name)
    net, inputs = load(make_net(f"sd:{name[:4]}", **SDS[name[:4]]), weights), info["inputs"]
    shapes = dict(x=(2, 4, 8, 8), context=(2, 7, 24), pooled=(2, 16))
    x, text, pooled = map(golden_recipe.tensor, shapes, shapes.values())
    cond = dict(text=text, pooled=pooled)
    if "mask" in name:
        cond["text_mask"] = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    if "time_ids" in inputs:
        cond["time_ids"] = torch.tensor(inputs["time_ids"])
    got = net(x, torch.tensor(inputs["t"]).double() / 1000, cond, taps=range(4))
    got |= dict(zip(("feat_down0", "feat_down1", "feat_down2", "feat_mid"), got["taps"]))
    assert all(near(got[key], value) for key, value in want.items())

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
        if key in ("text", "pooled"):
            refused(net, x, t, less, says=[key])
            less[key] = cond[key] + 1
        assert not near(net(x, t, less), out, 1e-3)
    if size == "sdxl":                                  # which no bfloat16 tells apart
        sizes = [cond | dict(time_ids=torch.full((3, 6), pixels)) for pixels in (1023.0, 1024.0)]
        assert not torch.equal(*(net.bfloat16()(x, t, c) for c in sizes))

@pytest.mark.parametrize("size", SDS)
def test_sd_has_the_public_keys_at_full_size(size):
    want = json.loads((golden_recipe.folder / "full_size_keys.json").read_text())[size]
    with torch.device("meta"):
        state = make_net(f"sd:{size}").state_dict()
    assert patterns((k, v.shape, 1) for k, v in state.items()) == patterns(want["keys"])
    assert (sum(v.numel() for v in state.values()), len(state)) == (want["params"], want["tensors"])

@pytest.mark.parametrize("size, pred, steps, guidance", [
    ("sd15", "eps", 1, 1.0), ("sd15", "eps", 3, 1.0), ("sd15", "eps", 7, 5.0), ("sd15", "v", 6, 3.0),
    ("sdxl", "eps", 3, 1.0), ("sdxl", "eps", 7, 5.0), ("sdxl", "v", 6, 3.0)])
@torch.no_grad()
def test_sd_teacher_samples_as_the_public_pipeline(size, pred, steps, guidance):
    diffusers, reference, net = unet(size, pred=pred)
    betas = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
                 timestep_spacing="leading", prediction_type=dict(eps="epsilon", v="v_prediction")[pred])
    draw = lambda: dict(prompt_embeds=torch.randn(2, 7, 24), pooled_prompt_embeds=torch.randn(2, 16))
    z, absent, given, negative = torch.randn(2, 4, 8, 8), ["vae", "text_encoder", "tokenizer"], draw(), draw()
    cond, uncond = (dict(zip(("text", "pooled"), each.values())) for each in (given, negative))
    if size == "sd15":
        scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **betas)
        make, absent = diffusers.StableDiffusionPipeline, absent + ["safety_checker", "feature_extractor"]
        del given["pooled_prompt_embeds"], negative["pooled_prompt_embeds"]
    else:
        scheduler = diffusers.EulerDiscreteScheduler(**betas)
        make, absent = diffusers.StableDiffusionXLPipeline, absent + ["text_encoder_2", "tokenizer_2"]
    pipeline = make(**dict.fromkeys(absent), unet=reference, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(**given, **{f"negative_{k}": v for k, v in negative.items()}, latents=z.clone(),
                    num_inference_steps=steps, guidance_scale=guidance, output_type="latent").images
    assert near(sd.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance), want, 1e-4)
