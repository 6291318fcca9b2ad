"""Data sets by format, and a stateless, resumable order.

    data = "digits"        the embedded 8x8 digits: 1,500 for training, 297 held out ("./digits" for a folder)
    data = "moving_digits" clips (1, 8, 12, 12) of the digits moving: 150,000, and 29,700 of held-out digits
    data = "some/folder"   png jpg jpeg webp bmp gif (first frame), recursive; labels from dataset.json in it,
                           else from the top-level sub-folders, sorted, if there are two or more, else none
    data = "cifar10.zip"   such files in a zip, as EDM's dataset_tool writes it; labels from dataset.json only
    data = "set.npz"       image | images | x | arr_0, uint8 or float in [-1, 1], as NHWC, NCHW, NHW or NCFHW;
                           label | labels | y, integers (N,), or none
    data = "some/pairs"    what tools/make_pairs.py wrote, or its URL; the last twentieth is held out
    data = "{000..010}.tar"    WebDataset tars, or a folder of them (class Tars below)

For a video net: mp4 webm mov gif in the place of images, of which the first frames, as many as the net takes,
are read at --data_fps (0: as they come). Latents of a VAE: .npy files (C, [F,] H, W) in the place of images,
as EDM2's dataset_tool writes them, or latent | latents | moments (N, C, [F,] H, W) of an npz. With as many
channels as the net takes they are ready, with twice as many they are moments: mean and standard deviation.
The net sees them times --data_scale, 0.18215 for Stable Diffusion's VAE; those of tars as given.

dataset.json is {"labels": [["00000/img00000000.png", 3], ...]}, or null in place of the list. All images of
a set have one size. The first file (in sorted order) sets the channels: grey makes a 1-channel set in which a
colour file is an error, anything else an RGB set. A folder in which NAME.txt stands beside NAME.png has
captions. With --encoders images are resized and cut to what the net takes, tars' images always.

Position p of the training stream is image permutation[p % n] of epoch p // n, and its flip and augmentation
are drawn from (seed, p). So what a batch holds depends on seed and iteration alone: not on ranks, threads
or a resume.
"""
import io
import json
import operator as op
import os
import re
import tarfile
import threading
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import augment
import files
import media
from common import BadInput, alpha_sigma
from nets import encoders

root = Path(__file__).resolve().parent


@contextmanager
def reading(what):
    """Any error inside is BadInput: pillow, zipfile, json, numpy raise about anything on a damaged file."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise BadInput(f"{what} cannot be read ({type(error).__name__}: {said}); replace it") from error


# ---------------------------------------------------------------- data sets

def load(cfg, split="train"):
    """-> dataset with .shape (C, [F,] H, W), .classes (0: none), .split, len(), get(index) -> (image, label).

    image: uint8, or float32 in [-1, 1], (C, H, W); label: int, -1 = none. cfg["classes"]: -1 = as many as
    the data has, 0 = ignore labels, N = labels must be below N. Digits and pairs have a held-out part of
    their own: for other data "val" reads cfg["val_data"], or the training data itself where that is "".
    """
    key = "val_data" if split == "val" and cfg.get("val_data") else "data"
    source, own = cfg[key], dict(digits=digits, moving_digits=moving_digits)
    path, url = files.place(source), "://" in source
    if source in own:
        found = Images(source, *own[source](split), cfg.get("classes", -1), split)
    elif tars := tar_files(source):
        found = Tars(tars, cfg, split)
    elif url or meta(path):
        found = Pairs(path, cfg, split)
    elif os.path.isdir(path) or os.path.isfile(path) and path.suffix in (".zip", ".npz"):
        found = Stored(path, key, cfg, split)
    else:
        net, what = cfg.get("net", "edm:digits"), "is no data" if os.path.exists(path) else "does not exist"
        net += f",chunk={cfg['chunk']}" if cfg.get("pairs") == "chunk" else ""          # causal_kd's
        times = f" --path_t {','.join(f'{t:g}' for t in cfg['t_list'])}" if cfg.get("pairs") else ""
        of = "" if net == "edm:digits" else f" --net {net} --data DATA --teacher PATH{times}"
        make = "" if path.suffix else f" (`torchrun tools/make_pairs.py{of} --out {source}` makes some)"
        raise BadInput(f"--{key} {source} {what}; give a folder of images or clips, a .zip, .npz, .tar, "
                       f"digits or pairs{make}")
    if found.kind == "image" and cfg.get("data_scale", 1) != 1:
        raise BadInput(f"--data_scale {cfg['data_scale']:g} is of latents in .npy and .npz, but --{key} "
                       f"{source} holds none; give --data_scale 1")
    return found


def pixels(cfg):
    """What the net takes, (C, [F,] H, W), None where images stay as they are; and of clips (frames, fps)."""
    shape = encoders.shapes(cfg) if cfg.get("net") else ()
    clip = (shape[1], cfg.get("data_fps", 0)) if len(shape) == 4 else None
    return shape if cfg.get("encoders") or clip else None, clip


def unmoved(path, what, cfg):
    if cfg.get("xflip") or cfg.get("augment"):
        raise BadInput(f"{path} holds {what}, which cannot be moved; leave out --xflip and --augment")


def captions(dataset, count=256):
    """Some captions, from all over a data set, that training encodes: none where embeddings are stored."""
    if not hasattr(dataset, "texts") or {"cond", "text"} & {*getattr(dataset, "kinds", ())}:
        return ()
    return dataset.texts(range(0, len(dataset), max(1, len(dataset) // count)))["caption"]


class Images:
    """Images by name, as read(name) gives them: (C, H, W), uint8 or float32 in [-1, 1]; labels or None.
    texts(indices), where there is such a method: what encoders.conditions takes as texts."""
    kind = "image"                                      # else latent, moments: encoders.encode

    def __init__(self, path, names, read, label, classes, split):
        if not names:
            raise BadInput(f"{path} holds no images (looked for {' '.join(media.IMAGES)} .npy)")
        self.path, self.names, self.read, self.split, self.shape = path, names, read, split, None
        self.label, self.classes = check_labels(label, names, classes, path)
        few = 64 if len(self.get(0)[0].shape) == 3 else 8       # the first one sets the shape
        for i in np.linspace(0, len(self) - 1, min(len(self), few)).astype(int):
            self.get(i)         # finds most mistakes before training starts

    def __len__(self):
        return len(self.names)

    def get(self, index):
        name = self.names[index]
        with reading(f"{self.path}: image {name}"):
            image = self.read(name)
        self.shape = self.shape or image.shape
        (c, *_, h, w), (c0, *_, h0, w0) = image.shape, self.shape
        if image.shape[1:] != self.shape[1:] or c not in (1, c0):
            raise BadInput(f"{self.path}: {name} is {w}x{h} with {c} channels, {self.names[0]} {w0}x{h0} "
                           f"with {c0}; a set has one size, no colours if the first is grey: convert one")
        return image if c == c0 else np.broadcast_to(image, self.shape), int(self.label[index])


def check_labels(label, names, classes, path):
    """-> int64 labels (-1 where there are none), number of classes."""
    if classes > 0 and label is None:
        raise BadInput(f"{path} has no labels, the nets are built for {classes} classes; use --classes 0")
    if classes == 0 or label is None:
        return np.full(len(names), -1), 0
    if len(label) != len(names):
        raise BadInput(f"{path} has {len(names)} images but {len(label)} labels")
    limit = classes if classes > 0 else 10 ** 6
    for name, value in zip(names, label):
        if not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
            raise BadInput(f"{path}: the label of image {name} is {value!r}; with --classes {classes} they "
                           f"are integers from 0 to {limit - 1}")
    return np.asarray(label, np.int64), classes if classes > 0 else int(max(label)) + 1


# ---------------------------------------------------------------- formats

@lru_cache
def digits(split):
    with np.load(root / "assets" / "digits.npz") as file:
        keep = file[split]
        image, label = file["image"][keep][:, None].astype(np.float32) / 8 - 1, file["label"][keep]
    return range(len(image)), image.__getitem__, label


def moving_digits(split):
    """Every clip of `clips`: training of 5,000 iterations of 32 sees each about once."""
    label = np.tile(digits(split)[2], 25 * 4)
    return range(len(label)), lambda i: clips(split, [i])[0][0], label


def clips(split, ids, frames=8):
    """Digits of 8 x 8 in frames of 12 x 12, background -1: (B, 1, F, 12, 12) float32 in [-1, 1], with the
    corners (row, column) at which they lie (B, F, 2).

    Of n digits clip i has digit i % n with motion (i // n + 37 (i % n)) % 100: each digit has every one of
    25 corners to start from times 4 directions, and n clips in a row have every digit once and the motions
    about equally often. In each direction a digit moves by a pixel a frame and turns round at the walls: one
    that starts at a with velocity v is at 4 - |4 - (a + v f) mod 8|."""
    names, read, _ = digits(split)
    turn, digit = np.divmod(np.asarray(ids), len(names))
    corner, way = np.divmod((turn + 37 * digit) % 100, 4)
    start, velocity = np.stack(np.divmod(corner, 5), -1), 2 * np.stack(np.divmod(way, 2), -1) - 1   # (B, 2)
    moved = start[:, None] + velocity[:, None] * np.arange(frames)[:, None]                 # (B, F, 2)
    corner = 4 - np.abs(4 - moved % 8)
    rows, columns = np.moveaxis(corner[..., None] + np.arange(8), 2, 0)                     # (B, F, 8)
    clip = np.full((len(digit), frames, 12, 12), -1, np.float32)
    b, f = np.ogrid[:len(digit), :frames]
    clip[b[..., None, None], f[..., None, None], rows[..., None], columns[..., None, :]] = read(digit)
    return clip[:, None], corner


class Stored(Images):
    """Images, clips or latents of a folder, zip or npz."""

    def __init__(self, path, key, cfg, split):
        keys = ("data_keys", "data_uncond", "data_ignore", "data_filter") if key == "data" else ()
        if stray := [key for key in keys if cfg.get(key)]:
            raise BadInput(f"--{stray[0]} is of tars, and --data {path} holds none; leave it out")
        shape, clip = pixels(cfg)
        with reading(path):
            names, get, label, captioned = npz(path) if path.suffix == ".npz" else listed(path, clip)
        super().__init__(path, names, lambda name: media.cut(get(name), shape), label,
                         cfg.get("classes", -1), split)
        if captioned:
            self.texts = lambda ids: dict(caption=[self.caption(names[i]) for i in ids])
        if self.shape[0] not in (1, 3):
            unmoved(path, "latents", cfg)
            c, scale = encoders.shapes(cfg | dict(encoders=""))[0], np.float32(cfg["data_scale"])
            self.kind = "moments" if self.shape[0] == 2 * c else "latent"
            self.read = lambda name: scale * get(name)
            if self.kind == "moments" and (self.get(0)[0][c:] < 0).any():
                raise BadInput(f"{path}: standard deviations, the last {c} channels of {names[0]}, are below "
                               "0; store exp(logvar / 2) of a log-variance")

    def caption(self, name):
        with reading(f"the caption of {self.path / name}"):
            return (self.path / name).with_suffix(".txt").read_text().strip()


def listed(path, clip):
    """Images, clips (as media.value takes `clip`) or .npy files of a folder or zip: names, read(name), labels
    or None, whether a .txt stands beside each."""
    if path.is_dir():
        every = sorted((Path(where) / name).relative_to(path).as_posix()
                       for where, _, found in os.walk(path, followlinks=True) for name in found)
        content = lambda name: (path / name).read_bytes()                                        # noqa: E731
    else:
        zipped, lock = zipfile.ZipFile(path), threading.Lock()
        every = sorted(zipped.namelist())

        def content(name):
            with lock:          # a ZipFile has one file position, so threads must take turns
                return zipped.read(name)
    ends, label = (*media.IMAGES, ".npy", *media.VIDEOS * bool(clip)), None
    names = [name for name in every if name.lower().endswith(ends)
             and not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))]
    tops = sorted({name.split("/")[0] for name in names if "/" in name and path.is_dir()})
    texts = {name[:-4] for name in every if name.endswith(".txt") and path.is_dir()}
    bare = [name for name in names if os.path.splitext(name)[0] not in texts]
    if 0 < len(bare) < len(names):
        raise BadInput(f"{path}: {len(bare)} of {len(names)} images have no caption, such as "
                       f"{Path(bare[0]).with_suffix('.txt')}; write it, an empty file for no text")
    if "dataset.json" in every:
        with reading(f'{path}/dataset.json, {{"labels": [[file name, class], ...]}} or {{"labels": null}},'):
            table = dict(json.loads(content("dataset.json")).get("labels") or ())
        if table and (apart := sorted(table.keys() ^ set(names))):
            raise BadInput(f"{path}: {apart[0]} is among the images or in dataset.json, but not in both, as "
                           f"{len(apart)} names; label all or none, by paths relative to dataset.json with /")
        label = [table[name] for name in names] if table else None
    elif len(tops) > 1:
        if loose := [name for name in names if "/" not in name]:
            raise BadInput(f"{path}: {loose[0]} lies in no class folder such as {tops[0]}; move it into one, "
                           "or label all files in dataset.json")
        label = [tops.index(name.split("/")[0]) for name in names]

    def read(name):
        found = media.value(name, content(name), clip)
        if torch.is_tensor(found) and (found.dim() != 3 + bool(clip) or not found.is_floating_point()):
            raise BadInput(f"{path}: {name} is {found.dtype} of shape {tuple(found.shape)}; latents are "
                           f"floats (C, {'F, ' if clip else ''}H, W)")
        return found.float().numpy() if torch.is_tensor(found) else found
    return names, read, label, not bare


def npz(path):
    with np.load(path) as file:
        image, label, latent = (next((file[k] for k in keys if k in file), None) for keys in (
            ("image", "images", "x", "arr_0"), ("label", "labels", "y"), ("latent", "latents", "moments")))
    if latent is not None:
        return range(len(latent)), latent.astype(np.float32).__getitem__, label, False
    if image is None:
        raise BadInput(f"{path} has no array image, images, x, arr_0 or latents but {', '.join(file)}")
    image = image[:, None] if image.ndim == 3 else image                        # (N, 1, H, W)
    first, last = (image.ndim == 4 and image.shape[d] in (1, 3) for d in (1, 3))
    if (first or image.ndim == 5) == last:
        raise BadInput(f"{path}: images of shape {image.shape} are neither (N, C, H, W) nor (N, H, W, C), "
                       "C 1 or 3, nor clips (N, C, F, H, W)")
    image = np.ascontiguousarray(image.transpose(0, 3, 1, 2)) if last else image
    if image.dtype != np.uint8 and image.size:
        low, high = float(image.min()), float(image.max())
        if image.dtype.kind != "f" or not (-1 <= low < 0 and high <= 1):        # NaN fails too
            raise BadInput(f"{path}: images are {image.dtype} from {low:g} to {high:g}; store uint8, or "
                           "floats in [-1, 1]: 2 x - 1 of images in [0, 1]")
        image = image.astype(np.float32)
    return range(len(image)), image.__getitem__, label, False


class Pairs(Images):
    """Samples x0 and the states x on the teacher's way there: mapped files, of a store copies in memory."""

    def __init__(self, path, cfg, split):
        self.meta = meta(path)
        if not self.meta:
            raise BadInput(f"{path} has no meta.json of tools/make_pairs.py, so no pairs")
        self.about = dict(pairs_of=self.meta["data"])
        unmoved(path, "pairs", cfg)
        n, t, label, classes = (self.meta[key] for key in ("pairs", "path_t", "labels", "classes"))
        self.shards = [pairs_shard(path, self.meta, k) for k in range(-(-n // self.meta["shard"]))]
        noise, sigma = self.shards[0][:256, 0], float(alpha_sigma(self.meta["schedule"], t[0])[1])
        if abs((std := noise.std()) / sigma - 1) > max(0.1, 4 * noise.size ** -0.5):
            raise BadInput(f"{path}: the noise has a standard deviation of {std:.3g}, not {sigma:.3g} as at "
                           f"t = {t[0]:g}; states are stored as nets see them, sigma z: make the pairs anew")
        if self.meta.get("texts"):                      # they stay in the data that the pairs were made of
            source = load(cfg | dict(data=self.meta["data"], val_data="", xflip=False, augment=0.0))
            order = indices(self.meta["seed"], range(n), len(source))
            self.texts = lambda ids: source.texts(order[[self.names[i] for i in ids]])
        held, asked = n - max(n // 20, 1), cfg.get("classes", -1)
        ids = range(held) if split == "train" else range(held, n)
        super().__init__(path, ids, lambda i: self.row(i)[-1], label and label[ids.start:ids.stop],
                         classes if asked < 0 else asked, split)

    def row(self, i):
        shard, at = divmod(i, self.meta["shard"])
        return np.array(self.shards[shard][at])                                 # (P + 1, C, H, W)

    def states(self, indices):
        path = torch.from_numpy(np.stack([self.row(self.names[i])[:-1] for i in indices]))  # (b, P, C, H, W)
        return dict(path=path, path_t=torch.tensor(self.meta["path_t"], dtype=torch.float64))


def meta(folder, keys=("path_t", "pairs")):
    """What meta.json in a folder says, of tools/make_pairs.py or, with other keys, tools/encode.py; or {}."""
    with suppress(OSError, ValueError, TypeError, AttributeError):  # no folder, no bytes, another program's
        found = json.loads(files.read(folder / "meta.json"))
        return found if found.keys() >= {*keys} else {}
    return {}


def pairs_shard(path, meta, k):
    """File k of the pairs, (pairs, P + 1, C, H, W), x0 last; BadInput if it is not there and whole."""
    file, n = path / f"{k:07d}.npy", min(meta["shard"], meta["pairs"] - k * meta["shard"])
    with suppress(OSError, ValueError, TypeError):
        local = isinstance(file, Path)
        rows = np.load(file if local else io.BytesIO(files.read(file)), mmap_mode="r" if local else None)
        if rows.shape == (n, len(meta["path_t"]) + 1, *meta["shape"]):
            return rows
    raise BadInput(f"{file} is missing or not whole; the command that made {path} makes the rest")


MEMBERS = dict(             # kind: members that are it, by preference; the order of kinds is in fingerprints
    latent="latent.npy;latent.pth", moments="moments.npy;moments.pth", label="cls",
    image="jpg;jpeg;png;webp;mp4;webm;mov;gif", caption="txt", cond="cond.safetensors",
    text="txt_emb.npy;txt_emb.pth", json="json", pooled="pooled.npy;pooled.pth", text_mask="text_mask.npy")
COMPARE = {">=": op.ge, "<=": op.le, "==": op.eq, "!=": op.ne, ">": op.gt, "<": op.lt}


def webdataset():
    try:
        import webdataset
        return webdataset
    except ImportError as e:
        raise BadInput(f"tars need the webdataset library ({e}); pip install webdataset") from e


def tar_files(source):
    """The tars that "{000..010}.tar" or a folder of tars names; [] where it names none."""
    path = os.path.expanduser(source)
    if path.endswith(".tar") and "://" not in path:
        return [Path(p) for p in webdataset().shardlists.expand_urls(path)]
    found = sorted(Path(path).glob("*.tar")) if os.path.isdir(path) else []
    made = meta(Path(path), ("samples", "shard")) if found else {}
    if made and len(found) < -(-made["samples"] // made["shard"]):
        raise BadInput(f"{path} holds {len(found)} tars, too few for the {made['samples']} samples in its "
                       f"meta.json; the command that made it makes the rest")
    return found


class Tars(Images):
    """Samples of WebDataset tars, read at random, so the stream's order is that of any data. At the start
    every rank reads the headers of all tars (512 bytes a member; labels and a filter's json too) and keeps
    names and offsets in memory (assumption: under 1 KB a sample).

    data_keys: kind=member;other, kinds of MEMBERS, which holds where this is (). A sample lacks nothing that
    the first one has. cond is a dict of text (L, D), pooled (P,), text_mask (L,), which may lie apart;
    data_uncond a file of one for all samples, or of its text. data_ignore: a file of keys, or TAR:KEY, one a
    line. data_filter: tests such as field>=5 or field==text of json, all must hold.
    """

    def __init__(self, tars, cfg, split):
        folder, own = tars[0].parent, dict(str(e).partition("=")[::2] for e in cfg["data_keys"])
        tests = [re.fullmatch("([^<>=!]+)(>=|<=|==|!=|>|<)(.+)", str(t)) for t in cfg["data_filter"]]
        if None in tests or own.keys() - MEMBERS:
            raise BadInput(f"--data_filter {cfg['data_filter']} are field>=5 ({' '.join(COMPARE)}), "
                           f"--data_keys {cfg['data_keys']} kind=member, kinds {', '.join(MEMBERS)}")
        with reading(f"--data_ignore {cfg['data_ignore']}"):
            ignored = {*Path(cfg["data_ignore"]).read_text().split("\n")} if cfg["data_ignore"] else set()
        keys, kinds, self.samples, self.clip = own or MEMBERS, tuple(own), [], pixels(cfg)[1]
        for tar, members in ((tar, members) for tar in tars for members in headers(tar)):
            if {key := members["__key__"], f"{tar.name}:{key}"} & ignored:
                continue
            names = {k: next((n for n in keys[k].split(";") if n in members), "") for k in kinds or keys}
            kinds = kinds or tuple(k for k in names if names[k])
            if lacking := [k for k in kinds if not names[k]]:
                raise BadInput(f"{tar}: {key} has no {lacking[0]} ({keys[lacking[0]]}) but {[*members]}; "
                               f"change --data_keys or list it in --data_ignore")
            sample = tar, key, {k: (names[k], *members[names[k]]) for k in kinds}
            if all(holds(self.member(sample, "json"), *test.groups()) for test in tests):
                self.samples.append(sample)
        if not self.samples:
            raise BadInput(f"{folder}: --data_filter and --data_ignore leave no sample of {len(tars)} tars")
        self.kinds, self.about = kinds, dict(kinds=list(kinds))
        self.kind = next((k for k in ("latent", "moments") if k in kinds), "image")
        self.size = encoders.shapes(cfg) if self.kind == "image" and cfg["net"] else None
        if self.kind != "image":
            unmoved(folder, "latents", cfg)
        file, asked = Path(cfg["data_uncond"] or folder / "uncond.safetensors"), cfg["negative_prompt"]
        with reading(file):
            blank = media.value(file.name, file.read_bytes()) if cfg["data_uncond"] or file.exists() else {}
        blank, made = dict(text=blank) if torch.is_tensor(blank) else blank, meta(folder, ())
        if blank and {"cond", "text"} & {*kinds} and not cfg["data_uncond"] and (
                asked not in ("", own := made.get("negative_prompt", ""))):
            raise BadInput(f"--negative_prompt {asked!r} is for encoders, {folder} holds that of {own!r}; "
                           "give --data_uncond FILE, or encode the data with that prompt")
        self.uncond = {k: v[None] for k, v in blank.items()}                    # (1, L, D), ...
        label = [self.member(sample, "label") for sample in self.samples] if "label" in kinds else None
        super().__init__(folder, range(len(self.samples)), self.image, label, cfg["classes"], split)
        if {"caption", "cond", "text"} & {*kinds}:
            self.texts = self.texts_of

    def member(self, sample, kind):
        tar, key, members = sample
        with reading(f"{tar}: {kind} of {key}"), open(tar, "rb") as f:
            name, offset, size = members[kind]
            f.seek(offset)
            return media.value(name, f.read(size), self.clip)

    def image(self, i):
        found = self.member(self.samples[i], self.kind)
        return media.cut(found, self.size) if self.kind == "image" else found.float().numpy()

    def texts_of(self, ids):
        told = [k for k in self.kinds if k in ("caption", "cond", "text", "pooled", "text_mask")]
        every = [{k: self.member(self.samples[i], k) for k in told} for i in ids]
        found = dict(caption=[s.pop("caption").strip() for s in every]) if "caption" in told else {}
        if any(every):
            parts = encoders.level(*({k: v[None] for k, v in (s.pop("cond", {}) | s).items()} for s in every))
            found |= dict(cond={k: torch.cat([p[k] for p in parts]) for k in parts[0]}, uncond=self.uncond)
        return found


def headers(tar):
    """Of each sample of a tar {member: (offset, size)}, and its __key__."""
    with reading(tar), tarfile.open(tar, "r:") as f:
        every = list(webdataset().tariterators.group_by_keys(
            dict(fname=m.name, data=(m.offset_data, m.size), __url__="") for m in f if m.isfile()))
        f.fileobj.seek(f.offset)                        # of what is cut at a header tarfile says nothing
        if f.fileobj.read(512) != bytes(512):
            raise BadInput(f"{tar} is cut off behind {len(every)} samples; replace it")
    return every


def holds(record, field, compare, text):
    with suppress(KeyError, TypeError, ValueError):     # no such field, or not of that kind: it does not
        return COMPARE[compare](record[field], text if isinstance(record[field], str) else float(text))
    return False


# ---------------------------------------------------------------- order

@lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    return np.random.default_rng((seed, 1, epoch)).permutation(n)


def indices(seed, positions, n):
    """Indices of the images at these positions of the endless stream over n images."""
    return np.array([permutation(seed, p // n, n)[p % n] for p in positions])


class Loader:
    """next() gives raw batches without end, one per micro-step: dict of CPU tensors image (b, C, H, W),
    label, id (b,) int64 and, where cfg["augment"] > 0, augment (b, ops, 2): the draws for augment.apply().

    Micro-step m of iteration it on this rank is slice j = m * world + rank: positions it * batch_size + j *
    b + [0, b), b = batch_size / (world * accum). With workers > 0, threads prepare workers + 1 batches
    ahead; they change nothing in the batches. Flips and augmentation are for the split "train" only.
    """

    def __init__(self, dataset, cfg, start_it=0, rank=0, world=1, accum=1, seed=0):
        self.dataset, self.rank, self.world, self.accum, self.seed = dataset, rank, world, accum, seed
        self.batch_size, self.turn, self.closed = cfg["batch_size"], start_it * accum, False
        train = dataset.split == "train"
        self.xflip, self.p = train and cfg.get("xflip", False), cfg.get("augment", 0.0) if train else 0.0
        self.ops = augment.chosen(cfg) if self.p else ()
        self.workers, self.queue = cfg.get("workers", 0), deque()
        self.pool = ThreadPoolExecutor(self.workers, "data") if self.workers else None
        self.pin = torch.cuda.is_available() and cfg.get("device", "") in ("", "cuda")  # so copies overlap

    def __next__(self):
        while self.pool and len(self.queue) < self.workers + 2:
            self.queue.append(self.pool.submit(self.batch, self.turn + len(self.queue)))
        self.turn += 1
        return self.queue.popleft().result() if self.pool else self.batch(self.turn - 1)

    def batch(self, turn):
        it, micro = divmod(turn, self.accum)
        size = self.batch_size // (self.world * self.accum)
        start = it * self.batch_size + (micro * self.world + self.rank) * size
        positions = range(start, start + size)
        ids = indices(self.seed, positions, len(self.dataset))
        rngs = [np.random.default_rng((self.seed, 2, p)) for p in positions] if self.xflip or self.p else []
        images = []
        for k, i in enumerate(ids):
            if self.closed:
                return None
            image, _ = self.dataset.get(i)
            images.append(image[..., ::-1] if self.xflip and rngs[k].random() < 0.5 else image)
        raw = {self.dataset.kind: torch.from_numpy(np.stack(images)),
               "label": torch.from_numpy(self.dataset.label[ids]), "id": torch.from_numpy(ids)}
        for more in "states", "texts":
            if hasattr(self.dataset, more):
                raw |= getattr(self.dataset, more)(ids)
        if self.p:
            raw["augment"] = torch.from_numpy(augment.draw(rngs, self.p, self.ops))
        return torch.utils.data._utils.pin_memory.pin_memory(raw) if self.pin else raw

    def close(self):
        """Ends the threads: each stops at its next image."""
        self.closed = True
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
            self.queue.clear()
