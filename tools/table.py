"""Train and score every method on the digits; rewrite the README's table and assets/results.json.

    python tools/table.py                    every row: about 120 minutes on two idle cores
    python tools/table.py cm scm             these rows; the others keep their figures

Runs are outputs/table/digits/NAME and continue where they were; delete one to train it again. Figures are
those of evaluate.py (5 seeds of 1,500 samples) for its first EMA; its minutes are those of the iterations.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common, train  # noqa: E401, E402

RESULTS, README = ROOT / "assets" / "results.json", ROOT / "README.md"
each = [(f"{n}", ["--steps", f"{n}"], f"{n}") for n in (1, 2, 4)]       # one run for each step count
once = [("", [], "1,2,4")]                                              # one run, sampled at each
# method: [(suffix of the run's name, arguments, step counts to score)]; {runs}: the folder of the runs
RUNS = dict(
    sft=[("", [], "18")], kd=each, cm=once, scm=once,
    tcm=[("", ["--preset=stage2", "--stage1={runs}/cm#ema"], "1,2,4")],     # goes on from CM's run
    mean_flow=once, dmd2=each, f_distill=each, ladd=each)


def call(*words):
    """A program of the repository; BadInput if it fails (it has said why)."""
    print("$", *words, flush=True)
    if subprocess.run([sys.executable, *map(str, words)], cwd=ROOT).returncode:
        raise common.BadInput(f"{words[0]} failed; its message is above")


def measure(method, suffix, args, steps, runs):
    """Rows of evaluate.py of one run, with what made them."""
    folder, args = runs / f"{method}{suffix}", [a.format(runs=runs) for a in args]
    call("train.py", f"methods/{method}.py", "--project=table", f"--name={folder.name}", *args)
    entry = common.parse_ema(json.loads((folder / "config.json").read_text())["ema"][0])[0]
    call("evaluate.py", folder, f"--net={entry}", f"--steps={steps}")
    found = json.loads(max((folder / "eval").glob("???????.json")).read_text())["results"]
    command = " ".join(["torchrun train.py", f"methods/{method}.py", *args]).replace(f"{runs}/", "RUNS/")
    lines, ms, before = (folder / "metrics.jsonl").read_text().splitlines(), 0.0, 0
    for line in filter(lambda line: "ms_per_it" in line, map(json.loads, lines)):
        ms, before = ms + line["ms_per_it"] * (line["it"] - before), line["it"]
    return [row | dict(command=command, minutes=ms / 6e4) for row in found]


def rewrite(text, results):
    """README text whose rows of methods (`methods/NAME.py` in a cell) have new figures: in the columns named
    lines, 1 step, 2 steps, 4 steps, minutes."""
    lines, columns = text.split("\n"), []
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        if "method" in cells and "lines" in cells:
            columns = cells
        name = next((c.strip("`")[8:-3] for c in cells if c.startswith("`methods/")), None)
        if name not in results or len(cells) != len(columns):
            continue
        rows = {row["steps"]: row for row in results[name]}
        cells[columns.index("lines")] = str(len((ROOT / "methods" / f"{name}.py").read_text().splitlines()))
        for steps in {1, 2, 4} & rows.keys():
            column = columns.index(f"{steps} step{'s' * (steps > 1)}")
            cells[column] = f"{rows[steps]['fd']:.2f} ± {rows[steps]['fd_std']:.2f}"
        minutes = {row["command"]: row["minutes"] for row in results[name]}.values()
        cells[columns.index("minutes")] = " + ".join(f"{m:.0f}" for m in minutes)
        lines[i] = " | ".join(cells).strip()
    return "\n".join(lines)


def main(argv):
    for name in argv:
        common.known("tools/table.py: method", name, RUNS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs = Path(os.environ.get("FEWSTEP_OUTPUT_ROOT", ROOT / "outputs")).absolute() / "table" / "digits"
    print(f"{sum(len(RUNS[name]) for name in argv or RUNS)} runs of up to 10 minutes each on two idle cores")
    for name in argv or RUNS:
        if name == "kd":
            call("tools/make_pairs.py", "--out", "outputs/pairs/digits")
        results[name] = [row for run in RUNS[name] for row in measure(name, *run, runs)]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        README.write_text(rewrite(README.read_text(), results))


if __name__ == "__main__":
    train.run(main)
