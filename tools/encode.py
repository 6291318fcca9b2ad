"""Encode a data set once: latents (moments of the VAE) and text embeddings, into tars that --data reads.

    torchrun --nproc_per_node 8 tools/encode.py --net sd:sdxl --encoders stabilityai/stable-diffusion-xl-base-1.0
        --data "laion/{00000..00099}.tar" --data_filter "aesthetic>=5.5" --out outputs/encoded/laion

Images are cut to what --net takes. FOLDER gets

    meta.json             what made it; another setting in the same folder is refused
    0000000.tar, .crc     --shard samples in the data's order: KEY.moments.npy (2 C, H, W), mean and std in the
                          net's space; KEY.cond.safetensors, text (L, D) and pooled; KEY.txt, KEY.cls
    uncond.safetensors    the same of --negative_prompt

Rank r makes shards r, r + ranks, ... Given again it makes what is missing or, by its checksum, damaged.
Training reads it with --data FOLDER; --encoders is then for pictures alone.
"""
import argparse
import io
import json
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common, data, files, sample, startup, train, trainer  # noqa: E401, E402
from nets import encoders  # noqa: E402

KEYS = ("data", "data_keys", "data_ignore", "data_filter", "classes", "net", "encoders", "encoder_dtype",
        "offline", "negative_prompt", "device")


def save(part, j):
    """Bytes of sample j of a condition, without its padding."""
    length = int(part["text_mask"][j].sum()) if "text_mask" in part else None
    own = {k: v[j, :length] if k == "text" else v[j] for k, v in part.items() if k != "text_mask"}
    return safetensors.torch.save({k: v.cpu().contiguous() for k, v in own.items()})


def samples(found, cfg, ids, dtype, device):
    """The members of samples `ids`, as bytes."""
    images, labels = zip(*(found.get(i) for i in ids))
    x = torch.from_numpy(np.stack(images)).float()
    x = x / 127.5 - 1 if images[0].dtype == np.uint8 else x
    moments = encoders.moments(x, cfg, device).cpu().numpy().astype(dtype)
    captions = found.texts(ids)["caption"] if hasattr(found, "texts") else None
    cond = encoders.prompts(captions, cfg, device) if captions else None
    for j, i in enumerate(ids):
        buffer = io.BytesIO()
        np.save(buffer, moments[j])
        yield ({"__key__": f"{i:09d}", "moments.npy": buffer.getvalue()}
               | ({"txt": captions[j].encode(), "cond.safetensors": save(cond, j)} if captions else {})
               | ({"cls": b"%d" % labels[j]} if labels[j] >= 0 else {}))


def main(argv):
    comments = train.comments(Path(trainer.__file__).read_bytes(), "defaults")
    parser = argparse.ArgumentParser("encode.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument("--shard", type=int, default=1000, help="samples of a tar (default 1000)")
    parser.add_argument("--batch", type=int, default=8, help="samples encoded at once (default 8)")
    parser.add_argument("--dtype", default="float16", help="of moments: float16 (default), float32")
    for key in KEYS:
        parser.add_argument(f"--{key}", help=comments[key])
    args = parser.parse_args(argv)
    given = {k: startup.parse(k, getattr(args, k), trainer.defaults[k], "encode.py") for k in KEYS
             if getattr(args, k) is not None}
    cfg, folder = trainer.defaults | given, Path(args.out)
    device, rank, world, group = sample.start(cfg["device"])
    common.known("--dtype", args.dtype, ("float16", "float32"))
    found = data.load(cfg)
    if not cfg["encoders"] or found.kind != "image" or min(args.shard, args.batch) < 1:
        raise common.BadInput("give --encoders, data of images, and --shard and --batch of at least 1")
    about = startup.fingerprint(cfg, found) | {k: cfg[k] for k in KEYS[5:10]} | dict(
        shard=args.shard, dtype=args.dtype, shape=list(found.shape))
    about = json.dumps(about, default=list).encode()

    def open_folder():
        sample.make_folder(folder)
        if (files.read(folder / "meta.json") or about) != about:
            raise common.BadInput(f"{folder} was made otherwise ({folder}/meta.json); give another --out")
        files.write(folder / "meta.json", lambda f: f.write(about))
        if hasattr(found, "texts"):
            files.write(folder / "uncond.safetensors",
                        lambda f: f.write(save(encoders.negative(cfg, device), 0)))
    common.on_rank0(open_folder, group)

    def write(k, f):
        """Shard k into the file f; -> its checksum."""
        crc, began = 0, k * args.shard

        def through(content):
            nonlocal crc
            crc = zlib.crc32(content, crc)
            return f.write(content)
        with data.webdataset().TarWriter(SimpleNamespace(write=through), encoder=False, mtime=0) as tar:
            for i in range(began, min(began + args.shard, len(found)), args.batch):
                for each in samples(found, cfg, range(i, min(i + args.batch, began + args.shard, len(found))),
                                    args.dtype, device):
                    tar.write(each)
        return crc
    mine, began, made = range(rank, -(-len(found) // args.shard), world), time.time(), 0
    for k in mine:
        file, crc = folder / f"{k:07d}.tar", []
        if files.read(file.with_suffix(".crc")) == b"%d" % zlib.crc32(files.read(file) or b""):
            continue
        files.write(file, lambda f: crc.append(write(k, f)))
        files.write(file.with_suffix(".crc"), lambda f: f.write(b"%d" % crc[0]))
        made += 1
        if rank == 0:
            print(f"{k + 1}/{mine.stop} tars, {time.time() - began:.0f} s", flush=True)
    made = sum(common.everyone(made, group))
    if rank == 0:
        print(f"{folder}: {len(found)} samples, {made} tars made now; train on them with --data {folder}")
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
