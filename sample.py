"""Draw samples from a run: from its student, an average of it, or its teacher.

    python sample.py outputs/fewstep/digits/dmd2            a sheet, samples/0005400_ema_1.png of the run
    python sample.py RUN --net teacher --classes 3 --seeds 0-15 --guidance 2 --out threes.png
    torchrun --nproc_per_node 8 sample.py RUN --seeds 0-49999 --batch 250 --out FOLDER   a PNG per sample
    python sample.py RUN --prompts prompts.txt --seeds 0-31         a line a prompt; four seeds each of eight
    python sample.py RUN --frames 16 --out clips.gif    clips, longer than trained; a PNG has one in each row
    python sample.py RUN --given stills --prompts p.txt --segments 3 --out clips.mp4        on from pictures

Sample s has the class classes[s % len(classes)] or the prompt prompts[s % len(prompts)], and goes on from the
s-th of what is --given, likewise. It depends on s, these and the weights alone (to 1e-5, in float32), not on
the batch or rank that draws it; of ten classes 0-79 are the trainer's grid. The run's own method.py samples,
with the checkpoint's config. Files carry run, checkpoint, net, seed, ... as text. A sheet of other prompts,
guidance, negative or --given has another name.

--given is a picture, gif, mp4, webm or mov, a folder of them in the order of their names, or moving_digits
(held-out ones). Wan's I2V nets take its first frame, Cosmos and causal nets its first --overlap latent ones,
VACE the depth of all. N --segments of F latent frames that overlap by K make N F - (N - 1) K: each but the
first goes on from the last K of the one before, as the VAE encodes their pixels at the beginning of a clip.
"""
import argparse
import copy
import importlib.util
import io
import re
import zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ckpt
import common
import data
import files
import fill
import judge
import logs
import media
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
        lacks = "holds no checkpoints" if files.exists(folder) else "does not exist"
        raise BadInput(f"{folder} {lacks}; give a run folder, as outputs/fewstep/digits/dmd2")
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
         first=None, segments=1, overlap=0):
    """Yields (ids, labels, x0 on the CPU) of this rank's batches: rank j % world draws batch j, so no batch
    depends on the ranks. Students sample by their method, others by their family's teacher_sample or Heun.
    first (N, C, f, H, W): pixels that sample s goes on from, or whose depth it has (VACE), s % N. Of several
    segments, which overlap by so many latent frames, the clip's uint8 pixels are in the place of x0."""
    def many_steps(net, noise, batch, cfg, steps):
        return common.teacher_sample(net, noise, batch["cond"], steps, batch["uncond"], cfg["guidance"])

    common.number("--steps", steps, 1, 1000)
    common.number("--batch", batch, 1)
    sampler = run.method if name in run.students else SimpleNamespace(sample=many_steps)
    cfg, shape, whole = run.cfg, shape_of(net, frames), getattr(net, "control", 0)
    cfg.read, kept = frozenset(), pixels(cfg, overlap)
    for start in range(rank * batch, len(ids), world * batch):
        i, c = ids[start:start + batch], labels[start:start + batch]
        texts = dict(caption=[prompts[k % len(prompts)] for k in i]) if prompts else {}
        clip, made = None if first is None else first[[k % len(first) for k in i]].to(device), []
        before = None if whole else clip
        for segment in range(segments):
            if whole:                                   # the control moves along
                long = pixels(cfg, shape[1])
                texts = texts | dict(image=clip[:, :, segment * (long - kept):][:, :, :long])
            key = common.hash_seed(seed, "segment", segment) if segment else seed
            x0 = judge.draw_samples(sampler, net, cfg, i, c, steps, key, device, shape, texts, before)
            if segments > 1:
                images = encoders.decode(x0, cfg)
                made.append(images[:, :, kept if segment else 0:])
                before = images[:, :, -kept:] if cfg["encoders"] else x0[:, :, -overlap:]
        if run.guidance is not None and "guidance" not in run.cfg.read:
            raise BadInput(f"--guidance {run.guidance:g} changes nothing for {name}: the sampler of "
                           f"{run.state['method']} does not use it; leave it out, or give --net teacher")
        if run.negative is not None and ("guidance" not in run.cfg.read or run.cfg["guidance"] == 1):
            raise BadInput(f"--negative {run.negative!r} changes nothing for {name}, which nothing guides; "
                           f"leave it out, or give --net teacher and --guidance above 1")
        yield i, c, (torch.cat(made, 2) if made else x0.float()).cpu()


def shape_of(net, frames=None):
    """The shape of its samples; of clips with so many frames."""
    if frames is None:
        return net.x_shape
    if len(net.x_shape) < 4:
        raise BadInput(f"--frames {frames} is of clips, the samples of this net are {net.x_shape}; leave it "
                       f"out")
    return net.x_shape[0], int(common.number("--frames", frames, 2, 10_000)), *net.x_shape[2:]


def pixels(cfg, frames):
    """How many frames of pixels so many latent ones are."""
    vae = cfg.get("encoders") and encoders.described(cfg["encoders"], cfg["offline"])[1]
    return 1 + (encoders.factors(vae)[2] if vae else 1) * (frames - 1)


def going_on(cfg, net, args):
    """(pixels of --given (N, C, F, H, W) or None, --overlap); BadInput where the net's clips cannot go on."""
    own, shape, segments = judge.own_frames(net), shape_of(net, args.frames), args.segments
    causal, whole, wanted = getattr(net, "chunk", 0), getattr(net, "control", 0), args.given or segments > 1
    usual = cfg["given_frames"] if getattr(net, "video2world", False) else not own and causal
    asked = args.overlap is not None
    overlap = args.overlap if asked else int(usual) or 1
    most = 1 if getattr(net, "first", "") else shape[1] - 1
    for wrong, text in (
            (not args.given and (own or causal or whole) and encoders.asks(cfg),
             f"--net {cfg['net']} makes clips from what is given; add --given FILE, or a folder"),
            (asked and not wanted, f"--overlap {args.overlap} needs --given or --segments"),
            (wanted and not (own or causal or whole and segments == 1),
             f"--given and --segments need a net that is causal, or given first frames, which {cfg['net']} "
             f"(chunk {causal}) is not; leave them out"),
            (wanted and (own or whole) and shape != net.x_shape,
             f"--frames {shape[1]}: what this net is given is for {net.x_shape[1]} frames; leave it out, "
             f"--segments make longer clips"),
            (wanted and not 0 < overlap <= most,
             f"--overlap {overlap}{'' if asked else ', the default here,'} of {shape[1]} latent frames must "
             f"be 1 to {most} for this net")):
        if wrong:
            raise BadInput(text)
    if not args.given:
        return None, overlap if wanted else 0
    frames = pixels(cfg, segments * shape[1] - (segments - 1) * overlap if whole else overlap)
    c, _, *size = encoders.shapes(cfg)
    return read_clips(args.given, (c, frames, *size), cfg["data_fps"]), overlap


def read_clips(place, shape, fps):
    """Clips (N, *shape) of pixels, shape (C, F, H, W), uint8, of --given; of moving digits in [-1, 1]."""
    if place == "moving_digits":
        return torch.from_numpy(data.clips("val", range(297), shape[1])[0])
    kinds, clips = {*media.IMAGES, *media.VIDEOS}, []
    if not Path(place).exists():
        raise BadInput(f"--given {place} does not exist; give a picture, a video, or a folder of them")
    every = sorted(Path(place).iterdir()) if Path(place).is_dir() else [Path(place)]
    for file in (file for file in every if file.suffix.lower() in kinds):
        with data.reading(f"--given {file}"):
            clip = torch.tensor(media.cut(media.value(file.name, file.read_bytes(), (shape[1], fps)), shape))
        if clip.shape[1] < shape[1]:
            raise BadInput(f"--given {file} is 1 frame, but {shape[1]} are needed; give a video")
        clips.append(clip if len(clip) == shape[0] else clip.float().mean(0, True).round().byte())
    if not clips:
        raise BadInput(f"--given {place} is, or holds, no file of the kinds {' '.join(sorted(kinds))}")
    return torch.stack(clips)


def save(pictures, file, fps, about):
    """A PIL picture as PNG, a clip of them as GIF or H.264 (an odd side gets a black line)."""
    if file.suffix.lower() == ".png":
        return logs.save_png(pictures[0], file, about)
    if file.suffix.lower() == ".gif":
        return logs.save_gif(pictures, file, fps, about)
    import av
    content, (width, height) = io.BytesIO(), (n + n % 2 for n in pictures[0].size)
    with av.open(content, "w", format="mp4") as video:
        video.metadata["comment"] = "\n".join(f"{key}: {value}" for key, value in about.items())
        stream = video.add_stream("libx264", Fraction(fps).limit_denominator(1000), options=dict(crf="18"),
                                  width=width, height=height, pix_fmt="yuv420p")
        for picture in pictures:
            whole = picture.convert("RGB").crop((0, 0, width, height))
            video.mux(stream.encode(av.VideoFrame.from_image(whole)))
        video.mux(stream.encode())
    files.write(file, lambda f: f.write(content.getvalue()))


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
    if isinstance(file, Path) and file.is_dir():
        raise BadInput(f"--prompts {text} is a folder; give a file, a prompt a line, or a text of words")
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


def arguments(name, text, batch):
    """A parser of what sample.py and evaluate.py both take."""
    parser = train.Parser(name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--ckpt", type=int, help="iterations done by the checkpoint (default: the newest)")
    parser.add_argument("--guidance", type=float, help="1 = conditional, 0 = none (default: the run's)")
    parser.add_argument("--batch", type=int, default=batch, help=f"samples drawn at once (default {batch})")
    parser.add_argument("--prompts", help="a text, or a file with one a line")
    parser.add_argument("--negative", help="what guidance leads away from (default: the run's)")
    parser.add_argument("--encoders", help="pipeline of text encoders and VAE (default: the run's)")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the best there is)")
    return parser


def read_texts(run, args, device, rank):
    """The list of --prompts; the run's config with what else is said of texts and pixels. BadInput where that
    is not for the run's net."""
    given = dict(negative_prompt=args.negative, encoders=args.encoders, device=str(device),
                 depth_model=getattr(args, "depth_model", None))
    run.negative = args.negative
    run.cfg = Config(trainer.defaults | run.cfg | {k: v for k, v in given.items() if v is not None})
    if bool(args.prompts) != bool(getattr(run.nets["student"], "text_dim", 0)):
        raise BadInput(f"--net {run.cfg['net']} takes no prompts" if args.prompts else
                       f"--net {run.cfg['net']} needs --prompts TEXT, or a file with one a line")
    prompts = read_prompts(args.prompts) if args.prompts else ()
    if prompts and not run.cfg["encoders"]:
        raise BadInput("prompts need text encoders; give --encoders, a diffusers pipeline (folder or hub id)")
    if args.negative is not None and not prompts:
        raise BadInput(f"--negative {args.negative!r} is for nets that take prompts, which "
                       f"--net {run.cfg['net']} does not; leave it out")
    encoders.check(run.cfg, prompts)
    for line in encoders.cut(prompts, run.cfg) if rank == 0 else ():
        print(line)
    return prompts


def main(argv):
    parser = arguments("sample.py", __doc__, batch=64)
    parser.add_argument("--net", default="", help="student, teacher, an EMA (default: the first one)")
    parser.add_argument("--steps", type=int, help="of the sampler (default: the run's; 18 for a teacher)")
    parser.add_argument("--classes", default="all", help="0,1,2 or 0-9 or all (default)")
    parser.add_argument("--seeds", default="0-79", help="samples to draw, 0-79 (default) or 0,5,7")
    parser.add_argument("--frames", type=int, help="of a clip (default: as trained)")
    parser.add_argument("--given", help="what clips go on from: a picture, a video, or a folder of them")
    parser.add_argument("--segments", type=int, default=1, help="of a clip, each of --frames (default 1)")
    parser.add_argument("--overlap", type=int, help="latent frames of --given, or of the segment before, to "
                                                    "go on from (default: as trained, or a chunk)")
    parser.add_argument("--depth_model", help="depth estimation for VACE's control (default: the run's)")
    parser.add_argument("--fps", type=float, default=8.0, help="frames a second of a GIF or MP4 (default 8)")
    parser.add_argument("--format", choices=("gif", "mp4"), default="gif", help="of clips in a folder (gif)")
    parser.add_argument("--out", help="a .png, of clips also a .gif or .mp4, for one sheet (default: in the "
                                      "run's samples/), or a folder for a file per sample, named by its seed")
    args = parser.parse_args(argv)

    # everything that can be wrong with the input
    device, rank, world, group = start(args.device)
    run = load_run(args.run, args.ckpt, args.guidance, print if rank == 0 else lambda text: None)
    name, many = pick_net(run, args.net), run.cfg["classes"]
    steps = own_steps(run, name) if args.steps is None else args.steps
    prompts = read_texts(run, args, device, rank)
    every = list(range(many)) or [-1]                                       # -1: unconditional
    classes = every if args.classes == "all" else numbers("--classes", args.classes, many)
    ids = numbers("--seeds", args.seeds, 10_000_000)                        # names have seven digits
    if args.given == "moving_digits" and many and args.classes == "all":
        classes = data.load(dict(data=args.given), "val").label[:297].tolist()          # their own
    labels = torch.tensor([classes[i % len(classes)] for i in ids])
    common.number("--segments", args.segments, 1, 1000)
    first, overlap = going_on(run.cfg, run.nets.get(name, run.nets["student"]), args)
    if first is not None and prompts and len(first) not in (1, len(prompts)):
        raise BadInput(f"--given {args.given} is {len(first)} for {len(prompts)} prompts; give 1, or as many")
    run.cfg["given_frames"], more = overlap, dict(given=args.given, segments=args.segments, overlap=overlap)
    asked = prompts, run.cfg["guidance"], run.cfg["negative_prompt"], *(more.values() if overlap else ())
    mark = f"_{zlib.crc32(repr(asked).encode()):08x}" if prompts or overlap else ""     # others' sheets stay
    out = files.place(args.out or run.folder / "samples" / f"{run.it:07d}_{name}_{steps}{mark}.png")
    video, kind = len(shape_of(run.nets["student"], args.frames)) == 4, out.suffix.lower()
    common.number("--fps", args.fps, 0.1, 50)
    known = {".png", *[".gif", ".mp4"] * video}
    if kind in {*media.IMAGES, *media.VIDEOS, ".avi", ".mkv", ".npy", ".npz"} - known:
        raise BadInput(f"--out {args.out}: no {kind} is made of {'clips' if video else 'images'}; give a .png"
                       f"{', .gif, .mp4' * video} or a folder")
    one_sheet, form = kind in known, f".{args.format}" if video else ".png"
    if ".mp4" in (kind, form) and not importlib.util.find_spec("av"):
        raise BadInput("mp4 needs the PyAV library; pip install av")
    files.make(out.parent if one_sheet else out)

    # draw; separate files are written batch by batch
    net, sheet = load_net(run, name, device), []
    about = dict(run=run.folder.resolve().name, method=run.state["method"], checkpoint=run.it, net=name,
                 steps=steps, guidance=run.cfg["guidance"]) | (more if overlap else {})
    about |= dict(negative=run.cfg["negative_prompt"]) if prompts else {}
    drawn = draw(run, net, name, ids, labels, steps, run.cfg["seed"], args.batch, device, rank, world,
                 prompts, args.frames, first, args.segments, overlap)
    for i, c, x0 in drawn:
        images = x0 if args.segments > 1 else encoders.decode(x0, run.cfg)  # uint8 (B, C, [F,] H, W)
        if one_sheet:
            sheet += zip(i, images)
            continue
        for number, label, image in zip(i, c.tolist(), images):
            told = {"prompt": prompts[number % len(prompts)]} if prompts else {"class": label}
            pictures = [logs.picture(frame) for frame in (image.unbind(1) if video else [image])]
            save(pictures, out / f"{number:07d}{form}", args.fps, told | about | {"seed": number})
    sheet = dict(sum(common.everyone(sheet, group), []))                    # every rank is through
    if rank == 0 and one_sheet:
        columns = len(classes) if 1 < len(classes) < 10 else 10
        told = {"prompt": "\n".join(prompts)} if prompts else {"class": ",".join(map(str, labels.tolist()))}
        about, images = about | {"seed": args.seeds} | told, torch.stack([sheet[i] for i in ids])
        if kind == ".png":
            logs.save_grid(images, out, 1 if video else columns, about)
        else:
            save([logs.sheet(frames, columns) for frames in images.unbind(2)], out, args.fps, about)
    if rank == 0:
        print(f"{out}: {len(ids)} samples of {name}, {steps} steps, checkpoint {run.it}")
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
