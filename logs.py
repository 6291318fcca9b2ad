"""What a run says: means over a window, metrics.jsonl, log lines, wandb, --dry_run."""
import contextlib
import json
import netrc
import os
import resource
import secrets
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
import common
import files
import resume
import watch
from nets import encoders


class Meter:
    """Means of scalars over a window and the ranks, of "skipped" the sum; tensors stay on their device."""

    def __init__(self, gloo):
        self.gloo, self.sums = gloo, {}

    def add(self, values):
        for key, value in values.items():
            s, n = self.sums.get(key, (0.0, 0))
            self.sums[key] = s + torch.as_tensor(value).detach().float().reshape(()), n + 1

    def flush(self):
        """{key: mean}, in the order in which the keys came."""
        keys, *others = common.everyone(list(self.sums), self.gloo)
        apart = set().union(keys, *others) - set(keys).intersection(*others)
        if apart:
            raise common.BadInput(f"step() logs {', '.join(sorted(apart))} on some ranks only; log it on all")
        sums, self.sums = self.sums, {}
        device = max((s.device for s, _ in sums.values()), key=lambda device: device.type != "cpu")
        values = torch.stack([sums[k][0].to(device) / (1 if k == "skipped" else sums[k][1]) for k in keys])
        values = values if self.gloo is None else common.all_mean(values)
        return dict(zip(keys, values.tolist()))


class Recorder:
    """metrics.jsonl, wandb and pictures, written by rank 0. What cannot be written is said, and no more: the
    next checkpoint will end the run. Objects of a store cannot grow: there the whole file is written anew."""

    def __init__(self, folder, wandb, rank, gloo, say):
        self.file, self.wandb, self.say = folder / "metrics.jsonl", wandb, say
        self.rank, self.gloo = rank, gloo
        self.lines = (files.read(self.file) or b"").decode().splitlines(True) if rank == 0 else []

    def __call__(self, it, values):
        if self.rank == 0:
            self.lines.append(json.dumps(dict(it=it) | values) + "\n")
            try:
                if isinstance(self.file, Path):
                    with open(self.file, "a") as f:
                        f.write(self.lines[-1])
                else:
                    files.write(self.file, lambda f: f.write("".join(self.lines).encode()))
            except (OSError, common.BadInput) as e:
                self.say(f"WARNING: {e}", "warning")
            self.report(lambda wandb: wandb.log(values, step=it))

    def picture(self, it, images, file, columns):
        try:
            save_grid(images, file, columns)
            with files.fetch(file) as here:
                self.report(lambda wandb: wandb.log({"samples": wandb.Image(str(here))}, step=it))
        except common.BadInput as e:
            self.say(f"WARNING: {e}", "warning")

    def report(self, call):
        """call(wandb). An error there (its process had a SIGTERM, too) ends the reporting, not the run."""
        try:
            if self.wandb:
                call(self.wandb)
        except Exception as e:
            self.wandb = None
            self.say(f"WARNING: wandb ends here ({type(e).__name__}: {e}); metrics.jsonl goes on", "warning")

    def has(self, it, prefix):
        """True on every rank if a line of `it` has a key with that prefix."""
        keys = [k for line in self.lines if (entry := json.loads(line))["it"] == it for k in entry]
        return common.from_rank0(any(k.startswith(prefix) for k in keys), self.gloo)


class Printer:
    """Lines on stdout. Survives a closed pipe: the run matters more than its output."""

    def __init__(self, level, rank):
        self.level, self.rank = level, rank

    def __call__(self, text, level="info"):
        if (self.rank and self.level != "debug") or (level == "info" and self.level == "warning"):
            return
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {self.rank}] {text}" if self.level == "debug" else text, flush=True)

    def warn(self, text):
        self(text, "warning")


# ---- lines of the log --------------------------------------------------------------------------------------

CLOCK = dict(ms_per_it="{:.0f} ms/it", data_ms="data {:.1f} ms", img_per_s="{:.0f} img/s", mem_gb="{:.1f} GB",
             gpu_util="gpu {:.0f} %", reserved_gb="{:.1f} GB reserved", eta_s="eta {:.0f} s")


def with_rates(values, batch_size, left, device):
    """Means of a window, with its speed, the time for the iterations left, memory and the use of a GPU."""
    s_per_it = values["ms_per_it"] / 1e3
    return values | dict(img_per_s=batch_size / s_per_it, mem_gb=memory_gb(device),
                         **watch.device_values(device), eta_s=left * s_per_it)


def log_line(done, total, values):
    """it 001200/010000 | loss 0.4 dm 0.4 norm 0.83 lr 1e-05 | 412 ms/it | ... | eta 3720 s"""
    own = " ".join(f"{key} {value:.4g}" for key, value in values.items() if key not in CLOCK)
    clock = (text.format(values[key]) for key, text in CLOCK.items() if key in values)
    return " | ".join([f"it {done:06d}/{total:06d}", own, *clock])


def memory_gb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2 ** 30 if sys.platform == "darwin" else 2 ** 20)


def config_lines(cfg, changed):
    return ["config (* = set by preset or command line)"] + [
        f"* {k} = {v!r}   (default {changed[k]!r})" if k in changed else f"  {k} = {v!r}"
        for k, v in cfg.items()]


def head(cfg, changed, nets, trainable, world):
    """What a run and a dry run begin with: config, parameters, batch arithmetic, memory."""
    lines, floats = config_lines(cfg, changed), 0
    for name, net in nets.items():
        sizes = {k: p.numel() for k, p in net.named_parameters()}
        size, train = sum(sizes.values()), sum(sizes[k] for k in trainable[name])
        floats += size + 3 * train + size * len(cfg["ema"]) * (name == "student")
        lines.append(f"net {name}: {size:,} parameters, {train:,} trainable")
    each = cfg["batch_size"] // (world * cfg["accum"])
    return [*lines, f"batch {cfg['batch_size']} = {each} per rank x accum {cfg['accum']} x {world} ranks",
            f"{4 * floats / 2 ** 30:.2f} GB for weights, gradients, two moments and {len(cfg['ema'])} EMA in "
            f"float32, in all ranks that share one copy; activations come on top"]


def describe(cfg, nets, trainable, opts, names, plan, world, start, changed):
    """The first lines of a log. names: {parameter: "net.key"}. The spread of the data shows a wrong range of
    values (0..255, latents scaled twice) first."""
    lines, data = head(cfg, changed, nets, trainable, world), plan.dataset
    for phase, opt in opts.items():
        owns = sorted({names[p].split(".")[0] for g in opt.param_groups for p in g["params"]})
        lines.append(f"optimizer {phase}: {type(opt).__name__} of {owns}, {plan.turns[phase]} turns")
    some = [torch.tensor(data.get(i)[0]) for i in range(0, len(data), max(1, len(data) // 128))]
    raw = dict(image=torch.stack(some), label=torch.full((len(some),), -1), id=torch.arange(len(some)))
    std = encoders.encode(raw, cfg, "cpu")["x0"].std()
    return "\n".join([
        *lines, f"data {cfg['data']}: {len(data):,} samples of {tuple(data.shape)}, {data.classes} classes, "
        f"std {std:.3f} (the net assumes {getattr(nets['student'], 'sigma_data', 'none')})",
        f"{plan.device}{f', {dist.get_backend()}' if world > 1 else ''}, {cfg['amp'] or 'fp32'}, "
        f"{'continuing' if start else 'starting'} at iteration {start} {resume.scheduler.resume_details()}"])


def ending(cfg, plan, done, last):
    """The last lines of a log."""
    file, grid = ckpt.path(plan.folder / "checkpoints", done), plan.folder / "samples" / f"{done:07d}.png"
    if done < cfg["max_iter"]:
        why = "asked to stop" if done < last else "stopped at --stop_at"
        return f"{why}: {done} iterations are in {file}"
    digits = plan.fingerprint.get("pairs_of", cfg["data"]) == "digits"
    return (f"done: {file}" + f"\nsamples: {grid}" * bool(cfg["sample_every"]) +
            f"\nscore it: python evaluate.py {plan.folder}" * digits)


# ---- pictures, wandb ---------------------------------------------------------------------------------------

def save_png(picture, file, about={}):
    """A PIL picture as PNG, with {key: value} as its text."""
    from PIL.PngImagePlugin import PngInfo
    info = PngInfo()
    for key, value in about.items():
        info.add_text(key, str(value))
    files.write(file, lambda f: picture.save(f, format="PNG", pnginfo=info))


def save_grid(images, file, columns, about={}):
    """uint8 images (N, C, H, W) as one PNG, row by row; small ones enlarged so that a pixel can be seen."""
    from PIL import Image
    n, c, h, w = images.shape
    rows, zoom = -(-n // columns), max(1, 64 // h)
    sheet = torch.full((c, rows * (h + 1) + 1, columns * (w + 1) + 1), 255, dtype=torch.uint8)
    for i, image in enumerate(images.cpu()):
        y, x = 1 + i // columns * (h + 1), 1 + i % columns * (w + 1)
        sheet[:, y:y + h, x:x + w] = image
    picture = Image.fromarray(sheet.permute(1, 2, 0).squeeze(-1).numpy())
    save_png(picture.resize((picture.width * zoom, picture.height * zoom), Image.NEAREST), file, about)


def start_wandb(cfg, folder, say):
    """wandb with a run that continues under its old id, or None with one line why. Never prompts."""
    mode, key = cfg["wandb"] or os.environ.get("WANDB_MODE") or "online", os.environ.get("WANDB_API_KEY")
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        key = key or netrc.netrc().authenticators("api.wandb.ai")
    if mode == "disabled" or (mode == "online" and not key):
        return say("wandb disabled" + ": no key (WANDB_API_KEY or ~/.netrc)" * (mode == "online"))
    try:
        import wandb
        id_file = folder / "wandb_id.txt"
        run_id = (files.read(id_file) or b"").decode().strip() or secrets.token_hex(4)
        wandb.init(project=cfg["project"], group=cfg["group"], name=cfg["name"], id=run_id, resume="allow",
                   mode=mode, dir=str(folder) if isinstance(folder, Path) else None, config=cfg,
                   settings=wandb.Settings(silent=True, init_timeout=30))
        files.write(id_file, lambda f: f.write(f"{run_id}\n".encode()))
        return wandb
    except Exception as e:                             # missing package, no network: training goes on without
        say(f"wandb disabled ({type(e).__name__}: {e}); pip install wandb, or --wandb offline", "warning")
