"""Moving digits: the clips, wan:digits, figures of real and of spoilt clips, a run up to its GIF."""
import json

import numpy as np
import pytest
import torch
from PIL import Image

import common
import data
import evaluate
import media
import run
import sample
from run import refused
from test_nets import shake

NET = "wan:digits,dim=32,heads=2,depth=1,hidden=32"

def test_a_clip_is_a_digit_that_moves_by_a_pixel_and_turns_round_at_the_walls():
    ids = np.random.default_rng(0).integers(29700, size=300)
    (image, _), (x, corner) = evaluate.digits("val"), data.clips("val", ids, 20)
    step = np.diff(corner, axis=1)
    assert corner.min() == 0 and corner.max() == 4 and (abs(step) == 1).all()
    assert ((step[:, 1:] != step[:, :-1]) == (corner[:, 1:-1] % 4 == 0)).all()      # there, and only there
    want = np.full_like(x, -1)
    for k, f in np.ndindex(300, 20):
        row, column = corner[k, f]
        want[k, 0, f, row:row + 8, column:column + 8] = image[ids[k] % 297, 0]
    assert np.array_equal(x, want)

def test_clips_are_all_digits_with_all_motions_each_once_as_a_function_of_the_index():
    for split, n in (("train", 1500), ("val", 297)):
        found, (_, label) = data.load(dict(data="moving_digits"), split), evaluate.digits(split)
        assert (len(found), found.shape, found.classes) == (100 * n, (1, 8, 12, 12), 10)
        motions = np.unique(data.clips(split, 7 + n * np.arange(100), 2)[1].reshape(100, 4), axis=0)
        assert len(motions) == (3 * 2 + 2) ** 2             # at a wall both velocities are one motion
        clip, its_label = found.get(5 * n + 7)
        assert np.array_equal(clip, data.clips(split, [5 * n + 7])[0][0]) and its_label == label[7]
    assert np.array_equal(data.clips("val", [3], 16)[0][:, :, :8], data.clips("val", [3])[0])

def test_a_clip_is_flipped_whole_and_augmentation_is_refused():
    cfg = run.TINY | dict(net=NET, data="moving_digits", batch_size=40)
    found = data.load(cfg)
    some, raw = (next(data.Loader(found, cfg | dict(xflip=on)))["image"] for on in (True, False))
    kept, flipped = ((a == b).flatten(1).all(1) for a, b in ((some, raw), (some, raw.flip(-1))))
    assert (kept ^ flipped).all() and 8 < flipped.sum() < 32
    refused(run.run, *run.setup("causal_sft", net=NET, data="moving_digits", augment=0.1), says=["--augment"])

def test_the_centre_is_that_of_ink_and_the_cut_window_holds_it_all():
    x = torch.full((2, 1, 2, 12, 12), -1.0)
    x[0, 0, 0, 3, 4], x[0, 0, 0, 5, 8] = 1.0, 0.0               # ink 1 and 1/2
    x[0, 0, 1], x[0, 0, 1, 11, 0] = -0.6, 3.0                   # ink below 1/4 counts nothing, above 1 as 1
    # an empty frame has a centre, too
    assert np.allclose(evaluate.centre(x), [[[11 / 3, 16 / 3], [11, 0]], [[0, 0], [0, 0]]])
    (x, corner), (image, _) = data.clips("val", range(297)), evaluate.digits("val")
    offset = evaluate.centre(torch.from_numpy(x)).numpy() - corner      # of a digit: the same anywhere
    assert np.allclose(offset, offset[:, :1], atol=1e-5)
    window = evaluate.cut(torch.from_numpy(x[:, 0, 3]))
    assert torch.allclose(window.sum((1, 2, 3)), image.sum((1, 2, 3)), atol=0.5)

def test_figures_of_real_clips_are_good_and_every_flaw_shows_in_the_one_that_is_for_it():
    judge, label, held = evaluate.VideoJudge(8, 2), evaluate.digits("train")[1], evaluate.digits("val")[1]
    other, real, stopped = judge.real.values()
    assert max(map(abs, judge(judge.train, label)["fd"])) < 1e-9 and max(other["fd"]) < 0.2
    assert max(real["fd"]) < 4 and min(real["identity"], real["agreement"]) > 0.98 and not any(real["track"])
    assert other["track"] is None and max(other["motion"], real["motion"]) < 4 < 40 < stopped["motion"]
    # measured elsewhere, with random starts: 0, 0, 1.41, 2.43, 3.33, 3.25, 2.79, 1.98
    assert stopped["track"] == pytest.approx([0, 0, 1.41, 2.45, 3.27, 3.11, 2.70, 1.98], abs=0.01)
    assert max(stopped["fd"]) < 4 and stopped["identity"] == 1          # a frame that stands looks real
    swapped = judge(torch.cat([judge.held[:, :, :4], judge.held.roll(1, 0)[:, :, 4:]], 2), held)
    assert swapped["identity"] < 0.3 < swapped["agreement"] < 0.7
    assert min(judge((judge.held + judge.held.roll(1, 0)) / 2, held)["fd"]) > 8
    halting = judge(judge.train[:, :, torch.arange(8) // 2 * 2], label)     # every other frame stands
    assert halting["motion"] > 10 and max(halting["fd"]) < 0.5

def test_digits_wan_takes_labels_for_text():
    net = common.make_net("wan:digits", label_dim=10)
    assert 2e5 < sum(p.numel() for p in net.parameters()) < 8e5 and net.chunk == 0
    net = shake(common.make_net(NET, label_dim=10, chunk=2)).double().eval()
    x, t, label = torch.randn(2, 1, 5, 12, 12).double(), torch.tensor([0.5, 0.7]), torch.tensor([3, -1])
    y, other, none = (net(x, t.double(), cond) for cond in (dict(label=label), dict(label=label + 1), {}))
    assert [torch.equal(*pair) for pair in zip(other, y)] == [False, False]
    assert torch.equal(none[1], y[1])                           # -1 is no label
    refused(net, x, t, dict(label=torch.tensor([10, 0])), says=["label 10"])
    refused(common.make_net, "wan:digits,patch=3", says=["multiple of 9"])

def test_a_run_on_moving_digits_is_sampled_as_clips_and_scored(tmp_path, capsys):
    cfg = dict(net=NET, data="moving_digits", max_iter=2, batch_size=4, sample_every=2, val_every=2, steps=2)
    folder = run.run(*run.setup("causal_sft", **cfg)).folder
    grid = Image.open(folder / "samples/0000002.png")
    assert grid.size == (5 * (8 * 12 + 2), 5 * (20 * 13 + 1))           # a clip in a row, two of a class
    args = [str(folder), "--net=student", "--seeds=0-3"]
    sample.main([*args, "--frames=11", "--fps=10", f"--out={tmp_path / 'x.gif'}"])
    sample.main([*args, f"--out={tmp_path / 'apart'}"])
    gif, one = Image.open(tmp_path / "x.gif"), Image.open(tmp_path / "apart/0000003.gif")
    assert (gif.n_frames, gif.info["duration"], one.n_frames, one.size) == (11, 100, 8, (12, 12))
    refused(sample.main, [*args, f"--out={tmp_path / 'x.webm'}"], says=["no .webm", ".gif", ".mp4"])
    for words, *how in (("--given or --segments", "--overlap=2"), ("none does not exist", "--given=none"),
                        ("must be 1 to 7", "--segments=2", "--overlap=8")):
        refused(sample.main, [*args, *how], says=[words])
    refused(sample.main, [str(tmp_path / "none")], says=["none does not exist"])
    # held-out clips go on, and so do the files of those, over segments of 8 frames that overlap by a chunk
    sample.main([*args, "--given=moving_digits", "--segments=3", f"--out={tmp_path / 'on'}"])
    sample.main([*args, f"--given={tmp_path / 'on'}", f"--out={tmp_path / 'again'}"])
    held = (data.clips("val", range(4), 2)[0][:, 0] * 127.5 + 128).clip(0, 255).astype(np.uint8)
    for k in range(4):
        files = [tmp_path / folder / f"{k:07d}.gif" for folder in ("on", "again")]
        on, again = (np.stack([read()[..., 0] for _, read in media.stills("x.gif", file.read_bytes())])
                     for file in files)
        assert on.shape == (20, 12, 12) and again.shape == (8, 12, 12)
        assert np.array_equal(on[:2], held[k]) and np.array_equal(again[:2], held[k])
        assert f"class: {evaluate.digits('val')[1][k]}".encode() in Image.open(files[0]).info["comment"]
    evaluate.main([str(folder), "--samples=150", "--seeds=2", "--net=student", "--steps=1", "--frames=10"])
    row, = json.loads((folder / "eval/0000002.json").read_text())["results"]
    assert len(row["fd"]) == len(row["fd_each"][1]) == len(row["track"]) == 10 and row["track"][:2] == [0, 0]
    assert row["track"][9] == pytest.approx(np.mean([each[9] for each in row["track_each"]]))
    assert row["calls"] == 9 and "fd 9" in (out := capsys.readouterr().out) and "stopped" in out
