"""Text to image in miniature: random pipelines with vocabularies made here, captions, tars, encode.py."""
import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import data
import run
import sample
import trainer
from nets import encoders

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("webdataset")
sys.path.insert(0, str(trainer.ROOT / "tools"))
import encode  # noqa: E402

WORDS = "a b c cat dog red blue on the mat".split()
NETS = dict(
    sdxl="sd:sdxl,x_shape=(4,8,8),width=16,mult=(1,2),depths=(0,1),heads=(2,2),groups=4,layers=1,text_dim=40,"
         "pooled_dim=24,id_dim=8",
    flux="flux:dev,x_shape=(4,8,8),depth=1,single_depth=1,dim=32,heads=2,axes=(4,6,6),text_dim=16,"
         "pooled_dim=16")

def clip(kind, size):
    config = transformers.CLIPTextConfig(
        vocab_size=300, hidden_size=size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=size, bos_token_id=298, eos_token_id=299, pad_token_id=299)
    return getattr(transformers, kind)(config).eval()

def clip_tokenizer():
    letters = [chr(i) for i in range(97, 123)]
    pieces = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(pieces)} | {"<|startoftext|>": 298, "<|endoftext|>": 299}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)

def t5():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *(("▁" + w, -2.0) for w in WORDS)]
    pieces += [(chr(i), -5.0) for i in range(97, 123)] + [("▁", -4.0)]
    tokenizer = transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return tokenizer, transformers.T5EncoderModel(config).eval()

def pipeline(name):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, scaling_factor=0.13, sample_size=16,
        shift_factor=0.1 if name == "flux" else None)
    if name == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            vae, clip("CLIPTextModel", 16), clip("CLIPTextModelWithProjection", 24), clip_tokenizer(),
            clip_tokenizer(), unet=None, scheduler=diffusers.EulerDiscreteScheduler())
    tokenizer, text = t5()
    return diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, clip("CLIPTextModel", 16),
                                  clip_tokenizer(), text, tokenizer, transformer=None)

@pytest.fixture(scope="module", params=NETS)
def made(request, tmp_path_factory):
    """(name, pipeline, its folder, a tar of 8 captioned images, a few pixels more than the net takes)."""
    folder, rng = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    pipe = pipeline(request.param)
    pipe.save_pretrained(folder / "pipe")
    with tarfile.open(folder / "000.tar", "w") as tar:
        for i in range(8):
            picture = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (20, 18, 3), np.uint8)).save(picture, "png")
            members = dict(png=picture.getvalue(), txt=" ".join(rng.choice(WORDS, 1 + i)).encode(),
                           json=json.dumps(dict(score=i, split="ab"[i % 2])).encode())
            for name, content in members.items():
                about = tarfile.TarInfo(f"some/{i:03d}.{name}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    return request.param, pipe, str(folder / "pipe"), folder / "000.tar"

def settings(made, **changes):
    name, _, pipe, tar = made
    return trainer.defaults | run.TINY | dict(net=NETS[name], data=str(tar), encoders=pipe, offline=True,
                                              encoder_dtype="", classes=0, batch_size=4) | changes

def precompute(made, out, *more):
    name, _, pipe, tar = made
    encode.main([f"--net={NETS[name]}", f"--data={tar}", f"--encoders={pipe}", f"--out={out}", "--shard=3",
                 "--offline=1", "--device=cpu", "--encoder_dtype=", "--batch_size=2", "--classes=0", *more])

def test_captions_are_encoded_as_by_the_official_pipeline(made):
    name, pipe, *_ = made
    cfg, texts = settings(made), ["a cat on the mat", "", "red " * 30]
    cond, uncond = encoders.conditions([0, 0, 0], cfg, "cpu", dict(caption=texts))
    how = dict(device="cpu", num_images_per_prompt=1)
    with torch.no_grad():
        if name == "sdxl":
            how["do_classifier_free_guidance"] = True
            text, blank, pooled, no_pooled = pipe.encode_prompt(texts, **how)
        else:
            (text, pooled, _), (blank, no_pooled, _) = (pipe.encode_prompt(t, None, **how)
                                                        for t in (texts, [""]))
    wanted = dict(text=text, pooled=pooled), dict(text=blank, pooled=no_pooled)
    for ours, want in zip((cond, uncond), wanted):
        assert all(torch.equal(ours[k], v.expand_as(ours[k])) for k, v in want.items())
    other = encoders.conditions([0, 0, 0], cfg, "cpu", dict(caption=texts, negative=["dog"] * 3))[1]
    assert not torch.equal(other["text"], uncond["text"]) and torch.equal(other["text"][0], other["text"][2])

def test_latents_are_those_of_the_pipelines_scale_and_come_back(made):
    name, pipe, *_ = made
    cfg, x = settings(made), torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        dist, c = pipe.vae.encode(x).latent_dist, pipe.vae.config
        z = (dist.mean - (c.shift_factor or 0)) * c.scaling_factor
        want = pipe.vae.decode(z / c.scaling_factor + (c.shift_factor or 0)).sample
    mean, std = encoders.moments(x, cfg, "cpu").chunk(2, 1)
    assert torch.allclose(mean, z, atol=1e-6) and torch.allclose(std, dist.std * c.scaling_factor, atol=1e-6)
    assert (encoders.decode(z, cfg).int() - (want * 127.5 + 128).clip(0, 255).int()).abs().max() <= 1

def test_training_data_are_the_same_encoded_in_the_loop_or_before(made, tmp_path):
    precompute(made, tmp_path)
    shards = sorted(tmp_path.glob("*.tar"))
    before, stamp = [shard.read_bytes() for shard in shards], shards[0].stat().st_mtime_ns
    shards[1].write_bytes(before[1][:-2000] + b"x" + before[1][-1999:])      # damaged
    shards[2].unlink()
    precompute(made, tmp_path)
    assert [shard.read_bytes() for shard in shards] == before and shards[0].stat().st_mtime_ns == stamp
    run.refused(precompute, made, tmp_path, "--negative_prompt=dog", says=["made otherwise"])
    batches = []
    for cfg in settings(made, guidance=3.0), settings(made, guidance=3.0, encoders="", data=str(tmp_path)):
        loader = data.Loader(data.load(cfg), cfg, start_it=1)
        torch.manual_seed(0)
        batches.append(encoders.encode(next(loader), cfg, "cpu"))
    own, stored = batches
    assert torch.equal(own["id"], stored["id"]) and own["cond"].keys() == stored["cond"].keys()
    assert (own["x0"] - stored["x0"]).abs().max() < 2e-3                     # float16
    for part in "cond", "uncond":
        assert all(torch.allclose(stored[part][k], v, atol=1e-5) for k, v in own[part].items())

def test_dmd2_trains_stops_and_resumes_bit_for_bit_on_captions_and_on_tars(made, tmp_path):
    precompute(made, tmp_path / "tars")
    method, states = run.load("dmd2"), {}
    given = settings(made, encoder_dtype="bf16", guidance=3.0, update_ratio=1, max_iter=3, save_every=1,
                     val_every=3, sample_every=3, gan_taps=(1,), t_list=(), t_dist="uniform", t_min=0.02,
                     t_max=0.9, dm_t_dist="uniform", dm_t_min=0.02, dm_t_max=0.9)
    given = {k: v for k, v in given.items() if v != trainer.defaults.get(k)}
    sources = dict(loop={}) if made[0] == "sdxl" else {}
    for name, data_ in (sources | dict(tars=dict(data=str(tmp_path / "tars")))).items():
        for stops in (3,), (1, 3):
            for stop in stops:
                cfg = run.config(method, **given | data_, name=f"{name}{len(stops)}", stop_at=stop)
                result = run.run(method, cfg)
            states[name, len(stops)] = run.saved(result.folder, 3)
        whole, resumed = states[name, 1], states[name, 2]
        assert whole["counts"] == dict(fake=2, student=1) and (result.folder / "samples/0000003.png").exists()
        for part in "nets", "emas", "optims":
            assert not run.differing(whole[part], resumed[part])
    (tmp_path / "prompts.txt").write_text("a red circle\n\na blue one\n")
    for text, more in ((str(tmp_path / "prompts.txt"), []), ("a red circle", ["--negative", "a blue one"])):
        args = ["--prompts", text, "--encoders", made[2], "--net=teacher", "--steps=2", "--seeds=0-2"]
        out = ["--guidance", "3", "--out", str(tmp_path / f"out{len(more)}")]
        sample.main([str(result.folder), *args, *more, *out])
    pixels = [[np.asarray(Image.open(tmp_path / out / f"{i:07d}.png")) for i in range(3)]
              for out in ("out0", "out2")]
    for a, b in zip(*pixels):       # another prompt, or another negative one; a fresh flux has its gates shut
        assert np.array_equal(a, b) == (made[0] == "flux")
    run.refused(sample.main, [str(result.folder)], says=["--prompts"])

def test_tars_are_mapped_filtered_and_refused(made, tmp_path):
    keys = "image=jpg;png", "caption=txt", "json=json"
    cfg = settings(made, data_filter=("score>=2", "split==a"), data_keys=keys)
    (tmp_path / "ignored").write_text("some/004\n")
    assert len(data.load(cfg)) == 3 and len(data.load(cfg | dict(data_ignore=str(tmp_path / "ignored")))) == 2
    found = data.load(cfg)
    assert found.shape == (3, 16, 16) and len(found.texts([0, 1])["caption"][1].split()) == 5
    (tmp_path / "cut.tar").write_bytes(made[3].read_bytes()[:1500])
    for changes, word in ((dict(data_keys=("image=tiff",)), "some/000"),
                          (dict(data_filter=("score",)), "score"),
                          (dict(data_keys=("picture=png",)), "picture"),
                          (dict(data=str(tmp_path / "cut.tar")), "cut.tar")):
        run.refused(data.load, cfg | changes, says=[word])
    run.refused(encoders.prompts, ["a"], cfg | dict(encoders=str(tmp_path)), "cpu", says=["--encoders"])

def test_a_folder_of_captioned_images_is_cut_to_the_net(made, tmp_path):
    for i in range(4):
        Image.new("L" if i else "RGB", (40, 20 + i), 50 * i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"cat {'a ' * i}\n")
    cfg = settings(made, data=str(tmp_path))
    raw = next(data.Loader(data.load(cfg), cfg))
    assert raw["image"].shape == (4, 3, 16, 16) and sorted(raw["caption"])[0] == "cat"
    (tmp_path / "2.txt").unlink()
    run.refused(lambda: next(data.Loader(data.load(cfg), cfg)), says=["2.txt"])

def test_a_qwen_image_vae_alone_encodes_images_of_classes_and_texts_are_made_of_one_length(tmp_path):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0]).eval()
    vae.save_pretrained(tmp_path)
    cfg = settings(("flux", None, str(tmp_path), ""), classes=10)
    raw = dict(image=torch.randint(256, (2, 1, 16, 16)).byte(), label=torch.tensor([3, -1]), id=torch.ones(2))
    with torch.no_grad():
        batch, x = encoders.encode(raw, cfg, "cpu"), raw["image"].float().expand(-1, 3, -1, -1) / 127.5 - 1
        mean = vae.encode(x[:, :, None]).latent_dist.mean[:, :, 0]
    want = (mean - torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None]) / torch.arange(1, 5)[:, None, None]
    assert torch.allclose(batch["x0"], want, atol=1e-5) and batch["cond"]["label"].tolist() == [3, -1]
    assert encoders.decode(batch["x0"], cfg).shape == (2, 3, 16, 16) and encoders.shapes(cfg) == (3, 16, 16)
    one, two = encoders.level(dict(text=torch.ones(2, 3, 4)), dict(text=torch.ones(1, 5, 4)))
    assert one["text"].shape == (2, 5, 4) and one["text_mask"].sum() == 6 and two["text_mask"].all()
