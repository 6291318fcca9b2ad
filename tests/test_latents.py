"""ImageNet-256's way in miniature: stored latents of classes; MeanFlow and SFT of DiT and SiT on them."""
import io
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import common
import data
import run
import trainer
from nets import dit, encoders
from run import refused
from test_data import labels, png, write

NET = "dit:sit_b2,x_shape=(4,8,8),dim=64,depth=2,heads=4"
SCALE = 0.18215

def moments(n=None):
    """What a VAE might store of the digits: mean and standard deviation (n, 8, 8, 8) float32; classes."""
    images = data.load(dict(data="digits", classes=-1))
    x = np.stack([images.get(i)[0] for i in range(n or len(images))])                   # (n, 1, 8, 8)
    mean = np.concatenate([x, x[:, :, ::-1], x[..., ::-1], -x], 1)
    return np.concatenate([mean, np.full_like(mean, 0.1)], 1) / np.float32(SCALE), images.label[:len(x)]

def npy(array):
    np.save(file := io.BytesIO(), array)
    return file.getvalue()

def zipped(files):
    with zipfile.ZipFile(file := io.BytesIO(), "w") as z:
        for name, content in files.items():
            z.writestr(name, content)
    return file.getvalue()

def settings(path, **changes):
    return trainer.defaults | run.TINY | dict(net=NET, data=str(path), data_scale=SCALE) | changes

# ---- reading
def test_moments_in_a_zip_a_folder_and_an_npz_and_ready_latents_are_alike_and_scaled(tmp_path):
    stored, label = moments(40)
    ready = stored[:, :4].astype(np.float16)
    names = [f"0000{c}/img-mean-std-{i:08d}.npy" for i, c in enumerate(label)]           # EDM2's, by class
    files = dict(zip(names, map(npy, stored)))
    write(tmp_path, {f"set/{name}": content for name, content in files.items()} | {
        "set.zip": zipped(files | labels(*([n, int(c)] for n, c in zip(names, label)))),
        "set.npz": dict(moments=stored, labels=label),
        "ready.zip": zipped({f"{i}.npy".zfill(6): npy(z) for i, z in enumerate(ready)}),
        "ready.npz": dict(latents=ready)})
    for name in "set", "set.zip", "set.npz", "ready.zip", "ready.npz":
        found = data.load(cfg := settings(tmp_path / name, batch_size=40))
        raw, kind = next(data.Loader(found, cfg)), "latent" if "ready" in name else "moments"
        order = sorted(range(40), key=names.__getitem__) if name in ("set", "set.zip") else range(40)
        at, named = [order[i] for i in raw["id"]], kind == "moments"
        assert found.kind == kind and raw["label"].tolist() == (label[at].tolist() if named else [-1] * 40)
        with torch.no_grad():
            mean = encoders.encode(raw, cfg, "cpu")["x0"]
        drawn = encoders.encode(raw, cfg, "cpu")["x0"] - mean
        assert torch.allclose(mean, SCALE * torch.tensor(stored[at, :4]), atol=1e-3)
        assert abs(drawn.std() - 0.1 * named) < 0.005
        assert encoders.shapes(cfg, found.shape, found.kind) == (4, 8, 8)

raw = moments(2)[0]

@pytest.mark.parametrize("files, changes, words", [
    ({"0.npy": npy(raw[0] - 1)}, {}, ["0.npy", "exp(logvar / 2)"]), ({"0.npy": npy(raw)}, {}, ["(C, H, W)"]),
    ({"0.npy": npy(raw[0])}, dict(xflip=True), ["latents", "--xflip"]),
    ({"0.png": png()}, {}, ["--data_scale 0.18215", "holds none"]),
    ({"0.npy": npy(raw[0]), "1.npy": npy(raw[0, :4])}, {}, ["1.npy", "4 channels"])])
def test_latents_that_cannot_be_used_are_one_sentence(tmp_path, files, changes, words):
    write(tmp_path, files)
    refused(data.load, settings(tmp_path, **changes), says=words)

def test_a_folder_of_images_by_classes_becomes_latents_by_classes(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("webdataset")
    sys.path.insert(0, str(trainer.ROOT / "tools"))
    import encode
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4)
    vae.save_pretrained(tmp_path / "vae")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    for image, name in zip(pixels, ("cat/1", "cat/2", "dog/1", "eel/1", "eel/2")):
        (file := tmp_path / "images" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    encode.main([f"--net={NET}", f"--data={tmp_path}/images", f"--encoders={tmp_path}/vae", "--shard=2",
                 f"--out={tmp_path}/set", "--encoder_dtype=", "--dtype=float32", "--device=cpu"])
    found = data.load(settings(tmp_path / "set"))        # its tars are in the net's space: no data_scale
    assert (found.kind, found.classes, found.label.tolist()) == ("moments", 3, [0, 0, 1, 2, 2])
    with torch.no_grad():
        given = vae.encode(torch.tensor(pixels).permute(0, 3, 1, 2) / 127.5 - 1).latent_dist
    want = SCALE * torch.cat([given.mean, given.std], 1)                # the scale is the VAE's own default
    assert torch.allclose(torch.tensor(np.stack([found.get(i)[0] for i in range(5)])), want, atol=1e-5)

# ---- training
FLOW = NET + ",reverse=false,learn_sigma=false,r_kind=diff"     # MeanFlow's DiT

@pytest.mark.parametrize("name, preset, net, keys", [
    ("mean_flow", "imagenet256_b", FLOW, ("mse", "fm")), ("sft", "sit_xl", NET, ("dsm",)),
    ("sft", "dit_xl", NET.replace("sit", "dit"), ("dsm",))])
def test_the_presets_of_dit_and_sit_lower_their_loss_on_stored_latents(tmp_path, name, preset, net, keys):
    """By the mean of the last 40 iterations of 120 below 0.6 of that of the first 20; in bf16."""
    write(tmp_path, {"set.npz": dict(zip(("moments", "labels"), moments()))})
    method, given = run.load(name), run.TINY | dict(
        net=net, data=str(tmp_path / "set.npz"), teacher="", batch_size=32, lr=1e-3, max_iter=120,
        log_every=20, sample_every=120, steps=4, amp="bf16")
    result = run.run(method, run.train.resolve(method, ["--preset", preset])[0] | given)
    for key in ("loss", *keys):
        values = [line[key] for line in result.lines if key in line]
        assert sum(values[-2:]) / 2 < (values[0] if key == "loss" else 0.6 * values[0])
    assert (result.folder / "samples/0000120.png").exists()

@pytest.mark.parametrize("kind", ["dit", "sit"])
def test_what_sft_trains_is_sampled_as_a_teacher_of_its_family(kind):
    """DiT by its pipeline's DDIM, SiT by Heun's method; FSDP2 puts a class in front of the net's own."""
    method, net = run.load("sft"), common.make_net(NET.replace("sit", kind), label_dim=3)
    for p in net.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    net.__class__ = type("FSDPDiT", (type(net),), dict(__module__="elsewhere"))
    batch = dict(cond=dict(label=torch.tensor([0, 2])), uncond=dict(label=torch.tensor([-1, -1])))
    noise = common.train_noise((2, 4, 8, 8), "cpu")
    with torch.no_grad():
        x0 = method.sample(net, noise, batch, dict(guidance=2.0), 3)
        of = lambda solve: solve(net, noise, batch["cond"], 3, batch["uncond"], 2.0)
        assert torch.equal(x0, of(dit.teacher_sample)) and torch.equal(x0, of(common.heun)) == (kind == "sit")
