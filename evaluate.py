"""Score checkpoints of a run: FID of images, Fréchet distances and more on the embedded digits.

    python evaluate.py outputs/fewstep/digits/dmd2                newest checkpoint: first EMA, and teacher
    python evaluate.py RUN --all --net student,ema --steps 1,2    every checkpoint, these nets and step counts
    torchrun --nproc_per_node 2 evaluate.py RUN                   the ranks share the sampling; same numbers
    torchrun --nproc_per_node 8 evaluate.py RUN --seeds 3 --ref cifar10-32x32.npz --inception weights.pth

The last is FID, of images that are no digits, or with --ref. Seed k is samples k N to (k + 1) N - 1 of
`sample.py --seeds`, N = --samples, in uint8 as pictures are, of random classes. EDM reports the least FID of
three seeds of 50,000. --ref is an .npz with mu and sigma (EDM, guided-diffusion, pytorch-fid), a .pkl with
them in "fid" (EDM2), or images as --data takes them (default: the run's), whose statistics --save_ref keeps.
Sums over samples stay in eval/ until all is scored: the same command goes on, 2,000 samples back at most.

Of digits one seed is 1,500 samples with the 1,500 training labels. Figures are mean and standard deviation
over the seeds, printed, and written to eval/N.json of the run with what made them.
    fd         Fréchet distance to the 1,500 training digits in the 64 features of assets/classifier.pth
    agreement  part of the samples in which that classifier sees their label
    nearest    median distance to the nearest training digit (of pixels) as a fraction of the held-out digits'
               median; below 0.8 is memorising
Beside them stand the fd of halves of the training digits (750 against 750, classes alike) and the figures of
the 297 held-out ones. Samples are clipped to [-1, 1], not rounded.

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
import io
import json
import pickle
from contextlib import suppress
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
from nets import encoders

SAVE_EVERY = 2000       # samples of a FID
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
    C = R^T R, R from a QR of the centred features."""
    def fit(z):
        z = z.double()
        return z.mean(0), torch.linalg.qr((z - z.mean(0)) / (len(z) - 1) ** 0.5, mode="r").R
    return distance(*fit(x), *fit(y))


def root(sigma):
    """R with R^T R = sigma (D, D), what is below 0 by rounding taken as 0."""
    value, vector = torch.linalg.eigh(sigma)
    return value.clamp(min=0).sqrt()[:, None] * vector.mT


def distance(m_x, r_x, m_y, r_y):
    """The Fréchet distance of means m (D,) and covariances R^T R: the trace of (C_x C_y)^(1/2) is the sum of
    the singular values of R_x R_y^T. So no root of a nearly singular product is taken, and the distance of a
    thing to itself is 0 to rounding."""
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


def finite(x0, of):
    if not x0.isfinite().all():
        raise BadInput(f"{of} makes samples that are not finite; score an earlier one with --ckpt")
    return x0


def spread(key, values):
    """{key: mean, key_std: standard deviation (n - 1), key_each: values}, None where there is no value; of
    lists element by element."""
    if None in values:
        return {key: None, f"{key}_std": None, f"{key}_each": None}
    std = np.std(values, axis=0, ddof=1) if len(values) > 1 else 0 * np.mean(values, axis=0)
    return {key: np.mean(values, axis=0).tolist(), f"{key}_std": std.tolist(), f"{key}_each": values}


# ---- FID -------------------------------------------------------------------------------------------

class Inception:
    """TensorFlow's Inception-v3 as torch-fidelity has it, with its weights in `file`, or as it downloads
    it: uint8 (B, 1 or 3, H, W), which it resizes, -> pooled features (B, 2048), float64 on the CPU."""
    size = 2048

    def __init__(self, file, device):
        try:
            import torch_fidelity
            from torch_fidelity import feature_extractor_inceptionv3 as library
        except Exception as e:                          # a torchvision of another torch raises RuntimeError
            raise BadInput(f"FID needs the torch-fidelity library ({e}); pip install "
                           f"torch=={torch.__version__.partition('+')[0]} torch-fidelity") from e
        at = Path(file or Path(torch.hub.get_dir(), "checkpoints", Path(library.URL_INCEPTION_V3).name))
        with data.reading(f"--inception {file or library.URL_INCEPTION_V3}"):
            if file:
                torch.load(file, "cpu", weights_only=True)      # the library would run whatever a pickle says
            self.net = library.FeatureExtractorInceptionV3("fid", ["2048"], file or None).to(device)
            self.about = dict(library=f"torch-fidelity {torch_fidelity.__version__}", weights=at.name,
                              weights_sha256=file_hash(at))

    def __call__(self, images):
        device = self.net.fc.weight.device
        parts = [self.net(x.expand(-1, 3, -1, -1).to(device))[0].cpu() for x in images.split(64)]
        return torch.cat(parts).double()


class Plain(pickle.Unpickler):
    """Reads arrays, dicts and numbers; nothing else that a pickle names is imported or called."""

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in (
                "_reconstruct", "_frombuffer", "ndarray", "dtype", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")


def statistics(file):
    """(mu (D,), sigma (D, D), the file's sha256, that of Inception's weights or "") of an .npz or .pkl; None
    of what is neither, or an .npz without mu."""
    read = {".npz": np.load, ".pkl": lambda at: Plain(io.BytesIO(at.read_bytes())).load()}.get(file.suffix)
    with data.reading(f"--ref {file}, which should hold mu and sigma,"), files.fetch(file) as here:
        found = read(here) if read else {}
        if not read or file.suffix == ".npz" and "mu" not in found:
            return None
        mu, sigma = (torch.tensor(found.get("fid", found)[k], dtype=torch.float64) for k in ("mu", "sigma"))
        if sigma.shape != 2 * mu.shape or not (mu.isfinite().all() and sigma.isfinite().all()):
            raise ValueError(f"{tuple(mu.shape)} and {tuple(sigma.shape)}, not finite of (D,) and (D, D)")
        return mu, sigma, file_hash(here), str(found.get("weights_sha256", ""))


class Fid:
    """Scores images of any run, as they are drawn, against mean and covariance of real ones."""
    columns, real = (("fid", "fid", None, 2), ("least", "fid_least", None, 2)), {}

    def __init__(self, run, source, args, here):
        (self.device, self.rank, self.world, self.group), self.args, self.sums = here, args, []
        self.extract, file = Inception(args.inception, self.device), files.place(args.ref or source)
        if not (found := ckpt.together(lambda: statistics(file), self.group)):
            file = self.make(run, args.ref or source)
            found = ckpt.together(lambda: statistics(file), self.group)
        mu, sigma, own, made_by = found
        if len(mu) != self.extract.size or made_by not in ("", self.extract.about["weights_sha256"]):
            raise BadInput(f"--ref {file} is of {len(mu)} features by weights {made_by[:8]}, samples have "
                           f"{self.extract.size} by {self.extract.about}; give that --inception")
        self.against, self.about = (mu, root(sigma)), dict(
            reference=str(file), reference_sha256=own, **self.extract.about, values="uint8 of [-1, 1]")

    def moments(self, file, about, total, pictures):
        """Mean (D,) and covariance (D, D) of the features of images 0 to total - 1, on rank 0.
        pictures(positions) yields this rank's, uint8. The sums, float64, are stored in `file`, where what was
        stopped goes on if it was about the same."""
        about, state, step = about | self.extract.about, dict(n=0), self.world * self.args.batch
        with suppress(ckpt.Damaged):                    # there is none, or it is not whole
            found = ckpt.load(file) if self.rank == 0 else {}
            state = found if found.get("about") == about else state

        def part(at):
            sums = torch.zeros(self.extract.size + 1, self.extract.size, dtype=torch.float64)
            for f in map(self.extract, pictures(at)):                                           # (B, D)
                sums += torch.cat([f.mT @ f, f.sum(0)[None]])
            return sums
        n, step = common.from_rank0(state["n"], self.group), step * max(1, SAVE_EVERY // step)
        while n < total:
            sums = ckpt.together(lambda: part(range(n, min(total, n + step))), self.group)      # noqa: B023
            sums, n = state.get("sums", 0) + self.world * common.all_mean(sums), min(total, n + step)
            state = dict(about=about, n=n, sums=sums)
            ckpt.together(lambda: ckpt.save(file, state) if self.rank == 0 else None, self.group)
        if self.rank == 0:
            mu = state["sums"][-1] / n
            return mu, (state["sums"][:-1] - n * mu[:, None] * mu) / (n - 1)

    def make(self, run, source):
        """The file of mean and covariance of all images of a data set."""
        file, batch = files.place(self.args.save_ref or run.folder / "eval/reference"), self.args.batch
        file = file.with_suffix(".npz")
        usual = {k: v for k, v in trainer.defaults.items() if k.startswith("data_") and self.args.ref}
        real = data.load(dict(run.cfg) | usual | dict(data=source, classes=0, xflip=False, augment=0.0))
        if real.kind != "image" or len(real.shape) != 3:
            raise BadInput(f"{source} holds {real.kind}s {real.shape}, FID is of images; give --ref")

        def pictures(at):
            for i in range(self.rank * batch, len(at), self.world * batch):
                x = torch.stack([torch.tensor(real.get(k)[0]) for k in at[i:i + batch]])
                yield x if x.dtype == torch.uint8 else encoders.decode(x, {})
        part, about = file.with_suffix(".sums.pth"), dict(of=source, images=len(real), shape=[*real.shape])
        if found := self.moments(part, about, len(real), pictures):
            content = about | self.extract.about | dict(mu=found[0], sigma=found[1])
            files.write(file, lambda f: np.savez(f, **content))
            files.remove(part)
        return file

    def score(self, run, net, name, steps, seed):
        """[dict(fid)] of one seed's samples on rank 0, [] on the others."""
        total, classes, base = self.args.samples, run.cfg["classes"], run.cfg["seed"]
        of = f"{name} of checkpoint {run.it} in {run.folder}"

        def pictures(at):
            ids = [seed * total + i for i in at]
            label = [common.hash_seed(base, "class", i) % classes if classes else -1 for i in ids]
            for *_, x0 in sample.draw(run, net, name, ids, torch.tensor(label), steps, base, self.args.batch,
                                      self.device, self.rank, self.world, run.prompts):
                yield encoders.decode(finite(x0, of), run.cfg)
        with files.fetch(ckpt.path(run.folder / "checkpoints", run.it)) as checkpoint:
            about = vars(self.args) | ckpt.pin(checkpoint) | dict(
                of=of, steps=steps, seed=seed, prompts=list(run.prompts))
        self.sums.append(run.folder / "eval" / f"{run.it:07d}_{name}_{steps}_{seed}.sums.pth")
        found = self.moments(self.sums[-1], about, total, pictures)
        return [dict(fid=distance(found[0], root(found[1]), *self.against))] if found else []


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
            next(sample.draw(run, net, name, [0], torch.tensor([0]), steps, 0, 1, device, prompts=run.prompts,
                             frames=args.frames))
            yield name, net, steps, len(calls)


def draw_all(run, net, name, label, steps, seed, args, here, first=None):
    """Samples 0, 1, ... with these labels, drawn by all ranks: (N, *shape)."""
    device, rank, world, group = here
    mine = sample.draw(run, net, name, list(range(len(label))), label, steps, seed, args.batch, device, rank,
                       world, frames=args.frames, first=first)
    mine = [(i, x) for part, _, x0 in mine for i, x in zip(part, x0)]
    drawn = dict(sum(common.everyone(mine, group), []))
    x0 = torch.stack([drawn[i] for i in range(len(label))])
    return finite(x0, f"{name} of checkpoint {run.it} in {run.folder}")


def score(run, net, name, steps, judge, args, here):
    """The row of a net at a step count: on rank 0 with its figures, the other ranks only draw."""
    known = lambda label: label if run.cfg["classes"] else torch.full_like(label, -1)           # noqa: E731
    label, figures = known(digits("train")[1][:args.samples]), []
    for seed in range(args.seeds):
        if isinstance(judge, Fid):
            figures += judge.score(run, net, name, steps, seed)
            continue
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
    return row | (dict(fid_least=min(row["fid_each"])) if "fid" in row else {})


def table(run, rows, judge):
    """The rows as text, real data below."""
    def cell(row, key, at, places):
        value, std = (v if at is None or v is None else v[at] for v in (row.get(key), row.get(f"{key}_std")))
        return "-" if value is None else f"{value:.{places}f}" + (
            "" if std is None or len(row["seeds"]) == 1 else f" ± {std:.{places}f}")
    lines = [("net", "steps", "calls", *(head for head, *_ in judge.columns))]
    for row in [*rows, *(dict(net=name) | figures for name, figures in judge.real.items())]:
        lines.append([*(str(row.get(k, "")) for k in ("net", "steps", "calls")),
                      *(cell(row, *how) for _, *how in judge.columns)])
    width = [max(map(len, column)) for column in zip(*lines)]
    head = (f"{run.folder} checkpoint {run.it} ({run.state['method']}): {rows[0]['samples']} samples, mean "
            f"± standard deviation of {len(rows[0]['seeds'])} seeds")
    told = [", ".join(judge.about.values())] if isinstance(judge, Fid) else []
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, width)).rstrip() for line in lines)
    return "\n".join([head, *told, *lines])


def main(argv):
    parser = sample.arguments("evaluate.py", __doc__, batch=500)
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--net", default="", help="student, an EMA, teacher, or several: student,ema "
                                                  "(default: first EMA, and teacher if there is one)")
    parser.add_argument("--steps", default="", help="step counts, 1,2 (default: the run's; a teacher's 18)")
    parser.add_argument("--seeds", type=int, help="samplings to average over (default 5, of a FID 1)")
    parser.add_argument("--samples", type=int, help="samples of one seed (default 1500, of a FID 50000)")
    parser.add_argument("--frames", type=int, help="frames of a clip (default: those of the data)")
    parser.add_argument("--ref", help="what FID is a distance to: mu and sigma, or images")
    parser.add_argument("--save_ref", help="where those of images go (default: eval/reference.npz)")
    parser.add_argument("--inception", help="weights file (default: torch-fidelity's, downloaded once)")
    args = parser.parse_args(argv)

    device, rank, *_, group = here = sample.start(args.device)
    judge, frozen = None, {}
    its = ckpt.scan(files.place(args.run) / "checkpoints") if args.all else []
    for it in its or [args.ckpt]:
        run = sample.load_run(args.run, it, args.guidance, print if rank == 0 else lambda text: None)
        source, student = run.state["data"].get("pairs_of", run.cfg["data"]), run.nets["student"]
        shape, run.prompts = sample.shape_of(student, args.frames), sample.read_texts(run, args, device, rank)
        fid = source not in ("digits", "moving_digits") or args.ref or args.inception or args.save_ref
        usual = dict(seeds=1, samples=50_000) if fid else dict(seeds=5, samples=1500)
        vars(args).update({k: v for k, v in usual.items() if getattr(args, k) is None})
        for key, low, high in ("seeds", 1, 1000), ("samples", 2, 10 ** 7 if fid else 1500):
            common.number(f"--{key}", getattr(args, key), low, high)
        if fid and (len(shape) == 4 or shape[0] not in (1, 3) and not run.cfg["encoders"]):
            raise BadInput(f"{run.folder} makes samples {shape}, FID is of images (C, H, W); of latents "
                           f"give --encoders, of clips sample.py --out FOLDER feeds another tool")
        rows, todo = [], [*plan(run, args, device)]
        files.make(run.folder / "eval")
        judge = judge or (Fid(run, source, args, here) if fid else Judge(args.seeds) if source == "digits"
                          else VideoJudge(shape[1], getattr(student, "chunk", 0)))
        for name, net, steps, calls in todo:
            row = frozen.get((name, steps)) or score(run, net, name, steps, judge, args, here)
            if name not in run.students and name not in run.state["nets"]:              # is scored once
                frozen[name, steps] = row
            rows.append(row | dict(calls=calls, checkpoint=run.it))
        if rank == 0:
            text = json.dumps(dict(
                run=run.folder.resolve().name, checkpoint=run.it, method=run.state["method"], data=source,
                **getattr(judge, "about", dict(
                    classifier=dict(file=f"assets/{CLASSIFIER.name}", sha256=file_hash(CLASSIFIER)))),
                sources=run.state["sources"], results=rows, real=judge.real), indent=1)
            files.write(run.folder / "eval" / f"{run.it:07d}.json", lambda f: f.write(f"{text}\n".encode()))
            print(table(run, rows, judge), flush=True)
    for file in getattr(judge, "sums", ()) if rank == 0 else ():
        files.remove(file)              # only now: with --all it may be stopped at a later checkpoint
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
