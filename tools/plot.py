"""Curves of runs over their iterations, one panel a key, or rows of their sample grids.

    python tools/plot.py outputs/fewstep/digits/dmd2                        losses, norms, rates, scores
    python tools/plot.py RUN RUN --keys "loss,norm*,val/*" --out curves.pdf
    python tools/plot.py RUN RUN --samples --out grids.png                  up to six a run, first to last

Keys (* stands for any letters) are those of metrics.jsonl (README, Metrics) and, from eval/*.json, of the
scores: mean and standard deviation over seeds, a line for each net and steps, of a clip's frames the mean.
Over more than 200 points their running median over a 25th of them is drawn. pip install matplotlib
"""
import contextlib
import fnmatch
import io
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common, files, logs, train  # noqa: E401, E402


def series(folder):
    """{key: {line: {iteration: (mean, standard deviation)}}}; the line of metrics.jsonl is ""."""
    found = defaultdict(lambda: defaultdict(dict))
    for line in (files.read(folder / "metrics.jsonl") or b"").splitlines():
        with contextlib.suppress(ValueError):           # a run may be writing the last one
            for key, value in (entry := json.loads(line)).items():
                found[key][""][entry["it"]] = value, 0
    if not found.pop("it", ()):
        raise common.BadInput(f"{folder} has no metrics.jsonl; give the folder of a run")
    for file in (folder / "eval" / name for name in files.names(folder / "eval")):
        for row in json.loads(files.read(file))["results"]:
            for key in (key for key in row if row.get(f"{key}_std") is not None):
                line = found[key][f", {row['net']}, steps {row['steps']}"]
                line[row["checkpoint"]] = np.mean(row[key]), np.mean(row[f"{key}_std"])
    return found


def curves(figure, runs, keys=""):
    """Draws {name: folder} of runs; without keys all but speeds, memory and validation."""
    found = {name: series(folder) for name, folder in runs.items()}
    known = [*dict.fromkeys(key for run in found.values() for key in run)]
    keys = keys or ",".join(key for key in known if key not in logs.SPEED and "/" not in key)
    asked = [key for pattern in keys.split(",")
             for key in fnmatch.filter(known, pattern) or common.known("--keys", pattern, known)]
    rows, columns, labels = -(-len(asked) // 3), min(len(asked), 3), {}
    figure.set_size_inches(5 * columns, 3.2 * rows + 0.5)
    for i, key in enumerate(asked):
        axes, ends = figure.add_subplot(rows, columns, i + 1, title=key), []
        for color, (name, run) in enumerate(found.items()):
            for style, (line, points) in enumerate(sorted(run.get(key, {}).items())):
                its, y, std = np.array([(it, *points[it]) for it in sorted(points)], float).T
                how = dict(color=f"C{color}", ls=("-", "--", ":", "-.")[style % 4])
                if len(y) > 200:
                    axes.plot(its, y, alpha=0.25, **how)
                    padded = np.pad(y, half := len(y) // 50, constant_values=np.nan)    # fewer at the ends
                    y = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
                shown = axes.errorbar(its, y, std if line else None, marker="o" if line else "", **how)
                labels.setdefault(name + line, shown[0])
                ends += [np.nanmin(y), np.nanmax(y)]
        if 0 < 20 * min(ends) < max(ends):
            axes.set_yscale("log")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=3)


def grids(figure, runs, columns=6):
    """Draws a row for each run."""
    figure.set_size_inches(4 * columns, 4 * len(runs))
    for j, (name, folder) in enumerate((name, folder / "samples") for name, folder in runs.items()):
        every = [file for file in files.names(folder) if re.fullmatch(r"\d{7}\.png", file)]
        if not every:
            raise common.BadInput(f"{folder} has no grids; --sample_every in training makes them")
        for i, k in enumerate(sorted({*np.linspace(0, len(every) - 1, columns).astype(int)})):
            axes = figure.add_subplot(len(runs), columns, j * columns + i + 1, title=f"{name} {every[k][:7]}")
            axes.imshow(Image.open(io.BytesIO(files.read(folder / every[k]))), cmap="gray")
            axes.set_axis_off()


def main(argv):
    parser = train.Parser(usage=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--keys", default="")
    parser.add_argument("--out", type=Path, default="curves.png")
    parser.add_argument("--samples", action="store_true")
    args = parser.parse_args(argv)
    runs = {run.rstrip("/"): files.place(run) for run in args.runs}
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise common.BadInput(f"curves need matplotlib ({e}); pip install matplotlib") from e
    figure, kind = Figure(layout="constrained", dpi=150), args.out.suffix[1:]
    common.known("--out, file type", kind, figure.canvas.get_supported_filetypes())
    grids(figure, runs) if args.samples else curves(figure, runs, args.keys)
    files.write(args.out, lambda f: figure.savefig(f, format=kind))
    print(args.out)
    return figure


if __name__ == "__main__":
    train.run(main)
