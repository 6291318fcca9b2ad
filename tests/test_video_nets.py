"""Networks of public video models against golden outputs, the installed diffusers classes and pipelines."""
import sys
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

import golden_recipe
from common import make_net, predict
from run import refused
from test_nets import shake
from test_public_nets import load, near, renamed

# ---- CogVideoX, Cosmos-Predict2
TINY = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2)
COG, COSMOS = TINY | dict(time_dim=12, text_dim=10), TINY | dict(rank=8, text_dim=20, text_proj=12)
FIRST = torch.tensor([1.0, 0, 0])[:, None, None].expand(2, 1, 3, 1, 1)      # a condition_mask

IMAGE, WORLD = COSMOS | dict(text_dim=12, text_proj=0, eps=1e-5), COSMOS | dict(eps=1e-5)
PUBLIC = {"cogvideox:2b": ("cogvideox2b", COG), "cogvideox:5b": ("cogvideox5b", COG),
          "cosmos_predict2:t2i_2b": ("cosmos2_t2i", IMAGE), "cosmos_predict2:v2w_2b": ("cosmos2_t2i", IMAGE),
          "cosmos_predict2:2.5_2b": ("cosmos25", WORLD)}        # spec: golden file, options

@pytest.mark.parametrize("spec, name, options", [("cosmos_predict2:2.5_2b", "fastgen_cosmos25", COSMOS)] + [
    (spec, *each) for spec, each in PUBLIC.items() if "v2w" not in spec])
def test_cogvideox_and_cosmos_equal_the_reference(spec, name, options):
    (_, want, weights), cog = golden_recipe.load(name), "cog" in name
    net = load(make_net(spec, **options), weights, "fastgen" if "fastgen" in name else "public")
    x = golden_recipe.tensor("x", (2, 3, 4, 4, 6) if cog else (2, 4, 3, 4, 6))
    x, want["out"] = (v.transpose(1, 2) if cog else v for v in (x, want["out"]))
    text = golden_recipe.tensor("context", (2, 5 if cog else 7, net.text_dim))
    cond = dict(text=text, condition_frames=x, condition_mask=FIRST)
    cond |= {} if name == "cosmos25" else dict(fps=torch.tensor([16.0, 16.0]))
    t, new = torch.tensor([0.999, 0.25] if cog else [0.75, 0.2]).double(), 1 if "25" in name else 0
    for clip, net.condition_t in enumerate((0.0, 0.1)):             # the time of the clip's first frame
        got = net(x, t, cond, taps=(0, 1))
        assert near(got["out"][clip, :, new:], want["out"][clip, :, new:])
        for k, tap in enumerate(got["taps"]):
            tap = rearrange(tap, "b c t (h p) (w q) -> b (c p q) t h w", p=2, q=2) if cog else tap
            feature = want[f"feat{k}" if "fastgen" in name else f"feat_block{k}"][clip]
            assert near(tap[clip].flatten(1).mT, feature.flatten(0, -2))

class Part:
    """In the place of a VAE, which gives these latents, and of a safety checker."""
    dtype, temperal_downsample = torch.float32, (False, True, True)
    config = SimpleNamespace(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, z_dim=4)
    latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(3))
    to = encode = lambda self, _: self

def pair(spec, monkeypatch):
    """Of diffusers, with random weights: the transformer, a pipeline around it; ours with these weights."""
    diffusers, (name, options) = pytest.importorskip("diffusers"), PUBLIC[spec]
    config = golden_recipe.load(name)[0]["config"] | dict(num_attention_heads=3)
    torch.manual_seed(0)
    if "cog" in spec:
        ref = diffusers.CogVideoXTransformer3DModel(**config)
        pipe = diffusers.CogVideoXPipeline(None, None, None, ref, diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
            snr_shift_scale=3.0 if "2b" in spec else 1.0))
    else:
        config |= dict(in_channels=5, rope_scale=(1, 3, 3)) if "v2w" in spec else {}
        kind = "2VideoToWorld" if "v2w" in spec else "2TextToImage"
        ref = diffusers.CosmosTransformer3DModel(**config)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
        if "2.5" in spec:
            kind, scheduler = "2_5_PredictBase", diffusers.UniPCMultistepScheduler(
                use_karras_sigmas=True, use_flow_sigmas=True, sigma_min=0.01, sigma_max=200.0,
                prediction_type="flow_prediction")
        pipe = getattr(diffusers, f"Cosmos{kind}Pipeline")(None, None, ref, Part(), scheduler, Part())
        fake = SimpleNamespace(resize=lambda mask, size, interpolation: mask.new_zeros(1, 1, *size))
        fake.functional = fake.InterpolationMode = fake.NEAREST = fake          # torchvision may be missing
        monkeypatch.setattr(sys.modules[type(ref).__module__], "transforms", fake, raising=False)
    pipe.set_progress_bar_config(disable=True)
    net = make_net(spec, **options | dict(dim=48, heads=3))
    net.load_state_dict(shake(ref).state_dict())
    return ref.eval(), pipe, net.eval()

@pytest.mark.parametrize("shape", [(1, 6, 14), (4, 10, 4)])
@pytest.mark.parametrize("spec", PUBLIC)
@torch.no_grad()
def test_cogvideox_and_cosmos_equal_diffusers_at_other_sizes(spec, shape, monkeypatch):
    (ref, pipe, net), (frames, height, width) = pair(spec, monkeypatch), shape
    x, t, text = torch.randn(2, 4, *shape), torch.tensor([0.999, 0.05]), torch.randn(2, 5, net.text_dim)
    if "cog" in spec:
        angle = pipe._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, x.device)
        want = ref(x.transpose(1, 2), text, 1000 * t, image_rotary_emb=angle if net.rotary else None).sample
        assert near(net(x, t.double(), dict(text=text)).transpose(1, 2), want)
        return
    kw = dict(padding_mask=torch.ones(1, 1, 9, 9), condition_mask=0 * x[:, :1] if net.video2world else None)
    assert near(net(x, t.double(), dict(text=text)), ref(x, t, text, **kw).sample)
    t = torch.rand(2, frames)                                       # and with a time per frame
    want = ref(x, t[:, None, :, None, None], text, fps=10, **kw).sample
    assert near(net(x, t.double(), dict(text=text, fps=torch.tensor([10, 10]))), want)

@pytest.mark.parametrize("steps, guidance", [(2, 1.0), (7, 1.0), (5, 4.0)])
@pytest.mark.parametrize("spec", PUBLIC)
@torch.no_grad()
def test_teachers_of_cogvideox_and_cosmos_sample_as_the_pipelines(spec, steps, guidance, monkeypatch):
    (_, pipe, net), cog, keep = pair(spec, monkeypatch), "cog" in spec, {}
    z, (text, negative) = torch.randn(1, 4, 3, 4, 6), torch.randn(2, 1, 5, net.text_dim)
    kw = dict(num_inference_steps=steps, prompt_embeds=text, negative_prompt_embeds=negative, height=32,
              width=48, output_type="latent", guidance_scale=guidance - (guidance > 1 and not cog))
    if spec == "cosmos_predict2:t2i_2b":
        z = z[:, :, :1]
    elif not cog:                                                   # five frames, which are two latents
        kw |= dict(num_frames=9, video=torch.rand((1, 3, 5, 32, 48) if net.unipc else (1, 5, 3, 32, 48)))
        keep = dict(condition_frames=Part.latents, condition_mask=1 - FIRST[:1].flip(2))
        keep |= {} if net.unipc else dict(fps=torch.tensor([16.0]))
    want, = pipe(latents=z.transpose(1, 2) if cog else z, return_dict=False, **kw)
    want = want.transpose(1, 2) if cog else want.view(z.shape)
    cond, uncond = (dict(text=v, **keep) for v in (text, negative))
    got = sys.modules[type(net).__module__].teacher_sample(net, lambda k: z, cond, steps, uncond, guidance)
    if "2.5" in spec:                                               # the pipeline leaves noise on these
        assert near(got[:, :, :2], Part.latents[:, :, :2], 1e-4)
        got[:, :, :2] += (z - got)[:, :, :2] / 201
    assert near(got, want, 1e-4 * want.abs().max().clamp(min=1)) and not near(got, z, 0.1)

def test_cosmos_takes_given_frames_for_the_clean_ones_and_looks_at_nothing_else_of_them():
    net = shake(make_net("cosmos_predict2:2.5_2b", **COSMOS))
    (x, clean, other), t, mask = torch.randn(3, 2, 4, 3, 4, 6), torch.tensor([0.3, 0.9]).double(), FIRST
    cond = dict(text=torch.randn(2, 7, 20), condition_frames=clean, condition_mask=mask)
    x0 = predict(net, x, t, cond)
    assert near(predict(net, torch.where(mask > 0, other, x), t, cond), x0)
    for frames, same in ((torch.where(mask > 0, clean, other), True), (other, False)):
        assert near(predict(net, x, t, dict(cond, condition_frames=frames))[:, :, 1:], x0[:, :, 1:]) == same
    refused(net, x, t, cond | dict(condition_mask=mask[:, :, :2]), says=["condition_mask", "(2, 1, 3)"])
    assert near(predict(net.bfloat16(), x, t, cond)[:, :, 0], clean[:, :, 0])
    assert {*renamed(net, "nvidia")} == {f"net.{key}" for key in renamed(net, "fastgen")}
    assert net.adapt("net.pos_embedder.seq", x) is net.adapt("net.blocks.0._extra_state", x) is None
    refused(make_net, "cosmos_predict2:2.5_2b,dim=40,heads=4", says=["12 channels"])
    net = make_net("cosmos_predict2:t2i_2b", **COSMOS)
    refused(sys.modules[type(net).__module__].teacher_sample, net, None, {}, 1, says=["2"])
    refused(make_net, "cogvideox:5b,dim=40,heads=4", says=["multiple"])
