"""Text, image and video to video in miniature: random pipelines, clips as gif and mp4, first frames, tars."""
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import common
import data
import judge
import media
import run
import sample
import trainer
from nets import encoders
from test_text_to_image import WORDS, encode, qwen, t5

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
av = pytest.importorskip("av")

WAN = "x_shape=(4,3,8,8),depth=1,dim=24,heads=2,hidden=32,text_dim=20,freq=16"
COSMOS = "x_shape=(4,3,8,8),depth=1,dim=32,heads=2,rank=8,text_dim="
CASES = dict(                                               # net, pipeline
    wan=(f"wan:t2v_1_3b,{WAN}", "WanPipeline"), replace=(f"wan:ti2v_5b,{WAN}", "WanPipeline"),
    i2v=(f"wan:i2v_14b,{WAN},image_dim=16", "WanImageToVideoPipeline"),
    vace=(f"wan:vace_1_3b,{WAN},control=12,hints=(0,)", "WanVACEPipeline"),
    cog=("cogvideox:2b,x_shape=(4,3,8,8),depth=1,dim=32,heads=2,time_dim=9,text_dim=20", "CogVideoXPipeline"),
    cosmos=(f"cosmos_predict2:v2w_2b,{COSMOS}20", "Cosmos2VideoToWorldPipeline"),
    cosmos25=(f"cosmos_predict2:2.5_2b,{COSMOS}40,text_proj=12", "Cosmos2_5_PredictBasePipeline"))
STD = torch.arange(1.0, 5).view(4, 1, 1, 1)
MEAN = STD / 10

def pipeline(name, module):
    torch.manual_seed(0)
    more, (tokenizer, text) = {}, qwen() if name == "cosmos25" else t5()
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=MEAN.flatten().tolist(), latents_std=STD.flatten().tolist(), scale_factor_temporal=2,
        scale_factor_spatial=2)
    if name == "cog":
        vae = diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8), down_block_types=("CogVideoXDownBlock3D",) * 2, layers_per_block=1,
            up_block_types=("CogVideoXUpBlock3D",) * 2, latent_channels=4, norm_num_groups=4,
            temporal_compression_ratio=2, scaling_factor=0.7)
    elif name == "cosmos25":
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
    elif name != "cosmos":
        config = dict(vocab_size=64, d_model=20, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        text = transformers.UMT5EncoderModel(transformers.UMT5Config(**config)).eval()
    if name == "i2v":
        vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(
            hidden_size=16, image_size=12, patch_size=4, num_hidden_layers=2, num_attention_heads=2))
        size = dict(size=dict(shortest_edge=12), crop_size=dict(height=12, width=12))
        more = dict(image_encoder=vision.eval(), image_processor=transformers.CLIPImageProcessor(**size))
    module.CosmosSafetyChecker = lambda: None               # needs a library, as Wan's texts do
    module.ftfy = sys.modules["ftfy"]
    return getattr(diffusers, CASES[name][1])(
        tokenizer=tokenizer, text_encoder=text, vae=vae.eval(), transformer=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **more)

class Depth(torch.nn.Module):
    """Brightness, at half the size."""
    def forward(self, x):
        return SimpleNamespace(predicted_depth=x.mean(1)[:, ::2, ::2])

@pytest.fixture(params=CASES)
def made(request, tmp_path, monkeypatch):
    """(name, pipeline, settings): a folder of 4 captioned clips, a few pixels more than the net takes."""
    monkeypatch.setitem(sys.modules, "ftfy", SimpleNamespace(fix_text=str))
    processor = lambda images, return_tensors: transformers.BatchFeature(dict(x=images[None].float()))
    monkeypatch.setattr(encoders, "depth_model", lambda *_: (Depth(), processor))
    (name, rng), (net, kind) = (request.param, np.random.default_rng(0)), CASES[request.param]
    pipe = pipeline(name, importlib.import_module(getattr(diffusers, kind).__module__))
    pipe.save_pretrained(tmp_path / "pipe")
    (tmp_path / "clips").mkdir()
    for i in range(4):
        write(tmp_path / f"clips/{i}.gif", rng.integers(0, 256, (3, 9, 20, 18), np.uint8))
        (tmp_path / f"clips/{i}.txt").write_text(" ".join(rng.choice(WORDS, 1 + i)))
    return name, pipe, trainer.defaults | run.TINY | dict(
        net=net, data=str(tmp_path / "clips"), encoders=str(tmp_path / "pipe"), offline=True, batch_size=4,
        encoder_dtype="", classes=0, given_frames=1, depth_model="fake")

def write(path, clip):
    """clip (3, F, H, W) uint8, a frame lasts 0.1 s."""
    sample.save([Image.fromarray(frame) for frame in clip.transpose(1, 2, 3, 0)], path, 10, {})

@torch.no_grad()
def test_text_latents_and_what_the_net_looks_at_are_the_official_pipelines(made):
    name, pipe, cfg = made
    cfg, texts = cfg | dict(negative_prompt="neg_prompt_cosmos", guidance=2.0), ["a cat &amp; a dog", ""]
    pixels = torch.randint(256, (2, 3, 5, 16, 16), generator=torch.manual_seed(1)).byte()
    raw = dict(image=pixels, caption=texts, label=torch.zeros(2), id=torch.arange(2))
    batch, x = encoders.encode(raw, cfg, "cpu"), encoders.scaled(pixels)
    cond, uncond, x0 = batch["cond"], batch["uncond"], batch["x0"]
    n, mean, std = (226, 0.0, 1 / 0.7) if name == "cog" else (512, MEAN, STD)
    for part, words in (cond, texts), (uncond, [encoders.NEGATIVE["neg_prompt_cosmos"]] * 2):
        want = pipe.encode_prompt(words, None, False, max_sequence_length=n, device="cpu")[0]
        assert torch.equal(part["text"], want) and want.shape[:2] == (2, n)
    latents = lambda clip: (pipe.vae.encode(clip).latent_dist.mode() - mean) / std
    want, first = latents(x), latents(x[:, :, :1])
    assert x0.shape == (2, 4, 3, 8, 8) and torch.allclose(x0, want, atol=1e-5)
    back = (pipe.vae.decode(want * std + mean).sample * 127.5 + 128).clip(0, 255).int()
    assert (encoders.decode(x0, cfg).int() - back).abs().max() <= 1

    wanted = dict(first_frame=first) if name == "replace" else {}
    if "cosmos" in name:
        mask = torch.tensor([1.0, 0, 0]).view(1, 1, 3, 1, 1).expand(2, -1, -1, -1, -1)
        wanted = dict(condition_frames=F.pad(first, (0,) * 5 + (2,)), condition_mask=mask)
    if name == "i2v":                                       # after a mask of 2 channels, frames of a latent
        given = [pipe.prepare_latents(v[None], 1, 4, 16, 16, 5, torch.float32, "cpu")[1] for v in x[:, :, 0]]
        stills = [Image.fromarray(v.permute(1, 2, 0).numpy()) for v in pixels[:, :, 0]]
        wanted = dict(first_frame=torch.cat(given)[:, 2:], image=pipe.encode_image(stills, "cpu"))
    if name == "vace":
        near = F.interpolate(pixels.float().mean(1)[..., ::2, ::2], (16, 16), mode="bilinear")[:, None]
        low, high = near.amin((2, 3, 4), True), near.amax((2, 3, 4), True)
        near, ones = (2 * (near - low) / (high - low) - 1).expand(-1, 3, -1, -1, -1), torch.ones_like(x[:1])
        video = torch.cat([pipe.prepare_video_latents(v[None], ones, [[]], device="cpu") for v in near])
        wanted = dict(control=torch.cat([video, torch.ones_like(video[:, :4])], 1))         # 2 x 2 of a mask
    assert cond.keys() - {"label", "text"} == wanted.keys()
    assert all(torch.allclose(part[k], v, atol=1e-5) for part in (cond, uncond) for k, v in wanted.items())
    if "first_frame" in cond:                               # a causal net takes it from cond itself, too
        net, noise = common.make_net(cfg["net"], chunk=1), lambda k: torch.randn_like(want)
        clip = common.causal_rollout(net, noise, [0.9, 0.5, 0.0], cond, first=cond["first_frame"])
        assert torch.allclose(clip[:, :, :1], first, atol=1e-5) == (name == "replace")
    with torch.enable_grad():                               # frames that are given have no noise
        x0 = encoders.encode(raw, cfg, "cpu")["x0"]
    assert torch.allclose(x0[:, :, :1], first, atol=1e-5) == ("cosmos" in name or name == "replace")
    assert not torch.allclose(x0[:, :, 1:], want[:, :, 1:])

def test_clips_train_and_sample_from_a_folder_of_gifs_and_from_tars(made, tmp_path, monkeypatch):
    name, _, cfg = made
    given = {k: v for k, v in cfg.items() if v != trainer.defaults.get(k)}
    own = {k: v for k, v in given.items() if k in ("net", "data", "encoders", "depth_model")}
    encode.main([*(f"--{k}={v}" for k, v in own.items()), f"--out={tmp_path / 'tars'}", "--shard=3",
                 "--offline=1", "--device=cpu", "--encoder_dtype=", "--classes=0", "--dtype=float32"])
    batches = []
    for source in cfg, cfg | dict(encoders="", data=str(tmp_path / "tars")):
        torch.manual_seed(0)
        batches.append(encoders.encode(next(data.Loader(data.load(source), source)), source, "cpu"))
    own, stored = batches
    for a, b in (own["x0"], stored["x0"]), *((v, stored["cond"][k]) for k, v in own["cond"].items()):
        assert torch.allclose(a, b, atol=1e-5)
    if name == "cosmos25":
        return
    causal = dict(chunk=1) if name in ("wan", "vace") else {}
    method, drawn = run.load("causal_sft" if causal else "sft"), run.spy(monkeypatch, judge, "draw_samples")
    given |= dict(teacher="", t_dist="uniform", max_iter=1, sample_every=1, steps=2) | causal
    result, x0 = run.run(method, run.config(method, **given)), drawn[-1][1]
    assert np.isfinite(result.lines[-1]["loss"]) and x0.shape[1:] == (4, 3, 8, 8) and x0.isfinite().all()

    # on from a clip, or its first frame, in two segments that overlap by one latent frame
    begins = dict(vace="b", i2v="").get(name, "ab")
    args = [str(result.folder), "--net=student", "--prompts=a cat", "--seeds=0,3", f"--out={tmp_path}/x.mp4"]
    clip, more = f"--given={tmp_path}/clips/1.gif", ["--segments=2", "--overlap=1"]
    if name == "cog":
        run.refused(sample.main, [*args, clip], says=["--given", "causal", "chunk 0"])
        return
    bad = {"overlap 3 of 3": [clip, "--overlap=3"], "not exist": [f"--given={tmp_path}/none", *more],
           "4 for 1 prompts": [f"--given={tmp_path}/clips"]} | ({} if name == "wan" else {"--given": more})
    bad |= {"9 frames takes 17": [clip, "--segments=4", "--overlap=1"]} if name == "vace" else {}
    for says, how in bad.items():
        run.refused(sample.main, [*args, *how], says=says.split())
    drawn.clear()
    sample.main([*args, clip, *more])
    (one, first), (two, second) = drawn
    pixels, done = one[9].get("image", one[10]), encoders.decode(first, cfg)
    own = media.value("1.gif", (tmp_path / "clips/1.gif").read_bytes(), (9, 0))
    own = torch.tensor(media.cut(own, (3, 9, 16, 16)))
    assert torch.equal(pixels[1], own[:, :pixels.shape[2]])
    assert torch.equal(two[10], done[:, :, -1:]) and not torch.allclose(first, second)
    for part, x0, x in ("a", first, pixels[:, :, :1]), ("b", second, two[10]):
        apart = (x0[:, :, :1] - encoders.moments(x, cfg, "cpu")[:, :4]).abs().max()
        assert (apart < (0.01 if name == "cosmos" else 1e-5)) == (part in begins)   # it ends at t = 0.002
    assert name != "vace" or torch.equal(two[9]["image"][1], own[:, 4:])          # its depth moves along
    with av.open(f"{tmp_path}/x.mp4") as file:
        assert file.streams.video[0].frames == 9 and "segments: 2" in file.metadata["comment"]

def test_latents_of_clips_lie_in_a_folder_and_begin_with_the_frame_that_the_net_is_given(tmp_path):
    stored = np.random.default_rng(0).random((2, 8, 3, 8, 8), np.float32)                   # mean, std
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", stored[i])
    cfg = trainer.defaults | run.TINY | dict(net=CASES["replace"][0], data=str(tmp_path), batch_size=2)
    batch = encoders.encode(raw := next(data.Loader(data.load(cfg), cfg)), cfg, "cpu")
    x0, mean = batch["x0"], torch.tensor(stored[raw["id"], :4])
    assert all(torch.equal(v[:, :, :1], mean[:, :, :1]) for v in (x0, batch["cond"]["first_frame"]))
    assert 0.3 < (x0 - mean)[:, :, 1:].std() < 1

@pytest.mark.parametrize("end", ["gif", "mp4"])
def test_the_first_frames_of_a_video_are_taken_at_a_rate(end, tmp_path):
    grey = np.arange(12, dtype=np.uint8) * 20               # frame i, of 0.1 s, is that bright
    clip = np.broadcast_to(grey[:, None, None], (3, 12, 16, 16))
    write(tmp_path / f"a.{end}", clip)
    net = "wan:t2v_1_3b,depth=1,dim=24,heads=2,x_shape=(3,5,8,8)"
    cfg = trainer.defaults | dict(data=str(tmp_path), net=net)
    for fps, want in (0, [0, 1, 2, 3, 4]), (5, [0, 2, 4, 6, 8]), (25, [0, 0, 0, 1, 1]):
        found, _ = data.load(cfg | dict(data_fps=float(fps))).get(0)
        assert found.shape == (3, 5, 8, 8) and np.abs(found.mean((0, 2, 3)) / 20 - want).max() < 0.3
    says = ["a." + end, "3 frames", "1.20 s", "takes 5", "2.00 s"]
    run.refused(data.load, cfg | dict(data_fps=2.0), says=says)
