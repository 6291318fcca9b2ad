"""Score checkpoints of a run on the embedded digits: Fréchet distance, label agreement, memorisation.

    python evaluate.py outputs/fewstep/digits/dmd2                newest checkpoint: first EMA, and teacher
    python evaluate.py RUN --all --net student,ema --steps 1,2    every checkpoint, these nets and step counts
    torchrun --nproc_per_node 2 evaluate.py RUN                   the ranks share the sampling; same numbers

One seed is 1,500 samples with the 1,500 training labels. Every figure is the mean and standard deviation over
the seeds (5 unless told otherwise), printed, and written to eval/N.json of the run with what made it.
    fd         Fréchet distance to the 1,500 training digits in the 64 features of assets/classifier.pth
    agreement  part of the samples in which that classifier sees their label
    nearest    median distance to the nearest training digit (of pixels) as a fraction of the held-out digits'
               median; below 0.8 is memorising
Beside them stand the fd of halves of the training digits (750 against 750, classes alike) and the figures of
the 297 held-out ones. Samples are clipped to [-1, 1], not rounded. Other data sets need FID, which this
version does not have.
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


# ---- the three figures -----------------------------------------------------------------------------

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


class Judge:
    """Scores samples against the training digits; `real` holds the same figures of real digits."""

    def __init__(self, seeds):
        self.classifier = Classifier().eval().requires_grad_(False)
        self.classifier.load_state_dict(ckpt.load(CLASSIFIER))
        self.train, label = digits("train")
        held, held_label = digits("val")
        self.features, self.unit = self.classifier(self.train)[0], nearest(held, self.train)
        halves = []
        for seed in range(seeds):                       # classes shuffled, then every other digit
            order = np.lexsort((np.random.default_rng(seed).permutation(len(label)), label))
            halves.append(frechet(self.features[order[::2]], self.features[order[1::2]]))
        self.real = dict(
            halves=dict(samples=len(label) // 2, seeds=list(range(seeds))) | spread("fd", halves),
            held_out=dict(samples=len(held), nearest_distance=self.unit) | self(held, held_label))

    def __call__(self, x0, label):
        """dict(fd, agreement, nearest) of samples x0 (N, 1, 8, 8); agreement is None without labels."""
        x0 = x0.clamp(-1, 1)
        features, logits = self.classifier(x0)
        agreement = float((logits.argmax(1) == label).double().mean()) if (label >= 0).all() else None
        return dict(fd=frechet(features, self.features), agreement=agreement,
                    nearest=nearest(x0, self.train) / self.unit)


def spread(key, values):
    """{key: mean, key_std: standard deviation (n - 1), key_each: values}, None where there is no value."""
    if None in values:
        return {key: None, f"{key}_std": None, f"{key}_each": None}
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {key: float(np.mean(values)), f"{key}_std": std, f"{key}_each": values}


# ---- sampling and output ---------------------------------------------------------------------------

def plan(run, args, device):
    """[(name, net, steps, its calls)] to be scored. A sample of each is drawn: a sampler that refuses a step
    count does so before the work."""
    found, names = [], {sample.pick_net(run, n): args.steps for n in args.net.split(",")}
    if not args.net and "teacher" in run.names:
        names["teacher"] = ""
    for name, given in names.items():
        net = sample.load_net(run, name, device)
        for steps in sample.numbers("--steps", given or str(sample.own_steps(run, name)), 1001):
            calls = trainer.watch_calls({name: net})
            next(sample.draw(run, net, name, [0], torch.tensor([0]), steps, 0, 1, device))
            found.append((name, net, steps, len(calls)))
    return found


def score(run, net, name, steps, judge, args, here):
    """The row of a net at a step count: on rank 0 with its figures, the other ranks only draw."""
    label = digits("train")[1][:args.samples] if run.cfg["classes"] else torch.full((args.samples,), -1)
    ids, figures, (device, rank, world, group) = list(range(args.samples)), [], here
    for seed in range(args.seeds):
        mine = sample.draw(run, net, name, ids, label, steps, seed, args.batch, device, rank, world)
        mine = [(i, x) for part, _, x0 in mine for i, x in zip(part, x0)]
        drawn = dict(sum(common.everyone(mine, group), []))
        x0 = torch.stack([drawn[i] for i in ids])                                           # (N, 1, 8, 8)
        if not x0.isfinite().all():
            raise BadInput(f"{name} of checkpoint {run.it} in {run.folder} makes samples that are not "
                           f"finite; score an earlier one with --ckpt")
        if rank == 0:
            figures.append(judge(x0, label))
    row = dict(net=name, checkpoint=run.it, steps=steps, guidance=run.cfg["guidance"], samples=args.samples,
               seeds=list(range(args.seeds)))
    for key in figures[0] if figures else ():
        row |= spread(key, [f[key] for f in figures])
    return row


def table(run, rows, real):
    """The rows as text, real data below."""
    def cell(row, key, places):
        if row.get(key) is None:
            return "-"
        std = row.get(f"{key}_std")
        return f"{row[key]:.{places}f}" + (f" ± {std:.{places}f}" if std is not None else "")
    lines = [("net", "steps", "calls", "fd", "agreement", "nearest")]
    for row in [*rows, dict(net="real halves") | real["halves"], dict(net="held out") | real["held_out"]]:
        lines.append((row["net"], *(str(row.get(k, "")) for k in ("steps", "calls")),
                      cell(row, "fd", 3), cell(row, "agreement", 4), cell(row, "nearest", 3)))
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
    args = parser.parse_args(argv)

    device, rank, *_, group = here = sample.start(args.device)
    for key, low, high in ("seeds", 1, 1000), ("samples", 2, 1500):
        common.number(f"--{key}", getattr(args, key), low, high)
    judge, frozen = Judge(args.seeds) if rank == 0 else None, {}
    its = ckpt.scan(files.place(args.run) / "checkpoints") if args.all else []
    for it in its or [args.ckpt]:
        run = sample.load_run(args.run, it, args.guidance, print if rank == 0 else lambda text: None)
        if run.state["data"].get("pairs_of", run.cfg["data"]) != "digits":
            raise BadInput(f"{run.folder} is a run on {run.cfg['data']}; this version scores --data digits "
                           f"only (FID needs Inception weights); sample.py --out FOLDER feeds another tool")
        rows, todo = [], plan(run, args, device)
        files.make(run.folder / "eval")
        for name, net, steps, calls in todo:
            row = frozen.get((name, steps)) or score(run, net, name, steps, judge, args, here)
            if name not in run.students and name not in run.state["nets"]:              # is scored once
                frozen[name, steps] = row
            rows.append(row | dict(calls=calls, checkpoint=run.it))
        if rank == 0:
            text = json.dumps(dict(
                run=run.folder.resolve().name, checkpoint=run.it, method=run.state["method"], data="digits",
                classifier=dict(file=f"assets/{CLASSIFIER.name}", sha256=file_hash(CLASSIFIER)),
                sources=run.state["sources"], results=rows, real=judge.real), indent=1)
            files.write(run.folder / "eval" / f"{run.it:07d}.json", lambda f: f.write(f"{text}\n".encode()))
            print(table(run, rows, judge.real), flush=True)
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
