"""Text to image in miniature: random pipelines with vocabularies made here, captions, tars, encode.py."""
import json
import shutil
import sys
import tarfile
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import common
import data
import evaluate
import golden_recipe
import logs
import run
import sample
import startup
import trainer
from families import load, near, pair, spec
from nets import encoders
from nets.layers import pack, unpack
from test_fid import Tiny

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
webdataset = pytest.importorskip("webdataset")
sys.path.insert(0, str(trainer.ROOT / "tools"))
import encode, export, make_pairs  # noqa: E401, E402

WORDS = "a b c cat dog red blue on the mat".split()
TWO = dict(layers=1, mult=(1, 2))                       # levels of the three
LESS = dict(sd15=TWO | dict(depths=(1, 1), heads=(4, 4)), sdxl=TWO | dict(depths=(0, 2), heads=(2, 4)),
            flux=dict(text_dim=20), qwen=dict(text_dim=20))
NETS = {name: spec(name, **less | dict(x_shape=(4, 8, 8))) for name, less in LESS.items()}

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
    config = transformers.T5Config(vocab_size=64, d_model=20, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return tokenizer, transformers.T5EncoderModel(config).eval()

def qwen():
    letters = [chr(i) for i in range(33, 127)] + ["\u0120", "\u010a"]        # a blank, a new line
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.Qwen2Tokenizer({piece: i for i, piece in enumerate(words + letters)}, [])
    tokenizer.add_special_tokens(dict(additional_special_tokens=words[1:]))
    tiny = dict(hidden_size=20, intermediate_size=32)
    turns = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 2, 2])
    config = transformers.Qwen2_5_VLConfig(
        text_config=tiny | dict(vocab_size=128, num_hidden_layers=2, num_attention_heads=2,
                                num_key_value_heads=2, rope_parameters=turns),
        vision_config=tiny | dict(depth=1, num_heads=2, out_hidden_size=20))
    return tokenizer, transformers.Qwen2_5_VLForConditionalGeneration(config).eval()

def qwen_vae():
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0]).eval()

def scheduler(name, pred="epsilon"):
    """That of the public pipeline."""
    if "sd" not in name:
        more = dict(max_shift=1.15) if name == "flux" else dict(
            max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)
        return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, **more)
    kw = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
              timestep_spacing="leading", prediction_type=pred)
    return diffusers.EulerDiscreteScheduler(**kw) if name == "sdxl" else diffusers.PNDMScheduler(
        skip_prk_steps=True, set_alpha_to_one=False, **kw)

def pipeline(name):
    config, steps = golden_recipe.load(name)[0]["config"], scheduler(name)
    two = {k: v[-2:] if k.startswith("up_") else v[:2] for k, v in config.items() if type(v) is list}
    net, _ = pair(name, two | dict(layers_per_block=1) if "sd" in name else dict(joint_attention_dim=20),
                  **LESS[name])
    if name == "qwen":
        return diffusers.QwenImagePipeline(steps, qwen_vae(), *qwen()[::-1], net)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, scaling_factor=0.13, sample_size=16,
        shift_factor=0.1 if name == "flux" else None)
    first = clip("CLIPTextModel", dict(sd15=24, sdxl=8, flux=20)[name]), clip_tokenizer()
    if name == "sd15":
        return diffusers.StableDiffusionPipeline(vae, *first, net, steps, None, None,
                                                 requires_safety_checker=False)
    if name == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            vae, first[0], clip("CLIPTextModelWithProjection", 16), first[1], clip_tokenizer(), net, steps)
    return diffusers.FluxPipeline(steps, vae, *first, *t5()[::-1], net)

@pytest.fixture(scope="module", params=NETS)
def made(request, tmp_path_factory):
    """(name, pipeline, its folder, a tar of 8 captioned images, a few pixels more than the net takes)."""
    folder, rng = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    pipe = pipeline(request.param)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / "pipe")
    with webdataset.TarWriter(f"{folder}/000.tar") as tar:
        for i in range(8):
            tar.write(dict(__key__=f"some/{i:03d}", png=rng.integers(0, 256, (20, 18, 3), np.uint8),
                           txt=" ".join(rng.choice(WORDS, 1 + i)), json=dict(score=i, split="ab"[i % 2])))
    return request.param, pipe, str(folder / "pipe"), folder / "000.tar"

def settings(made, **changes):
    name, _, pipe, tar = made
    return trainer.defaults | run.TINY | dict(net=NETS[name], data=str(tar), encoders=pipe, offline=True,
                                              encoder_dtype="", classes=0, batch_size=4) | changes

def arguments(made, out, *more):
    name, _, pipe, tar = made
    return [f"--net={NETS[name]}", f"--data={tar}", f"--encoders={pipe}", f"--out={out}", "--shard=3",
            "--offline=1", "--device=cpu", "--encoder_dtype=", "--batch_size=2", "--classes=0", *more]

def precompute(*args):
    encode.main(arguments(*args))

def official(pipe, prompts, negative, z, steps=2, guidance=3.0):
    """Latents of the pipeline from z."""
    kw = dict(prompt=prompts, num_inference_steps=steps, output_type="latent")
    if hasattr(pipe, "unet"):
        if hasattr(pipe, "text_encoder_2"):             # this VAE halves, SDXL's own makes 8 pixels one
            kw |= dict.fromkeys(("original_size", "target_size"), tuple(8 * n for n in z.shape[2:]))
        negative = [negative] * len(prompts) if negative else None
        return pipe(latents=z.clone(), guidance_scale=guidance, negative_prompt=negative, **kw).images
    negative = [negative or ("" if hasattr(pipe, "text_encoder_2") else " ")] * len(prompts)
    kw |= dict(height=2 * z.shape[2], width=2 * z.shape[3], true_cfg_scale=guidance)
    return unpack(pipe(latents=pack(z), negative_prompt=negative, **kw).images, z.shape[2] // 2)

def denoiser(pipe):
    return "unet" if hasattr(pipe, "unet") else "transformer"

def of_family(net):
    return sys.modules[type(net).__module__].teacher_sample

@torch.no_grad()
def test_the_teacher_samples_as_the_pipeline(made):
    name, pipe, *_ = made
    texts, size = ["a cat on the mat", "", "red"], (7, 13) if "sd" in name else (12, 20)
    cond, uncond = encoders.conditions([0] * 3, settings(made), "cpu", dict(caption=texts))
    z, before = torch.randn(3, 4, *size), pipe.scheduler
    for pred, theirs in dict(eps="epsilon", v="v_prediction").items():
        if pred == "v" and "sd" not in name:
            continue
        net = common.make_net(NETS[name], **dict(pred=pred) if "sd" in name else {})
        load(net, pipe.components[denoiser(pipe)].state_dict())
        pipe.scheduler = scheduler(name, theirs)
        for steps, guidance in (1 if "sd" in name else 3, 1.0), (2, 1.0), (7, 4.0):
            want = official(pipe, texts, "", z, steps, guidance)
            got = of_family(net)(net, lambda k: z, cond, steps, uncond, guidance)
            assert near(got, want, 1e-4 * want.abs().max().clamp(min=1))
    pipe.scheduler = before

@torch.no_grad()
def test_captions_are_encoded_as_by_the_official_pipeline(made):
    name, pipe, *_ = made
    cfg, texts = settings(made), ["a cat on the mat", "", "red " * 30]
    cond, uncond = encoders.conditions([0, 0, 0], cfg, "cpu", dict(caption=texts))
    how = dict(device="cpu", num_images_per_prompt=1)
    if "sd" in name:
        wanted = zip(*[iter(pipe.encode_prompt(texts, do_classifier_free_guidance=True, **how))] * 2)
    elif name == "flux":
        wanted = zip(*(pipe.encode_prompt(t, None, **how)[:2] for t in (texts, [""])))
    else:
        (text, mask), (blank, _) = (pipe.encode_prompt(t, **how) for t in (texts, [" "]))
        wanted = (text, blank), (mask, torch.ones(blank.shape[:2]))
    keys = dict(sd15=["text"], qwen=["text", "text_mask"]).get(name, ["text", "pooled"])
    assert {*cond} == {"label", *keys}
    for key, want in zip(keys, wanted):
        for ours, v in zip((cond[key], uncond[key]), want):
            n = v.shape[1]                              # Qwen-Image's texts are padded to the longest
            assert torch.equal(ours[:, :n], v.to(ours).expand(3, *v.shape[1:])) and not ours[:, n:].any()
    told = dict(qwen="1 are cut to 512", flux="2 are cut to 77 tokens, 1 are cut to 512")
    assert encoders.cut([*texts, "a b " * 256], cfg) == [
        f"WARNING: of 4 texts looked at {told.get(name, '2 are cut to 77')} tokens"]

@torch.no_grad()
def test_latents_are_those_of_the_pipelines_scale_and_come_back(made):
    name, pipe, *_ = made
    cfg, x = settings(made), torch.rand(2, 3, 16, 16) * 2 - 1
    shift, scale, frames = dict(flux=(0.1, 0.13, ())).get(name, (0.0, 0.13, ()))
    if name == "qwen":
        scale = 1 / torch.arange(1.0, 5)[:, None, None]
        shift, frames = 0.1 / scale, (1,)
    dist = pipe.vae.encode(x.reshape(2, 3, *frames, 16, 16)).latent_dist
    mean, std = (v.reshape(2, -1, 8, 8) for v in (dist.mean, dist.std))
    z = (mean - shift) * scale
    want = pipe.vae.decode((z / scale + shift).reshape(2, -1, *frames, 8, 8)).sample.reshape(x.shape)
    got = encoders.moments(x, cfg, "cpu")
    assert torch.allclose(got, torch.cat([z, std * scale], 1), atol=1e-6)
    assert (encoders.decode(z, cfg).int() - (want * 127.5 + 128).clip(0, 255).int()).abs().max() <= 1

def test_training_data_are_the_same_encoded_in_the_loop_or_before(made, tmp_path):
    precompute(made, tmp_path)
    stored = settings(made, encoders="", data=str(tmp_path), guidance=3.0)
    shards = sorted(tmp_path.glob("*.tar"))
    before, stamp = [shard.read_bytes() for shard in shards], shards[0].stat().st_mtime_ns
    shards[1].write_bytes(before[1][:-2000] + b"x" + before[1][-1999:])      # damaged
    shards[2].unlink()
    precompute(made, tmp_path)
    assert [shard.read_bytes() for shard in shards] == before and shards[0].stat().st_mtime_ns == stamp
    run.refused(precompute, made, tmp_path, "--negative_prompt=dog", says=["made otherwise"])
    run.refused(data.load, stored | dict(negative_prompt="dog"), says=["'dog' is for encoders"])
    np.save(tmp_path / "dog.npy", np.ones((3, 20), np.float32))
    for file in "uncond.safetensors", "dog.npy":
        data.load(stored | dict(negative_prompt="dog", data_uncond=str(tmp_path / file)))
    batches = []
    for cfg in settings(made, guidance=3.0), stored:
        loader = data.Loader(data.load(cfg), cfg, start_it=1)
        torch.manual_seed(0)
        batches.append(encoders.encode(next(loader), cfg, "cpu"))
    own, stored = batches
    assert torch.equal(own["id"], stored["id"]) and own["cond"].keys() == stored["cond"].keys()
    assert (own["x0"] - stored["x0"]).abs().max() < 2e-3                     # float16
    for part in "cond", "uncond":
        assert all(torch.allclose(stored[part][k], v, atol=1e-5) for k, v in own[part].items())
    before = startup.fingerprint(cfg, loader.dataset)
    loader.dataset.uncond["text"] += 1
    assert startup.fingerprint(cfg, loader.dataset)["crc"] != before["crc"]

@pytest.mark.parametrize("made", ["sdxl"], indirect=True)
def test_encode_sees_every_caption_clears_what_a_kill_left_and_refuses_before_any_work(made, tmp_path):
    path, out = made[2], tmp_path / "out"
    shutil.copytree(path, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer"))
    file = shutil.copytree(path, tmp_path / "other") / "vae/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(latent_channels=5)))
    for arg, words in (("--xflip=1", "leave out --xflip"), ("--augment=0.1", "--augment"),
                       (f"--encoders={path}/vae", "is a VAE alone"),
                       (f"--encoders={tmp_path}/mute", "lacks the folder tokenizer"),
                       (f"--encoders={tmp_path}/other", "a VAE of 5 channels, --net sd:sdxl")):
        args = [a for a in arguments(made, out) if a.partition("=")[0] != arg.partition("=")[0]]
        run.refused(encode.main, [*args, arg], says=[words])
    assert not out.exists()
    (folder := tmp_path / "data").mkdir()
    for i in range(34):                                 # the fingerprint reads every second one
        Image.new("RGB", (16, 16), (7 * i, 0, 0)).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.txt").write_text("a cat")
    precompute(here := (*made[:3], folder), out)
    (out / ".0000004.tar.99.tmp").write_bytes(b"half")
    precompute(here, out)
    assert not [*out.glob(".*")]
    (folder / "05.txt").write_text("a dog")
    run.refused(precompute, here, out, says=["made otherwise"])
    np.save(folder / "00.txt_emb.npy", np.ones((3, 20)))    # embeddings without captions are kept
    with tarfile.open(tmp_path / "told.tar", "w") as tar:
        for name in "00.png", "00.txt_emb.npy":
            tar.add(folder / name, name)
    precompute((*made[:3], tmp_path / "told.tar"), tmp_path / "kept")
    kept = data.load(settings(made, data=str(tmp_path / "kept"))).texts([0])
    assert torch.equal(kept["cond"]["text"], torch.ones(1, 3, 20)) and not kept["uncond"]

@pytest.mark.parametrize("made", ["sdxl"], indirect=True)
def test_two_ranks_finish_what_a_killed_run_began_as_one_makes_it(made, tmp_path, monkeypatch):
    precompute(made, tmp_path / "one")
    packed, calls = encode.packed, []
    def dies(*args):
        calls.append(args)
        return packed(*args) if len(calls) < 5 else 1 / 0       # uncond, shard 0, then in shard 1
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(encode, "packed", dies)
        precompute(made, tmp_path / "two")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 8 and {*two} == {"meta.json", "uncond.safetensors", "0000000.tar", "0000000.crc"}
    run.ranks(2, encode.main, arguments(made, tmp_path / "two"))
    assert {f.name: f.read_bytes() for f in (tmp_path / "two").iterdir()} == one

def test_dmd2_trains_resumes_samples_as_the_pipeline_and_exports_from_captions_and_tars(
        made, tmp_path, monkeypatch):
    precompute(made, tmp_path / "tars")
    (name, pipe, path, _), method = made, run.load("dmd2")
    given = settings(made, guidance=3.0, update_ratio=1, max_iter=3, save_every=1, val_every=3, lr=0.01,
                     sample_every=3, gan_taps=(1,), t_list=(), t_dist="uniform", t_min=0.02, t_max=0.9,
                     dm_t_dist="uniform", dm_t_min=0.02, dm_t_max=0.9, teacher=path)
    given = {k: v for k, v in given.items() if v != trainer.defaults.get(k)}

    def trained(name, *stops, **changes):
        for stop in stops:
            cfg = run.config(method, **given | changes, name=name, stop_at=stop)
            folder = run.run(method, cfg).folder
        return cfg, folder, run.saved(folder, 3)

    if name == "sdxl":
        trained("loop", 3, encoder_dtype="bf16", sample_every=0)
    _, _, whole = trained("whole", 3, data=str(tmp_path / "tars"))
    cfg, folder, resumed = trained("resumed", 1, 3, data=str(tmp_path / "tars"))
    assert whole["counts"] == dict(fake=2, student=1) and (folder / "samples/0000003.png").exists()
    assert not any(run.differing(whole[part], resumed[part]) for part in ("nets", "emas", "optims"))
    # the teacher's samples are the pipeline's
    (tmp_path / "prompts.txt").write_text("a red circle\n\na blue one\n")
    drawn, told = run.spy(monkeypatch, encoders, "decode"), ["a red circle", "a blue one", "a red circle"]
    z, teacher = common.noise_fn(0, range(3), (4, 8, 8), "cpu")(0), [
        str(folder), f"--encoders={path}", "--net=teacher"]
    sample.main([*teacher, f"--prompts={tmp_path}/prompts.txt", "--steps=2", "--seeds=0-2", "--negative=dog",
                 f"--out={tmp_path}/pictures"])
    want = official(pipe, told, "dog", z)
    assert near(drawn[-1][0][0], want, 1e-5 * want.abs().max())
    # evaluate.py draws these too: no distance to them
    monkeypatch.setattr(evaluate, "Inception", Tiny)
    evaluate.main([*teacher, f"--prompts={tmp_path}/prompts.txt", "--steps=2", "--samples=3",
                   "--negative=dog", f"--ref={tmp_path}/pictures"])
    scored = json.loads((folder / "eval/0000003.json").read_text())["results"][0]
    assert scored["fid"] == pytest.approx(0, abs=1e-9)
    run.refused(sample.main, [str(folder)], says=["--prompts"])
    teacher += ["--seeds=0", "--steps=1", "--prompts"]
    run.refused(sample.main, [*teacher, "a", "--guidance=1", "--negative=dog"], says=["'dog' changes"])
    for more in [], ["--negative=dog"], ["--negative=dog"]:
        sample.main([*teacher, "a", *more])
    assert len([*(folder / "samples").glob("0000003_teacher_1_????????.png")]) == 2
    # the exported student is the pipeline's net
    export.main([f"{folder}#student", f"{tmp_path}/out"])
    other = type(pipe.components[denoiser(pipe)]).from_pretrained(tmp_path / "out")
    net = sample.load_net(sample.load_run(folder), "student", "cpu")
    cond, uncond = encoders.conditions([-1] * 3, cfg | dict(encoders=path), "cpu",
                                       dict(caption=told, negative=["dog"] * 3))
    own = of_family(net)(net, lambda k: z, cond, 2, uncond, 3.0)
    got = official(type(pipe)(**pipe.components | {denoiser(pipe): other}), told, "dog", z)
    assert near(own, got, 1e-5 * got.abs().max()) and not near(own, want, 1e-3 * want.abs().max())

@pytest.mark.parametrize("made", ["sdxl"], indirect=True)
def test_pairs_keep_the_texts_of_tars_and_forward_mode_runs_behind_the_vae(made, tmp_path):
    precompute(made, tmp_path / "tars")
    args = [f"--net={NETS['sdxl']}", f"--teacher={made[2]}", f"--out={tmp_path}/pairs", "--pairs=20",
            "--path_t=0.9,0.5"]
    run.refused(make_pairs.main, [*args, f"--data={made[3]}"], says=["tools/encode.py"])
    make_pairs.main([*args, f"--data={tmp_path}/tars", "--steps=3", "--guidance=2"])
    once = settings(made, max_iter=1, t_list=(), guidance=1.0, teacher="")
    cfg = once | dict(data=f"{tmp_path}/pairs", encoders="", guidance=2.0, teacher=made[2], steps=2)
    found, source = data.load(cfg), data.load(cfg | dict(data=f"{tmp_path}/tars"))
    order = data.indices(0, range(20), 8)
    assert torch.equal(found.texts([3, 7])["cond"]["text"], source.texts(order[[3, 7]])["cond"]["text"])
    for name, cfg in dict(kd=cfg | dict(t_list=(0.9, 0.5)), mean_flow=once | dict(distill=False)).items():
        method = run.load(name)
        run.run(method, trainer.defaults | method.config | cfg | dict(name=name))

@pytest.mark.parametrize("made", ["sdxl"], indirect=True)
def test_tars_are_mapped_filtered_and_refused(made, tmp_path):
    cfg = settings(made, data_filter=("score>=2", "split==a"),
                   data_keys=("image=jpg;png", "caption=txt", "json=json"))
    (tmp_path / "ignored").write_text("some/004\n")
    found = data.load(cfg)
    assert len(found) == 3 and len(data.load(cfg | dict(data_ignore=str(tmp_path / "ignored")))) == 2
    assert found.shape == (3, 16, 16) and len(found.texts([0, 1])["caption"][1].split()) == 5
    with tarfile.open(made[3]) as tar:
        last = tar.getmembers()[-1].offset
    for name, end in ("cut", 2000), ("less", last + 100):           # in a file, in a header
        (tmp_path / f"{name}.tar").write_bytes(made[3].read_bytes()[:end])
    for changes, word in ((dict(data_keys=("image=tiff",)), "some/000"),
                          (dict(data_filter=("score",)), "score"),
                          (dict(data_keys=("picture=png",)), "picture"),
                          (dict(data=f"{tmp_path}/cut.tar"), "cut.tar"),
                          (dict(data=f"{tmp_path}/less.tar"), "less.tar is cut off behind 8 samples"),
                          (dict(data_filter=("score>9",)), "--data_filter"),
                          (dict(data_ignore="nowhere"), "--data_ignore nowhere"),
                          (dict(data=str(trainer.ROOT / "assets")), "--data_keys is of tars")):
        run.refused(data.load, cfg | changes, says=[word])

@pytest.mark.parametrize("made", ["sdxl"], indirect=True)
def test_a_folder_of_captioned_images_is_cut_to_the_net(made, tmp_path):
    for i in range(4):
        Image.new("L" if i else "RGB", (40, 20 + i), 50 * i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"cat {'a ' * 30 * i}\n")
    cfg = settings(made, data=str(tmp_path))
    plan = SimpleNamespace(dataset=data.load(cfg), turns=Counter())
    assert logs.warnings(cfg, plan, {}, {}) == ["WARNING: of 4 texts looked at 1 are cut to 77 tokens"]
    assert logs.warnings(cfg | dict(encoders=""), plan, {}, {}) == []
    before = startup.fingerprint(cfg, plan.dataset)
    (tmp_path / "1.txt").write_text("dog")
    assert startup.fingerprint(cfg, plan.dataset)["crc"] != before["crc"]
    raw = next(data.Loader(data.load(cfg), cfg))
    assert raw["image"].shape == (4, 3, 16, 16) and sorted(raw["caption"])[::3] == ["cat", "dog"]
    (tmp_path / "2.txt").unlink()
    run.refused(lambda: next(data.Loader(data.load(cfg), cfg)), says=["2.txt"])

def test_a_qwen_image_vae_alone_encodes_images_of_classes_and_texts_are_made_of_one_length(tmp_path):
    qwen_vae().save_pretrained(tmp_path)
    cfg = settings(("flux", None, str(tmp_path), ""), classes=10)
    raw = dict(image=torch.randint(256, (2, 1, 16, 16)).byte(), label=torch.tensor([3, -1]), id=torch.ones(2))
    with torch.no_grad():
        batch = encoders.encode(raw, cfg, "cpu")
    want = encoders.moments(raw["image"].expand(-1, 3, -1, -1), cfg, "cpu")[:, :4]
    assert torch.equal(batch["x0"], want) and batch["cond"]["label"].tolist() == [3, -1]
    assert encoders.decode(batch["x0"], cfg).shape == (2, 3, 16, 16) and encoders.shapes(cfg) == (3, 16, 16)
    one, two = encoders.level(dict(text=torch.ones(2, 3, 4)), dict(text=torch.ones(1, 5, 4)))
    assert one["text"].shape == (2, 5, 4) and one["text_mask"].sum() == 6 and two["text_mask"].all()
