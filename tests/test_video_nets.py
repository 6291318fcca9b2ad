"""Networks of public video models against golden outputs, the installed diffusers classes and pipelines."""
import importlib
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

import golden_recipe
from common import make_net
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

class Part:
    """In the place of a VAE, which gives these latents, and of a safety checker."""
    dtype, temperal_downsample = torch.float32, (False, True, True)
    config = SimpleNamespace(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, z_dim=4)
    latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(3))
    to = encode = lambda self, _: self

def pair(spec, monkeypatch):
    """Of diffusers, with random weights: the transformer, a pipeline around it; ours with these weights."""
    diffusers, size = pytest.importorskip("diffusers"), spec.split(":")[1]
    own = dict(x_shape=(4, 3, 4, 6), depth=2, dim=48, heads=3, text_dim=10)
    torch.manual_seed(0)
    if "cogvideox" in spec:
        ref = diffusers.CogVideoXTransformer3DModel(
            3, 16, 4, 4, time_embed_dim=12, text_embed_dim=10, num_layers=2, sample_width=6, sample_height=4,
            sample_frames=9, max_text_seq_length=7, use_rotary_positional_embeddings=size == "5b")
        pipe = diffusers.CogVideoXPipeline(None, None, None, ref, diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
            snr_shift_scale=dict([("2b", 3.0), ("5b", 1.0)])[size]))
        own |= dict(time_dim=12)
    else:
        world, later = size != "t2i_2b", "2.5" in size
        ref = diffusers.CosmosTransformer3DModel(
            4 + world, 4, 3, 16, 2, text_embed_dim=8 if later else 10, adaln_lora_dim=6, extra_pos_embed_type=None,
            rope_scale=(1, 3, 3) if world else (1, 4, 4), use_crossattn_projection=later,
            crossattn_proj_in_channels=10, encoder_hidden_states_channels=8)
        blank = lambda mask, size, interpolation: mask.new_zeros(1, 1, *size)   # torchvision may be missing
        monkeypatch.setattr("diffusers.models.transformers.transformer_cosmos.transforms", SimpleNamespace(
            functional=SimpleNamespace(resize=blank), InterpolationMode=SimpleNamespace(NEAREST=0)), raising=False)
        make = diffusers.Cosmos2VideoToWorldPipeline if world else diffusers.Cosmos2TextToImagePipeline
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
        if later:
            make = diffusers.Cosmos2_5_PredictBasePipeline
            scheduler = diffusers.UniPCMultistepScheduler(use_karras_sigmas=True, use_flow_sigmas=True, sigma_min=0.01,
                                                          prediction_type="flow_prediction", sigma_max=200.0)
        pipe = make(None, None, ref, Part(), scheduler, Part())
        own |= dict(rank=6, eps=1e-5, text_proj=8 * later)
    pipe.set_progress_bar_config(disable=True)
    for p in ref.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    net = make_net(spec, **own)
    net.load_state_dict(ref.state_dict())
    return ref.eval(), pipe, net.eval()

SPECS = ["cogvideox:2b", "cogvideox:5b", "cosmos_predict2:t2i_2b", "cosmos_predict2:v2w_2b", "cosmos_predict2:2.5_2b"]

@pytest.mark.parametrize("shape", [(1, 6, 14), (4, 10, 4), (3, 4, 6)])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_cogvideox_and_cosmos_equal_diffusers_at_other_sizes(spec, shape, monkeypatch):
    (ref, pipe, net), (frames, height, width) = pair(spec, monkeypatch), shape
    x, t, text = torch.randn(2, 4, *shape), torch.tensor([0.999, 0.05]), torch.randn(2, 7, 10)
    if "cog" in spec:
        places = pipe._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, x.device)
        want = ref(x.transpose(1, 2), text, 1000 * t, image_rotary_emb=places).sample.transpose(1, 2)
        assert near(net(x, t.double(), dict(text=text)), want)
        return
    mask = dict(condition_mask=torch.zeros(2, 1, *shape)) if net.video2world else {}
    for t, fps in ((t, {}), (torch.rand(2, frames), dict(fps=10))):
        want = ref(x, t if t.ndim == 1 else t[:, None, :, None, None], text, padding_mask=torch.ones(1, 1, 9, 9),
                   **mask, **fps).sample
        fps = {key: torch.tensor([v, v]) for key, v in fps.items()}
        assert near(net(x, t.double(), dict(text=text, **fps)), want)

@pytest.mark.parametrize("steps, guidance", [(2, 1.0), (7, 1.0), (5, 4.0)])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_teachers_of_cogvideox_and_cosmos_sample_as_the_pipelines(spec, steps, guidance, monkeypatch):
    (_, pipe, net), given = pair(spec, monkeypatch), 0
    z, text, negative = torch.randn(1, 4, 3, 4, 6), torch.randn(1, 7, 10), torch.randn(1, 7, 10)
    cond, uncond, cog = dict(text=text), dict(text=negative), "cog" in spec
    kw = dict(num_inference_steps=steps, prompt_embeds=text, negative_prompt_embeds=negative, height=32, width=48,
              output_type="latent", guidance_scale=guidance - (0 if cog or guidance == 1 else 1))
    if "t2i" in spec:
        z = z[:, :, :1]
    elif "v2w" in spec or "2.5" in spec:                # five frames, or two latents, are given
        given, kw["num_frames"] = 2, 9
        kw["video"] = torch.rand(1, 3, 5, 32, 48) if "2.5" in spec else torch.rand(1, 5, 3, 32, 48)
        keep = dict(condition_frames=Part.latents, condition_mask=(torch.arange(3) < 2).float().view(1, 1, 3, 1, 1))
        cond, uncond = ({**c, **keep} for c in (cond, uncond))
        if "v2w" in spec:
            cond["fps"] = uncond["fps"] = torch.tensor([16.0])
    want = pipe(latents=z.transpose(1, 2) if cog else z, **kw)
    want = want.images[:, :, None] if "t2i" in spec else want.frames.transpose(1, 2) if cog else want.frames
    got = importlib.import_module(f"nets.{spec.split(':')[0]}").teacher_sample(
        net, lambda k: z, cond, steps, uncond, guidance)
    size = want.abs().max().clamp(min=1)
    assert near(got[:, :, given:] / size, want[:, :, given:] / size, 1e-4) and not near(got, z, 0.1)
    if given:                                           # the pipeline leaves 1 % of noise there, we none
        assert near(got[:, :, :2], Part.latents[:, :, :2], 0.02 if "v2w" in spec else 1e-5)
        assert near(got[:, :, :2], want[:, :, :2], 0.05)
