"""tools/prepare_data.py and tools/plot.py."""
import io
import json
import multiprocessing
import os
import pickle
import struct
import tarfile
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import data
from run import refused
from tools import plot, prepare_data

draw = np.random.default_rng(3)

def dumps(rows, labels):
    """A batch as Python 2 wrote it."""
    class Python2(pickle._Pickler):
        text = lambda self, b: self.write(b"T" + struct.pack("<i", len(b)) + b)
        dispatch = pickle._Pickler.dispatch | {bytes: text}
    Python2(f := io.BytesIO(), 2).dump({b"data": rows, b"labels": labels})
    return f.getvalue().replace(b"numpy._core", b"numpy.core")

def archive(file, members, mode="w"):
    with tarfile.open(file, mode) as tar:
        for name, content in members.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file

@pytest.fixture
def tree(tmp_path):
    """Three classes of pictures of several sizes and modes, all PNG under ImageNet's names."""
    for name, *size, mode in (("n2/a", 90, 70, "L"), ("n1/b", 20, 31, "RGBA"), ("n1/a", 32, 32, "P"),
                              ("n3/a", 9, 64, "RGB")):
        (file := tmp_path / "train" / f"{name}.JPEG").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)).convert(mode).save(file, "PNG")
    (tmp_path / "train/n3/._a.JPEG").write_text("no image")
    return tmp_path / "train"

def made(source, out, *options):
    prepare_data.main([str(source), str(out), "--workers", "2", *options])
    assert [*out.parent.glob(f"{out.name}*")] == [out]
    return out.read_bytes()

def test_cifar_10_is_read_from_archive_folder_or_url_and_no_code_of_its_pickles_runs(tmp_path, monkeypatch):
    rows, labels = draw.integers(0, 256, (5, 3, 3072), np.uint8), draw.integers(0, 10, (5, 3)).tolist()
    batches = {f"cifar-10-batches-py/data_batch_{k + 1}": dumps(rows[k], labels[k]) for k in range(5)}
    tar = archive(tmp_path / "cifar-10-python.tar.gz", batches | {"test_batch": b""}, "w:gz")
    monkeypatch.setattr(prepare_data, "URL", tar.as_uri())
    whole = made(tmp_path / "copy.tar.gz", tmp_path / "a.zip", "--download")
    found = data.load(dict(data=str(tmp_path / "a.zip")))
    assert found.label.tolist() == sum(labels, []) and found.names[14] == "00000/img00000014.png"
    assert np.array_equal([found.get(i)[0].ravel() for i in range(15)], rows.reshape(15, 3072))
    with tarfile.open(tar) as f:
        f.extractall(tmp_path, filter="data")
    assert made(folder := tmp_path / "cifar-10-batches-py", tmp_path / "b.zip") == whole
    (folder / "data_batch_4").write_bytes(trap := f"cos\nmkdir\n(S{str(tmp_path / 'ran')!r}\ntR.".encode())
    refused(made, folder, tmp_path / "c.zip", says=["data_batch_4", "it calls os.mkdir"])
    refused(made, tar, tmp_path / "c.zip", says=["not the published md5"])
    assert not (tmp_path / "ran").exists() and not pickle.loads(trap) and (tmp_path / "ran").exists()

@pytest.mark.parametrize("how", ["adm", "edm"])
def test_imagenet_as_folders_or_a_tar_of_tars_is_cut_with_labels_in_sorted_order(tmp_path, tree, how):
    options, every = ("--size", "16", "--crop", how), sorted(tree.glob("*/[a-z].JPEG"))
    inner = lambda k: {file.name: file.read_bytes() for file in reversed(every) if k in file.parts}
    whole, found = made(tree, tmp_path / "a.zip", *options), data.load(dict(data=str(tmp_path / "a.zip")))
    assert found.label.tolist() == [0, 0, 1, 2] and found.shape == (3, 16, 16)
    for i, file in enumerate(every):
        cut = np.asarray(prepare_data.crop(Image.open(file), 16, how))
        assert np.array_equal(found.get(i)[0].transpose(1, 2, 0), cut)
    tars = {f"{k}.tar": archive(tmp_path / "n", inner(k)).read_bytes() for k in ("n3", "n1", "n2")}
    assert made(archive(tmp_path / "t.tar", tars), tmp_path / "b.zip", *options) == whole

def test_crops_are_box_halvings_and_bicubic_or_a_square_and_lanczos():
    """Bicubic as torch's with antialias, Lanczos by its formula, to rounding."""
    picture = Image.fromarray(draw.integers(60, 190, (100, 150, 3), np.uint8))
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].double()
    adm = F.interpolate(F.avg_pool2d(x, 2), (32, 48), mode="bicubic", antialias=True)[..., 8:40]
    u = (torch.arange(100).double() + 0.5) / 3.125 - (torch.arange(32)[:, None] + 0.5)
    weight = torch.sinc(u) * torch.sinc(u / 3) * (u.abs() < 3)
    weight /= weight.sum(1, keepdim=True)
    for how, want in ("adm", adm), ("edm", weight @ x[..., 25:125] @ weight.T):
        ours = torch.from_numpy(np.array(prepare_data.crop(picture, 32, how))).permute(2, 0, 1)
        assert (ours - want).abs().max() < 2, how

def test_a_killed_run_leaves_no_process_and_goes_on_to_the_same_bytes(tmp_path, tree, capsys):
    whole, blocked = made(tree, tmp_path / "a.zip", "--size", "16"), tree / "n3/a.JPEG"
    blocked.rename(tmp_path / "a.JPEG")
    os.mkfifo(blocked)                                  # a worker waits here for what never comes
    how = dict(target=made, args=(tree, tmp_path / "k.zip", "--size", "16"))
    process = multiprocessing.get_context("fork").Process(**how)
    process.start()
    while len([*tmp_path.glob("k.zip.*.parts/0000[01].zip")]) < 2:
        assert not process.join(0.1) and process.is_alive()
    time.sleep(0.5)
    process.kill()
    time.sleep(2)
    with pytest.raises(OSError, match="No such device"):        # nobody reads there any more
        os.open(blocked, os.O_WRONLY | os.O_NONBLOCK)
    (tmp_path / "a.JPEG").replace(blocked)
    capsys.readouterr()
    assert made(tree, tmp_path / "k.zip", "--size", "16") == whole
    assert "00002.zip of 3" in (said := capsys.readouterr().out) and "00000.zip" not in said

def test_what_cannot_be_prepared_is_one_sentence(tmp_path, tree):
    (tree / "n2/a.JPEG").write_bytes(b"GIF89a")
    for source, out, size, *says in (
            (tmp_path / "none.tar", "x.zip", 0, "none.tar", "--download", "image-net.org"),
            (tree, "x.zip", 0, "0 of 5 batches"), (tree / "n1", "x.zip", 8, "0 classes"),
            (tree, "x.zip", -1, "size -1"), (tree, "x", 8, "no .zip"),
            (tree, "x.zip", 8, "n2: a.JPEG cannot be read")):
        refused(made, source, tmp_path / out, "--size", f"{size}", says=says)
    (tree / "n2/a.JPEG").unlink()
    refused(made, tree, tmp_path / "x.zip", "--size", "8", says=["n2 holds no images"])

# ---- curves
def test_curves_hold_the_values_of_the_files_and_their_median_and_grids_a_row_a_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    monkeypatch.chdir(tmp_path)
    titles = lambda figure: [axes.get_title() for axes in figure.axes]
    its, loss = range(10, 3010, 10), draw.normal(size=300)
    a = [json.dumps({"it": it, "loss": y, "ms_per_it": 1, "val/student/loss": y}) for it, y in zip(its, loss)]
    b = '{"it": 7, "loss": 2.0, "norm": 1e-3}', '{"it": 9, "loss": NaN, "norm": 0.1}'
    for name, lines in ("a", [*a, '{"it": 30']), ("b", b):
        (tmp_path / name / "eval").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    rows = [dict(net="ema", steps=1, checkpoint=20, fd=[1.0, 3.0], fd_std=[0.5, 0.7], calls=1)]
    (tmp_path / "b/eval/0000020.json").write_text(json.dumps(dict(results=rows)))
    figure = plot.main(["a", "b/", "--out", "c.pdf"])
    assert titles(figure) == ["loss", "norm", "fd"] and (tmp_path / "c.pdf").stat().st_size
    raw, smooth, other = (line.get_xydata() for line in figure.axes[0].lines)
    assert np.array_equal(raw, np.c_[its, loss]) and np.array_equal(other, [[7, 2], [9, np.nan]], True)
    assert np.array_equal(smooth[:, 1], [np.median(loss[max(0, i - 6):i + 7]) for i in range(300)])
    (fd,), (bar,) = figure.axes[2].lines, figure.axes[2].collections
    assert fd.get_xydata().tolist() == [[20, 2]] and np.allclose(bar.get_segments(), [[[20, 1.4], [20, 2.6]]])
    assert figure.axes[0].get_yscale() == "linear" and figure.axes[1].get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", "b, ema, steps 1"]
    assert titles(plot.main(["a", "b", "--keys", "val/*,norm"])) == ["val/student/loss", "norm"]
    refused(plot.main, ["a", "--keys", "los"], says=["did you mean loss", "val/student/loss"])
    refused(plot.main, ["."], says=["no metrics.jsonl"])
    refused(plot.main, ["a", "--out", "x.doc"], says=["doc", "png"])
    refused(plot.main, ["a", "--samples"], says=["no grids"])
    for file in (tmp_path / name / "samples" / f"000000{it}.png" for name in "ab" for it in (0, 5, 7)):
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(picture := draw.integers(0, 256, (9, 12, 3), np.uint8)).save(file)
    figure = plot.main(["a", "b", "--samples"])
    assert titles(figure) == [f"{name} 000000{it}" for name in "ab" for it in (0, 5, 7)]
    assert np.array_equal(figure.axes[5].images[0].get_array(), picture)
