"""Networks of public video models against golden outputs, the installed diffusers classes and pipelines."""
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

import golden_recipe
from common import make_net, predict
from nets import cosmos_predict2
from run import refused
from test_nets import shake
from test_public_nets import load, near

# ---- CogVideoX, Cosmos-Predict2
TINY = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2)
COSMOS = TINY | dict(rank=8, text_dim=20, text_proj=12)
FIRST = torch.tensor([1.0, 0, 0])[:, None, None].expand(2, 1, 3, 1, 1)      # a condition_mask

@pytest.mark.parametrize("name", ["2b", "5b"])
def test_cogvideox_equals_the_reference(name):
    info, want, weights = golden_recipe.load(f"cogvideox{name}")
    net = load(make_net(f"cogvideox:{name}", **TINY | dict(time_dim=12, text_dim=10)), weights)
    x, text = golden_recipe.tensor("x", (2, 3, 4, 4, 6)), golden_recipe.tensor("context", (2, 5, 10))
    t = torch.tensor(info["inputs"]["t"]).double() / 1000
    got = net(x.transpose(1, 2), t, dict(text=text), taps=(0, 1))
    assert near(got["out"].transpose(1, 2), want["out"])
    for k, tap in enumerate(got["taps"]):
        tokens = rearrange(tap, "b c t (h p) (w q) -> b (t h w) (c p q)", p=2, q=2)
        assert near(tokens, want[f"feat_block{k}"])

@pytest.mark.parametrize("name, spec, layout, options", [
    ("cosmos2_t2i", "t2i_2b", "public", dict(text_dim=12, text_proj=0, eps=1e-5)),
    ("cosmos25", "2.5_2b", "public", dict(eps=1e-5)), ("fastgen_cosmos25", "2.5_2b", "fastgen", {})])
def test_cosmos_equals_the_reference(name, spec, layout, options):
    _, want, weights = golden_recipe.load(name)
    net = load(make_net(f"cosmos_predict2:{spec}", **COSMOS | options), weights, layout)
    x, t = golden_recipe.tensor("x", (2, 4, 3, 4, 6)), torch.tensor([0.75, 0.2]).double()
    cond = dict(text=golden_recipe.tensor("context", (2, 7, net.text_dim)),
                condition_frames=x, condition_mask=FIRST)
    cond |= {} if name == "cosmos25" else dict(fps=torch.tensor([16.0, 16.0]))
    for clip, net.condition_t in enumerate((0.0, 0.1)):             # the times of the clips' first frames
        got = net(x, t, cond, taps=(0, 1))
        new = slice(1 if net.video2world else 0, 3)
        assert near(got["out"][clip, :, new], want["out"][clip, :, new])
        for k, tap in enumerate(got["taps"]):
            feature = want[f"feat{k}" if layout == "fastgen" else f"feat_block{k}"][clip]
            assert near(tap[clip].flatten(1).mT, feature.flatten(0, -2))

class Part:
    """In the place of a VAE, which gives these latents, and of a safety checker."""
    dtype, temperal_downsample = torch.float32, (False, True, True)
    config = SimpleNamespace(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, z_dim=4)
    latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(3))
    to = encode = lambda self, _: self

def pair(spec, monkeypatch):
    """Of diffusers, with random weights: the transformer, a pipeline around it; ours with these weights."""
    diffusers, (family, size) = pytest.importorskip("diffusers"), spec.split(":")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    own = dict(dim=48, heads=3, text_dim=10)
    torch.manual_seed(0)
    if family == "cogvideox":
        ref = diffusers.CogVideoXTransformer3DModel(
            3, 16, 4, 4, time_embed_dim=12, text_embed_dim=10, num_layers=2, sample_width=6, sample_height=4,
            max_text_seq_length=7, use_rotary_positional_embeddings=size == "5b")
        scheduler = diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
            snr_shift_scale=3.0 if size == "2b" else 1.0)
        pipe, own["time_dim"] = diffusers.CogVideoXPipeline(None, None, None, ref, scheduler), 12
    else:
        world, later = size != "t2i_2b", size == "2.5_2b"
        ref = diffusers.CosmosTransformer3DModel(
            4 + world, 4, 3, 16, 2, text_embed_dim=8 if later else 10, adaln_lora_dim=6,
            extra_pos_embed_type=None, rope_scale=(1, 3, 3) if world else (1, 4, 4),
            use_crossattn_projection=later, crossattn_proj_in_channels=10, encoder_hidden_states_channels=8)
        resize = lambda mask, size, interpolation: mask.new_zeros(1, 1, *size)  # torchvision may be missing
        monkeypatch.setattr(sys.modules[type(ref).__module__], "transforms", SimpleNamespace(
            functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST=0)), False)
        kind = dict(t="Cosmos2TextToImage", v="Cosmos2VideoToWorld").get(size[0], "Cosmos2_5_PredictBase")
        if later:
            scheduler = diffusers.UniPCMultistepScheduler(
                use_karras_sigmas=True, use_flow_sigmas=True, sigma_min=0.01, sigma_max=200.0,
                prediction_type="flow_prediction")
        pipe = getattr(diffusers, kind + "Pipeline")(None, None, ref, Part(), scheduler, Part())
        own |= dict(rank=6, eps=1e-5, text_proj=8 * later)
    pipe.set_progress_bar_config(disable=True)
    net = make_net(spec, **TINY | own)
    net.load_state_dict(shake(ref).state_dict())
    return ref.eval(), pipe, net.eval()

SPECS = ["cogvideox:2b", "cogvideox:5b", *(f"cosmos_predict2:{size}_2b" for size in ("t2i", "v2w", "2.5"))]

@pytest.mark.parametrize("shape", [(1, 6, 14), (4, 10, 4)])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_cogvideox_and_cosmos_equal_diffusers_at_other_sizes(spec, shape, monkeypatch):
    (ref, pipe, net), (frames, height, width) = pair(spec, monkeypatch), shape
    x, t, text = torch.randn(2, 4, *shape), torch.tensor([0.999, 0.05]), torch.randn(2, 7, 10)
    if "cog" in spec:
        angle = pipe._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, x.device)
        want = ref(x.transpose(1, 2), text, 1000 * t, image_rotary_emb=angle if net.rotary else None).sample
        assert near(net(x, t.double(), dict(text=text)).transpose(1, 2), want)
        return
    kw = dict(padding_mask=torch.ones(1, 1, 9, 9))
    kw |= dict(condition_mask=torch.zeros(2, 1, *shape)) if net.video2world else {}
    assert near(net(x, t.double(), dict(text=text)), ref(x, t, text, **kw).sample)
    t = torch.rand(2, frames)                                       # and with a time per frame
    want = ref(x, t[:, None, :, None, None], text, fps=10, **kw).sample
    assert near(net(x, t.double(), dict(text=text, fps=torch.tensor([10, 10]))), want)

@pytest.mark.parametrize("steps, guidance", [(2, 1.0), (7, 1.0), (5, 4.0)])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_teachers_of_cogvideox_and_cosmos_sample_as_the_pipelines(spec, steps, guidance, monkeypatch):
    (_, pipe, net), cog, given = pair(spec, monkeypatch), "cog" in spec, 0
    z, text, negative = torch.randn(1, 4, 3, 4, 6), torch.randn(1, 7, 10), torch.randn(1, 7, 10)
    kw = dict(num_inference_steps=steps, prompt_embeds=text, negative_prompt_embeds=negative, height=32,
              width=48, output_type="latent", guidance_scale=guidance - (guidance > 1 and not cog))
    keep = {}
    if spec == "cosmos_predict2:t2i_2b":
        z = z[:, :, :1]
    elif not cog:                                                   # five frames, which are two latents
        given, kw["num_frames"] = 2, 9
        kw["video"] = torch.rand((1, 3, 5, 32, 48) if net.unipc else (1, 5, 3, 32, 48))
        keep = dict(condition_frames=Part.latents, condition_mask=1 - FIRST[:1].flip(2))
        keep |= {} if net.unipc else dict(fps=torch.tensor([16.0]))
    want = pipe(latents=z.transpose(1, 2) if cog else z, **kw)
    want = want.frames if "frames" in want else want.images[:, :, None]
    want = want.transpose(1, 2) if cog else want
    module = importlib.import_module(type(net).__module__)
    cond, uncond = (dict(text=v, **keep) for v in (text, negative))
    got, size = module.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance), want.abs().max().clamp(1)
    if given and net.unipc:                                         # whose pipeline leaves noise there
        assert near(got[:, :, :2], Part.latents[:, :, :2], 1e-4)
        got[:, :, :2] += (z - got)[:, :, :2] / 201
    assert near(got / size, want / size, 1e-4) and not near(got, z, 0.1)

@torch.no_grad()
def test_cosmos_takes_given_frames_for_the_clean_ones_and_looks_at_nothing_else_of_them():
    net = shake(make_net("cosmos_predict2:2.5_2b", **COSMOS))
    (x, clean, other), t, mask = torch.randn(3, 2, 4, 3, 4, 6), torch.tensor([0.3, 0.9]).double(), FIRST
    cond = dict(text=torch.randn(2, 7, 20), condition_frames=clean, condition_mask=mask)
    x0 = predict(net, x, t, cond)
    assert near(x0[:, :, 0], clean[:, :, 0])
    assert near(predict(net, torch.where(mask > 0, other, x), t, cond), x0)
    for frames, same in ((torch.where(mask > 0, clean, other), True), (other, False)):
        assert near(predict(net, x, t, dict(cond, condition_frames=frames))[:, :, 1:], x0[:, :, 1:]) == same
    at = torch.stack([torch.full_like(t, net.condition_t), t, t], dim=1)
    assert near(predict(net, x, at, cond)[:, :, 1:], x0[:, :, 1:])
    for bad in (dict(condition_frames=clean[:, :, :1]), dict(condition_mask=mask[:, :, :2])):
        refused(net, x, t, cond | bad, says=["condition_frames", "condition_mask", tuple(x.shape)])
    refused(net, x, at[:, :2], cond, says=["(2, 2)", "3 frames"])
    refused(net, x[..., 1:], t, dict(text=cond["text"]), says=["even"])
    refused(make_net, "cosmos_predict2:2.5_2b,dim=40,heads=4", says=["12 channels"])
    net = make_net("cosmos_predict2:t2i_2b", **COSMOS)
    refused(cosmos_predict2.teacher_sample, net, None, {}, 1, says=["2"])
    refused(make_net, "cogvideox:5b,dim=40,heads=4", says=["multiple"])
