"""One file out of a checkpoint, sharded or not, on one process.

    python tools/export.py RUN#ema OUT.safetensors      weights of the newest checkpoint's average
    python tools/export.py RUN/checkpoints/0010000.pth#student OUT.pth
    python tools/export.py RUN FOLDER/0010000.pth       all of it: a run of replicas or shards continues there

The first two are weights by name, as a source for --teacher and for other programs. The last is a training
checkpoint in one file, named by its iteration. Paths may be URLs. It needs the memory of what it writes.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt, common, files, startup, train  # noqa: E401, E402


def main(argv):
    if len(argv) != 2:
        return print(__doc__)
    out = files.place(argv[1])
    if out.suffix not in (".pth", ".safetensors"):
        raise common.BadInput(f"{out} must end in .pth or .safetensors")
    if isinstance(out, Path):
        startup.make_folder(out.parent, f"{out.parent} cannot be written to", "give another place")
    source = ckpt.resolve(argv[0])
    file = ckpt.find(source["file"])
    if source["entry"]:
        content = {k: v.contiguous() for k, v in ckpt.read(source).items()}
    else:
        content = ckpt.load_checkpoint(file)
        if out.name != file.name:
            raise common.BadInput(f"{argv[0]} is the checkpoint of iteration {content['it']}, so {out} must "
                                  f"be named {file.name}; for weights alone write {argv[0]}#student")
        for kind in ckpt.KINDS:
            content[kind] = {name: dict(held.items()) for name, held in content[kind].items()}
        content["shards"] = dict(index={}, count=0, stamp="")
    if files.exists(out):
        raise common.BadInput(f"{out} exists; give another name")
    if out.suffix == ".safetensors":
        from safetensors.torch import save
        files.write(out, lambda f: f.write(save(content)))
    else:
        ckpt.save(out, content)
    print(f"{out}: {source['entry'] or 'all'} of {source['file']}")


if __name__ == "__main__":
    train.run(main)
