"""Score checkpoints of a run on the embedded digits, at rest or moving: Fréchet distances and more.

    python evaluate.py outputs/fewstep/digits/dmd2                newest checkpoint: first EMA, and teacher
    python evaluate.py RUN --all --net student,ema --steps 1,2    every checkpoint, these nets and step counts
    torchrun --nproc_per_node 2 evaluate.py RUN                   the ranks share the sampling; same numbers

One seed is 1,500 samples with the 1,500 training labels. Every figure is the mean and standard deviation over
the seeds, printed, and written to eval/N.json of the run with what made it.
    fd         Fréchet distance to the 1,500 training digits in the 64 features of assets/classifier.pth
    agreement  part of the samples in which that classifier sees their label
    nearest    median distance to the nearest training digit (of pixels) as a fraction of the held-out digits'
               median; below 0.8 is memorising
Beside them stand the fd of halves of the training digits (750 against 750, classes alike) and the figures of
the 297 held-out ones. Samples are clipped to [-1, 1], not rounded. Other data need FID, which is not here.

Of moving digits 1,500 clips, as long as those of the data or --frames, are compared with 1,500 of training:
    fd F       as above, of frame F (from 0), cut to the digit: how it looks, wherever it is
    motion     Fréchet distance of the pixels of frame differences, mean over the clip: in a clip that stands
               still every frame may look real
    track F    how far off, in pixels, the digit's centre is at frame F where a causal net continues each of
               297 held-out clips from its first chunk, which determines the rest
    identity   part of the clips in whose first and last frame the classifier sees the same digit
    agreement  part of the frames in which it sees their label
A blur of several futures has a small track error and a large fd: these belong together. Beside them stand
other training clips, the held-out ones, and those stopped after their first chunk (or frame).
"""
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import ckpt
import common
import data
import files
import sample
import train
import trainer
import watch
from common import BadInput

CLASSIFIER = Path(__file__).resolve().parent / "assets" / "classifier.pth"


class Classifier(nn.Module):
    """x0 (B, 1, 8, 8) in [-1, 1] -> features (B, 64), logits (B, 10). Trained by tools/make_classifier.py."""

    def __init__(self, width=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.features = nn.Linear(2 * width * 16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x0):
        h = F.silu(F.avg_pool2d(self.conv2(F.silu(self.conv1(x0))), 2)).flatten(1)         # (B, 4 * 4 * 48)
        h = F.silu(self.features(F.dropout(h, 0.5, self.training)))                         # (B, 64)
        return h, self.out(F.dropout(h, 0.2, self.training))


def file_hash(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def digits(split):
    """Images (N, 1, 8, 8) in [-1, 1] and labels (N,) of "train" or "val"."""
    found = data.load(dict(data="digits"), split)
    return torch.stack([torch.tensor(found.get(i)[0]) for i in range(len(found))]), torch.tensor(found.label)


# ---- figures ---------------------------------------------------------------------------------------

def frechet(x, y):
    """|m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)) of features x (N, D), y (M, D) in float64.
    With C = R^T R (R from a QR of the centred features) the trace of the root is the sum of the singular
    values of R_x R_y^T: no root of a nearly singular matrix is taken, and frechet(x, x) is 0 to rounding."""
    def fit(z):
        z = z.double()
        return z.mean(0), torch.linalg.qr((z - z.mean(0)) / (len(z) - 1) ** 0.5, mode="r").R
    (m_x, r_x), (m_y, r_y) = fit(x), fit(y)
    cross = torch.linalg.svdvals(r_x @ r_y.mT).sum()
    return float((m_x - m_y).square().sum() + r_x.square().sum() + r_y.square().sum() - 2 * cross)


def nearest(x, to):
    """Median over x (N, ...) of the Euclidean distance to the nearest of `to` (M, ...)."""
    far = torch.cdist(x.flatten(1), to.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")     # (N, M)
    return float(far.amin(1).median())


def classifier():
    net = Classifier().eval().requires_grad_(False)
    net.load_state_dict(ckpt.load(CLASSIFIER))
    return net


class Judge:
    """Scores samples against the training digits; `real` holds the same figures of real digits."""
    columns = ("fd", "fd", None, 3), ("agreement", "agreement", None, 4), ("nearest", "nearest", None, 3)
    first = None

    def __init__(self, seeds):
        self.classifier = classifier()
        self.train, label = digits("train")
        held, held_label = digits("val")
        self.features, self.unit = self.classifier(self.train)[0], nearest(held, self.train)
        def halves(seed):                               # classes shuffled, then every other digit
            order = np.lexsort((np.random.default_rng(seed).permutation(len(label)), label))
            return frechet(self.features[order[::2]], self.features[order[1::2]])
        self.real = {
            "real halves": dict(samples=len(label) // 2, seeds=list(range(seeds))) | spread(
                "fd", [*map(halves, range(seeds))]),
            "held out": dict(samples=len(held), nearest_distance=self.unit) | self(held, held_label)}

    def __call__(self, x0, label):
        """dict(fd, agreement, nearest) of samples x0 (N, 1, 8, 8); agreement is None without labels."""
        x0 = x0.clamp(-1, 1)
        features, logits = self.classifier(x0)
        agreement = float((logits.argmax(1) == label).double().mean()) if (label >= 0).all() else None
        return dict(fd=frechet(features, self.features), agreement=agreement,
                    nearest=nearest(x0, self.train) / self.unit)


def centre(x):
    """The centre of ink, (x + 1) / 2 where at least 1/4, in x (B, 1, F, H, W): rows and columns (B, F, 2)."""
    ink = (x[:, 0].clamp(-1, 1) + 1) / 2
    ink, at = ink * (ink >= 0.25), torch.arange(float(x.shape[-1]))
    both = torch.stack([(ink.sum(3) * at).sum(2), (ink.sum(2) * at).sum(2)], dim=-1)
    return both / ink.sum((2, 3)).clamp(min=1e-6)[..., None]


def cut(x, size=8):
    """The window with most ink of each frame x (N, H, W), of several the middle one: (N, 1, size, size)."""
    ink = F.avg_pool2d((x[:, None] + 1) / 2, size, stride=1)[:, 0]
    best = (ink >= ink.amax((1, 2), keepdim=True) - 0.002).float()                          # (N, 5, 5)
    at = torch.arange(float(ink.shape[-1]))
    corners = [(best.sum(dim) * at).sum(1) / best.sum((1, 2)) for dim in (2, 1)]
    rows, columns = (c.round().long()[:, None] + torch.arange(size) for c in corners)       # (N, size)
    return x[torch.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None]][:, None]


class VideoJudge:
    """Scores clips of moving digits against training ones; `real` holds the same figures of real clips."""

    def __init__(self, frames, chunk):
        """chunk: first frames that a causal net is given of the held-out clips, `first`; 0 = it is not."""
        clips = lambda *which: torch.from_numpy(data.clips(*which, frames)[0])                  # noqa: E731
        self.classifier, last = classifier(), frames - 1
        self.train, self.held = clips("train", range(1500)), clips("val", range(297))
        self.first = self.held[:, :, :chunk] if 0 < chunk < frames else None
        self.features = self.look(self.train)[0]
        until = torch.arange(frames).clamp(max=max(chunk, 1) - 1)
        (_, label), (_, held) = digits("train"), digits("val")
        self.real = {"other training": self(clips("train", range(1500, 3000)), label),
                     "held out": self(self.held, held, self.held),
                     "stopped": self(self.held[:, :, until], held, self.held[:, :, until])}
        self.columns = (*((f"fd {k}", "fd", k, 2) for k in sorted({0, max(frames // 2 - 1, 0), last})),
                        ("motion", "motion", None, 2), (f"track {last}", "track", last, 2),
                        ("identity", "identity", None, 4), ("agreement", "agreement", None, 4))

    def look(self, x0):
        """Features (F, N, 64) and classes (F, N) of the digits in all frames."""
        features, logits = self.classifier(cut(x0[:, 0].transpose(0, 1).flatten(0, 1)))
        return [v.unflatten(0, (x0.shape[2], -1)) for v in (features, logits.argmax(1))]

    def __call__(self, x0, label, continued=None):
        """dict(fd by frame, motion, track by frame, identity, agreement) of clips x0 (N, 1, F, 12, 12) and,
        for track, of the held-out ones as they were continued."""
        x0 = x0.clamp(-1, 1)
        features, seen = self.look(x0)
        moves = zip(*(x[:, 0].diff(dim=1).flatten(2).unbind(1) for x in (x0, self.train)))      # (N, 144)
        off = None if continued is None else (centre(continued) - centre(self.held)).norm(dim=2).mean(0)
        return dict(fd=[frechet(x, y) for x, y in zip(features, self.features)],
                    motion=float(np.mean([frechet(x, y) for x, y in moves])),
                    track=None if off is None else off.tolist(),
                    identity=float((seen[-1] == seen[0]).double().mean()),
                    agreement=float((seen == label).double().mean()) if (label >= 0).all() else None)


def spread(key, values):
    """{key: mean, key_std: standard deviation (n - 1), key_each: values}, None where there is no value; of
    lists element by element."""
    if None in values:
        return {key: None, f"{key}_std": None, f"{key}_each": None}
    std = np.std(values, axis=0, ddof=1) if len(values) > 1 else 0 * np.mean(values, axis=0)
    return {key: np.mean(values, axis=0).tolist(), f"{key}_std": std.tolist(), f"{key}_each": values}


# ---- sampling and output ---------------------------------------------------------------------------

def plan(run, args, device):
    """(name, net, steps, its calls) of each to be scored. A sample of each is drawn: a sampler that refuses a
    step count does so before the work."""
    names = {sample.pick_net(run, n): args.steps for n in args.net.split(",")}
    if not args.net and "teacher" in run.names:
        names["teacher"] = ""
    for name, given in names.items():
        net = sample.load_net(run, name, device)
        for steps in sample.numbers("--steps", given or str(sample.own_steps(run, name)), 1001):
            calls = watch.count_calls({name: net})
            next(sample.draw(run, net, name, [0], torch.tensor([0]), steps, 0, 1, device, frames=args.frames))
            yield name, net, steps, len(calls)


def draw_all(run, net, name, label, steps, seed, args, here, first=None):
    """Samples 0, 1, ... with these labels, drawn by all ranks: (N, *shape)."""
    device, rank, world, group = here
    mine = sample.draw(run, net, name, list(range(len(label))), label, steps, seed, args.batch, device, rank,
                       world, frames=args.frames, first=first)
    mine = [(i, x) for part, _, x0 in mine for i, x in zip(part, x0)]
    drawn = dict(sum(common.everyone(mine, group), []))
    x0 = torch.stack([drawn[i] for i in range(len(label))])
    if not x0.isfinite().all():
        raise BadInput(f"{name} of checkpoint {run.it} in {run.folder} makes samples that are not "
                       f"finite; score an earlier one with --ckpt")
    return x0


def score(run, net, name, steps, judge, args, here):
    """The row of a net at a step count: on rank 0 with its figures, the other ranks only draw."""
    known = lambda label: label if run.cfg["classes"] else torch.full_like(label, -1)           # noqa: E731
    label, figures = known(digits("train")[1][:args.samples]), []
    for seed in range(args.seeds):
        drawn = [draw_all(run, net, name, label, steps, seed, args, here), label]
        if judge.first is not None and getattr(net, "chunk", 0):
            held = known(digits("val")[1])
            drawn.append(draw_all(run, net, name, held, steps, seed, args, here, judge.first))
        if here[1] == 0:
            figures.append(judge(*drawn))
    row = dict(net=name, checkpoint=run.it, steps=steps, guidance=run.cfg["guidance"], samples=args.samples,
               seeds=list(range(args.seeds)))
    for key in figures[0] if figures else ():
        row |= spread(key, [f[key] for f in figures])
    return row


def table(run, rows, judge):
    """The rows as text, real data below."""
    def cell(row, key, at, places):
        value, std = (v if at is None or v is None else v[at] for v in (row.get(key), row.get(f"{key}_std")))
        return "-" if value is None else f"{value:.{places}f}" + (
            "" if std is None else f" ± {std:.{places}f}")
    lines = [("net", "steps", "calls", *(head for head, *_ in judge.columns))]
    for row in [*rows, *(dict(net=name) | figures for name, figures in judge.real.items())]:
        lines.append([*(str(row.get(k, "")) for k in ("net", "steps", "calls")),
                      *(cell(row, *how) for _, *how in judge.columns)])
    width = [max(map(len, column)) for column in zip(*lines)]
    head = (f"{run.folder} checkpoint {run.it} ({run.state['method']}): {rows[0]['samples']} samples, mean "
            f"± standard deviation of {len(rows[0]['seeds'])} seeds")
    return "\n".join([head, *("  ".join(c.ljust(w) for c, w in zip(line, width)).rstrip() for line in lines)])


def main(argv):
    parser = sample.arguments("evaluate.py", __doc__, batch=500)
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--net", default="", help="student, an EMA, teacher, or several: student,ema "
                                                  "(default: first EMA, and teacher if there is one)")
    parser.add_argument("--steps", default="", help="step counts, 1,2 (default: the run's; a teacher's 18)")
    parser.add_argument("--seeds", type=int, default=5, help="samplings to average over (default 5)")
    parser.add_argument("--samples", type=int, default=1500, help="samples of one seed (default 1500)")
    parser.add_argument("--frames", type=int, help="frames of a clip (default: those of the data)")
    args = parser.parse_args(argv)

    device, rank, *_, group = here = sample.start(args.device)
    for key, low, high in ("seeds", 1, 1000), ("samples", 2, 1500):
        common.number(f"--{key}", getattr(args, key), low, high)
    judge, frozen = None, {}
    its = ckpt.scan(files.place(args.run) / "checkpoints") if args.all else []
    for it in its or [args.ckpt]:
        run = sample.load_run(args.run, it, args.guidance, print if rank == 0 else lambda text: None)
        source, student = run.state["data"].get("pairs_of", run.cfg["data"]), run.nets["student"]
        if source not in ("digits", "moving_digits"):
            raise BadInput(f"{run.folder} is a run on {run.cfg['data']}; this version scores --data digits "
                           f"and moving_digits only (FID needs Inception weights); sample.py --out FOLDER "
                           f"feeds another tool")
        shape = sample.shape_of(student, args.frames)
        judge = judge or (Judge(args.seeds) if source == "digits" else
                          VideoJudge(shape[1], getattr(student, "chunk", 0)))
        rows, todo = [], [*plan(run, args, device)]
        files.make(run.folder / "eval")
        for name, net, steps, calls in todo:
            row = frozen.get((name, steps)) or score(run, net, name, steps, judge, args, here)
            if name not in run.students and name not in run.state["nets"]:              # is scored once
                frozen[name, steps] = row
            rows.append(row | dict(calls=calls, checkpoint=run.it))
        if rank == 0:
            text = json.dumps(dict(
                run=run.folder.resolve().name, checkpoint=run.it, method=run.state["method"], data=source,
                classifier=dict(file=f"assets/{CLASSIFIER.name}", sha256=file_hash(CLASSIFIER)),
                sources=run.state["sources"], results=rows, real=judge.real), indent=1)
            files.write(run.folder / "eval" / f"{run.it:07d}.json", lambda f: f.write(f"{text}\n".encode()))
            print(table(run, rows, judge), flush=True)
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
