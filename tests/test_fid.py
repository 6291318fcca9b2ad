"""FID of evaluate.py: of the pictures that sample.py draws, by a small extractor in the place of Inception;
and the library's own class, with random weights."""
import json
import pickle
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import data
import evaluate
import sample
from run import ranks, refused

class Tiny:
    """8 random features of the pixels' first channel."""
    size, about = 8, dict(library="tiny", weights="random", weights_sha256="abc")

    def __init__(self, *_):
        pass

    def __call__(self, images):
        assert images.dtype == torch.uint8
        x = images[:, 0].flatten(1).double() / 255
        return (x @ torch.randn(x.shape[1], 8, generator=torch.Generator().manual_seed(1)).double()).relu()

def scored(args, stop=0):
    """What evaluate.py writes, and how often it saved sums, every 16 samples; stopped at such a save."""
    saves, save = [], evaluate.ckpt.save
    def saving(*args):
        save(*args)
        saves.append(args)
        if len(saves) == stop:
            raise evaluate.BadInput("stopped")
    with mock.patch.multiple(evaluate, Inception=Tiny, SAVE_EVERY=16):
        with mock.patch.object(evaluate.ckpt, "save", saving):
            evaluate.main(args)
    return json.loads(evaluate.Path(args[0], "eval/0000002.json").read_text()), len(saves)

def test_samples_are_the_pictures_of_sample_py_on_any_ranks_and_stopped_or_not(runs, tmp_path):
    args = [str(runs / "dmd2"), "--net=student", "--samples=41", "--seeds=2", "--batch=8"]
    classes = [str(evaluate.common.hash_seed(0, "class", i) % 10) for i in range(41, 82)]
    sample.main([*args[:2], f"--classes={','.join(classes)}", "--seeds=41-81", f"--out={tmp_path}/second"])
    (row,), pictures = scored([*args, f"--ref={tmp_path / 'second'}"])[0]["results"], Tiny()
    assert row["fid_least"] == row["fid_each"][1] == pytest.approx(0, abs=1e-9) and row["fid_each"][0] > 0.01
    # against digits: floats, rounded as pictures are
    whole, _ = scored([*args, "--ref=digits", f"--save_ref={tmp_path / 'ref'}"])
    second, (row,) = data.load(dict(data=str(tmp_path / "second"))), whole["results"]
    x, real = torch.stack([torch.tensor(second.get(i)[0]) for i in range(41)]), evaluate.digits("train")[0]
    exact = evaluate.frechet(pictures(x), pictures((real * 127.5 + 128).clip(0, 255).byte()))
    assert row["fid_each"][1] == pytest.approx(exact, rel=1e-6) and row["samples"] == 41
    # EDM2's format; two ranks, stopped in the second seed, then one
    ref = {k: np.load(tmp_path / "ref.npz")[k] for k in ("mu", "sigma")}
    (tmp_path / "ref.pkl").write_bytes(pickle.dumps(dict(fid=ref, fd_other=None)))
    args.append(f"--ref={tmp_path / 'ref.pkl'}")
    with pytest.raises(AssertionError, match="stopped"):
        ranks(2, scored, args, 5)
    assert len([*(runs / "dmd2/eval").glob("*.sums.pth")]) == 2
    rest, saves = scored(args)
    assert saves == 1 and not [*(runs / "dmd2/eval").glob("*.sums.pth")]
    for found in rest, ranks(2, scored, [*args[:-1], f"--ref={tmp_path / 'ref.npz'}"])[0][0]:
        assert found["results"][0]["fid_each"] == pytest.approx(row["fid_each"], rel=1e-9)
    assert rest["reference_sha256"] == evaluate.file_hash(tmp_path / "ref.pkl") and rest["library"] == "tiny"

def test_what_cannot_be_scored_is_one_sentence(runs, tmp_path):
    good = dict(mu=np.zeros(8), sigma=np.eye(8))
    np.savez(tmp_path / "other.npz", **good, weights_sha256="12")
    np.savez(tmp_path / "small.npz", mu=np.zeros(3), sigma=np.eye(3))
    np.savez(tmp_path / "flat.npz", mu=np.zeros(3), sigma=np.eye(2))
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(dict(fid=good, more=exit)))
    for ref, words in (("other.npz", "by weights 12, samples have 8"), ("small.npz", "3 features"),
                       ("flat.npz", "(3,) and (2, 2)"), ("code.pkl", "Quitter, which is not run"),
                       ("none", "does not exist")):
        refused(scored, [str(runs / "dmd2"), f"--ref={tmp_path / ref}"], says=[ref, words])
    refused(scored, [str(runs / "dmd2"), "--ref=moving_digits"], says=["FID is of images"])

def test_the_librarys_inception_takes_a_file_of_weights_and_pictures_of_any_size(tmp_path, monkeypatch):
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):     # which is not needed here
        monkeypatch.setitem(sys.modules, f"torchvision{name}", mock.MagicMock())
    library = pytest.importorskip("torch_fidelity", reason="pip install --no-deps torch-fidelity")
    net, file = library.FeatureExtractorInceptionV3, tmp_path / "inception.pth"
    with mock.patch.object(net, "load_state_dict"), mock.patch("torch.load"):
        drawn = net("fid", ["2048"], "random")
    torch.save(drawn.state_dict(), file)
    x, found = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8), evaluate.Inception(str(file), "cpu")
    assert torch.equal(found(x), drawn(x.repeat(1, 3, 1, 1))[0].double()) and found(x).std(0).max() > 0
    torch.save(exit, file)
    refused(evaluate.Inception, str(file), "cpu", says=["--inception", "inception.pth cannot be read"])
