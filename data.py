"""Data sets by format, and a stateless, resumable order.

    data = "digits"        the embedded 8x8 digits: 1,500 for training, 297 held out ("./digits" for a folder)
    data = "some/folder"   png jpg jpeg webp bmp gif (first frame), recursive; labels from dataset.json in it,
                           else from the top-level sub-folders, sorted, if there are two or more, else none
    data = "cifar10.zip"   such files in a zip, as EDM's dataset_tool writes it; labels from dataset.json only
    data = "set.npz"       image | images | x | arr_0, uint8 or float in [-1, 1], as NHWC, NCHW or NHW;
                           label | labels | y, integers (N,), or none
    data = "some/pairs"    what tools/make_pairs.py wrote, or its URL; the last twentieth is held out

dataset.json is {"labels": [["00000/img00000000.png", 3], ...]}, or null in place of the list. All images of
a set have one size. The first file (in sorted order) sets the channels: grey (also 16-bit) makes a
1-channel set in which a colour file is an error, anything else makes an RGB set. Transparent pixels are
laid over white.

Position p of the training stream is image permutation[p % n] of epoch p // n, and its flip and augmentation
are drawn from (seed, p). So what a batch holds depends on seed and iteration alone: not on ranks, threads
or a resume.
"""
import io
import json
import os
import threading
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import augment
import files
from common import BadInput, alpha_sigma

root = Path(__file__).resolve().parent
suffixes = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


# ---------------------------------------------------------------- data sets

def load(cfg, split="train"):
    """-> dataset with .shape (C, H, W), .classes (0: no labels), .split, len(), get(index) -> (image, label).

    image: uint8, or float32 in [-1, 1], (C, H, W); label: int, -1 = none. cfg["classes"]: -1 = as many as
    the data has, 0 = ignore labels, N = labels must be below N. Digits and pairs have a held-out part of
    their own: for other data "val" reads cfg["val_data"], or the training data itself where that is "".
    """
    key = "val_data" if split == "val" and cfg.get("val_data") else "data"
    source, classes = cfg[key], cfg.get("classes", -1)
    if classes < -1:
        raise BadInput(f"--classes {classes} must be -1 (those of the data), 0 (no labels) or more")
    if source == "digits":
        with np.load(root / "assets" / "digits.npz") as file:
            keep = file[split]
            image, label = file["image"][keep], file["label"][keep]
        return Arrays(image[:, None].astype(np.float32) / 8 - 1, label, classes, split, source)
    if "://" in source:
        return Pairs(files.place(source), cfg, split)
    path = next((p for p in (Path(source), root / source) if source and os.path.exists(p)), None)
    if path is None:
        raise BadInput(f"--{key} {source or repr(source)} does not exist, neither in {os.getcwd()} nor beside "
                       "data.py; give a folder of images, a .zip, an .npz, digits" + (
                           "" if "." in source else ", or a teacher's pairs (`torchrun tools/make_pairs.py "
                           f"--out {source}` makes them for the digits)"))
    if path.is_dir():
        if pairs_meta(path):
            return Pairs(path, cfg, split)
        names = sorted((Path(folder) / name).relative_to(path).as_posix()
                       for folder, _, files in os.walk(path, followlinks=True) for name in files)
        return Files(path, names, lambda name: (path / name).read_bytes(), classes, split)
    if zipfile.is_zipfile(path) and path.suffix == ".zip":
        archive, lock = zipfile.ZipFile(path), threading.Lock()

        def read(name):
            with lock:  # a ZipFile has one file position, so threads must take turns
                return archive.read(name)
        return Files(path, sorted(archive.namelist()), read, classes, split)
    if path.suffix == ".npz":
        return load_npz(path, classes, split)
    raise BadInput(f"--{key} {source} is neither a folder, a readable .zip, an .npz nor digits")


class Arrays:
    """Images and labels in memory."""

    def __init__(self, image, label, classes, split, source):
        if len(image) == 0:
            raise BadInput(f"{source} holds no images")
        self.image, self.split, self.shape = image, split, image.shape[1:]
        names = [f"image {i}" for i in range(len(image))]
        self.label, self.classes = check_labels(label, names, classes, source)

    def __len__(self):
        return len(self.image)

    def get(self, index):
        return self.image[index], int(self.label[index])


class Files:
    """Image files, listed and sampled here, each decoded when it is asked for."""

    def __init__(self, path, names, read, classes, split):
        self.path, self.read, self.split, self.shape = path, read, split, None
        self.names = [n for n in names if n.lower().endswith(suffixes)
                      and not any(part.startswith((".", "__MACOSX")) for part in n.split("/"))]
        if not self.names:
            raise BadInput(f"{path} holds no images (looked for {' '.join(suffixes)})")
        label, tops = None, sorted({n.split("/")[0] for n in self.names if "/" in n})
        if "dataset.json" in names:
            label = json_labels(read, self.names, f"{path}/dataset.json")
        elif path.is_dir() and len(tops) > 1:
            loose = [n for n in self.names if "/" not in n]
            if loose:
                raise BadInput(f"{path}: {loose[0]} lies in no class folder such as {tops[0]}; "
                               "move it into one, or label all files in dataset.json")
            number = {top: i for i, top in enumerate(tops)}
            label = [number[n.split("/")[0]] for n in self.names]
        self.label, self.classes = check_labels(label, self.names, classes, path)
        for i in np.linspace(0, len(self) - 1, min(len(self), 64)).astype(int):
            self.get(i)  # finds most mistakes before training starts; the first one sets the shape

    def __len__(self):
        return len(self.names)

    def get(self, index):
        name = self.names[index]
        image = decode_file(lambda: self.read(name), f"{self.path}/{name}")     # (1 or 3, H, W) uint8
        if self.shape is None:
            self.shape = image.shape
        if image.shape[1:] != self.shape[1:]:
            (h, w), (h0, w0) = image.shape[1:], self.shape[1:]
            raise BadInput(f"{self.path}: {name} is {w}x{h} but {self.names[0]} is {w0}x{h0}; all images of "
                           "a set must have one size, resize them first")
        if len(image) > self.shape[0]:
            raise BadInput(f"{self.path}: {name} is in colour but the first file, {self.names[0]}, is grey; "
                           "convert one of them")
        return np.broadcast_to(image, self.shape), int(self.label[index])


class Pairs:
    """Samples x0 and the states x on the teacher's way there: mapped files, of a store copies in memory."""

    def __init__(self, path, cfg, split):
        self.path, self.split, self.meta = path, split, pairs_meta(path)
        if not self.meta or cfg.get("xflip") or cfg.get("augment"):
            raise BadInput(f"{path} holds pairs, which --xflip and --augment would part; leave those out"
                           if self.meta else f"{path} has no meta.json of tools/make_pairs.py, so no pairs")
        n, t, self.shape = self.meta["pairs"], self.meta["path_t"][0], tuple(self.meta["shape"])
        self.shards = [pairs_shard(path, self.meta, k) for k in range(-(-n // self.meta["shard"]))]
        std, sigma = self.shards[0][:256, 0].std(), float(alpha_sigma(self.meta["schedule"], t)[1])
        if abs(std / sigma - 1) > 0.1:
            raise BadInput(f"{path}: the noise has a standard deviation of {std:.3g}, not {sigma:.3g} as at "
                           f"t = {t:g}; states are stored as the nets see them, sigma z: make the pairs anew")
        self.ids = range(n)[:-max(n // 20, 1)] if split == "train" else range(n)[-max(n // 20, 1):]
        label, self.classes = check_labels(self.meta["labels"], range(n), cfg.get("classes", -1), path)
        self.classes = self.meta["classes"] if cfg.get("classes", -1) < 0 else self.classes
        self.label, self.about = label[self.ids], dict(pairs_of=self.meta["data"])

    def __len__(self):
        return len(self.ids)

    def row(self, index):
        shard, at = divmod(self.ids[index], self.meta["shard"])
        return np.array(self.shards[shard][at])                                 # (P + 1, C, H, W)

    def get(self, index):
        return self.row(index)[-1], int(self.label[index])

    def states(self, ids):
        path = torch.from_numpy(np.stack([self.row(i)[:-1] for i in ids]))      # (b, P, C, H, W)
        return dict(path=path, path_t=torch.tensor(self.meta["path_t"], dtype=torch.float64))


def pairs_meta(path):
    """What meta.json of tools/make_pairs.py says, or {} where there is none."""
    with suppress(ValueError, TypeError, AttributeError):       # of no bytes, of another program
        meta = json.loads(files.read(path / "meta.json"))
        return meta if meta.keys() >= {"path_t", "pairs"} else {}
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


def decode_file(read, name):
    """read(): bytes of an image file -> uint8 (1 or 3, H, W); 16-bit grey is scaled by 1/257, not clipped."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise BadInput("reading image files needs pillow: pip install pillow") from error
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(read())))
        grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
        if image.mode.startswith("I"):  # 16-bit, which convert("L") would clip
            array = np.round(np.asarray(image).astype(np.float64) / 257).clip(0, 255).astype(np.uint8)
        else:
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            array = np.asarray(image.convert("L" if grey else "RGB"))
    except Exception as error:  # pillow and zipfile raise about anything on a damaged file
        raise BadInput(f"{name} cannot be read as an image ({type(error).__name__}: {error}); replace or "
                       "remove it") from error
    return array[None] if grey else np.ascontiguousarray(array.transpose(2, 0, 1))


def json_labels(read, names, source):
    """EDM's dataset.json -> the labels of `names` in order, or None."""
    try:
        given = json.loads(read("dataset.json")).get("labels")
        given = None if given is None else dict(given)
    except Exception as error:  # of the zip, of json (RecursionError too), or another structure
        raise BadInput(f'{source} is neither {{"labels": [[file name, class], ...]}} nor {{"labels": null}}: '
                       f"{error}") from error
    if given is None:
        return None
    absent, bare = sorted(set(given) - set(names)), [n for n in names if n not in given]
    if absent:
        raise BadInput(f"{source} labels {absent[0]}, which is not there ({len(absent)} such names); names "
                       "are paths relative to dataset.json with /")
    if bare:
        raise BadInput(f"{source} has no label for {bare[0]} ({len(bare)} such files); label all or none")
    return [given[n] for n in names]


def check_labels(label, names, classes, source):
    """-> int64 labels (-1 where there are none), number of classes."""
    if classes == 0 or label is None:
        if classes > 0:
            raise BadInput(f"{source} has no labels, but the nets are built for {classes} classes; "
                           f"use --classes 0")
        return np.full(len(names), -1), 0
    if len(label) != len(names):
        raise BadInput(f"{source} has {len(names)} images but {len(label)} labels")
    for name, value in zip(names, label):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 <= value < 10 ** 6:
            raise BadInput(f"{source}: the label of {name} is {value!r}; labels are integers from 0 to 10^6")
        if value >= classes > 0:
            raise BadInput(f"{source}: the label of {name} is {value}, but --classes {classes} allows "
                           f"0 to {classes - 1}")
    label = np.asarray(label, np.int64)
    return label, classes if classes > 0 else int(label.max()) + 1


def load_npz(path, classes, split):
    try:
        with np.load(path) as file:
            image = next((file[k] for k in ("image", "images", "x", "arr_0") if k in file), None)
            label = next((file[k] for k in ("label", "labels", "y") if k in file), None)
            keys = list(file)
    except Exception as error:  # object arrays, an .npy by another name, damaged files: about anything
        raise BadInput(f"{path} cannot be read as an .npz ({type(error).__name__}: {error})") from error
    if image is None:
        raise BadInput(f"{path} has the arrays {', '.join(keys)}, none of them image, images, x or arr_0")
    if label is not None and label.ndim != 1:
        raise BadInput(f"{path}: labels have the shape {label.shape}, not (N,)")
    if image.ndim == 3:
        image = image[:, None]  # (N, 1, H, W)
    first, last = [image.ndim == 4 and image.shape[d] in (1, 3) for d in (1, 3)]
    if first == last:
        raise BadInput(f"{path}: images of shape {image.shape} are neither (N, C, H, W) nor (N, H, W, C), "
                       "C 1 or 3")
    image = image if first else np.ascontiguousarray(image.transpose(0, 3, 1, 2))
    if image.dtype.kind == "f" and image.size:
        low, high = float(image.min()), float(image.max())
        if not (-1 <= low < 0 and high <= 1):  # NaN fails too
            raise BadInput(f"{path}: float images must span [-1, 1], these lie in [{low:g}, {high:g}]; store "
                           "2 x - 1 of images in [0, 1], uint8 of images in [0, 255]")
        image = image.astype(np.float32)
    elif image.dtype != np.uint8:
        raise BadInput(f"{path}: images are {image.dtype}; store uint8, or float in [-1, 1]")
    return Arrays(image, label, classes, split, path)


# ---------------------------------------------------------------- order

@lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    return np.random.default_rng((seed, 1, epoch)).permutation(n)


def index(seed, position, n):
    """Index of the image at `position` of the endless stream over n images."""
    return int(permutation(seed, position // n, n)[position % n])


def indices(seed, positions, n):
    return np.array([index(seed, p, n) for p in positions])


class Loader:
    """Endless iterator of raw batches, one per micro-step: dict of CPU tensors image (b, C, H, W), label,
    id (b,) int64 and, where cfg["augment"] > 0, augment (b, ops, 2): the draws that augment.apply() takes.

    Micro-step m of iteration it on this rank is slice j = m * world + rank: positions it * batch_size + j *
    b + [0, b), b = batch_size / (world * accum). With workers > 0, threads prepare workers + 1 batches
    ahead; they change nothing in the batches. Flips and augmentation are for the split "train" only.
    """

    def __init__(self, dataset, cfg, start_it=0, rank=0, world=1, accum=1, seed=0):
        self.dataset, self.batch_size, self.rank, self.world, self.accum = (
            dataset, cfg["batch_size"], rank, world, accum)
        self.seed, self.turn, self.closed = seed, start_it * accum, False
        train = dataset.split == "train"
        self.xflip, self.p = train and cfg.get("xflip", False), cfg.get("augment", 0.0) if train else 0.0
        self.ops = augment.chosen(cfg) if self.p else ()
        self.workers, self.queue = cfg.get("workers", 0), deque()
        self.pool = ThreadPoolExecutor(self.workers, "data") if self.workers else None
        self.pin = torch.cuda.is_available() and cfg.get("device", "") in ("", "cuda")  # so copies overlap

    def __iter__(self):
        return self

    def __next__(self):
        if self.closed:
            raise StopIteration
        while self.pool and len(self.queue) < self.workers + 2:
            self.queue.append(self.pool.submit(self.batch, self.turn + len(self.queue)))
        self.turn += 1
        return self.queue.popleft().result() if self.pool else self.batch(self.turn - 1)

    def batch(self, turn):
        it, micro = divmod(turn, self.accum)
        size = self.batch_size // (self.world * self.accum)
        start = it * self.batch_size + (micro * self.world + self.rank) * size
        ids, images, labels, rngs = [], [], [], []
        for position in range(start, start + size):
            if self.closed:
                return None
            ids.append(index(self.seed, position, len(self.dataset)))
            image, label = self.dataset.get(ids[-1])
            if self.xflip or self.p:
                rngs.append(np.random.default_rng((self.seed, 2, position)))
            if self.xflip and rngs[-1].random() < 0.5:
                image = image[:, :, ::-1]
            images.append(image)
            labels.append(label)
        raw = dict(image=torch.from_numpy(np.stack(images)), label=torch.tensor(labels), id=torch.tensor(ids))
        if hasattr(self.dataset, "states"):
            raw |= self.dataset.states(ids)
        if self.p:
            raw["augment"] = torch.from_numpy(augment.draw(rngs, self.p, self.ops))
        return {k: v.pin_memory() for k, v in raw.items()} if self.pin else raw

    def close(self):
        """Ends the threads: each stops at its next image."""
        self.closed = True
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
            self.queue.clear()
