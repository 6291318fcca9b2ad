"""Draw samples from a run: from its student, an average of it, or its teacher.

    python sample.py outputs/fewstep/digits/dmd2            a sheet, samples/0005400_ema_1.png of the run
    python sample.py RUN --net teacher --classes 3 --seeds 0-15 --guidance 2 --out threes.png
    torchrun --nproc_per_node 8 sample.py RUN --seeds 0-49999 --batch 250 --out FOLDER   a PNG per sample
    python sample.py RUN --prompts prompts.txt --seeds 0-31         a line a prompt; four seeds each of eight
    python sample.py RUN --frames 16 --out clips.gif    clips, longer than trained; a PNG has one in each row

Sample s has the class classes[s % len(classes)], or the prompt prompts[s % len(prompts)]. It depends on s,
these and the weights alone (to 1e-5, in float32), not on the batch or rank that draws it; of ten classes 0-79
are the trainer's grid. The run's own method.py samples, with the checkpoint's config. PNGs carry run,
checkpoint, net, seed, ... as text. A sheet of other prompts, guidance or negative has another name.
"""
import argparse
import copy
import re
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ckpt
import common
import files
import fill
import judge
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
    """A run at checkpoint `it` (None = the newest that can be read): folder, it, state (the checkpoint), cfg,
    guidance (None = cfg's), method, nets (on meta), students and names (of all that can sample)."""
    folder = files.place(folder)
    its = ckpt.scan(folder / "checkpoints")
    if not its:
        raise BadInput(f"{folder} holds no checkpoints; give a run folder, as outputs/fewstep/digits/dmd2")
    if it is None:
        it, state = ckpt.newest(folder / "checkpoints", say)
        if state is None:
            raise BadInput(f"{folder} has no training checkpoint of this version that can be read")
    elif it in its:
        state = ckpt.load_checkpoint(ckpt.path(folder / "checkpoints", it))
    else:
        raise BadInput(f"{folder} has no checkpoint {it}; the newest is {its[-1]}")
    cfg = Config(state["config"])
    with files.fetch(folder / "method.py") as here:
        method = train.load_method(here)
    with torch.device("meta"):
        nets = method.build(cfg)
    if guidance is not None:
        cfg["guidance"] = common.number("--guidance", guidance)
    students = [*state["emas"], "student"]
    names = dict.fromkeys(students + [n for n, net in nets.items() if hasattr(net, "x_shape")])
    return SimpleNamespace(folder=folder, it=it, state=state, cfg=cfg, guidance=guidance, negative=None,
                           method=method, nets=nets, students=students, names=names)


def pick_net(run, name):
    """The net that is meant: "" = the first EMA, else the student."""
    common.known(f"--net of {run.folder}:", name or run.students[0], run.names)
    return name or run.students[0]


def own_steps(run, name):
    return run.cfg["steps"] if name in run.students else 18


def load_net(run, name, device):
    """One net or EMA, filled and frozen. The others stay on the meta device, and no source file is read,
    unless frozen parts of this one come from them."""
    inits, weights = run.method.init(run.cfg), dict(run.state["nets"])
    own = source = "student" if name in run.students else name
    if name in run.state["emas"]:
        weights[own] = run.state["emas"][name]
    nets, models = run.nets, {own: run.nets[own]}
    while set(weights.get(source, ())) != set(nets[source].state_dict()) and inits.get(source) in nets:
        source = inits[source]
        models[source] = nets[source]
    state = dict(nets=weights)
    sources = {s: ckpt.read(run.state["sources"][s]) for s in fill.needed(models, inits, state)}
    return frozen(models, inits, sources, state, run.cfg["seed"])[own].to(device)


def frozen(models, inits, sources, state=None, seed=0):
    """The nets whose models (on meta) are given, filled on the CPU as `fill.fill` says, in eval mode."""
    nets = {name: copy.deepcopy(model).to_empty(device="cpu") for name, model in models.items()}
    trainable = {n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in nets.items()}
    fill.fill(nets, models, inits, sources, state, trainable, dict(seed=seed), "cpu")
    return {name: net.eval().requires_grad_(False) for name, net in nets.items()}


@torch.no_grad()
def draw(run, net, name, ids, labels, steps, seed, batch, device, rank=0, world=1, prompts=(), frames=None,
         first=None):
    """Yields (ids, labels, x0 on the CPU) of this rank's batches: rank j % world draws batch j, so no batch
    depends on the ranks. Students sample by their method, others by their family's teacher_sample or Heun.
    first (len(ids), C, f, H, W): frames that the clips begin with."""
    def many_steps(net, noise, batch, cfg, steps):
        return common.teacher_sample(net, noise, batch["cond"], steps, batch["uncond"], cfg["guidance"])

    common.number("--steps", steps, 1, 1000)
    common.number("--batch", batch, 1)
    sampler = run.method if name in run.students else SimpleNamespace(sample=many_steps)
    run.cfg.read, shape = frozenset(), shape_of(net, frames)
    for start in range(rank * batch, len(ids), world * batch):
        i, c = ids[start:start + batch], labels[start:start + batch]
        texts = dict(caption=[prompts[k % len(prompts)] for k in i]) if prompts else {}
        begin = None if first is None else first[start:start + batch].to(device)
        x0 = judge.draw_samples(sampler, net, run.cfg, i, c, steps, seed, device, shape, texts, begin)
        if run.guidance is not None and "guidance" not in run.cfg.read:
            raise BadInput(f"--guidance {run.guidance:g} changes nothing for {name}: the sampler of "
                           f"{run.state['method']} does not use it; leave it out, or give --net teacher")
        if run.negative is not None and ("guidance" not in run.cfg.read or run.cfg["guidance"] == 1):
            raise BadInput(f"--negative {run.negative!r} changes nothing for {name}, which nothing guides; "
                           f"leave it out, or give --net teacher and --guidance above 1")
        yield i, c, x0.float().cpu()


def shape_of(net, frames=None):
    """The shape of its samples; of clips with so many frames."""
    if frames is None:
        return net.x_shape
    if len(net.x_shape) < 4:
        raise BadInput(f"--frames {frames} is of clips, the samples of this net are {net.x_shape}; leave it "
                       f"out")
    return net.x_shape[0], int(common.number("--frames", frames, 2, 10_000)), *net.x_shape[2:]


def start(device):
    """(device, rank, world, group): of several ranks a gloo group, which gathers on the CPU, else None."""
    rank, world, local = startup.ranks()
    device = startup.pick_device(dict(device=device), local)
    torch.backends.cudnn.allow_tf32 = False             # with TF32 a sample would depend on its batch
    if world > 1:
        dist.init_process_group("gloo")
    return device, rank, world, dist.group.WORLD if world > 1 else None


def numbers(flag, text, limit):
    """[0, 1, 2, 5] of "0-2,5", each below `limit`."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high < limit:
            raise BadInput(f"{flag} {text!r} is not a list of numbers below {limit}, such as 0,5-7")
        found += range(low, high + 1)
    return found


def read_prompts(text):
    """The lines of a file that are not empty, or the text itself."""
    file = files.place(text) if len(text) < 200 else None
    found = files.read(file) if file is not None and files.exists(file) else None
    if found is None and (text.endswith(".txt") or "/" in text and " " not in text):
        raise BadInput(f"--prompts {text} does not exist; give a file, a prompt a line, or a text of words")
    try:
        lines = (text if found is None else found.decode()).splitlines()
    except UnicodeDecodeError as e:
        raise BadInput(f"--prompts {text} is not UTF-8 ({e.reason} at byte {e.start}); convert it") from e
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise BadInput(f"--prompts {text} holds no text")
    return prompts


def make_folder(folder):
    files.make(folder)


def arguments(name, text, batch):
    """A parser of what sample.py and evaluate.py both take."""
    parser = argparse.ArgumentParser(name, description=text,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--ckpt", type=int, help="iterations done by the checkpoint (default: the newest)")
    parser.add_argument("--guidance", type=float, help="1 = conditional, 0 = none (default: the run's)")
    parser.add_argument("--batch", type=int, default=batch, help=f"samples drawn at once (default {batch})")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the best there is)")
    return parser


def main(argv):
    parser = arguments("sample.py", __doc__, batch=64)
    parser.add_argument("--net", default="", help="student, teacher, an EMA (default: the first one)")
    parser.add_argument("--steps", type=int, help="of the sampler (default: the run's; 18 for a teacher)")
    parser.add_argument("--classes", default="all", help="0,1,2 or 0-9 or all (default)")
    parser.add_argument("--seeds", default="0-79", help="samples to draw, 0-79 (default) or 0,5,7")
    parser.add_argument("--prompts", help="a text, or a file with one a line")
    parser.add_argument("--negative", help="what guidance leads away from (default: the run's)")
    parser.add_argument("--encoders", help="pipeline of text encoders and VAE (default: the run's)")
    parser.add_argument("--frames", type=int, help="of a clip (default: as trained)")
    parser.add_argument("--fps", type=float, default=8.0, help="frames a second of a GIF (default 8)")
    parser.add_argument("--out", help="a .png, of clips also a .gif, for one sheet (default: in the run's "
                                      "samples/), or a folder for a PNG or GIF per sample, named by its seed")
    args = parser.parse_args(argv)

    # everything that can be wrong with the input
    device, rank, world, group = start(args.device)
    run = load_run(args.run, args.ckpt, args.guidance, print if rank == 0 else lambda text: None)
    name, many = pick_net(run, args.net), run.cfg["classes"]
    steps = own_steps(run, name) if args.steps is None else args.steps
    given = dict(negative_prompt=args.negative, encoders=args.encoders, device=str(device))
    run.negative = args.negative
    run.cfg = Config(trainer.defaults | run.cfg | {k: v for k, v in given.items() if v is not None})
    prompts = read_prompts(args.prompts) if args.prompts else ()
    if bool(prompts) != bool(getattr(run.nets["student"], "text_dim", 0)):
        raise BadInput(f"--net {run.cfg['net']} takes no prompts" if prompts else
                       f"--net {run.cfg['net']} needs --prompts TEXT, or a file with one a line")
    if prompts and not run.cfg["encoders"]:
        raise BadInput("prompts need text encoders; give --encoders, a diffusers pipeline (folder or hub id)")
    if args.negative is not None and not prompts:
        raise BadInput(f"--negative {args.negative!r} is for nets that take prompts, which "
                       f"--net {run.cfg['net']} does not; leave it out")
    encoders.check(run.cfg, prompts)
    for line in encoders.cut(prompts, run.cfg) if rank == 0 else ():
        print(line)
    every = list(range(many)) or [-1]                                       # -1: unconditional
    classes = every if args.classes == "all" else numbers("--classes", args.classes, many)
    ids = numbers("--seeds", args.seeds, 10_000_000)                        # names have seven digits
    labels = torch.tensor([classes[i % len(classes)] for i in ids])
    asked = prompts, run.cfg["guidance"], run.cfg["negative_prompt"]
    mark = f"_{zlib.crc32(repr(asked).encode()):08x}" if prompts else ""    # sheets of other prompts stay
    out = files.place(args.out or run.folder / "samples" / f"{run.it:07d}_{name}_{steps}{mark}.png")
    video, kind = len(shape_of(run.nets["student"], args.frames)) == 4, out.suffix.lower()
    common.number("--fps", args.fps, 0.1, 50)
    if kind in (".mp4", ".webm") or kind == ".gif" and not video:
        raise BadInput(f"--out {args.out}: no {kind} is made of {'clips' if video else 'images'}; give a .png"
                       f"{', a .gif' * video} or a folder")
    one_sheet = kind in (".png", ".gif")
    make_folder(out.parent if one_sheet else out)

    # draw; separate files are written batch by batch
    net, sheet = load_net(run, name, device), []
    about = dict(run=run.folder.resolve().name, method=run.state["method"], checkpoint=run.it, net=name,
                 steps=steps, guidance=run.cfg["guidance"])
    about |= dict(negative=run.cfg["negative_prompt"]) if prompts else {}
    seed = run.cfg["seed"]
    drawn = draw(run, net, name, ids, labels, steps, seed, args.batch, device, rank, world, prompts,
                 args.frames)
    for i, c, x0 in drawn:
        images = encoders.decode(x0, run.cfg)                               # uint8 (B, C, [F,] H, W)
        if one_sheet:
            sheet += zip(i, images)
            continue
        for number, label, image in zip(i, c.tolist(), images):
            told = {"prompt": prompts[number % len(prompts)]} if prompts else {"class": label}
            told |= about | {"seed": number}
            if video:
                pictures = [logs.picture(frame) for frame in image.unbind(1)]
                logs.save_gif(pictures, out / f"{number:07d}.gif", args.fps, told)
            else:
                logs.save_png(logs.picture(image), out / f"{number:07d}.png", told)
    sheet = dict(sum(common.everyone(sheet, group), []))                    # every rank is through
    if rank == 0 and one_sheet:
        columns = len(classes) if 1 < len(classes) < 10 else 10
        told = {"prompt": "\n".join(prompts)} if prompts else {"class": ",".join(map(str, labels.tolist()))}
        about |= {"seed": args.seeds} | told
        images = torch.stack([sheet[i] for i in ids])
        if kind == ".gif":
            pictures = [logs.sheet(frames, columns) for frames in images.unbind(2)]
            logs.save_gif(pictures, out, args.fps, about)
        else:
            logs.save_grid(images, out, 1 if video else columns, about)
    if rank == 0:
        print(f"{out}: {len(ids)} samples of {name}, {steps} steps, checkpoint {run.it}")
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
