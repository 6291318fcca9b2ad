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
are read at --data_fps (0: as they come); a clip that is too short is an error, with the numbers.

Latents of a VAE: .npy files (C, [F,] H, W) in the place of images in a folder or zip, as EDM2's dataset_tool
writes them (00000/img-mean-std-00000000.npy, 8 x 32 x 32), or latent | latents | moments (N, C, H, W) of an
npz. With as many channels as the net takes they are ready, with twice as many they are moments: mean and
standard deviation. The net sees them times --data_scale, 0.18215 for Stable Diffusion's VAE; tars as given.

dataset.json is {"labels": [["00000/img00000000.png", 3], ...]}, or null in place of the list. All images of
a set have one size. The first file (in sorted order) sets the channels: grey (also 16-bit) makes a
1-channel set in which a colour file is an error, anything else makes an RGB set. Transparent pixels are
laid over white. A folder in which NAME.txt stands beside NAME.png has captions. With --encoders images are
resized (short side, bicubic) and cut (centre) to what the net takes, tars' images always.

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
from common import BadInput, alpha_sigma, known
from nets import encoders

root = Path(__file__).resolve().parent
videos = (".mp4", ".webm", ".mov")
suffixes = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".npy")


@contextmanager
def reading(what):
    """Any error inside is BadInput: pillow, zipfile, json, numpy raise about anything on a damaged file."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{what} cannot be read ({type(error).__name__}: {error}); replace it") from error


# ---------------------------------------------------------------- data sets

def load(cfg, split="train"):
    """-> dataset with .shape (C, [F,] H, W), .classes (0: none), .split, len(), get(index) -> (image, label).

    image: uint8, or float32 in [-1, 1], (C, H, W); label: int, -1 = none. cfg["classes"]: -1 = as many as
    the data has, 0 = ignore labels, N = labels must be below N. Digits and pairs have a held-out part of
    their own: for other data "val" reads cfg["val_data"], or the training data itself where that is "".
    """
    key = "val_data" if split == "val" and cfg.get("val_data") else "data"
    source, classes = cfg[key], cfg.get("classes", -1)
    if source == "digits":
        return Images(source, *digits(split), classes, split)
    if source == "moving_digits":
        return Images(source, *moving_digits(split), classes, split)
    if tars := tar_files(source):
        return Tars(tars, cfg, split)
    path, url = files.place(source), "://" in source
    if not url and not os.path.exists(path):
        net = cfg.get("net", "edm:digits")
        of = "" if net == "edm:digits" else f" --net {net} --data DATA --teacher PATH"
        make = "" if path.suffix else f" (`torchrun tools/make_pairs.py{of} --out {source}` makes some)"
        raise BadInput(f"--{key} {source} does not exist; give a folder of images or clips, a .zip, .npz, "
                       f".tar, digits or pairs{make}")
    if url or pairs_meta(path):
        return Pairs(path, cfg, split)
    for stray in ("data_keys", "data_uncond", "data_ignore", "data_filter") if key == "data" else ():
        if cfg.get(stray):
            raise BadInput(f"--{stray} is of tars, and --data {source} holds none; leave it out")
    read = folder if path.is_dir() else {".zip": archive, ".npz": npz}.get(path.suffix)
    if read is None:
        raise BadInput(f"--{key} {source} is neither a folder, a .zip, an .npz nor digits")
    shape, clip = pixels(cfg)
    with reading(path):
        names, get, label = read(path, clip)
    images = Images(path, names, lambda name: cut(get(name), shape), label, classes, split)
    if images.shape[0] not in (1, 3):
        images.kind, scale = latent_kind(images, cfg), np.float32(cfg["data_scale"])
        images.read = lambda name: scale * get(name)
    written = {Path(where, name[:-4]) for where, _, found in os.walk(path, followlinks=True)
               for name in found if name.endswith(".txt")}
    bare = [name for name in names if written and (path / name).with_suffix("") not in written]
    if written and len(bare) < len(names):
        if bare:
            raise BadInput(f"{path}: {len(bare)} of {len(names)} images have no caption, such as "
                           f"{Path(bare[0]).with_suffix('.txt')}; write it, an empty file for no text")
        images.texts = lambda ids: dict(caption=[caption(path / names[i]) for i in ids])
    return images


def pixels(cfg):
    """What the net takes, (C, [F,] H, W), None where images stay as they are; and of clips (frames, fps)."""
    shape = encoders.shapes(cfg) if cfg.get("net") else ()
    clip = (shape[1], cfg.get("data_fps", 0)) if len(shape) == 4 else None
    return shape if cfg.get("encoders") or clip else None, clip


class Images:
    """Images by name, as read(name) gives them: (C, H, W), uint8 or float32 in [-1, 1]; labels or None.
    texts(indices), where there is such a method: what encoders.conditions takes as texts."""
    kind = "image"                                      # else latent, moments: encoders.encode

    def __init__(self, path, names, read, label, classes, split):
        if not names:
            raise BadInput(f"{path} holds no images (looked for {' '.join(suffixes)})")
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
            raise BadInput(f"{self.path}: {name} is {w}x{h} with {c} channels, but the first image, "
                           f"{self.names[0]}, is {w0}x{h0} with {c0}; a set has one size, no colours if "
                           "the first is grey: convert one of them")
        return image if c == c0 else np.broadcast_to(image, self.shape), int(self.label[index])


def latent_kind(images, cfg):
    """latent or moments, by the channels that the net takes."""
    unmoved(images.path, "latents", cfg)
    c = encoders.shapes(cfg | dict(encoders=""))[0]
    if images.shape[0] != 2 * c:
        return "latent"
    if (images.get(0)[0][c:] < 0).any():
        raise BadInput(f"{images.path}: standard deviations, the last {c} channels of {images.names[0]}, are "
                       "below 0; store exp(logvar / 2) of a log-variance")
    return "moments"


def unmoved(path, what, cfg):
    if cfg.get("xflip") or cfg.get("augment"):
        raise BadInput(f"{path} holds {what}, which cannot be moved; leave out --xflip and --augment")


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
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 <= value < limit:
            raise BadInput(f"{path}: the label of image {name} is {value!r}; with --classes {classes} they "
                           f"are integers from 0 to {limit - 1}")
    label = np.asarray(label, np.int64)
    return label, classes if classes > 0 else int(label.max()) + 1


def cut(image, shape):
    """uint8 image (c, [f,] h, w) -> (C, [F,] H, W) = shape: short side by bicubic, centre cut, grey to C
    channels; an image is a clip of one frame."""
    from PIL import Image, ImageOps
    if shape is None or image.dtype != np.uint8 or image.shape == shape:
        return image
    frames = image.shape[1:-2] or shape[1:-2] and (1,)
    planes = [np.asarray(ImageOps.fit(Image.fromarray(p), shape[:-3:-1], Image.BICUBIC))
              for p in image.reshape(-1, *image.shape[-2:])]
    planes = np.stack(planes).reshape(len(image), *frames, *shape[-2:])
    return np.repeat(planes, shape[0], axis=0) if len(image) == 1 else planes


def captions(dataset, count=256):
    """Some captions, from all over a data set, that training encodes: none where embeddings are stored."""
    if not hasattr(dataset, "texts") or {"cond", "text"} & {*getattr(dataset, "kinds", ())}:
        return ()
    return dataset.texts(range(0, len(dataset), max(1, len(dataset) // count)))["caption"]


def caption(image):
    with reading(f"the caption of {image}"):
        return image.with_suffix(".txt").read_text().strip()


# ---------------- formats: (path, clip of `pixels`) -> (names, read(name) -> image, labels or None)

def digits(split):
    with np.load(root / "assets" / "digits.npz") as file:
        keep = file[split]
        image, label = file["image"][keep][:, None].astype(np.float32) / 8 - 1, file["label"][keep]
    return range(len(image)), image.__getitem__, label


def moving_digits(split):
    """Every clip of `clips`. Training of 5,000 iterations of 32 sees each about once, so none is repeated
    before another motion of its digit has been seen, and no choice of some has to be made and kept."""
    label = np.tile(digits(split)[2], 25 * 4)
    return range(len(label)), lambda i: clips(split, [i])[0][0], label


def clips(split, ids, frames=8):
    """Digits of 8 x 8 in frames of 12 x 12, background -1: (B, 1, F, 12, 12) float32 in [-1, 1], with the
    corners (row, column) at which they lie (B, F, 2).

    Of n digits clip i has digit i % n with motion (i // n + 37 (i % n)) % 100: each digit has every one of
    25 corners to start from times 4 directions, and n clips in a row have every digit once and the motions
    about equally often. In each direction a digit moves by a pixel a frame and turns round at the walls: one
    that starts at a with velocity v is at 4 - |4 - (a + v f) mod 8|."""
    image = padded(split)
    turn, digit = np.divmod(np.asarray(ids), len(image))
    corner, way = np.divmod((turn + 37 * digit) % 100, 4)
    start, velocity = np.stack(np.divmod(corner, 5), -1), 2 * np.stack(np.divmod(way, 2), -1) - 1   # (B, 2)
    moved = start[:, None] + velocity[:, None] * np.arange(frames)[:, None]                 # (B, F, 2)
    corner = 4 - np.abs(4 - moved % 8)
    rows, columns = np.moveaxis(4 + np.arange(12) - corner[..., None], 2, 0)                # (B, F, 12)
    clip = image[digit[:, None, None, None], rows[..., :, None], columns[..., None, :]]     # (B, F, 12, 12)
    return clip[:, None], corner


@lru_cache
def padded(split):
    ids, read, _ = digits(split)
    return np.pad(read(slice(None))[:, 0], ((0, 0), (4, 4), (4, 4)), constant_values=-1)    # (n, 16, 16)


def folder(path, clip):
    every = sorted((Path(where) / name).relative_to(path).as_posix()
                   for where, _, found in os.walk(path, followlinks=True) for name in found)
    names, read, label = image_files(path, every, lambda name: (path / name).read_bytes(), clip)
    tops = sorted({name.split("/")[0] for name in names if "/" in name})
    if "dataset.json" in every or len(tops) < 2:
        return names, read, label
    if loose := [name for name in names if "/" not in name]:
        raise BadInput(f"{path}: {loose[0]} lies in no class folder such as {tops[0]}; move it into one, or "
                       "label all files in dataset.json")
    number = {top: i for i, top in enumerate(tops)}
    return names, read, [number[name.split("/")[0]] for name in names]


def archive(path, clip):
    zipped, lock = zipfile.ZipFile(path), threading.Lock()

    def content(name):
        with lock:  # a ZipFile has one file position, so threads must take turns
            return zipped.read(name)
    return image_files(path, sorted(zipped.namelist()), content, clip)


def image_files(path, every, content, clip):
    """The images among the files `every`, content(name) being the bytes of one; labels by dataset.json."""
    ends = (*suffixes, *videos) if clip else suffixes
    names, label = [name for name in every if name.lower().endswith(ends) and not any(
        part.startswith((".", "__MACOSX")) for part in name.split("/"))], None
    if "dataset.json" in every:
        with reading(f'{path}/dataset.json, {{"labels": [[file name, class], ...]}} or {{"labels": null}},'):
            table = dict(json.loads(content("dataset.json")).get("labels") or ())
        if table and (apart := sorted(table.keys() ^ set(names))):
            raise BadInput(f"{path}: {apart[0]} is among the images or in dataset.json, but not in both, as "
                           f"{len(apart)} names; label all or none, by paths relative to dataset.json with /")
        label = [table[name] for name in names] if table else None

    def read(name):
        found = value(name, content(name), clip)
        if isinstance(found, np.ndarray):
            return found
        if found.dim() != 3 + bool(clip) or not found.is_floating_point():
            raise BadInput(f"{path}: {name} is {found.dtype} of shape {tuple(found.shape)}; latents are "
                           f"floats (C, {'F, ' if clip else ''}H, W)")
        return found.float().numpy()
    return names, read, label


def decode(content):
    """Bytes of an image file -> uint8 (1 or 3, H, W); 16-bit grey is scaled by 1/257, not clipped."""
    from PIL import Image, ImageOps
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode.startswith("I"):  # 16-bit grey, which convert("L") would clip
        return np.round(np.asarray(image).astype(np.float64) / 257).clip(0, 255).astype(np.uint8)[None]
    grey = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    array = np.asarray(image.convert("L" if grey else "RGB"))
    return array[None] if grey else np.ascontiguousarray(array.transpose(2, 0, 1))


def video(name, content, frames, fps):
    """Bytes of a video file -> its first frames at this rate, uint8 (3, frames, H, W)."""
    found, seconds = [], 0.0
    for i, (seconds, read) in enumerate(stills(name, content)):
        # the picture is seen until then; at 0 fps each one is taken once
        while len(found) < frames and (len(found) / fps < seconds - 1e-6 if fps else len(found) <= i):
            found.append(read())
        if len(found) == frames:
            return np.ascontiguousarray(np.stack(found).transpose(3, 0, 1, 2))
    need = f" at --data_fps {fps:g}, which end after {(frames - 1) / fps:.2f} s" if fps else ""
    raise BadInput(f"{name} has {len(found)} frames in {seconds:.2f} s, but --net takes {frames}{need}; leave"
                   " it out, give a higher rate, or fewer frames by the net's x_shape")


def stills(name, content):
    """(second until which it is seen, read() -> (H, W, 3) uint8) of each picture of a video."""
    if name.lower().endswith(".gif"):
        from PIL import Image, ImageSequence
        seconds = 0.0
        for picture in ImageSequence.Iterator(Image.open(io.BytesIO(content))):
            seconds += (picture.info.get("duration") or 100) / 1000
            yield seconds, lambda: np.asarray(picture.convert("RGB"))
        return
    try:
        import av
    except ImportError as e:
        raise BadInput(f"{name} needs the PyAV library ({e}); pip install av") from e
    with av.open(io.BytesIO(content)) as container:
        stream, first = container.streams.video[0], None
        stream.thread_type = "AUTO"
        for picture in container.decode(stream):
            first = picture.time if first is None else first
            yield (picture.time - first + 1 / float(stream.average_rate),
                   lambda: picture.to_ndarray(format="rgb24"))


def npz(path, clip):
    with np.load(path) as file:
        image = next((file[k] for k in ("image", "images", "x", "arr_0") if k in file), None)
        label = next((file[k] for k in ("label", "labels", "y") if k in file), None)
        latent = next((file[k] for k in ("latent", "latents", "moments") if k in file), None)
        keys = ", ".join(file)
    if latent is not None:
        return range(len(latent)), latent.astype(np.float32).__getitem__, label
    if image is None:
        raise BadInput(f"{path} has the arrays {keys}, none of them image, images, x, arr_0 or latents")
    if image.ndim == 3:
        image = image[:, None]  # (N, 1, H, W)
    first, last = [image.ndim == 4 and image.shape[d] in (1, 3) for d in (1, 3)]
    first = first or image.ndim == 5
    if first == last:
        raise BadInput(f"{path}: images of shape {image.shape} are neither (N, C, H, W) nor (N, H, W, C), "
                       "C 1 or 3, nor clips (N, C, F, H, W)")
    image = image if first else np.ascontiguousarray(image.transpose(0, 3, 1, 2))
    if image.dtype != np.uint8 and image.size:
        low, high = float(image.min()), float(image.max())
        if image.dtype.kind != "f" or not (-1 <= low < 0 and high <= 1):  # NaN fails too
            raise BadInput(f"{path}: images are {image.dtype} from {low:g} to {high:g}; store uint8, or "
                           "floats in [-1, 1]: 2 x - 1 of images in [0, 1]")
        image = image.astype(np.float32)
    return range(len(image)), image.__getitem__, label


# ---------------------------------------------------------------- a teacher's pairs

class Pairs(Images):
    """Samples x0 and the states x on the teacher's way there: mapped files, of a store copies in memory."""

    def __init__(self, path, cfg, split):
        self.meta, classes = pairs_meta(path), cfg.get("classes", -1)
        if not self.meta:
            raise BadInput(f"{path} has no meta.json of tools/make_pairs.py, so no pairs")
        unmoved(path, "pairs", cfg)
        n, t, label = (self.meta[key] for key in ("pairs", "path_t", "labels"))
        self.shards = [pairs_shard(path, self.meta, k) for k in range(-(-n // self.meta["shard"]))]
        std, sigma = self.shards[0][:256, 0].std(), float(alpha_sigma(self.meta["schedule"], t[0])[1])
        if abs(std / sigma - 1) > max(0.1, 4 * self.shards[0][:256, 0].size ** -0.5):
            raise BadInput(f"{path}: the noise has a standard deviation of {std:.3g}, not {sigma:.3g} as at "
                           f"t = {t[0]:g}; states are stored as nets see them, sigma z: make the pairs anew")
        held, self.about = max(n // 20, 1), dict(pairs_of=self.meta["data"])
        if self.meta.get("texts"):                      # they stay in the data that the pairs were made of
            source = load(cfg | dict(data=self.meta["data"], val_data="", xflip=False, augment=0.0))
            order = indices(self.meta["seed"], range(n), len(source))
            self.texts = lambda ids: source.texts(order[[self.names[i] for i in ids]])
        ids = range(n - held) if split == "train" else range(n - held, n)
        super().__init__(path, ids, lambda i: self.row(i)[-1], label and label[ids.start:ids.stop],
                         self.meta["classes"] if classes < 0 else classes, split)

    def row(self, i):
        shard, at = divmod(i, self.meta["shard"])
        return np.array(self.shards[shard][at])                                 # (P + 1, C, H, W)

    def states(self, indices):
        path = torch.from_numpy(np.stack([self.row(self.names[i])[:-1] for i in indices]))  # (b, P, C, H, W)
        return dict(path=path, path_t=torch.tensor(self.meta["path_t"], dtype=torch.float64))


def pairs_meta(path):
    """What meta.json of tools/make_pairs.py says, or {} where there is none."""
    with suppress(OSError, ValueError, TypeError, AttributeError):  # no folder, no bytes, another program's
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


# ---------------------------------------------------------------- WebDataset tars

MEMBERS = dict(                                         # kind: members that are it, in order of preference
    latent="latent.npy;latent.pth", moments="moments.npy;moments.pth", label="cls",
    image="jpg;jpeg;png;webp;mp4;webm;mov;gif",
    caption="txt", cond="cond.safetensors", text="txt_emb.npy;txt_emb.pth", json="json",
    pooled="pooled.npy;pooled.pth", text_mask="text_mask.npy")
COMPARE = {">=": op.ge, "<=": op.le, "==": op.eq, "!=": op.ne, ">": op.gt, "<": op.lt}


def webdataset():
    try:
        import webdataset.autodecode
        return webdataset
    except ImportError as e:
        raise BadInput(f"tars need the webdataset library ({e}); pip install webdataset") from e


def tar_files(source):
    """The tars that "{000..010}.tar" or a folder of tars names; [] where it names none."""
    path = os.path.expanduser(source)
    if path.endswith(".tar") and "://" not in path:
        return [Path(p) for p in webdataset().shardlists.expand_urls(path)]
    found = sorted(Path(path).glob("*.tar")) if os.path.isdir(path) else []
    made = json.loads(files.read(Path(path, "meta.json")) or b"{}") if found else {}    # tools/encode.py's
    if {"samples", "shard"} <= made.keys() and len(found) < -(-made["samples"] // made["shard"]):
        raise BadInput(f"{path} holds {len(found)} tars, too few for the {made['samples']} samples in its "
                       f"meta.json; the command that made it makes the rest")
    return found


def value(name, content, clip=None):
    """What the bytes of a file of this name hold: image, clip, tensors, text, int, json. Never a pickle's
    code."""
    import safetensors.torch
    end = name.lower().rpartition(".")[2]
    if clip and f".{end}" in (".gif", *videos):
        return video(name, content, *clip)
    own = dict.fromkeys((suffix[1:] for suffix in suffixes), decode) | dict(
        safetensors=safetensors.torch.load, npy=lambda b: torch.from_numpy(np.load(io.BytesIO(b))),
        pth=lambda b: torch.load(io.BytesIO(b), "cpu", weights_only=True))
    known(f"{name}: file type", end, [*own, "txt", "cls", "json"])
    return own[end](content) if end in own else webdataset().autodecode.basichandlers(name, content)


class Tars(Images):
    """Samples of WebDataset tars, read at random, so the stream's order is that of any data. At the start
    every rank reads the headers of all tars (a seek and 512 bytes a member; labels and a filter's json too)
    and keeps names and offsets in memory (assumption: under 1 KB a sample). Nothing is written.

    data_keys: kind=member;other, kinds of MEMBERS, which holds where this is (). A sample lacks nothing that
    the first one has. cond is a dict of text (L, D), pooled (P,), text_mask (L,), which may lie apart;
    data_uncond a file of one for all samples, or of its text. data_ignore: a file of keys, or TAR:KEY, one a
    line. data_filter: tests such as field>=5 or field==text of json, all must hold.
    """

    def __init__(self, tars, cfg, split):
        folder, own = tars[0].parent, dict(str(e).partition("=")[::2] for e in cfg.get("data_keys", ()))
        tests = [re.fullmatch("([^<>=!]+)(>=|<=|==|!=|>|<)(.+)", str(t)) for t in cfg.get("data_filter", ())]
        if None in tests or own.keys() - MEMBERS:
            raise BadInput(f"--data_filter {cfg['data_filter']} are field>=5 ({' '.join(COMPARE)}), "
                           f"--data_keys {cfg['data_keys']} kind=member, kinds {', '.join(MEMBERS)}")
        ignored = set()
        if cfg.get("data_ignore"):
            with reading(f"--data_ignore {cfg['data_ignore']}"):
                ignored = set(Path(cfg["data_ignore"]).read_text().split("\n"))
        keys, kinds, self.samples, self.clip = own or MEMBERS, tuple(own), [], pixels(cfg)[1]
        for tar in tars:
            with reading(tar), tarfile.open(tar, "r:") as f:            # reads the headers alone
                every = list(webdataset().tariterators.group_by_keys(
                    dict(fname=m.name, data=(m.offset_data, m.size), __url__="") for m in f if m.isfile()))
                f.fileobj.seek(f.offset)                # of what is cut at a header tarfile says nothing
                if f.fileobj.read(512) != bytes(512):
                    raise BadInput(f"{tar} is cut off behind {len(every)} samples; replace it")
            for members in every:
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
        self.size = encoders.shapes(cfg) if self.kind == "image" and cfg.get("net") else None
        if self.kind != "image":
            unmoved(folder, "latents", cfg)
        file = Path(cfg.get("data_uncond") or folder / "uncond.safetensors")
        with reading(file):
            blank = value(file.name, file.read_bytes()) if cfg.get("data_uncond") or file.exists() else {}
        asked = "" if cfg.get("data_uncond") else cfg.get("negative_prompt")
        if asked and blank and {"cond", "text"} & {*kinds}:
            with reading(folder / "meta.json"):
                made = json.loads(files.read(folder / "meta.json") or b"{}").get("negative_prompt", "")
            if asked != made:
                raise BadInput(f"--negative_prompt {asked!r} is for encoders, {folder} holds that of {made!r}"
                               "; give --data_uncond FILE, or encode the data with that prompt")
        blank = dict(text=blank) if torch.is_tensor(blank) else blank
        self.uncond = {k: v[None] for k, v in blank.items()}                    # (1, L, D), ...
        label = [self.member(sample, "label") for sample in self.samples] if "label" in kinds else None
        super().__init__(folder, range(len(self.samples)), self.image, label, cfg.get("classes", -1), split)
        if {"caption", "cond", "text"} & {*kinds}:
            self.texts = self.texts_of

    def member(self, sample, kind):
        tar, key, members = sample
        with reading(f"{tar}: {kind} of {key}"), open(tar, "rb") as f:
            name, offset, size = members[kind]
            f.seek(offset)
            return value(name, f.read(size), self.clip)

    def image(self, i):
        found = self.member(self.samples[i], self.kind)
        return cut(found, self.size) if self.kind == "image" else found.float().numpy()

    def texts_of(self, ids):
        told = [k for k in self.kinds if k in ("caption", "cond", "text", "pooled", "text_mask")]
        every = [{k: self.member(self.samples[i], k) for k in told} for i in ids]
        found = dict(caption=[s.pop("caption").strip() for s in every]) if "caption" in told else {}
        if any(every):
            parts = encoders.level(*({k: v[None] for k, v in (s.pop("cond", {}) | s).items()} for s in every))
            found |= dict(cond={k: torch.cat([p[k] for p in parts]) for k in parts[0]}, uncond=self.uncond)
        return found


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
    """Endless iterator of raw batches, one per micro-step: dict of CPU tensors image (b, C, H, W), label,
    id (b,) int64 and, where cfg["augment"] > 0, augment (b, ops, 2): the draws that augment.apply() takes.

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
        positions = range(start, start + size)
        ids = indices(self.seed, positions, len(self.dataset))
        rngs = [np.random.default_rng((self.seed, 2, p)) for p in positions] if self.xflip or self.p else []
        images, labels = [], []
        for k, i in enumerate(ids):
            if self.closed:
                return None
            image, label = self.dataset.get(i)
            images.append(image[..., ::-1] if self.xflip and rngs[k].random() < 0.5 else image)
            labels.append(label)
        raw = {self.dataset.kind: torch.from_numpy(np.stack(images)), "label": torch.tensor(labels),
               "id": torch.from_numpy(ids)}
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
