"""Make assets/digits.npz: the 1,797 handwritten digits of the UCI set (8x8, values 0..16, CC BY 4.0).

    pip download scikit-learn --no-deps
    python tools/make_digits.py scikit_learn-*.whl

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
Arrays: image uint8 (1797, 8, 8), label uint8 (1797,), and the fixed split as sorted indices into them, train
(1500,) and val (297,), drawn with seed 0, every class in the same ratio.
"""
import gzip
import sys
import zipfile
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(print(__doc__) or 2)
    packed = zipfile.ZipFile(sys.argv[1]).read("sklearn/datasets/data/digits.csv.gz")
    lines = gzip.decompress(packed).decode().splitlines()
    table = np.loadtxt(lines, delimiter=",").astype(np.uint8)  # (1797, 65): 64 pixels, label
    label, n = table[:, 64], len(table)
    order = np.lexsort((np.random.default_rng(0).permutation(n), label)).astype(np.int16)  # classes shuffled
    val = order[np.arange(297) * n // 297]  # evenly spaced, so each class is split in the same ratio
    out = Path(__file__).resolve().parent.parent / "assets" / "digits.npz"
    np.savez_compressed(out, image=table[:, :64].reshape(-1, 8, 8), label=label,
                        train=np.setdiff1d(order, val), val=np.sort(val))
