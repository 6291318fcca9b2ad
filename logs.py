"""What a run says: means over a window, metrics.jsonl, the log line, the bar, pictures, wandb."""
import contextlib
import json
import netrc
import os
import resource
import secrets
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange

import ckpt
import common
import data
import files
import resume
from nets import encoders

SPEED = ("ms_per_it", "img_per_s", "mem_gb", "reserved_gb", "gpu_util", "eta_s", "data_ms")


class Meter:
    """Means of scalars over a window and over the ranks (of "skipped" the sum); tensors stay on their device
    until flush()."""

    def __init__(self, gloo):
        self.gloo, self.sums = gloo, {}

    def add(self, values):
        for key, value in values.items():
            s, n = self.sums.get(key, (0.0, 0))
            self.sums[key] = s + torch.as_tensor(value).float().reshape(()), n + 1

    def flush(self):
        """{key: mean}; keys of the student's turns (from `loss` on) come first, whoever's turn was first."""
        ranks, sums, self.sums = common.everyone(list(self.sums), self.gloo), self.sums, {}
        keys = list(sums)
        if apart := set().union(*ranks) - set(keys).intersection(*ranks):
            raise common.BadInput(f"step() logs {', '.join(sorted(apart))} on some ranks only; log it on all")
        if not keys:
            return {}
        device = max((s.device for s, _ in sums.values()), key=lambda device: device.type != "cpu")
        values = torch.stack([s.to(device) / (1 if k == "skipped" else n) for k, (s, n) in sums.items()])
        if self.gloo is not None:
            values = common.all_mean(values)
        means = dict(zip(keys, values.tolist()))
        i = keys.index("loss") if "loss" in keys else 0
        j = next((k for k in range(i + 1, len(keys)) if keys[k].startswith("loss_")), len(keys))
        return {k: means[k] for k in keys[i:j] + keys[:i] + keys[j:]}


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
            with self.saying():
                if isinstance(self.file, Path):
                    with files.spoken("write", self.file), open(self.file, "a") as f:
                        f.write(self.lines[-1])
                else:
                    files.write(self.file, lambda f: f.write("".join(self.lines).encode()))
            self.report(lambda wandb: wandb.log(values, step=it))

    def picture(self, it, images, file, columns):
        with self.saying():
            save_grid(images, file, columns)
            with files.fetch(file) as here:
                self.report(lambda wandb: wandb.log({"samples": wandb.Image(str(here))}, step=it))

    @contextlib.contextmanager
    def saying(self):
        try:
            yield
        except common.BadInput as e:
            self.say.warn(f"WARNING: {e}")

    def report(self, call):
        """call(wandb). An error there (its process had a SIGTERM, too) ends the reporting, not the run."""
        try:
            if self.wandb:
                call(self.wandb)
        except Exception as e:
            self.wandb = None
            self.say.warn(f"WARNING: wandb ends here ({type(e).__name__}: {e}); metrics.jsonl goes on")

    def has(self, it, prefix):
        """True on every rank if a line of `it` has a key with that prefix."""
        entries = map(json.loads, self.lines)
        there = any(e["it"] == it and any(k.startswith(prefix) for k in e) for e in entries)
        return common.from_rank0(there, self.gloo)


class Printer:
    """Lines on stdout, a bar on a terminal. Survives a closed pipe: the run matters more than its output."""

    def __init__(self, level, rank, total):
        self.level, self.rank, self.total, self.bar = level, rank, total, None

    def __call__(self, text, level="info"):
        if (self.rank and self.level != "debug") or (level == "info" and self.level == "warning"):
            return
        with contextlib.suppress(OSError, ValueError):
            text = f"[rank {self.rank}] {text}" if self.level == "debug" else text
            self.bar.write(text) if self.bar else print(text, flush=True)

    def warn(self, text):
        self(text, "warning")

    def progress(self, done):
        """Moves the bar; None ends it."""
        if self.rank == 0 and sys.stderr.isatty() and self.level != "warning":
            with contextlib.suppress(OSError, ValueError):
                if self.bar is None:
                    from tqdm import tqdm
                    self.bar = tqdm(total=self.total, initial=done, dynamic_ncols=True, unit="it")
                elif done is None:
                    self.bar = self.bar.close()
                else:
                    self.bar.update(done - self.bar.n)


# ---- lines of the log --------------------------------------------------------------------------------------

def with_rates(values, batch_size, left, device):
    """Means of a window, with its speed, the time for the iterations left, memory and, on CUDA, the peak of
    the allocator and gpu_util, percent of the last second with a kernel (nvidia-ml-py; not under MIG)."""
    s_per_it = values["ms_per_it"] / 1e3
    values |= dict(img_per_s=batch_size / s_per_it, eta_s=left * s_per_it, mem_gb=memory_gb(device))
    if device.type == "cuda":
        values["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2 ** 30
        with contextlib.suppress(Exception):
            values["gpu_util"] = torch.cuda.utilization(device)
    return values


def log_line(done, total, values):
    """it 001200/010000 | loss 0.4 dm 0.4 | dsm 0.08 | norm 0.83 | lr 1.0e-05 | 412 ms/it | ... | eta 1h02m"""
    groups = {"loss": [], "norm": [], "lr": []}
    for key, value in values.items():
        if key not in SPEED:
            kind = next((k for k in ("norm", "lr") if key.startswith(k)), "loss")
            kind = "norm" if key in ("skipped", "scale") else kind
            groups[kind].append(f"{key} {value:{'.1e' if kind == 'lr' else '.4g'}}")
    m, s = divmod(int(values["eta_s"]), 60)
    width = max(6, len(str(total)))
    return " | ".join([
        f"it {done:0{width}d}/{total:0{width}d}", *(" ".join(group) for group in groups.values() if group),
        f"{values['ms_per_it']:.0f} ms/it", f"data {values['data_ms']:.1f} ms",
        f"{values['img_per_s']:.0f} img/s", f"{values['mem_gb']:.1f} GB",
        *([f"gpu {values['gpu_util']:.0f} %"] if "gpu_util" in values else []),
        f"eta {m // 60}h{m % 60:02d}m" if m >= 60 else f"eta {m}m{s:02d}s"])


def memory_gb(device):
    """The peak of the allocator on CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2 ** 30 if sys.platform == "darwin" else 2 ** 20)


def config_lines(cfg, changed):
    return ["config (* = set by preset or command line)"] + [
        f"* {k} = {v!r}   (default {changed[k]!r})" if k in changed else f"  {k} = {v!r}"
        for k, v in cfg.items()]


def data_line(cfg, dataset, net, device):
    """Size and spread of the data: a wrong value range (0..255, latents scaled twice) shows here first."""
    n, device = (8, device) if cfg["encoders"] else (128, "cpu")
    some = [dataset.get(i)[0] for i in range(0, len(dataset), max(1, len(dataset) // n))]
    raw = {dataset.kind: torch.stack([torch.as_tensor(image.copy()) for image in some]),
           "label": torch.zeros(len(some)).long() - 1, "id": torch.arange(len(some))}
    std = encoders.encode(raw, cfg, device)["x0"].std().item()
    return (f"data {cfg['data']}: {len(dataset):,} samples of {tuple(dataset.shape)}, "
            f"{dataset.classes} classes, std {std:.3f}" +
            (f" (the net assumes {net.sigma_data})" if hasattr(net, "sigma_data") else "") +
            ("\nWARNING: latents should spread by about 1; raw ones of Stable Diffusion's VAE need "
             "--data_scale 0.18215" if dataset.kind != "image" and not 0.3 < std < 3 else ""))


def describe(cfg, changed, plan, world, start=None, opts={}, owners={}):
    """The first lines of a log: config, parameters, batch arithmetic, optimizers and the nets that each owns;
    without a start what --dry_run prints before memory."""
    lines, each = config_lines(cfg, changed), cfg["batch_size"] // (world * cfg["accum"])
    for name, net in plan.nets.items():
        sizes = {k: p.numel() for k, p in net.named_parameters()}
        lines.append(f"net {name}: {sum(sizes.values()):,} parameters, "
                     f"{sum(sizes[k] for k in plan.trainable[name]):,} trainable")
    shards = f", nets sharded over {cfg['shard_size'] or world}" if cfg["parallel"] == "fsdp" else ""
    batch = f"batch {cfg['batch_size']} = {each} per rank x accum {cfg['accum']} x {world} ranks{shards}"
    if start is None:
        samples = cfg["max_iter"] * cfg["batch_size"]
        return "\n".join([*lines, f"{batch}; {cfg['max_iter']} iterations = {samples:,} samples",
                          f"output {plan.folder}"])
    lines += [f"optimizer {phase}: {type(opt).__name__} of {', '.join(owners[phase])}, {plan.turns[phase]} "
              f"turns" for phase, opt in opts.items()]
    device = f"{plan.device}, {dist.get_backend()}" if world > 1 else plan.device
    return "\n".join(filter(None, [
        *lines, f"{batch} | {device}, {torch.get_num_threads()} threads | {cfg['amp'] or 'fp32'}",
        f"{'starting' if start == 0 else 'continuing'} at iteration {start}",
        data_line(cfg, plan.dataset, plan.nets["student"], plan.device), resume.scheduler.resume_details()]))


def warnings(cfg, plan, opts, sources):
    """What works, but may not be meant."""
    lines = [f"WARNING: --max_iter {cfg['max_iter']} ends before the first turn of phase {phase!r}, so what "
             f"it trains stays as it is" for phase in opts if not plan.turns[phase]]
    meta, pin = getattr(plan.dataset, "meta", {}), sources.get(cfg["teacher"], {})
    if any(pin.get(k, was) != was for k, was in meta.get("weights", {}).items()):
        lines.append(f"WARNING: the pairs {cfg['data']} are of --net {meta['net']} --teacher "
                     f"{meta['teacher']}, other weights than this run's --teacher {cfg['teacher']}")
    return lines + encoders.cut(data.captions(plan.dataset) if cfg["encoders"] else (), cfg)


def ending(cfg, plan, done, last):
    """The last lines of a log."""
    file, grid = ckpt.path(plan.folder / "checkpoints", done), plan.folder / "samples" / f"{done:07d}.png"
    if done < last:
        return f"asked to stop: {done} iterations are in {file}; the same command continues there"
    if done < cfg["max_iter"]:
        return f"stopped at --stop_at {cfg['stop_at']}: {file}"
    digits = plan.fingerprint.get("pairs_of", cfg["data"]) in ("digits", "moving_digits")
    return (f"done: {file}\nsamples: {grid if cfg['sample_every'] else 'none'}" +
            f"\nscore it: python evaluate.py {shlex.quote(str(plan.folder))}" * digits)


# ---- pictures, wandb ---------------------------------------------------------------------------------------

def save_png(picture, file, about={}):
    """A PIL picture as PNG, with {key: value} as its text."""
    from PIL.PngImagePlugin import PngInfo
    info = PngInfo()
    for key, value in about.items():
        info.add_text(key, str(value))
    files.write(file, lambda f: picture.save(f, format="PNG", pnginfo=info))


def save_gif(pictures, file, fps, about={}):
    """PIL pictures as an animated GIF that repeats, with {key: value} as its comment."""
    told = "\n".join(f"{key}: {value}" for key, value in about.items())
    how = dict(format="GIF", save_all=True, duration=1000 / fps, loop=0, comment=told.encode())
    files.write(file, lambda f: pictures[0].save(f, append_images=pictures[1:], **how))


def picture(image):
    """uint8 (C, H, W) as a PIL picture."""
    from PIL import Image
    return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())


def sheet(images, columns, pad=1):
    """uint8 images (N, C, H, W), row by row, as one picture; small ones enlarged: a pixel can be seen."""
    images = F.pad(images.cpu(), (pad, 0, pad, 0, 0, 0, 0, -len(images) % columns), value=255)
    whole = rearrange(images, "(r q) c h w -> c (r h) (q w)", q=columns)
    whole, zoom = picture(F.pad(whole, (0, pad, 0, pad), value=255)), max(1, 64 // (images.shape[2] - pad))
    return whole.resize((whole.width * zoom, whole.height * zoom), 0)       # 0: nearest


def save_grid(images, file, columns, about={}):
    """uint8 images (N, C, H, W) as a PNG of their sheet. Clips (N, C, F, H, W) are strips of their frames."""
    images = images.movedim(2, -2).flatten(3) if images.ndim == 5 else images
    save_png(sheet(images, columns), file, about)


def start_wandb(cfg, folder, say):
    """wandb with a run that continues under its old id, or None with one line why. Never prompts."""
    host, key = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"), os.environ.get("WANDB_API_KEY")
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        key = key or netrc.netrc().authenticators(host.split("//")[-1].split("/")[0])
    mode = cfg["wandb"] or os.environ.get("WANDB_MODE") or ("online" if key else "disabled")
    if mode == "disabled" or (mode == "online" and not key):
        say("wandb disabled" + ("" if cfg["wandb"] == "disabled" else
                                ": no key (WANDB_API_KEY or ~/.netrc); metrics are in metrics.jsonl"))
        return None
    try:
        import wandb
        id_file = folder / "wandb_id.txt"
        run_id = (files.read(id_file) or b"").decode().strip() or secrets.token_hex(4)
        local = str(folder) if isinstance(folder, Path) else None       # None = $WANDB_DIR, or where we are
        wandb.init(project=cfg["project"], group=cfg["group"], name=cfg["name"], id=run_id, resume="allow",
                   mode=mode, dir=local, config=cfg, settings=wandb.Settings(silent=True, init_timeout=30))
        files.write(id_file, lambda f: f.write(f"{run_id}\n".encode()))
        return wandb
    except Exception as e:                             # missing package, no network: training goes on without
        say(f"wandb disabled: {str(e).splitlines()[0] if str(e) else type(e).__name__} (pip install wandb, "
            f"or --wandb offline)", "warning")
        return None
