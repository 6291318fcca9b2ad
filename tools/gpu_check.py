"""Does it work on this GPU, and how fast? Short runs of train.py in every precision and kind of parallelism.

    python tools/gpu_check.py [--only WORD] [--quick]       --quick: rehearses them on the CPU, a tiny net

Weights and images are random. A run must end well, its losses be finite, its validation before the first
update that of the first (float32) run of the method to 3 %; `resume` compares a stopped and resumed run with
a straight one, bit for bit. ms and GB are of the last log line. A failure leaves its last words, exit code 1.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ckpt, common  # noqa: E401, E402

COMMON = "--warmup=0 --sample_every=0 --val_every=100000 --log_every=10 --wandb=disabled --group=check"
BF16, FP16, FSDP, COMPILE = "--amp=bf16", "--amp=fp16", "--parallel=fsdp", "--compile=true"
SCM = "--tangent=none --tangent_warmup=0"
RUNS = {        # name: (method, arguments), what matters most first
    "fp32": ("dmd2", ""), "bf16": ("dmd2", BF16), "fp16": ("dmd2", FP16), "fsdp": ("dmd2", FSDP),
    "fsdp bf16": ("dmd2", f"{FSDP} {BF16}"), "resume": ("dmd2", ""),
    "resume fsdp bf16 async": ("dmd2", f"{FSDP} {BF16} --async_save=true"),
    "jvp": ("scm", SCM), "jvp bf16": ("scm", f"{SCM} {BF16}"), "jvp fsdp": ("scm", f"{SCM} {FSDP}"),
    "offload recompute": ("dmd2", f"{FSDP} {BF16} --offload=true --recompute=true"),
    "compiled": ("dmd2", COMPILE), "compiled fsdp bf16": ("dmd2", f"{COMPILE} {FSDP} {BF16}")}


def train(method, name, words, ranks, env):
    """Runs train.py; -> (its folder, lines of its metrics). AssertionError if it fails."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *start, "train.py", f"methods/{method}.py", f"--name={name}",
                           *words.split()], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stderr.splitlines() or ["no words"])[-1][:150]
    folder = Path(env["FEWSTEP_OUTPUT_ROOT"], "fewstep", "check", name)
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(name, method, words, known, ranks, env):
    """The verdict on one run. known: {method: its validation in float32}."""
    if name.startswith("resume"):
        words += " --deterministic=true"
        train(method, f"{name} halves", f"{words} --stop_at=10", ranks, env)
        folders = [train(method, f"{name} {which}", words, ranks, env)[0] for which in ("straight", "halves")]
        nets = [ckpt.read(ckpt.resolve(f"{folder}#student")) for folder in folders]
        apart = [k for k in nets[0] if not torch.equal(nets[0][k], nets[1][k])]
        assert not apart, f"{len(apart)} of {len(nets[0])} tensors differ, as {apart[-1]}"
        return f"{len(nets[0])} tensors bit for bit"
    first, *rest = train(method, name, words, ranks, env)[1]
    losses = [v for line in (first, *rest) for k, v in line.items() if "loss" in k]
    off = abs(first["val/student/loss"] / known.setdefault(method, first["val/student/loss"]) - 1)
    last = [line for line in rest if "ms_per_it" in line][-1]
    assert all(map(math.isfinite, losses)) and off < 0.03, f"losses {losses[:4]} .., first off by {off:.2g}"
    return f"{last['ms_per_it']:.1f} ms, {last['mem_gb']:.2f} GB, loss {losses[-1]:.4g}, first off {off:.0e}"


def main(argv=None):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    todo, failed, known = {name: run for name, run in RUNS.items() if args.only in name}, 0, {}
    if not args.quick and not torch.cuda.is_available():
        sys.exit("no CUDA device; --quick rehearses the runs on this CPU")
    device, net, side, ranks = (("cpu", "toy:tiny", 8, 1) if args.quick else
                                ("cuda", "edm:cifar10", 32, torch.cuda.device_count()))
    with tempfile.TemporaryDirectory() as root:
        draw, teacher = np.random.default_rng(0), common.make_net(net, label_dim=10)
        image = draw.integers(0, 256, (1024, side, side, 1 if args.quick else 3), np.uint8)
        np.savez(f"{root}/random.npz", image=image, label=draw.integers(0, 10, 1024))
        for p in teacher.parameters():                  # no weight is 0
            p.data.add_(0.02 * torch.randn_like(p))
        ckpt.save(Path(root, "teacher.pth"), teacher.state_dict())
        every = (f"{COMMON} --max_iter={20 if args.quick else 60} --batch_size={8 if args.quick else 128} "
                 f"--device={device} --net={net} --data={root}/random.npz --teacher={root}/teacher.pth ")
        env = dict(FEWSTEP_OUTPUT_ROOT=root, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        for name, (method, words) in todo.items():
            began = time.monotonic()
            try:
                said = check(name, method, every + words, known, ranks, env)
            except (AssertionError, common.BadInput) as e:
                said, failed = f"FAILED: {e}", failed + 1
            print(f"{name:<24}{time.monotonic() - began:4.0f} s  {said}", flush=True)
    print(f"{len(todo)} runs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
