"""Train and score every method on the digits, at rest and moving; rewrite the README's tables and
assets/results.json.

    python tools/table.py --jobs 2           every row, two methods at a time, one thread each: two hours
    python tools/table.py                    one after the other
    python tools/table.py cm scm             these rows; the others keep their figures

Runs are outputs/table/digits/NAME (moving: table/moving_digits) and continue where they were; delete one to
train it again. NAME.log beside a run is what it said. Figures are those of evaluate.py (5 seeds of 1,500
samples) for its first EMA, written as they come; minutes are those of the iterations. causal_sft is the
shipped teacher, as causal_kd's run holds it.
"""
import json
import os
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common, train  # noqa: E401, E402

RESULTS, README = ROOT / "assets" / "results.json", ROOT / "README.md"
OUT = Path(os.environ.get("FEWSTEP_OUTPUT_ROOT", ROOT / "outputs")).absolute() / "table"
each = [(f"{n}", ["--steps", f"{n}"], f"{n}") for n in (1, 2, 4)]       # one run for each step count
once = [("", [], "1,2,4")]                                              # one run, sampled at each
# method: [(suffix of the run's name, arguments, step counts to score)]
RUNS = dict(sft=[("", [], "18")], kd=each, cm=once, scm=once, mean_flow=once, dmd2=each, f_distill=each,
            ladd=each, tcm=[("", ["--preset=stage2", f"--stage1={OUT}/digits/cm#ema"], "1,2,4")])
MOVING = dict(causal_kd=[("", [], "4")], causal_sft=[("", [], "4,32")], causvid=[("", [], "4")],
              self_forcing=[("", [], "4")])
RUNS |= MOVING
AFTER = dict(tcm="cm", causal_sft="causal_kd")
PAIRS = dict(kd="--out outputs/pairs/digits", causal_kd=(
    "--net wan:digits,chunk=2 --teacher assets/moving_digits_causal.pth --data moving_digits --pairs 8000 "
    "--path_t 0.999,0.9375,0.8333,0.625 --steps 12 --out outputs/pairs/moving_digits"))
writing = threading.Lock()


def call(log, jobs, *words):
    """A program of the repository, what it says in the file `log`; BadInput if it fails."""
    print(f"$ {' '.join(map(str, words))}", flush=True)
    env = os.environ | (dict(OMP_NUM_THREADS="1") if jobs > 1 else {})
    with log.open("a") as out:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env, stdout=out, stderr=out)
    if done.returncode:
        raise common.BadInput(f"{words[0]} failed with exit code {done.returncode}; {log} says why")


def measure(method, suffix, args, steps, jobs):
    """Rows of evaluate.py of one run, with what made them."""
    folder = OUT / ("moving_digits" if method in MOVING else "digits") / f"{method}{suffix}"
    log, teacher = folder.with_suffix(".log"), method == "causal_sft"
    if teacher:
        folder, entry = folder.with_name("causal_kd"), "teacher"
    else:
        call(log, jobs, "train.py", f"methods/{method}.py", "--project=table", f"--name={folder.name}", *args)
        entry = common.parse_ema(json.loads((folder / "config.json").read_text())["ema"][0])[0]
    call(log, jobs, "evaluate.py", folder, f"--net={entry}", f"--steps={steps}")
    found = json.loads(max((folder / "eval").glob("???????.json")).read_text())["results"]
    if teacher:
        return [row | dict(command="assets/README.md", minutes=None) for row in found]
    command = " ".join(["torchrun train.py", f"methods/{method}.py", *args]).replace(f"{OUT}/digits", "RUNS")
    lines, ms, before = (folder / "metrics.jsonl").read_text().splitlines(), 0.0, 0
    for line in filter(lambda line: "ms_per_it" in line, map(json.loads, lines)):
        ms, before = ms + line["ms_per_it"] * (line["it"] - before), line["it"]
    return [row | dict(command=command, minutes=ms / 6e4) for row in found]


def rewrite(text, results):
    """README text whose rows of methods (file `methods/NAME.py`) have new figures in the columns lines,
    minutes, 1 step, 2 steps, 4 steps; of moving digits, a row for each step count, fd F, motion, ..."""
    lines, columns = text.split("\n"), []
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        columns = cells if {"method", "lines"} <= {*cells} else columns
        row = dict(zip(columns, cells))
        name = row.get("file", "")[9:-4]                # of `methods/NAME.py`
        if name not in results or len(cells) != len(columns):
            continue
        row["lines"] = str(len((ROOT / "methods" / f"{name}.py").read_text().splitlines()))
        for found in [found for found in results[name] if str(found["steps"]) == row.get("steps")]:
            for key, _, frame in [head.partition(" ") for head in columns]:
                if key in ("fd", "motion", "track", "identity"):
                    value = found[key][int(frame)] if frame else found[key]
                    row[f"{key} {frame}".strip()] = f"{value:.2f}"
        for found in results[name]:
            head = f"{found['steps']} step{'s' * (found['steps'] > 1)}"
            if head in columns:
                row[head] = f"{found['fd']:.2f} ± {found['fd_std']:.2f}"
        minutes = {found["command"]: found["minutes"] for found in results[name] if found["minutes"]}.values()
        row["minutes"] = " + ".join(f"{m:.0f}" for m in minutes) or row["minutes"]
        lines[i] = " | ".join(row[head] for head in columns).strip()
    return "\n".join(lines)


def train_and_score(method, first, jobs):
    """All runs of a method, after the future `first`; their rows replace those of the same step counts."""
    futures.wait(first)
    if method in PAIRS:
        call(OUT / f"{method}_pairs.log", jobs, "tools/make_pairs.py", *PAIRS[method].split())
    for run in RUNS[method]:
        rows = measure(method, *run, jobs)
        with writing:
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            kept = {row["steps"]: row for row in [*results.get(method, []), *rows]}
            results[method] = [kept[steps] for steps in sorted(kept)]
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            README.write_text(rewrite(README.read_text(), results))
            print("\n".join(f"{method} {row['steps']} steps: fd {row['fd']}" for row in rows), flush=True)


def main(argv):
    parser = train.Parser(usage=__doc__)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    for name in args.methods:
        common.known("tools/table.py: method", name, RUNS)
    names = [name for name in RUNS if name in args.methods or not args.methods]
    print(f"{sum(len(RUNS[name]) for name in names)} runs of up to 15 minutes each on two idle cores")
    for group in "digits", "moving_digits":
        (OUT / group).mkdir(parents=True, exist_ok=True)
    started = {}
    with futures.ThreadPoolExecutor(args.jobs) as pool:
        for name in names:                              # TCM goes on from CM's run, ...
            first = [started[AFTER[name]]] if AFTER.get(name) in started else []
            started[name] = pool.submit(train_and_score, name, first, args.jobs)
        try:
            failed = [str(f.exception()) for f in futures.as_completed(started.values()) if f.exception()]
        finally:
            pool.shutdown(cancel_futures=True)          # after Ctrl-C nothing new starts
    if failed:
        raise common.BadInput("; ".join(failed))


if __name__ == "__main__":
    train.run(main)
