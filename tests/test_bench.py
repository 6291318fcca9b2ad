"""tools/bench.py: what its table lists. Speed itself is not tested."""
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import bench  # noqa: E402
from common import BadInput  # noqa: E402

PARTS = ["data + encode", "step", "backward", "average, clip + guard", "optimizer", "EMA + log", "= iteration"]


def table(argv, monkeypatch, capsys):
    """{phase: {row: median}} of what bench prints, and {phase: device syncs}."""
    monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", "")       # bench sets it; this puts it back afterwards
    bench.main([*map(str, argv), "--net", "toy:tiny", "--batch_size", "4", "--blocks", "2", "--iters", "2"])
    phases, syncs = {}, {}
    for line in capsys.readouterr().out.splitlines():
        if head := re.match(r"(\w+): (\d+) device sync", line):
            phases[head[1]] = rows = {}
            syncs[head[1]] = int(head[2])
        elif cells := re.match(r"  (.+?) +([\d.]+)  \[([\d.]+) ([\d.]+)\]$", line):
            assert float(cells[3]) <= float(cells[2]) <= float(cells[4])
            assert cells[1] not in list(rows)[-6:]      # "optimizer" is a row of the passes and one of the iteration
            rows[cells[1]] = float(cells[2])
    return phases, syncs


def passes(rows):
    names = list(rows)
    return names[:names.index("= passes")]
