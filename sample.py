"""Draw samples from a run: from its student, an average of it, or its teacher.

    python sample.py outputs/fewstep/digits/dmd2                a grid, samples/0005400_ema_1.png in the run folder
    python sample.py RUN --net teacher --classes 3 --seeds 0-15 --guidance 2
    torchrun --nproc_per_node 8 sample.py RUN --seeds 0-49999 --batch 250 --out FOLDER         a PNG per sample

Sample s has the class classes[s % len(classes)]. It depends on s, that class and the weights alone (to 1e-5, in
float32), not on the batch or the rank that draws it; the first 80 are the samples of the trainer's grid. The run's
own method.py samples, under the config of the checkpoint. PNGs carry run, checkpoint, net, steps, seed and class.
"""
import argparse
import copy
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ckpt
import common
import logs
import startup
import train
import trainer
from common import BadInput
from nets import encoders


class Config(dict):
    """A config that remembers which keys were read."""
    read = frozenset()

    def __getitem__(self, key):
        self.read |= {key}
        return super().__getitem__(key)


def load_run(folder, it=None, guidance=None, say=print):
    """A run at checkpoint `it` (None = the newest that can be read): folder, it, state (what the checkpoint holds),
    cfg, guidance (None = as in cfg), method, nets (on the meta device), names (what can sample, the default first)."""
    folder = Path(folder)
    its = ckpt.scan(folder / "checkpoints")
    if not its:
        raise BadInput(f"{folder} holds no checkpoints; give a run folder, such as outputs/fewstep/digits/dmd2")
    if it is None:
        it, state = ckpt.newest(folder / "checkpoints", say)
    elif it in its:
        state = ckpt.load(ckpt.path(folder / "checkpoints", it))
    else:
        raise BadInput(f"{folder} has no checkpoint {it}; the nearest is {min(its, key=lambda n: abs(n - it))}, "
                       f"the newest {its[-1]}")
    if state is None or state.get("format") != ckpt.FORMAT:
        raise BadInput(f"{folder} has no training checkpoint of this version that can be read")
    cfg = Config(state["config"])
    if guidance is not None:
        cfg["guidance"] = guidance
    method = train.load_method(folder / "method.py")
    with torch.device("meta"):
        nets = method.build(cfg)
    names = [*state["emas"], *(n for n, net in nets.items() if hasattr(net, "x_shape"))]
    return SimpleNamespace(folder=folder, it=it, state=state, cfg=cfg, guidance=guidance, method=method, nets=nets,
                           names=names)


def pick_net(run, name):
    """The name of the net that is meant: "" = the first EMA, else the student; "ema" = the first EMA."""
    if name == "" or (name == "ema" and run.state["emas"] and name not in run.names):
        return next(iter(run.state["emas"]), "student")
    if name not in run.names:
        raise BadInput(f"--net {name} is not in {run.folder}; it has {', '.join(run.names)}")
    return name


def is_student(run, name):
    return name == "student" or name in run.state["emas"]


def load_net(run, name, device):
    """One net or EMA, filled, in eval mode. The others stay on the meta device, unless frozen parts of this one come
    from them; source files are read for frozen parts only."""
    nets, inits, weights = copy.deepcopy(run.nets), run.method.init(run.cfg), dict(run.state["nets"])
    own = source = "student" if is_student(run, name) else name
    if name in run.state["emas"]:
        weights["student"] = run.state["emas"][name]
    needed = {own: nets[own]}
    while set(weights.get(source, ())) != set(nets[source].state_dict()) and inits.get(source) in nets:
        source = inits[source]
        needed[source] = nets[source]
    trainable = {n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in needed.items()}
    startup.fill(needed, inits, run.state["sources"], dict(nets=weights), trainable, run.cfg)
    return nets[own].to(device).eval().requires_grad_(False)


def many_steps(net, noise, batch, cfg, steps):
    """The sampler of a diffusion model: its family's own, or Heun's method."""
    sampler = getattr(sys.modules.get(type(net).__module__), "teacher_sample", common.heun)
    return sampler(net, noise, batch["cond"], steps, batch["uncond"], cfg["guidance"])


@torch.no_grad()
def draw(run, net, name, ids, labels, steps, seed, batch, device, rank=0, world=1):
    """Yields (ids, labels, x0 on the CPU) of this rank's batches; rank j % world draws batch j, so what is in a batch
    does not depend on the ranks."""
    sampler = run.method if is_student(run, name) else SimpleNamespace(sample=many_steps)
    run.cfg.read = frozenset()
    for start in range(rank * batch, len(ids), world * batch):
        i, c = ids[start:start + batch], labels[start:start + batch]
        x0 = trainer.draw_samples(sampler, net, run.cfg, i, c, steps, seed, device)
        if run.guidance is not None and "guidance" not in run.cfg.read:
            raise BadInput(f"--guidance {run.guidance:g} changes nothing for {name}: the sampler of "
                           f"{run.state['method']} does not use it; leave it out, or give --net teacher")
        yield i, c, x0.float().cpu()


def start(device):
    """(device, rank, world); with several ranks the process group, which gathers on the CPU."""
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = startup.pick_device(dict(device=device), local)
    torch.backends.cudnn.allow_tf32 = False             # with TF32 a sample would depend on its batch
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return device, rank, world


def gather(mine, world):
    """The items of every rank's list on rank 0, [] on the others."""
    if world == 1:
        return mine
    everyone = [[]] * world
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    return sum(everyone, [])


def numbers(flag, text, limit):
    """[0, 1, 2, 5] of "0-2,5", each below `limit`."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low:
            raise BadInput(f"{flag} {text!r} is not a list of numbers and ranges, such as 0-79 or 0,5,7")
        if high >= limit:
            raise BadInput(f"{flag} {text} is out of range; numbers go from 0 to {limit - 1}")
        found += range(low, high + 1)
    return found


def writable(folder):
    """Makes the folder. Raises BadInput, before any work, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise BadInput(f"{folder} cannot be written to ({e.strerror}); give another place") from None


def save_png(picture, file, about):
    """A PIL image with `about` as PNG text chunks."""
    from PIL.PngImagePlugin import PngInfo
    info = PngInfo()
    for key, value in about.items():
        info.add_text(key, str(value))
    ckpt.write(file, lambda f: picture.save(f, format="PNG", pnginfo=info))


def main(argv):
    parser = argparse.ArgumentParser("sample.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--ckpt", type=int, help="checkpoint, iterations done (default: the newest)")
    parser.add_argument("--net", default="", help="student, an EMA, teacher, ... (default: first EMA, else student)")
    parser.add_argument("--steps", type=int, help="steps of the sampler (default: the run's; a teacher's 18)")
    parser.add_argument("--classes", default="all", help="0,1,2 or 0-9 or all (default)")
    parser.add_argument("--seeds", default="0-79", help="samples to draw, 0-79 (default) or 0,5,7")
    parser.add_argument("--guidance", type=float, help="1 = conditional, 0 = unconditional (default: the run's)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--grid", type=Path, help="file for one sheet (default: in the run's samples/)")
    where.add_argument("--out", type=Path, help="folder for one PNG per sample, named by its seed")
    parser.add_argument("--batch", type=int, default=64, help="samples drawn at once (default 64)")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the best there is)")
    args = parser.parse_args(argv)

    # everything that can be wrong with the input
    device, rank, world = start(args.device)
    run = load_run(args.run, args.ckpt, args.guidance, print if rank == 0 else lambda text: None)
    name, many = pick_net(run, args.net), run.cfg["classes"]
    steps = args.steps if args.steps is not None else run.cfg["steps"] if is_student(run, name) else 18
    if min(steps, args.batch) < 1:
        raise BadInput(f"--steps {steps} and --batch {args.batch} must be at least 1")
    if not many and args.classes != "all":
        raise BadInput(f"--classes {args.classes}: {run.folder} is unconditional; leave --classes out")
    classes = numbers("--classes", args.classes if args.classes != "all" else f"0-{many - 1}", many) if many else [-1]
    ids = numbers("--seeds", args.seeds, 10_000_000)                            # names have seven digits
    labels = torch.tensor([classes[i % len(classes)] for i in ids])
    grid = args.grid or run.folder / "samples" / f"{run.it:07d}_{name}_{steps}.png"
    if grid.is_dir():
        raise BadInput(f"--grid {grid} is a folder; give a file, or --out for one PNG per sample")
    writable(args.out or grid.parent)

    # draw; separate files are written batch by batch
    from PIL import Image
    net, sheet = load_net(run, name, device), []
    about = dict(run=run.folder.resolve().name, method=run.state["method"], checkpoint=run.it, net=name, steps=steps,
                 guidance=run.cfg["guidance"])
    for i, c, x0 in draw(run, net, name, ids, labels, steps, run.cfg["seed"], args.batch, device, rank, world):
        images = encoders.decode(x0, run.cfg)                                   # uint8 (B, C, H, W)
        if not args.out:
            sheet += zip(i, images)
            continue
        for seed, label, image in zip(i, c.tolist(), images):
            picture = Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())
            save_png(picture, args.out / f"{seed:07d}.png", about | {"seed": seed, "class": label})
    if not args.out:
        sheet = dict(gather(sheet, world))
        if rank == 0:
            logs.save_grid(torch.stack([sheet[i] for i in ids]), grid, len(classes) if 1 < len(classes) < 10 else 10)
            with Image.open(grid) as picture:
                save_png(picture, grid, about | {"seed": args.seeds, "class": ",".join(map(str, labels.tolist()))})
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        print(f"{args.out or grid}: {len(ids)} samples of {name}, {steps} steps, checkpoint {run.it}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as e:
        train.quit_with(e)
