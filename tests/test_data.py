"""Data sets, their order, the loader and the augmentation pipe."""
import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import augment
import data
from nets import encoders
from run import differing, refused

every_op, rng = tuple(augment.labels), np.random.default_rng(7)

def config(source="digits", **more):
    return dict(dict(data=str(source), batch_size=12, seed=0, xflip=True, augment=0.12, workers=0), **more)

def png(mode="RGB", size=(8, 8), kind="png"):
    """An image file of this mode, of random bytes."""
    file, shape = io.BytesIO(), np.asarray(Image.new(mode, size)).shape
    Image.fromarray(rng.integers(0, 256, shape, np.uint8), mode).save(file, kind)
    return file.getvalue()

def labels(*table):
    return {"dataset.json": json.dumps(dict(labels=table))}

def pixels(dataset, ids):
    return torch.stack([torch.tensor(dataset.get(i)[0]) for i in ids])

def write(folder, files):
    """Files of bytes, of text or, from a dict of arrays, .npz."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            np.savez(folder / name, **content)
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

zeros, noise, two = np.zeros((4, 8, 8), np.uint8), rng.random((4, 3, 8, 8)), {"a.png": png(), "b.png": png()}

# ---- formats
def test_digits_are_split_in_1500_and_297_and_val_is_never_augmented(tmp_path):
    train = data.load(config())
    image = pixels(train, range(1500))
    assert (len(train), train.classes, image.min(), image.max()) == (1500, 10, -1, 1)
    assert abs(image.std() - 0.75) < 0.01               # sigma_data
    write(tmp_path, {"set.npz": dict(x=zeros)})         # val reads val_data
    val = data.load(config(tmp_path / "set.npz", val_data="digits"), "val")
    assert len(val) == 297 and len(data.load(config(tmp_path / "set.npz"), "val")) == 4
    raw = next(data.Loader(val, config(augment=1.0)))
    assert "augment" not in raw and torch.equal(raw["image"], pixels(val, raw["id"]))

def test_a_zip_a_folder_and_an_npz_of_the_same_images_are_equal(tmp_path):
    files = {f"0000{i % 2}/img{i}.png": png() for i in range(5)}
    images = np.stack([np.array(Image.open(io.BytesIO(content))) for content in files.values()])
    write(tmp_path / "set", files | labels(*([name, i] for i, name in enumerate(files))))
    shutil.make_archive(tmp_path / "set", "zip", tmp_path / "set")
    write(tmp_path, {"hwc.npz": dict(images=images, y=np.arange(5, dtype=np.uint8)),
                     "chw.npz": dict(x=images.transpose(0, 3, 1, 2) / 127.5 - 1, labels=np.arange(5))})
    for name in "set", "set.zip", "hwc.npz", "chw.npz":
        dataset = data.load(config(tmp_path / name))
        assert dataset.shape == (3, 8, 8) and dataset.classes == 5
        for image, i in sorted(map(dataset.get, range(5)), key=lambda each: each[1]):
            image = image if image.dtype == np.uint8 else np.round(image * 127.5 + 127.5)
            assert np.array_equal(image, images[i].transpose(2, 0, 1)), name

def test_sub_folders_are_classes_in_sorted_order_and_a_single_one_is_none(tmp_path):
    write(tmp_path, {"dog/1.jpg": png(kind="jpeg"), "cat/2.webp": png(kind="webp"), "ant/.hidden.png": "none",
                     "cat/deep/3.BMP": png(kind="bmp"), "ant/4.gif": png(kind="gif"), "ant/a.txt": ""})
    dataset = data.load(config(tmp_path))
    assert dataset.names == ["ant/4.gif", "cat/2.webp", "cat/deep/3.BMP", "dog/1.jpg"]
    assert dataset.label.tolist() == [0, 1, 1, 2] and dataset.classes == 3
    assert data.load(config(tmp_path / "cat")).classes == 0

def test_files_of_every_mode_join_an_rgb_set(tmp_path):
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "0.png")  # transparent: laid over white
    Image.new("RGB", (8, 8), "white").save(tmp_path / "1.png")
    for mode in "1", "L", "LA", "P", "RGBA", "CMYK":
        white = Image.new("RGB", (8, 8), "white").convert(mode)
        white.save(tmp_path / f"2{mode}.{'jpg' if mode == 'CMYK' else 'png'}")
    assert pixels(data.load(config(tmp_path)), range(8)).min() >= 254
    ramp = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    (tmp_path / "deep").mkdir()
    Image.fromarray(ramp).save(tmp_path / "deep/a.png")
    assert abs(pixels(data.load(config(tmp_path / "deep")), [0]).numpy() - ramp / 257).max() <= 0.5

@pytest.mark.parametrize("files, words", [(files, words) for files, *words in (
    ({"a.png": png("LA"), "b.png": png("LA"), "c.png": png()}, "c.png", "a.png", "grey"),   # unlike the first
    ({"a.png": png(size=(16, 8)), "c.png": png(size=(8, 16))}, "a.png", "16x8", "c.png", "8x16"),
    ({"a.png": png(), "class0/b.png": png(), "class1/c.png": png()}, "a.png", "class0"),
    (two | labels(["a.png", 0]), "not in both"),
    (two | labels(["a.png", 0], ["b.png", 3]), "b.png", "0 to 2"),
    ({"set.npz": dict(x=noise)}, "[-1, 1]", "2 x - 1"), ({"set.npz": dict(x=noise + np.nan)}, "nan"),
    ({"set.npz": dict(x=noise.astype(int))}, "int64", "uint8"),
    ({"set.npz": dict(x=zeros, y=np.zeros(3, int))}, "3 labels"))])
def test_data_that_cannot_be_used_are_one_sentence(tmp_path, files, words):
    write(tmp_path, files)
    path = tmp_path / "set.npz" if "set.npz" in files else tmp_path
    refused(data.load, config(path, classes=3 if "dataset.json" in files else -1), says=words)

# ---- order, loader, encode
def test_every_epoch_is_another_permutation():
    epochs = [data.indices(3, range(e * 97, (e + 1) * 97), 97) for e in range(3)]
    assert all(sorted(e) == list(range(97)) for e in epochs)
    assert len({tuple(e) for e in epochs} | {tuple(data.indices(4, range(97), 97))}) == 4

def test_ranks_accumulation_threads_and_resume_give_the_same_iteration_and_no_draw_comes_twice():
    cfg = config(augment=1.0, augment_ops=every_op)
    images = np.arange(7 * 4, dtype=np.uint8).reshape(7, 1, 2, 2)
    dataset = data.Images("set", range(7), images.__getitem__, np.arange(7), -1, "train")
    loader = data.Loader(dataset, cfg)
    whole = [next(loader) for _ in range(4)]            # seven epochs, over whose ends a batch may go
    assert all(torch.equal(raw["label"], raw["id"]) for raw in whole)
    assert torch.cat([raw["id"] for raw in whole])[:42].bincount().tolist() == [6] * 7
    assert len({tuple(draws.flatten().tolist()) for raw in whole for draws in raw["augment"]}) == 4 * 12
    for world, accum, workers, start in (1, 4, 1, 0), (2, 2, 3, 0), (4, 1, 0, 0), (2, 1, 3, 2), (1, 2, 0, 3):
        cfg["workers"] = workers
        loaders = [data.Loader(dataset, cfg, start, rank, world, accum) for rank in range(world)]
        for it in range(start, 4):
            slices = [next(ranked) for _ in range(accum) for ranked in loaders]
            assert differing({k: torch.cat([s[k] for s in slices]) for k in slices[0]}, whole[it]) == []
        for ranked in loaders:
            ranked.close()

def test_half_of_the_images_are_flipped_and_only_mirrored():
    raw, still = (next(data.Loader(data.load(config()), config(xflip=xflip, batch_size=1000, augment=0.0)))
                  for xflip in (True, False))
    kept = (raw["image"] == still["image"]).flatten(1).all(1)
    assert torch.equal(raw["image"][~kept], still["image"][~kept].flip(3))
    assert abs((~kept).float().mean() - 0.5) < 0.05

def test_every_uint8_value_survives_encode_and_decode_and_both_conditions_carry_the_augment_labels():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    raw = dict(image=every, label=torch.tensor([3]), id=torch.tensor([9]))
    batch = encoders.encode(raw, dict(classes=10), "cpu")
    assert batch["x0"].min() == -1 and batch["x0"].max() == 1
    assert (batch["cond"]["label"].item(), batch["uncond"]["label"].item()) == (3, -1)
    assert torch.equal(encoders.decode(batch["x0"], {}), every)
    between = torch.tensor([-3.0, 100.4 / 127.5 - 1, 100.6 / 127.5 - 1, 3.0])
    assert encoders.decode(between, {}).tolist() == [0, 100, 101, 255]  # clipped, to the nearest
    cfg = config(augment=1.0, classes=10)
    batch = encoders.encode(next(data.Loader(data.load(cfg), cfg)), cfg, "cpu")
    assert batch["cond"]["augment"].shape == (12, 9)
    assert batch["uncond"]["augment"] is batch["cond"]["augment"]

# ---- augmentation
def drawn(n, p, ops):
    return torch.from_numpy(augment.draw([np.random.default_rng(i) for i in range(n)], p, ops))

def bump(cx, cy, widths=(6.0, 4.0)):
    """A smooth 49x49 image, its centre at (cx, cy) from the middle, wider than high."""
    place = torch.arange(-24.0, 25.0)
    return torch.exp(-((place - cx) / widths[0]) ** 2 - ((place[:, None] - cy) / widths[1]) ** 2)[None, None]

def test_zero_draws_change_nothing_and_no_image_depends_on_its_batch():
    x, draws = torch.randn(6, 3, 12, 12), drawn(6, 0.5, every_op)
    y, labels = augment.apply(x, 0 * draws, every_op)
    assert torch.equal(x, y) and torch.equal(labels, torch.zeros(6, 15))
    whole, alone = (augment.apply(x[s], draws[s], every_op) for s in (slice(6), slice(4, 5)))   # of its batch
    assert torch.allclose(whole[0][4:5], alone[0], atol=1e-5) and torch.equal(whole[1][4:5], alone[1])

def test_ops_are_on_with_probability_p_but_xflip_flips_half():
    on = (drawn(3000, 0.2, every_op) != 0).any(2).float().mean(0)
    expected = [dict(xflip=0.5, yflip=0.1, lumaflip=0.1).get(op, 0.2) for op in every_op]
    assert on.tolist() == pytest.approx(expected, abs=0.03)

def test_every_op_moves_and_colours_as_its_formula_says():
    """Whole pixels exactly, a bump to 0.01, colours to 1e-6."""
    x, s, a, half_pi = bump(5, 2), 2 ** 0.3, 0.4, math.pi / 2
    z, rgb = torch.randn(2, 3, 8, 8), torch.rand(2, 3, 4, 4) * 2 - 1
    mean = rgb.mean(1, keepdim=True)
    for tolerance, op, value, image, expected, label in (
            (0, "xflip", (1,), z, z.flip(3), [1]), (0, "yflip", (1,), z, z.flip(2), [1]),
            (0.01, "translate_frac", (0.5, -1.0), x, bump(5 + 49 / 16, 2 - 49 / 8), [0.5, -1]),
            (0.01, "scale", (1.5,), x, bump(5 * s, 2 * s, (6 * s, 4 * s)), [1.5]),
            (0.01, "rotate_frac", (half_pi,), x, torch.rot90(x, 1, (2, 3)), [-1, 1]),
            (0.01, "rotate_frac", (a,), bump(6, 0, (3, 3)), bump(6 * math.cos(a), -6 * math.sin(a), (3, 3)),
             [math.cos(a) - 1, math.sin(a)]),
            (0.01, "aniso", (1.5, 0.0), x, bump(5 * s, 2 / s, (6 * s, 4 / s)), [1.5, 0]),
            (0.01, "aniso", (1.5, half_pi), x, bump(5 / s, 2 * s, (6 / s, 4 * s)), [0, 1.5]),
            (1e-6, "brightness", (2.0,), rgb, rgb + 0.4, [2.0]),
            (1e-6, "contrast", (-2.0,), rgb, rgb / 2, [-2.0]),
            (1e-6, "lumaflip", (1.0,), rgb, rgb - 2 * mean, [1.0]),
            (1e-6, "saturation", (1.0,), rgb, mean + 2 * (rgb - mean), [1.0]),
            (1e-6, "hue", (2 * math.pi / 3,), rgb, rgb.roll(1, 1), [-1.5, math.sqrt(0.75)])):   # red is green
        draws = torch.tensor([[[*value, 0.0][:2]]]).expand(len(image), 1, 2)
        y, labels = augment.apply(image, draws, (op,))
        assert torch.allclose(y, expected, rtol=0, atol=tolerance), op
        assert torch.allclose(labels[-1], torch.tensor(label).float(), atol=1e-6), op
