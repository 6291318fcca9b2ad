"""Stable Diffusion, Flux and Qwen-Image against diffusers' classes with fresh weights and their pipelines."""
import pytest
import torch

import golden_recipe
from common import make_net
from families import FAMILIES, near
from nets import flux, qwen_image, sd
from nets.layers import pack as tokens

SDS = {name: FAMILIES[name].options for name in ("sd15", "sdxl")}
FLOW = dict(flux="flux:dev", qwen="qwen_image:base")

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
def test_sd_equals_diffusers_at_another_size(size, mult, shape):
    _, reference, net = unet(size, mult)
    x, t = torch.randn(3, 4, *shape), torch.tensor([0.0, 0.5005, 0.999]).double()
    cond = dict(text=torch.randn(3, 9, 24), text_mask=(torch.rand(3, 9) < 0.6).long())
    cond |= dict(pooled=torch.randn(3, 16), time_ids=torch.randint(2000, (3, 6))) if size == "sdxl" else {}
    added = dict(text_embeds=cond.get("pooled"), time_ids=cond.get("time_ids"))
    out = net(x, t, cond)
    assert near(out, reference(x, 1000 * t, cond["text"], encoder_attention_mask=cond["text_mask"],
                               added_cond_kwargs=added).sample)

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
    net = make_net(FLOW[name], **PAIRS[name])
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
