"""CIFAR-10 or ImageNet, as they are published, into the zip of images and labels that --data reads.

    python tools/prepare_data.py cifar-10-python.tar.gz cifar10-32x32.zip --download
    python tools/prepare_data.py ILSVRC2012_img_train.tar imagenet-256.zip --size 256 --workers 16
    python tools/prepare_data.py ILSVRC/Data/CLS-LOC/train imagenet-64x64.zip --size 64 --crop edm

Without --size the source is CIFAR-10's archive or unpacked folder (no code in its pickles is run), with it
ImageNet's tar of tars or a folder with a folder or tar of images for each class, numbered in sorted order.
Archives under their published names are checked. --crop as the teacher's data were: adm (guided-diffusion,
DiT, center-crop-dhariwal of EDM2) halves by a box filter while the shorter side stays at least --size, goes
on to it by bicubic, takes the centre; edm (center-crop of EDM: its ImageNet-64 teacher) takes the largest
central square to --size by Lanczos. Until OUT is whole its parts, as large, lie beside it: a killed run goes
on. Any --workers, tar or folder, make the same bytes. Latents: tools/encode.py. FID references: evaluate.py.
"""
import hashlib
import io
import json
import mmap
import multiprocessing
import os
import pickle
import sys
import tarfile
import threading
import urllib.request
import zipfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data, files, media, train  # noqa: E401, E402
from common import BadInput  # noqa: E402

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
       "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e"}


class Batch(pickle.Unpickler):
    """Of all that a pickle may name it calls only what makes an array."""

    def find_class(self, module, name):
        allowed = dict(_reconstruct=np.empty(0).__reduce__()[0], ndarray=np.ndarray, dtype=np.dtype)
        if not module.startswith("numpy") or name not in allowed:
            raise ValueError(f"it calls {module}.{name}, CIFAR-10's are arrays")
        return allowed[name]


def crop(picture, size, how):
    """A picture as RGB (size, size), as the top of this file says."""
    picture = picture.convert("RGB")
    while how == "adm" and min(picture.size) >= 2 * size:
        picture = picture.resize([length // 2 for length in picture.size], Image.BOX)
    if how == "adm":
        scale = size / min(picture.size)
        picture = picture.resize([round(length * scale) for length in picture.size], Image.BICUBIC)
    side = min(picture.size)                            # of adm now the size, so that no filter follows
    left, top = ((length - side) // 2 for length in picture.size)
    return picture.crop((left, top, left + side, top + side)).resize((size, size), Image.LANCZOS)


def entries(source):
    """{name: function that reads it} of a folder, or of a tar by its path or as its bytes."""
    if isinstance(source, Path) and source.is_dir():
        return {path.name: path.read_bytes for path in source.glob("[!.]*")}
    tar = tarfile.open(fileobj=io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb"))
    return {member.name: tar.extractfile(member).read for member in tar if member.isfile()}


def images(source, name, label, size, how):
    """(picture, label) of each image of a class by name or, without a size, of one of CIFAR-10's batches."""
    with data.reading(f"{source}: {name}"):
        if not size:
            found = Batch(io.BytesIO(entries(source)[name]()), encoding="latin1").load()    # Python 2's text
            rows = found["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            yield from zip(map(Image.fromarray, rows), found["labels"], strict=True)
            return
        read = entries(source / name if source.is_dir() else entries(source)[name]())
        for file in sorted(file for file in read if file.lower().endswith(media.IMAGES)):
            with data.reading(f"{source}: {name}: {file}"):
                yield crop(Image.open(io.BytesIO(read[file]())), size, how), label


def save_part(part, f):
    """Images as a zip of PNGs named K.LABEL, written into the file f."""
    with zipfile.ZipFile(f, "w") as zipped:
        for k, (picture, label) in enumerate(images(*part)):
            picture.save(png := io.BytesIO(), "PNG", compress_level=1)
            zipped.writestr(zipfile.ZipInfo(f"{k:07d}.{label:d}"), png.getvalue())
        if not zipped.namelist():
            raise BadInput(f"{part[0]}: {part[1]} holds no images; fill it, or leave it out")


def save_all(parts, labels, f):
    """Parts as one zip with dataset.json, written into the file f; fills the list of (name, label)."""
    with zipfile.ZipFile(f, "w") as whole:
        for part in map(zipfile.ZipFile, parts):
            for name in part.namelist():
                k = f"{len(labels):08d}"
                labels.append((f"{k[:5]}/img{k}.png", int(name.partition(".")[2])))
                whole.writestr(zipfile.ZipInfo(labels[-1][0]), part.read(name))
        whole.writestr(zipfile.ZipInfo("dataset.json"), json.dumps(dict(labels=labels)))


def digest(file, kind):
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return hashlib.new(kind, whole).hexdigest()


def end_with_parent():
    """A worker whose parent is killed would wait for work for ever."""
    gone = multiprocessing.parent_process().join
    threading.Thread(target=lambda: gone() or os._exit(1), daemon=True).start()


def main(argv):
    parser = train.Parser(usage=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--crop", choices=("adm", "edm"), default="adm")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--download", action="store_true")
    args = parser.parse_args(argv)
    source, out, size, labels = args.source.resolve(), args.out, args.size, []
    if out.suffix != ".zip" or out.exists():
        raise BadInput(f"{out} is there already, or is no .zip; give another name")
    if args.download and not source.exists():
        with data.reading(URL), urllib.request.urlopen(URL) as answer:
            files.write(source, lambda f: f.write(answer.read()))
    with data.reading(f"{source} (--download gets CIFAR-10; for ImageNet register at https://image-net.org)"):
        names = [name for name in sorted(entries(source)) if (
            (source / name).is_dir() or name.endswith(".tar") if size else "data_batch_" in name)]
    if size < 0 or len(names) < 2 or not size and len(names) != 5:
        raise BadInput(f"{source} holds {len(names)} {'classes' if size else 'of 5 batches'}, size {size}; "
                       "give the folder or archive of all, and --size for classes, not for CIFAR-10")
    parts = [(source, name, k, size, args.crop) for k, name in enumerate(names)]
    folder = out.with_name(f"{out.name}.{hashlib.md5(repr(parts).encode()).hexdigest()[:8]}.parts")
    md5 = MD5.get(source.name) if source.is_file() and not folder.exists() else ""
    if md5 and digest(source, "md5") != md5:
        raise BadInput(f"{source} has not the published md5, {md5}; get it again, or rename it")
    files.make(folder)
    zips = [folder / f"{k:05d}.zip" for k in range(len(parts))]
    todo = {file: partial(save_part, part) for file, part in zip(zips, parts) if not file.exists()}
    with ProcessPoolExecutor(max(1, args.workers), initializer=end_with_parent) as pool:
        for file, _ in zip(todo, pool.map(files.write, todo, todo.values())):
            print(f"{file} of {len(zips)}", flush=True)
    files.write(folder / out.name, partial(save_all, zips, labels))
    (folder / out.name).replace(out)
    files.remove(folder)                                # with what a killed run left
    print(f"{out}: {len(labels):,} images (CIFAR-10 has 50,000, ImageNet 1,281,167) of "
          f"{len(dict(map(reversed, labels)))} classes, sha256 {digest(out, 'sha256')}")


if __name__ == "__main__":
    train.run(main)
