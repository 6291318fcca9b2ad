"""Networks of public video models against their references and diffusers; what chunks and caches do."""
import sys
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

import golden_recipe
from common import chunks, make_net, predict
from nets import wan
from run import refused
from test_nets import close, f64, shake
from test_public_nets import load, near, renamed

# ---- Wan
WAN = dict(x_shape=(4, 3, 4, 6), depth=3, dim=48, heads=4, hidden=64, text_dim=16, freq=32)
TIMES = torch.tensor([0.999, 0.2505], dtype=f64)
unpatched = lambda f: rearrange(f, "b (t h w) (p q c) -> b c t (h p) (w q)", h=2, w=3, p=2, q=2)

@pytest.mark.parametrize("name, size, options", [
    ("wan_t2v", "t2v_1_3b", {}), ("wan_orig_t2v", "t2v_14b", {}), ("wan22_ti2v", "ti2v_5b", {}),
    ("wan_i2v", "i2v_14b", dict(image_dim=20)), ("wan_orig_i2v", "i2v_14b", {}),
    ("wan_vace", "vace_1_3b", dict(control=24, hints=(0, 2)))])
@torch.no_grad()
def test_wan_equals_the_reference_in_both_layouts_of_keys(name, size, options):
    (_, want, weights), draw, whole = golden_recipe.load(name), golden_recipe.tensor, name == "wan_i2v"
    net = load(make_net(f"wan:{size}", **WAN | options), weights, "original" if "orig" in name else "public")
    x, text = draw("x", (2, 12 if whole else 4, 3, 4, 6)), draw("context", (2, 512 if whole else 8, 16))
    cond = dict(text=text, control=draw("control", (2, 24, 3, 4, 6)),
                image=draw("image", (2, 257, 20)) if whole else draw("clip", (2, 257, 1280)))
    t = torch.tensor([[0, 0.999, 0.999], [0.2505] * 3], dtype=f64) if size == "ti2v_5b" else TIMES
    if size == "i2v_14b":                               # the fixtures have random channels, even of the mask
        net.beside = lambda *_: [x[:, 4:] if whole else draw("y", (2, 8, 3, 4, 6))]
    if size == "vace_1_3b":                             # its second hint counts half
        for p in net.vace_blocks[1].proj_out.parameters():
            p.data.mul_(0.5)
    got = net(x[:, :4], t, cond, taps=range(3))
    assert near(got["out"], want["out"])
    for i, tap in enumerate(got["taps"]):               # theirs are without hints
        hint = want[f"feat_vace{i // 2}"] * (1 - i / 4) if i in net.hints else 0
        assert near(tap, unpatched(want[f"feat_block{i}"] + hint))

@pytest.mark.parametrize("key, options", [
    ("diff", dict(r=True, logvar=True)), ("abs", dict(r=True, r_kind="abs")), ("no_r_skip1", {}),
    ("abs_skip1", dict(r=True, r_kind="abs")), ("abs_normtemb", dict(r=True, r_kind="abs", norm_temb=True))])
@torch.no_grad()
def test_wan_with_r_equals_fastgen(key, options):
    (_, want, weights), net = golden_recipe.load("fastgen_wan_r"), make_net("wan:t2v_1_3b", **WAN | options)
    load(net, {k: v for k, v in weights.items() if net.adapt(k, v) is not None})
    kw = dict(r=torch.tensor([0.5, 0.1], dtype=f64)) if options else {}
    x, text = golden_recipe.tensor("x", (2, 4, 3, 4, 6)), golden_recipe.tensor("context", (2, 8, 16))
    kw |= dict(skip=(1,)) if "skip" in key else dict(logvar="logvar" in options)
    got = net(x, TIMES, dict(text=text), taps=(0, 2), **kw)
    assert near(got["out"], want[key])
    if key == "diff":
        assert near(got["logvar"], want["diff_logvar"][:, 0])
        assert all(near(tap, unpatched(want[f"diff_feat{i}"])) for i, tap in zip((0, 2), got["taps"]))

MINI = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2, hidden=40, text_dim=20, freq=16)
KINDS = dict(t2v_1_3b={}, ti2v_5b={}, i2v_14b=dict(image_dim=12), vace_1_3b=dict(control=6, hints=(0, 1)))

def wan_pair(size):
    """diffusers, its class with random weights, ours with the same."""
    diffusers, kind = pytest.importorskip("diffusers"), dict(in_channels=12 if size == "i2v_14b" else 4)
    torch.manual_seed(0)
    make = diffusers.WanVACETransformer3DModel if "vace" in size else diffusers.WanTransformer3DModel
    kind |= dict(image_dim=12, added_kv_proj_dim=32) if size == "i2v_14b" else {}
    kind |= dict(vace_layers=[0, 1], vace_in_channels=6) if "vace" in size else {}
    ref = make(num_attention_heads=2, attention_head_dim=16, out_channels=4, text_dim=20, freq_dim=16,
               ffn_dim=40, num_layers=2, **kind)
    return diffusers, shake(ref).eval(), load(make_net(f"wan:{size}", **MINI | KINDS[size]), ref.state_dict())

def wan_cond(net, *size, batch=2):
    """Everything that a Wan of any kind may want, random; the image is one for all, as pipelines have it."""
    draw, first = lambda *shape: torch.randn(batch, *shape), 1 if net.first == "replace" else size[0]
    return dict(text=draw(512, 20), control=draw(6, *size), first_frame=draw(4, first, *size[1:]),
                image=draw(5, 12)[:1].expand(batch, -1, -1))

def beside(first):
    """Latents of a first frame (B, 4, T, H, W) under their mask."""
    return torch.cat([(torch.arange(first.shape[2]) == 0)[:, None, None].expand_as(first), first], dim=1)

@pytest.mark.parametrize("size", KINDS)
@torch.no_grad()
def test_wan_equals_diffusers_at_other_sizes(size):
    _, ref, net = wan_pair(size)
    x, cond, t, kw = torch.randn(2, 4, 5, 6, 10), wan_cond(net, 5, 6, 10), torch.rand(2, dtype=f64), {}
    seen, times = x, 1000 * t.float()
    if size == "i2v_14b":
        seen = torch.cat([x, beside(cond["first_frame"])], dim=1)
        kw["encoder_hidden_states_image"] = cond["image"]
    if size == "ti2v_5b":                               # a clean first frame, and the others' times
        seen = torch.cat([cond["first_frame"], x[:, :, 1:]], dim=2)
        times = (times[:, None] * (torch.arange(5) > 0)).repeat_interleave(15, dim=1)
    kw |= dict(control_hidden_states=cond["control"]) if size == "vace_1_3b" else {}
    want, out = ref(seen, times, cond["text"], **kw).sample, net(x, t, cond)
    if size == "ti2v_5b":
        assert near((x - t[:, None, None, None, None] * out)[:, :, :1], cond["first_frame"])
        want, out = want[:, :, 1:], out[:, :, 1:]
    assert near(out, want)

@pytest.mark.parametrize("size, steps, guidance", [
    ("t2v_1_3b", 1, 1), ("t2v_1_3b", 2, 3.0), ("t2v_1_3b", 7, 1), ("ti2v_5b", 5, 4.0), ("i2v_14b", 5, 4.0)])
@torch.no_grad()
def test_teacher_of_wan_samples_as_the_pipeline(size, steps, guidance):
    diffusers, ref, net = wan_pair(size)
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True,
                                                  flow_shift=net.shift)
    z, cond, replace = torch.randn(2, 4, 3, 6, 10), wan_cond(net, 3, 6, 10), size == "ti2v_5b"
    uncond = cond | dict(text=torch.randn(2, 512, 20))
    kw = dict(prompt_embeds=cond["text"], negative_prompt_embeds=uncond["text"], latents=z, num_frames=9,
              height=48, width=80, guidance_scale=guidance, num_inference_steps=steps, output_type="latent")
    pipe = diffusers.WanPipeline(None, None, None, scheduler, ref)
    if size != "t2v_1_3b":
        pipe = diffusers.WanImageToVideoPipeline(None, None, None, scheduler, None, None, ref,
                                                 expand_timesteps=replace)
        first, later = cond["first_frame"], torch.ones(1, 1, 3, 6, 10)
        later[:, :, 0] = 0
        pipe.prepare_latents = lambda *_: (z, first, later) if replace else (z, beside(first))
        pipe.encode_image = lambda *_: cond["image"][:1]
        kw["image"], pipe.vae = torch.rand(1, 3, 48, 80), SimpleNamespace(config=SimpleNamespace(z_dim=4))
    pipe.set_progress_bar_config(disable=True)
    got, want = wan.teacher_sample(net, lambda k: z, cond, steps, uncond, guidance), pipe(**kw).frames
    assert near(got, want, 1e-4) and not near(got, z, 0.1)

@pytest.mark.parametrize("size, options, kept", [
    ("t2v_1_3b", dict(window=3), [4, 5, 6]),
    ("t2v_1_3b", dict(window=2, sink=1, positions="window"), [0, 5, 6]),
    ("vace_1_3b", dict(window=4, sink=2), [0, 1, 3, 4, 5, 6]), ("i2v_14b", {}, [0, 1, 2, 3, 4, 5, 6])])
@torch.no_grad()
def test_a_cached_rollout_of_causal_wan_is_the_full_forward(size, options, kept):
    net = shake(make_net(f"wan:{size}", **MINI | KINDS[size] | options, chunk=2)).double()
    x, end, cache = torch.randn(2, 4, 7, 4, 6, dtype=f64), 0, None
    cond = {key: v.double() for key, v in wan_cond(net, 7, 4, 6).items()}
    for frames in chunks(7, 2):                         # 3, 2, 2
        begin, end = end, end + frames
        t = torch.tensor([0.0] * begin + [0.3] * frames, dtype=f64).expand(2, -1)
        chunk, past = x[:, :, begin:end], dict(start=begin, cache=cache)
        want = net(x[:, :, :end], t, cond)[:, :, begin:]
        assert close(net(chunk, t[:, begin:], cond, **past), want, 1e-10)
        cache = net(chunk, 0 * t[:, begin:], cond, write=True, **past)["cache"]
    assert cache["pos"].tolist() == kept and {kv.shape[1] for kv in cache["kv"]} == {len(kept)}

@torch.no_grad()
def test_a_chunk_of_causal_wan_sees_its_window_and_sink_and_may_place_keys_in_it():
    assert [chunks(8, 3), chunks(2, 3), chunks(3, 1), chunks(5, 0)] == [[5, 3], [2], [1, 1, 1], [5]]
    x, cond, t = torch.randn(1, 4, 7, 4, 6), dict(text=torch.randn(1, 5, 20)), torch.tensor([0.5], dtype=f64)
    build = lambda **kw: shake(make_net("wan:t2v_1_3b", **MINI | dict(depth=1), chunk=2, **kw))
    net, sees = build(window=3, sink=1), [{0, 1, 2}] * 3 + [{0, 2, 3, 4}] * 2 + [{0, 4, 5, 6}] * 2
    for k in range(7):
        moved = net(x + (torch.arange(7) == k)[:, None, None], t, cond) != net(x, t, cond)
        assert moved.flatten(3).any(3).any(1)[0].tolist() == [k in seen for seen in sees]
    for kw, same in ((dict(), True), (dict(window=3), True), (dict(window=3, sink=1), False)):
        net = build(**kw)
        absolute, net.positions = net(x, t, cond), "window"
        assert close(net(x, t, cond), absolute) == same

def test_what_wan_cannot_do_is_refused_in_a_sentence():
    t, x = torch.tensor([0.5], dtype=f64), torch.randn(1, 4, 3, 4, 6)
    for key, size in zip(("text", "image", "first_frame", "control"), [*KINDS][1:3] + [*KINDS][2:]):
        net = make_net(f"wan:{size}", **MINI | KINDS[size], chunk=3)
        cond = wan_cond(net, 3, 4, 6, batch=1)
        refused(net, x, t, {k: v for k, v in cond.items() if k != key}, says=[key])
    refused(net, x, t, cond, start=1, says=["control", "frames"])
    refused(net, x, t.expand(1, 2), cond, says=["3 frames"])
    refused(net, x, t, cond, write=True, skip=(0,), says=["skip"])
    for bad in (dict(window=2), dict(chunk=-1), dict(first="x"), dict(positions="y"), dict(heads=3)):
        refused(make_net, "wan:t2v_1_3b", **MINI | dict(chunk=3) | bad, says=["wan"])

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

@pytest.mark.parametrize("steps, guidance", [(2, 1.0), (48, 1.0), (7, 4.0)])
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
    assert near(got, want, 2e-5 * want.abs().max().clamp(min=1)) and not near(got, z, 0.1)

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
