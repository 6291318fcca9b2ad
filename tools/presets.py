"""Every preset: parameters and memory of its nets at full size; with --steps the time of a step of tiny ones.

    python tools/presets.py [dmd2/cifar10 sft ...] [--ranks 8] [--fits] [--steps]

A row: method, preset, net; millions of parameters of the student, of all nets; GB per rank of weights, two
moments, averages and gradients; with --fits what a micro-step adds (memory.py; seconds to minutes a row) and
the smallest device that holds all; with --steps the CPU time of step and backward pass of each
phase, 4 samples, nets shrunk as tests/test_recipes.py does it. Nothing is downloaded or read.
"""
import importlib
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common, memory, startup, train, trainer  # noqa: E401, E402


def names():
    """(method, preset) of all: a method's own, then those of recipes.py."""
    methods = {p.stem: train.load_method(p) for p in sorted((ROOT / "methods").glob("*.py"))}
    own = [(name, preset) for name, method in methods.items() for preset in getattr(method, "presets", {})]
    return [*own, *train.recipes.presets]


def load(name, preset, ranks=8):
    """(method, config with the classes that its net has, nets on the meta device)."""
    method = train.load_method(ROOT / "methods" / f"{name}.py")
    cfg = train.resolve(method, ["--preset", preset])[0]
    startup.check(cfg, ranks, trainer.defaults)
    family, size = cfg["net"].partition(",")[0].split(":")
    known = importlib.import_module(f"nets.{family}").sizes[size]
    cfg["classes"] = cfg["classes"] and known.get("label_dim", 0)       # -1 = those of the data
    with torch.device("meta"):
        return method, cfg, method.build(cfg)


def main(argv):
    parser = train.Parser(usage=__doc__)
    parser.add_argument("presets", nargs="*", help="METHOD/PRESET, or a METHOD for all of its own")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--fits", action="store_true")
    parser.add_argument("--steps", action="store_true")
    args, every = parser.parse_args(argv), names()
    for asked in args.presets:
        common.known("preset", asked, {m for m, _ in every} | {f"{m}/{p}" for m, p in every})
    if args.steps:
        sys.path.insert(0, str(ROOT / "tests"))
        import test_recipes
    print(f"{'method':12} {'preset':19} {'net':32} student M  nets M | weights moments   ema "
          f"grads{'  step' * args.fits} = GB, {args.ranks} ranks")
    for name, preset in every:
        if not args.presets or {name, f"{name}/{preset}"} & {*args.presets}:
            method, cfg, nets = load(name, preset, args.ranks)
            student, total = (sum(p.numel() for net in some for p in net.parameters()) / 1e6
                              for some in ([nets["student"]], nets.values()))
            gb, why = memory.per_rank(method, cfg, nets, args.ranks, args.fits)
            steps = test_recipes.steps(method, *test_recipes.shrunk(method, cfg)) if args.steps else ()
            print(f"{name:12} {preset:19} {cfg['net'].partition(',')[0]:32} {student:9.1f} {total:7.0f} | "
                  f"{' '.join(f'{v:6.2f}' for v in gb.values())} = {sum(gb.values()):.1f}",
                  *([why or memory.fits(gb)] if args.fits else ()),
                  *(f"{phase} {ms:.0f} ms" for phase, ms, *_ in steps), sep="  ", flush=True)


if __name__ == "__main__":
    train.run(main)
