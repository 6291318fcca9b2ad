"""Data sets, their order, the loader and the augmentation pipe."""
import hashlib
import json
import math
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import augment
import data
from common import BadInput
from nets import encoders
from run import refused

every_op = tuple(augment.known)
rng = np.random.default_rng(7)

def config(source="digits", **more):
    return dict(dict(data=str(source), batch_size=12, seed=0, xflip=True, augment=0.12, workers=0), **more)

def save(path, size=(8, 8), mode="RGB", value=None):
    """A random image file of this mode, or one of a constant value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (size[1], size[0]) + (() if channels == 1 else (channels,))
    pixels = rng.integers(0, 256, shape) if value is None else np.full(shape, value)
    image = Image.fromarray(pixels.astype(np.uint8), mode if mode != "P" else "L")
    (image.convert("P") if mode == "P" else image).save(path)
    return pixels.astype(np.uint8)

# ---- formats
def test_digits_are_the_uci_set_split_in_1500_and_297_of_every_class():
    with np.load(data.root / "assets" / "digits.npz") as file:
        arrays = [file[k].tobytes() for k in ("image", "label", "train", "val")]
        assert sorted(np.concatenate([file["train"], file["val"]])) == list(range(1797))
        assert np.bincount(file["label"]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert hashlib.sha256(b"".join(arrays)).hexdigest().startswith("2594b34e6cf41cf6a4f3348ee3bcc505")
    train, val = data.load(config()), data.load(config(), "val")
    assert (len(train), len(val), train.shape, train.classes) == (1500, 297, (1, 8, 8), 10)
    assert train.image.dtype == np.float32 and train.image.min() == -1 and train.image.max() == 1
    assert abs(train.image.std() - 0.75) < 0.01  # sigma_data
    assert np.bincount(val.label).min() >= 29 and np.bincount(val.label).max() <= 30

def test_a_zip_a_folder_and_an_npz_of_the_same_images_are_equal(tmp_path):
    names = [f"0000{i % 2}/img{i}.png" for i in range(5)]
    images = [save(tmp_path / "set" / n) for n in names]
    table = json.dumps(dict(labels=[[n, i] for i, n in enumerate(names)]))
    (tmp_path / "set" / "dataset.json").write_text(table)
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as file:
        for n in names + ["dataset.json"]:
            file.write(tmp_path / "set" / n, n)
    np.savez(tmp_path / "hwc.npz", images=np.stack(images), y=np.arange(5, dtype=np.uint8))
    np.savez(tmp_path / "chw.npz", x=np.stack(images).transpose(0, 3, 1, 2) / 127.5 - 1, labels=np.arange(5))
    by_name = sorted(range(5), key=lambda i: names[i])
    for name, order in (("set", by_name), ("set.zip", by_name), ("hwc.npz", range(5)), ("chw.npz", range(5))):
        dataset = data.load(config(tmp_path / name, classes=6 if name == "set" else -1))
        assert dataset.shape == (3, 8, 8) and dataset.classes == (6 if name == "set" else 5)
        for k, i in enumerate(order):
            image, label = dataset.get(k)
            pixels = image if image.dtype == np.uint8 else np.round(image * 127.5 + 127.5)
            assert label == i and np.array_equal(pixels, images[i].transpose(2, 0, 1))

def test_sub_folders_are_classes_in_sorted_order_and_a_single_one_or_a_null_table_is_none(tmp_path):
    for name in ("dog/1.jpg", "cat/2.webp", "cat/deep/3.BMP", "ant/4.gif"):
        save(tmp_path / name, mode="P" if name.endswith("gif") else "RGB")
    for name in ("notes.txt", "ant/notes.txt", "ant/.hidden.png"):
        (tmp_path / name).write_text("no image")
    dataset = data.load(config(tmp_path))
    assert dataset.names == ["ant/4.gif", "cat/2.webp", "cat/deep/3.BMP", "dog/1.jpg"]
    assert dataset.label.tolist() == [0, 1, 1, 2] and dataset.classes == 3
    assert data.load(config(tmp_path, classes=0)).label.tolist() == [-1] * 4
    assert data.load(config(tmp_path / "cat")).classes == 0
    (tmp_path / "dataset.json").write_text('{"labels": null}')
    assert data.load(config(tmp_path)).get(1)[1] == -1

def test_a_16_bit_grey_ramp_stays_a_ramp(tmp_path):
    ramp = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(32, 32)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    dataset = data.load(config(tmp_path))
    image = dataset.get(0)[0]
    x0 = image / 127.5 - 1
    assert dataset.shape == (1, 32, 32) and abs(x0.mean()) < 0.01
    assert np.abs(x0 - (ramp / 65535 * 2 - 1)).max() < 1 / 127.5 and len(np.unique(image)) == 256

@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_files_of_every_mode_join_an_rgb_set(tmp_path, mode):
    save(tmp_path / "a.png", value=200)
    Image.new("RGB", (8, 8), "white").convert(mode).save(tmp_path / ("b.jpg" if mode == "CMYK" else "b.png"))
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "c.png")      # transparent is white
    dataset = data.load(config(tmp_path))
    assert dataset.get(1)[0].shape == (3, 8, 8) and dataset.get(1)[0].min() >= 254
    assert (dataset.get(0)[0] == 200).all() and (dataset.get(2)[0] == 255).all()

@pytest.mark.parametrize("first, third, shape, words", [        # first: how a.png and b.png are saved
    ([dict(mode="L"), dict(mode="LA")], dict(), (1, 8, 8), ["c.png", "a.png", "grey"]),
    ([dict(size=(16, 8))] * 2, dict(size=(8, 16)), (3, 8, 16), ["a.png", "16x8", "c.png", "8x16"]),
    ([dict(mode="RGBA")] * 2, "not an image", (3, 8, 8), ["c.png"]),
])
def test_a_file_unlike_the_first_one_is_named(tmp_path, first, third, shape, words):
    for name, how in zip(("a.png", "b.png"), first):
        save(tmp_path / name, **how)
    assert data.load(config(tmp_path)).shape == shape
    (tmp_path / "c.png").write_text(third) if isinstance(third, str) else save(tmp_path / "c.png", **third)
    refused(data.load, config(tmp_path), says=words)

@pytest.mark.parametrize("table, words", [
    ([["a.png", 0], ["gone.png", 1]], ["gone.png", "not there"]),
    ([["a.png", 0]], ["no label", "b.png"]),
    ([["a.png", 0], ["b.png", -1]], ["b.png", "-1"]),
    ([["a.png", 0], ["b.png", 1.5]], ["b.png", "1.5"]),
    ([["a.png", 0], ["b.png", [0, 1]]], ["b.png", "[0, 1]"]),
    ([["a.png", 0], ["b.png", 5]], ["b.png", "5", "--classes 3"]),
    ([["a.png"]], ["dataset.json"]),
    ("half a", ["dataset.json"]),
])
def test_bad_labels_say_which(tmp_path, table, words):
    save(tmp_path / "a.png"), save(tmp_path / "b.png")
    text = json.dumps(dict(labels=table)) if isinstance(table, list) else '{"labels": ['
    (tmp_path / "dataset.json").write_text(text)
    refused(data.load, config(tmp_path, classes=3), says=words)

def test_places_without_images_are_named(tmp_path):
    for name in ("notes.txt", "broken.zip", "broken.npz"):
        (tmp_path / name).write_text("x")
    for name, word in ((".", "holds no images (looked for .png"), ("gone", "does not exist"),
                       ("notes.txt", "neither"), ("broken.zip", "broken.zip"),
                       ("broken.npz", "cannot be read")):
        refused(data.load, config(tmp_path / name), says=[word])
    save(tmp_path / "a.png"), save(tmp_path / "class0" / "b.png"), save(tmp_path / "class1" / "c.png")
    refused(data.load, config(tmp_path), says=["a.png", "class0"])

@pytest.mark.parametrize("arrays, words", [
    (dict(x=rng.random((4, 3, 8, 8))), ["[-1, 1]", "2 x - 1"]),
    (dict(x=rng.random((4, 3, 8, 8)) * 255), ["[-1, 1]", "uint8"]),
    (dict(x=np.full((4, 3, 8, 8), np.nan)), ["[-1, 1]", "nan"]),
    (dict(x=np.zeros((4, 3, 8, 8), np.int64)), ["int64"]),
    (dict(x=np.zeros((4, 5, 8, 8), np.uint8)), ["(4, 5, 8, 8)"]),
    (dict(x=np.zeros((4, 8, 8), np.uint8), y=np.zeros(3, int)), ["4 images", "3 labels"]),
    (dict(x=np.zeros((4, 8, 8), np.uint8), y=np.zeros(4)), ["label", "integers"]),
    (dict(x=np.zeros((0, 8, 8), np.uint8)), ["holds no images"]),
    (dict(z=np.zeros((4, 8, 8), np.uint8)), ["z"]),
    (dict(x=np.array([None] * 4)), ["cannot be read"]),
])
def test_an_npz_of_the_wrong_kind_says_why(tmp_path, arrays, words):
    np.savez(tmp_path / "set.npz", **arrays)
    refused(data.load, config(tmp_path / "set.npz"), says=words)

def test_val_reads_val_data_and_is_never_augmented(tmp_path):
    np.savez(tmp_path / "set.npz", x=np.zeros((4, 8, 8), np.uint8))
    val = data.load(config(tmp_path / "set.npz", val_data="digits"), "val")
    assert len(val) == 297 and len(data.load(config(tmp_path / "set.npz"), "val")) == 4
    raw = next(data.Loader(val, config(augment=1.0)))
    assert "augment" not in raw and np.array_equal(raw["image"], val.image[raw["id"]])

# ---- order and loader
def tiny(pixels, labels=None):
    return data.Arrays(pixels, labels, -1, "train", "set")

def test_every_epoch_is_another_permutation_and_a_batch_may_wrap_over_epochs():
    epochs = [data.indices(3, range(e * 97, (e + 1) * 97), 97) for e in range(3)]
    assert all(sorted(e) == list(range(97)) for e in epochs)
    assert len({tuple(e) for e in epochs} | {tuple(data.indices(4, range(97), 97))}) == 4
    raw = next(data.Loader(tiny(np.zeros((5, 1, 2, 2), np.uint8), np.arange(5)), config(augment=0.0)))
    assert np.bincount(raw["id"][:10]).tolist() == [2] * 5 and torch.equal(raw["label"], raw["id"])

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def test_ranks_accumulation_threads_and_resume_give_the_same_iteration():
    cfg, dataset = config(augment_ops=every_op), data.load(config())
    loader = data.Loader(dataset, cfg)
    whole = [next(loader) for _ in range(4)]
    for world, accum, workers, start in (1, 4, 1, 0), (2, 2, 3, 0), (4, 1, 0, 0), (2, 1, 3, 2), (1, 2, 0, 3):
        cfg["workers"] = workers
        loaders = [data.Loader(dataset, cfg, start, rank, world, accum) for rank in range(world)]
        for it in range(start, 4):
            slices = [next(ranked) for _ in range(accum) for ranked in loaders]
            assert same({k: torch.cat([s[k] for s in slices]) for k in slices[0]}, whole[it])
        for ranked in loaders:
            ranked.close()

def test_flips_and_augmentation_never_repeat_over_ranks_threads_and_epochs():
    np.random.seed(0), torch.manual_seed(0)
    dataset, seen = tiny(np.arange(7 * 4, dtype=np.uint8).reshape(7, 1, 2, 2)), []
    for rank in range(2):
        loader = data.Loader(dataset, config(augment=1.0, workers=2, batch_size=4), 0, rank, 2)
        seen += [tuple(d.flatten().tolist()) for _ in range(14) for d in next(loader)["augment"]]
        loader.close()
    assert len(set(seen)) == len(seen) == 2 * 14 * 2  # eight epochs

def test_half_of_the_images_are_flipped_and_only_mirrored():
    dataset = data.load(config())
    raw = next(data.Loader(dataset, config(batch_size=1000, augment=0.0)))
    plain = torch.from_numpy(dataset.image[raw["id"]])
    kept = (raw["image"] == plain).flatten(1).all(1)
    assert torch.equal(raw["image"][~kept], plain[~kept].flip(3)) and abs((~kept).float().mean() - 0.5) < 0.05
    raw = next(data.Loader(dataset, config(batch_size=1000, augment=0.0, xflip=False)))
    assert np.array_equal(raw["image"], dataset.image[raw["id"]])

class Slow:
    """Images that take a while; image 3 fails."""
    split, shape, classes = "train", (1, 2, 2), 0

    def __init__(self, wait):
        self.wait = wait

    def __len__(self):
        return 5

    def get(self, index):
        time.sleep(self.wait)
        if index == 3 and not self.wait:
            raise BadInput("image 3 is broken")
        return np.zeros((1, 2, 2), np.uint8), -1

def test_close_stops_at_once_and_leaves_no_thread():
    before = threading.active_count()
    loader = data.Loader(Slow(0.02), config(batch_size=200, workers=2, augment=0.0))
    loader.queue.append(loader.pool.submit(loader.batch, 0))
    start = time.time()
    loader.close()
    assert time.time() - start < 1 and threading.active_count() == before
    assert list(loader) == []

@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_thread_comes_out_of_next(workers):
    loader = data.Loader(Slow(0), config(workers=workers, augment=0.0))
    refused(next, loader, says=["image 3 is broken"])
    loader.close()

# ---- encode, decode
def test_every_uint8_value_survives_encode_and_decode():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    raw = dict(image=pixels, label=torch.tensor([3]), id=torch.tensor([9]))
    batch = encoders.encode(raw, dict(classes=10), "cpu")
    assert batch["x0"].min() == -1 and batch["x0"].max() == 1 and batch["x0"].dtype == torch.float32
    assert torch.equal(encoders.decode(batch["x0"], {}), pixels)
    between = torch.tensor([-3.0, 100.4 / 127.5 - 1, 100.6 / 127.5 - 1, 3.0])
    assert encoders.decode(between, {}).tolist() == [0, 100, 101, 255]  # clipped, to the nearest
    assert (batch["cond"]["label"].item(), batch["uncond"]["label"].item(), batch["id"].item()) == (3, -1, 9)

def test_labels_need_classes_and_both_conditions_carry_the_augment_labels():
    assert encoders.conditions([0, 4], dict(classes=0), "cpu")[0]["label"].tolist() == [-1, -1]
    refused(encoders.conditions, [0, 10], dict(classes=10), "cpu", says=["0 to 9", "10"])
    raw = next(data.Loader(data.load(config()), config(augment=1.0)))
    batch = encoders.encode(raw, config(augment=1.0, classes=10), "cpu")
    assert batch["cond"]["augment"].shape == (12, 9) and batch["x0"].shape == (12, 1, 8, 8)
    assert batch["uncond"]["augment"] is batch["cond"]["augment"]

# ---- augmentation
def one(op, *value, x=None):
    """One op applied to x -> image, labels."""
    draws = torch.zeros(len(x), 1, 2)
    draws[:, 0, :len(value)] = torch.tensor(value)
    return augment.apply(x, draws, (op,))

def drawn(n, p, ops):
    return torch.from_numpy(augment.draw([np.random.default_rng(i) for i in range(n)], p, ops))

def bump(cx, cy, size=49, widths=(6.0, 4.0)):
    """A smooth image, its centre at (cx, cy) from the middle, wider than high."""
    place = torch.arange(float(size)) - (size - 1) / 2
    image = torch.exp(-((place - cx) / widths[0]) ** 2 - ((place[:, None] - cy) / widths[1]) ** 2)
    return image[None, None]

def test_published_settings_have_their_number_of_labels():
    fastgen = ("scale", "rotate_frac", "brightness", "contrast", "lumaflip", "hue", "saturation")
    mean_flow = ("aniso", "xflip", "scale", "translate_frac")
    for ops, number in ((), 9), (fastgen, 9), (mean_flow, 6):
        assert augment.dim(dict(augment=0.12, augment_ops=ops)) == number
    assert augment.dim(dict(augment=0.0)) == 0
    assert augment.chosen(dict(augment_ops=("hue", "xflip"))) == ("xflip", "hue")
    refused(augment.chosen, dict(augment_ops=("spin",)), says=["spin", "xflip"])

def test_zero_draws_change_nothing_and_the_result_of_an_image_does_not_depend_on_its_batch():
    x, draws = torch.randn(6, 3, 12, 12), drawn(6, 0.5, every_op)
    y, labels = augment.apply(x, 0 * draws, every_op)
    assert torch.equal(x, y) and torch.equal(labels, torch.zeros(6, 19))
    whole, alone = augment.apply(x, draws, every_op), augment.apply(x[4:5], draws[4:5], every_op)
    assert torch.allclose(whole[0][4:5], alone[0], atol=1e-5) and torch.equal(whole[1][4:5], alone[1])

def test_ops_are_on_with_probability_p_but_xflip_flips_half():
    draws = drawn(3000, 0.2, every_op).numpy()
    for op, found in zip(every_op, (draws != 0).any(2).mean(0)):
        expected = {"xflip": 0.5, "yflip": 0.1, "lumaflip": 0.1, "rotate_int": 0.15}.get(op, 0.2)
        assert abs(found - expected) < 0.03, op
    scale = draws[:, every_op.index("scale"), 0]
    assert abs(scale[scale != 0].std() - 1) < 0.1
    aniso = draws[:, every_op.index("aniso")]
    assert abs((aniso[aniso[:, 0] != 0, 1] != 0).mean() - 0.5) < 0.06

def test_flips_quarter_turns_and_integer_shifts_copy_pixels_exactly():
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(one("xflip", 1, x=x)[0], x.flip(3)) and torch.equal(one("yflip", 1, x=x)[0], x.flip(2))
    for turns, label in ((1, [1, 0]), (2, [1, 1]), (3, [0, 1])):
        y, labels = one("rotate_int", turns, x=x)
        assert torch.equal(y, torch.rot90(x, turns, (2, 3))) and labels[0].tolist() == label
    y, labels = one("translate_int", 1.0, -1.0, x=x)  # one pixel right and one up, mirrored at the edge
    assert torch.equal(y[:, :, :-1, 1:], x[:, :, 1:, :-1]) and labels[0].tolist() == [1, -1]
    assert torch.equal(y[:, :, :-1, 0], x[:, :, 1:, 1]) and torch.equal(y[:, :, -1, 1:], x[:, :, -2, :-1])
    refused(one, "rotate_int", 1, x=x[:, :, :4], says=["rotate_int", "8x4"])

def test_fractional_moves_put_a_bump_where_the_formula_says():
    x, s, a, half_pi = bump(5, 2), 2 ** 0.3, 0.4, math.pi / 2
    disc = lambda cx, cy: bump(cx, cy, widths=(3.0, 3.0))
    turned = one("rotate_frac", a, x=one("aniso", 1.5, 0.0, x=disc(0, 0))[0])[0]
    for op, value, image, expected, label in (
            ("translate_frac", (0.5, -1.0), x, bump(5 + 49 / 16, 2 - 49 / 8), [0.5, -1]),
            ("scale", (1.5,), x, bump(5 * s, 2 * s, widths=(6 * s, 4 * s)), [1.5]),
            ("rotate_frac", (half_pi,), x, torch.rot90(x, 1, (2, 3)), [-1, 1]),
            ("rotate_frac", (a,), disc(6, 0), disc(6 * math.cos(a), -6 * math.sin(a)), None),
            ("aniso", (1.5, 0.0), x, bump(5 * s, 2 / s, widths=(6 * s, 4 / s)), None),
            ("aniso", (1.5, a), disc(0, 0), turned, None),
            ("aniso", (1.5, half_pi), x, bump(5 / s, 2 * s, widths=(6 / s, 4 * s)), [0, 1.5])):
        y, labels = one(op, *value, x=image)
        assert torch.allclose(y, expected, atol=0.01), op
        assert label is None or torch.allclose(labels, torch.tensor([label]).float(), atol=1e-6), op

def test_the_image_goes_on_mirrored_beyond_its_edges_and_an_oblong_one_turns_about_its_centre():
    x = torch.ones(2, 1, 8, 8)
    draws = torch.tensor([[[-4.0, 0], [2.0, 0], [3.0, 1.0], [3.0, -3.0]]]).expand(2, 4, 2)
    y, _ = augment.apply(x, draws, ("scale", "rotate_frac", "aniso", "translate_frac"))
    assert torch.allclose(y, x, atol=1e-4)
    x = bump(0, 0, widths=(4.0, 4.0))[:, :, 12:37]  # 25 rows, 49 columns
    y = one("rotate_frac", 1.0, x=x)[0]
    assert torch.allclose(y[..., 14:35], x[..., 14:35], atol=0.01)  # further out lie mirror images

def test_colours_follow_their_formulas_and_those_of_a_grey_image_are_its_rgb_copys():
    x, grey = torch.rand(2, 3, 4, 4) * 2 - 1, torch.rand(4, 1, 4, 4) * 2 - 1
    mean = x.mean(1, keepdim=True)
    for op, value, expected, label in (
            ("brightness", 2.0, x + 0.4, [2.0]),
            ("contrast", -2.0, x / 2, [-2.0]),
            ("lumaflip", 1.0, x - 2 * mean, [1.0]),
            ("hue", 2 * math.pi / 3, x.roll(1, 1), [-1.5, math.sqrt(0.75)]),  # red becomes green
            ("saturation", 1.0, mean + 2 * (x - mean), [1.0])):
        y, labels = one(op, value, x=x)
        assert torch.allclose(y, expected, atol=1e-6), op
        assert torch.allclose(labels[1], torch.tensor(label), atol=1e-6), op
    ops = ("brightness", "contrast", "lumaflip", "hue", "saturation")
    draws = drawn(4, 1.0, ops)
    rgb, _ = augment.apply(grey.expand(4, 3, 4, 4), draws, ops)
    assert torch.allclose(augment.apply(grey, draws, ops)[0], rgb.mean(1, keepdim=True), atol=1e-5)
