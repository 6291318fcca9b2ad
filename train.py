"""Train a method file.

    torchrun train.py methods/dmd2.py                             the embedded digits, minutes on a laptop
    torchrun train.py methods/dmd2.py --max_iter 10000 --lr 1e-5  any config key, --key value or --key=value
    torchrun --nproc_per_node 8 train.py methods/dmd2.py --preset cifar10 --data cifar10.zip --teacher edm.pth
    python train.py methods/dmd2.py --help | --dry_run            every key with its comment | plan, no work

Order of authority: trainer defaults < the method's config < preset < command line. Bad input ends with one
sentence and exit code 2 before any work (torchrun itself then returns 1).
"""
import resume
if __name__ == "__main__":
    resume.install()                # before torch is imported: a signal must not kill a run that is starting

import argparse
import difflib
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import logs
import recipes
import trainer
from common import BadInput
from startup import like, parse

OPTIONS = ("help", "dry_run", "preset")
REQUIRED = ("config", "build", "init", "optimizers", "step", "sample")


def load_method(path):
    """Import a method file by path, from any folder, and check that it has what the trainer calls."""
    path = Path(path)
    try:
        source = path.read_bytes()          # once: what runs is what method.py of the run folder keeps
        code = compile(source, str(path), "exec")
    except OSError as e:
        known = ", ".join(os.path.relpath(p) for p in sorted((trainer.ROOT / "methods").glob("*.py")))
        problem = "does not exist" if isinstance(e, FileNotFoundError) else f"cannot be read ({e.strerror})"
        raise BadInput(f"method file {path} {problem}; there are {known}") from None
    except SyntaxError as e:
        raise BadInput(f"{path} line {e.lineno}: {e.msg}") from None
    method = ModuleType(path.stem)
    method.__file__, method.source, method.path = str(path.resolve()), source, path.resolve()
    method.phase = lambda it, cfg: "student"
    exec(code, vars(method))
    lacking = [n for n in REQUIRED if not hasattr(method, n)]
    if lacking:
        raise BadInput(f"{path} lacks {', '.join(lacking)}; a method file has {', '.join(REQUIRED)} "
                       f"(and presets, phase where needed), see methods/sft.py")
    return method


def resolve(method, argv):
    """(config, {key: value before} of what preset and command line set, {option: value}). Raises BadInput."""
    where = os.path.relpath(method.path) if method.path.is_relative_to(Path.cwd()) else str(method.path)
    cfg, given, options = dict(trainer.defaults), {}, {}

    def check(key, keys, where):
        if key not in keys:
            near = difflib.get_close_matches(key, [*keys, *OPTIONS], n=1, cutoff=0.5)
            hint = f"did you mean --{near[0]}?" if near else "--help lists them"
            raise BadInput(f"--{key} is not a config key of {where}; {hint}")

    for key, value in method.config.items():
        if not isinstance(value, (int, float, str, tuple)):
            raise BadInput(f"{where}: config[{key!r}] is a {type(value).__name__}; use int, float, bool, "
                           f"str, tuple")
        cfg[key] = like(cfg.get(key, value), value, f"{where}: config has {key} = {value!r}, which")
    base, args = dict(cfg), list(argv)
    while args:
        arg = args.pop(0)
        if not arg.startswith("--"):
            raise BadInput(f"{arg!r} is not an option; write --key value")
        key, equals, text = arg[2:].partition("=")
        if key in ("help", "dry_run") and not equals:
            options[key] = True
            continue
        check(key, [*cfg, "preset"], where)
        if not equals and (not args or args[0].startswith("--")):
            raise BadInput(f"--{key} needs a value; write one that starts with -- as --{key}=VALUE")
        text = text if equals else args.pop(0)
        if key in given or key in options:
            raise BadInput(f"--{key} is given twice; keep one")
        if key == "preset":
            options[key] = text
        else:
            given[key] = parse(key, text, cfg[key], where)
    if "preset" in options:
        name = options["preset"]
        presets = {n: p for (m, n), p in recipes.presets.items() if m == cfg["recipes"]}
        presets |= getattr(method, "presets", {})
        if name not in presets:
            raise BadInput(f"{where} has no preset {name!r}; it has {', '.join(sorted(presets)) or 'none'}")
        for key, value in presets[name].items():
            check(key, cfg, f"{where} (preset {name})")
            cfg[key] = like(cfg[key], value, f"{where}: preset {name} has {key} = {value!r}, which")
    cfg |= given
    data = Path(os.path.abspath(cfg["data"]))                       # of "." and ".." too
    data = (data.parent if "{" in data.name else data).name or "root"       # {000..010}.tar: of its folder
    cfg["group"] = cfg["group"] or re.sub(r"(?<=.)\.(zip|npz)$", "", data)
    cfg["name"] = cfg["name"] or method.path.stem + (f"_{options['preset']}" if "preset" in options else "")
    return cfg, {k: base[k] for k in cfg if cfg[k] != base[k]}, options


def comments(source, name):
    """{key: comment of its line} of `name = dict(` ... `)` in the bytes of a source file."""
    found = {}
    block = re.search(rf"^{name} *= dict\(\n(.*?)^\)", source.decode(), re.M | re.S)
    for line in block[1].splitlines() if block else ():
        code, _, comment = line.partition("  # ")
        found |= dict.fromkeys(re.findall(r"(\w+)=", code), comment)
    return found


def show_help(method, cfg):
    print(f"{(method.__doc__ or '').strip()}\n\nOptions: --help, --dry_run, --preset NAME\n")
    trainers = comments(Path(trainer.__file__).read_bytes(), "defaults")
    own = comments(method.source, "config")
    others = [key for key in trainer.defaults if key not in method.config]
    for title, keys in ("this method", method.config), ("the trainer", others):
        print(f"Config of {title}:")
        for key in keys:
            value = cfg[key] if cfg[key] not in ("", ()) else '""'
            print(f"  --{key:<16} {value!s:<24} {own.get(key) or trainers.get(key, '')}")


class Parser(argparse.ArgumentParser):
    """Options of the other programs; what it cannot read is a BadInput."""

    def error(self, message):
        raise BadInput(f"{message}; --help lists the options")


def quit_with(sentence):
    """Print the sentence once, from rank 0, and exit with 2. The others wait for it: torchrun ends every
    worker when the first one fails. If nobody ends this one, it alone had something to say."""
    until = time.time() + (0 if os.environ.get("RANK", "0") == "0" else 10)
    while time.time() < until and not resume.requested():
        time.sleep(0.05)
    if time.time() >= until:
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)                     # not sys.exit: threads and process groups must not hold up the answer


def main(argv):
    if not argv or argv in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0 if argv else 2)
    method = load_method(argv[0])
    cfg, changed, options = resolve(method, argv[1:])
    if "help" in options:
        return show_help(method, cfg)
    try:
        trainer.train(method, cfg, changed, dry_run="dry_run" in options)
    except BadInput:
        if "dry_run" in options and os.environ.get("RANK", "0") == "0":     # what a preset sets, even so
            print("\n".join(logs.config_lines(cfg, changed)), flush=True)
        raise


def run(main):
    """Call a script's main; bad input ends it with one sentence and exit code 2."""
    if hasattr(sys.stdout, "reconfigure"):              # an ASCII terminal must not end it at a name or a ±
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
    except BadInput as e:
        quit_with(e)


if __name__ == "__main__":
    run(main)
