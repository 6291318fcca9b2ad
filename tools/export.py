"""Weights, or one file, out of a checkpoint, sharded or not, on one process.

    python tools/export.py RUN#ema OUT.safetensors      weights of the newest checkpoint's average
    python tools/export.py RUN/checkpoints/0010000.pth#student OUT.pth
    python tools/export.py RUN#ema FOLDER               under the public model's keys, as diffusers reads them
    python tools/export.py RUN FOLDER/0010000.pth       all of it: a run of replicas or shards continues there

The first two are weights by this repository's names, as a source for --teacher. The third writes files of
about 5 GB with an index, the config.json of such a folder if the teacher, or its own teacher, came from one,
and fewstep.json, which says what the student is: method, net, schedule, prediction, steps, guidance, ...
The last is a training checkpoint, named by its iteration. Paths may be URLs, but for FOLDER.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt, common, files, fill, train  # noqa: E401, E402

SHARD = 5 * 10 ** 9         # bytes after which the next file begins
RECORD = ("net", "steps", "t_list", "guidance", "sampler", "max_iter")


def write_folder(out, held, state, source):
    """held (weights by our names) as a folder of safetensors under the public names; state: the record."""
    cfg = state["config"]
    config = public_config(cfg, state["sources"])
    with torch.device("meta"):
        model = common.make_net(cfg["net"], label_dim=cfg.get("classes"))
    ours = fill.theirs(model, next(iter(getattr(model, "layouts", {"": ()}))))
    ours |= {key: key for key in held if key not in ours.values()}          # heads that public models lack
    parts, total = {}, 0
    for key in sorted(k for k, own in ours.items() if own in held):
        parts.setdefault(total // SHARD, []).append(key)
        total += held[ours[key]].nbytes
    base, where = "diffusion_pytorch_model", {}
    for i, keys in enumerate(parts.values(), 1):
        name = f"{base}-{i:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else f"{base}.safetensors"
        content = save({k: held[ours[k]].contiguous() for k in keys}, metadata=dict(format="pt"))
        files.write(out / name, lambda f: f.write(content))                                     # noqa: B023
        where |= dict.fromkeys(keys, name)
    record = {k: cfg[k] for k in RECORD if k in cfg} | {k: state[k] for k in ("method", "it")} | dict(
        schedule=model.schedule, pred=model.pred, entry=source["entry"])
    index = dict(metadata=dict(total_size=total), weight_map=where) if len(parts) > 1 else {}
    for name, content in {"fewstep.json": record, f"{base}.safetensors.index.json": index,
                          "config.json": config}.items():
        if content:
            files.write(out / name, lambda f: f.write(json.dumps(content, indent=1).encode()))  # noqa: B023
    if not config:
        print(f"{out} has no config.json, as none is where the teacher came from; copy the public model's")


def public_config(cfg, sources):
    """diffusers' config.json of the folder that a run's teacher, or its teacher's teacher, ... came from."""
    for _ in range(9):
        teacher = sources.get(cfg.get("teacher"))
        at = ckpt.find(teacher["file"]) if teacher else None
        if isinstance(at, Path) and at.is_dir():
            file = next(iter(ckpt.weight_files(at, teacher["entry"])), at).parent / "config.json"
            return json.loads(file.read_text()) if file.exists() else None
        if at is None or teacher["it"] < 0:             # gone, or weights that say nothing of where from
            return None
        cfg = json.loads(files.read(at.parent.parent / "config.json") or b"{}")
        sources = cfg.get("sources", {})


def main(argv):
    if len(argv) != 2:
        return print(__doc__)
    out = files.place(argv[1])
    if out.suffix not in (".pth", ".safetensors", ""):
        raise common.BadInput(f"{out} must end in .pth or .safetensors, or be a folder")
    source = ckpt.resolve(argv[0])
    file = ckpt.find(source["file"])
    if out.suffix == "" and (not source["entry"] or source["it"] < 0):
        raise common.BadInput(f"{out} is a folder, for weights of a run: write RUN#ema or RUN#student")
    if files.exists(out) and (out.suffix or not out.is_dir() or files.names(out)):
        raise common.BadInput(f"{out} exists; give another name")
    if source["entry"]:
        held = ckpt.read(source)
        content = {k: v.contiguous() for k, v in held.items()} if out.suffix else {}
    else:
        content = ckpt.load_checkpoint(file)
        if out.name != file.name:
            raise common.BadInput(f"{argv[0]} is the checkpoint of iteration {content['it']}, so {out} must "
                                  f"be named {file.name}; for weights alone write {argv[0]}#student")
        for kind in ckpt.KINDS:
            content[kind] = {name: dict(held.items()) for name, held in content[kind].items()}
        content["shards"] = dict(index={}, count=0, stamp="")
    if isinstance(out, Path):                           # not before all that can be wrong
        files.make(out if out.suffix == "" else out.parent)
    if out.suffix == "":
        write_folder(out, held, ckpt.load_checkpoint(file), source)
    elif out.suffix == ".safetensors":
        files.write(out, lambda f: f.write(save(content)))
    else:
        ckpt.save(out, content)
    print(f"{out}: {source['entry'] or 'all'} of {source['file']}")


if __name__ == "__main__":
    train.run(main)
