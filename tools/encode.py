"""Encode a data set once: latents (moments of the VAE) and text embeddings, into tars that --data reads.

    torchrun --nproc_per_node 8 tools/encode.py --net sd:sdxl --data "laion/{00000..00099}.tar"
        --encoders stabilityai/stable-diffusion-xl-base-1.0 --data_filter "aesthetic>=5.5" --out encoded/laion

or videos, --net wan:i2v_14b --data clips --data_fps 16 --encoders Wan-AI/Wan2.1-I2V-14B-480P-Diffusers,
or, by classes, --net dit:dit_xl2 --data imagenet (folders) --encoders stabilityai/sd-vae-ft-mse --out latents

It takes all keys of the trainer. Images and clips are cut to what --net is trained on. FOLDER gets meta.json
(what made it; other settings or captions are refused), uncond.safetensors (of --negative_prompt), 0000000.tar
... with KEY.moments.npy (2 C, [F,] H, W), mean and std in the net's space, KEY.cond.safetensors, text (L, D),
pooled and what the net sees of a clip (encoders.seen), KEY.txt, KEY.cls. Without captions texts are those
that tars hold, if any. Given again it makes what is missing or, by the checksum in 0000000.crc, damaged.
"""
import io
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common, data, files, sample, startup, train, trainer  # noqa: E401, E402
from nets import encoders  # noqa: E402

config = dict(
    out="",                          # folder
    shard=1000,                      # samples of a tar
    dtype="float16",                 # of all but texts: float16, float32
    batch_size=8,                    # samples encoded at once
)


def packed(part, j):
    """Bytes of sample j of a condition, without its padding."""
    n = int(part["text_mask"][j].sum()) if "text_mask" in part else None
    own = {k: v[j, :n] if k == "text" else v[j] for k, v in part.items() if k != "text_mask"}
    return safetensors.torch.save({k: v.cpu().contiguous() for k, v in own.items()})


def write(f, found, cfg, ids, device):
    """A tar of samples `ids`, written into the file f."""
    with data.webdataset().TarWriter(f, encoder=False, mtime=0) as tar:
        for part in (ids[i:i + cfg["batch_size"]] for i in range(0, len(ids), cfg["batch_size"])):
            images = torch.from_numpy(np.stack([found.get(i)[0] for i in part]))
            moments = encoders.moments(images, cfg, device)
            told = found.texts(part) if hasattr(found, "texts") else {}
            cond = encoders.prompts(told["caption"], cfg, device) if "caption" in told else told.get("cond")
            if cond and images.dim() == 5:
                seen = encoders.seen(images, cfg, device)
                cond |= {k: v.to(getattr(torch, cfg["dtype"])) for k, v in seen.items()}
            for j, i in enumerate(part):
                np.save(content := io.BytesIO(), moments[j].cpu().numpy().astype(cfg["dtype"]))
                sample = {"__key__": f"{i:09d}", "moments.npy": content.getvalue()}
                sample |= {"txt": told["caption"][j].encode()} if "caption" in told else {}
                sample |= {"cond.safetensors": packed(cond, j)} if cond else {}
                sample |= {"cls": b"%d" % found.label[i]} if found.label[i] >= 0 else {}
                tar.write(sample)


def main(argv):
    method = SimpleNamespace(config=config, path=Path(__file__).resolve(), source=Path(__file__).read_bytes(),
                             __doc__=__doc__)
    cfg, _, options = train.resolve(method, argv)
    if "help" in options:
        return train.show_help(method, cfg)
    device, rank, world, group = sample.start(cfg["device"])
    found, folder = data.load(cfg), Path(cfg["out"])
    common.known("--dtype", cfg["dtype"], ("float16", "float32"))
    if not cfg["encoders"] or not cfg["out"] or found.kind != "image" or cfg["shard"] < 1:
        raise common.BadInput("give --out, --encoders, --data of images, and --shard of at least 1")
    data.unmoved(folder, "latents", cfg)
    captioned = hasattr(found, "texts") and "caption" in found.texts([0])       # else it may have embeddings
    encoders.check(cfg, captioned or getattr(encoders.net_of(cfg["net"]), "text_dim", 0))
    # the fingerprint reads a few captions, this number is of all
    texts = sum(zlib.crc32(f"{i} {found.texts([i])['caption'][0]}".encode())
                for i in range(rank, len(found), world) if captioned)
    about = startup.fingerprint(cfg, found) | {k: cfg[k] for k in (
        "net", "encoders", "encoder_dtype", "negative_prompt", "shard", "dtype", "data_fps", "depth_model")}
    about = json.dumps(about | dict(texts=sum(common.everyone(texts, group)))).encode()

    def open_folder():
        files.make(folder)
        if files.read(folder / "meta.json") not in (None, about):
            raise common.BadInput(f"{folder} was made otherwise (see its meta.json); give another --out")
        for left in folder.glob(".*.tmp"):              # by a killed run
            files.remove(left)
        files.write(folder / "meta.json", lambda f: f.write(about))
        if blank := encoders.negative(cfg, device) if captioned else getattr(found, "uncond", {}):
            blank = packed(blank, 0)
            files.write(folder / "uncond.safetensors", lambda f: f.write(blank))
    common.on_rank0(open_folder, group)
    for line in encoders.cut(data.captions(found), cfg) if rank == 0 else ():
        print(line)
    made, shards = 0, -(-len(found) // cfg["shard"])
    for k in range(rank, shards, world):
        tar, mark, ids = folder / f"{k:07d}.tar", folder / f"{k:07d}.crc", range(len(found))
        crc = lambda: b"%d" % zlib.crc32(files.read(tar) or b"")                                 # noqa: E731
        if files.read(mark) != crc():
            files.write(tar, lambda f: write(f, found, cfg, ids[k * cfg["shard"]:][:cfg["shard"]], device))
            files.write(mark, lambda f: f.write(crc()))
            print(f"{tar} of {shards}", flush=True)
            made += 1
    made = sum(common.everyone(made, group))
    if rank == 0:
        print(f"{folder}: {len(found)} samples, {made} tars made now; train on them with --data {folder}")
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
