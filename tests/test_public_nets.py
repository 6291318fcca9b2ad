"""Networks of public models against golden outputs of the reference, through their key maps."""
import json
import math
import re
from collections import Counter

import pytest
import torch
from einops import rearrange

import golden_recipe
from common import make_net
from nets import flux, qwen_image
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

@pytest.mark.parametrize("name, spec", [("flux", "flux:dev"), ("qwen", "qwen_image:base")])
def test_full_sizes_have_the_public_keys(name, spec):
    with torch.device("meta"):
        net = make_net(spec)
    want, own = json.loads((golden_recipe.folder / "full_size_keys.json").read_text())[name], net.state_dict()
    assert sum(p.numel() for p in net.parameters()) == want["params"]
    found = Counter((re.sub(r"blocks\.\d+", "blocks.{i}", theirs), *own[ours].shape)
                    for theirs, ours in renamed(net, "public").items())
    assert found == {(key, *shape): n for key, shape, n in want["keys"]}

# ---- Flux, Qwen-Image
ROPE = dict(heads=2, dim=32, axes=(4, 6, 6), text_dim=24)
FLOW = dict(flux=("flux:dev", dict(x_shape=(4, 4, 6), depth=2, single_depth=2, pooled_dim=20) | ROPE),
            qwen=("qwen_image:base", dict(x_shape=(4, 6, 10), depth=3) | ROPE))

def tokens(x):
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)

@pytest.mark.parametrize("name", FLOW)
def test_flux_and_qwen_image_equal_the_reference(name):
    (info, want, weights), (spec, options) = golden_recipe.load(name), FLOW[name]
    net = load(make_net(spec, **options), weights)
    # flux: guidance 3.5 makes angles of 3500, where exp's last digit counts: diffusers itself is 2.5e-5 off
    tolerance = dict(flux=5e-5, qwen=2e-5)[name]
    cond = dict(text=golden_recipe.tensor("context", (2, 5, 24)), guidance=torch.tensor([3.5, 1.0]),
                pooled=golden_recipe.tensor("pooled", (2, 20)),
                text_mask=torch.arange(5) < torch.tensor([[5], [3]]))
    x, t = golden_recipe.tensor("x", (2, *net.x_shape)), torch.tensor(info["inputs"]["t"]).double()
    got, features = net(x, t, cond, taps=range(net.n_taps)), [k for k in want if k.startswith("feat")]
    assert near(tokens(got["out"]), want["out"], tolerance) and len(features) == net.n_taps
    assert all(near(tap.flatten(2).mT, want[key], tolerance) for tap, key in zip(got["taps"], features))

def pair(name):
    """Of diffusers, with random weights: the transformer, a pipeline around it; ours with these weights."""
    diffusers, heads = pytest.importorskip("diffusers"), dict(attention_head_dim=16, num_attention_heads=3)
    sizes, ours = dict(joint_attention_dim=20, axes_dims_rope=(4, 4, 8), in_channels=32, **heads), dict(
        x_shape=(8, 4, 4), dim=48, heads=3, axes=(4, 4, 8), text_dim=20)
    torch.manual_seed(0)
    kw = dict(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    if name == "flux":
        ref = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=3, pooled_projection_dim=12,
                                               guidance_embeds=True, **sizes)
        ours |= dict(depth=1, single_depth=3, pooled_dim=12)
        pipe = diffusers.FluxPipeline(None, None, None, None, None, None, ref)
    else:
        ref = diffusers.QwenImageTransformer2DModel(num_layers=2, out_channels=8, **sizes)
        ours |= dict(depth=2)
        kw |= dict(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)
        pipe = diffusers.QwenImagePipeline(None, None, None, None, ref)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**kw)
    pipe.set_progress_bar_config(disable=True)
    for p in ref.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    net = make_net(FLOW[name][0], **ours)
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

@pytest.mark.parametrize("name", FLOW)
def test_what_flux_and_qwen_image_cannot_do_without_is_refused_in_a_sentence(name):
    spec, options = FLOW[name]
    net, t = make_net(spec, **options), torch.full((2,), 0.5).double()
    x, cond = torch.randn(2, *net.x_shape), dict(text=torch.randn(2, 5, 24), pooled=torch.randn(2, 20))
    for bad in ("text", "pooled")[:2 if name == "flux" else 1]:
        refused(net, x, t, {k: v for k, v in cond.items() if k != bad}, says=[f"{bad} of width"])
        refused(net, x, t, cond | {bad: cond[bad][..., 1:]}, says=[bad, str(tuple(cond[bad][..., 1:].shape))])
    refused(net, x[..., 1:], t, cond, says=["even"])
    refused(make_net, spec, **options | dict(axes=(4, 6, 8)), says=["axes"])

def test_times_of_the_flow_samplers_in_closed_form():
    assert sigma_grid(4) == [1, 0.75, 0.5, 0.25, 0] and sigma_grid(1, 3.0, 0.02) == [1, 0]
    assert sigma_grid(2, math.log(3)) == pytest.approx([1, 0.75, 0])            # 3 s / (1 + 2 s)
    assert sigma_grid(4, 0.0, 0.1) == pytest.approx([1, 0.7, 0.4, 0.1, 0])      # linear: stays so
    assert sigma_grid(2, 0.9, 0.02) == pytest.approx([1, 0.02, 0])
    assert [dynamic_mu(n, (256, 0.5), (4096, 1.15)) for n in (256, 2176, 4096)] == [0.5, 0.825, 1.15]
