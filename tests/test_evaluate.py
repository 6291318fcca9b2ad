"""evaluate.py: its figures against closed forms, the shipped classifier, what it writes."""
import json

import numpy as np
import pytest
import torch

import evaluate
import sample
import trainer
from judge import draw_samples
from run import ranks, refused, spy
from tools import make_classifier

FEW = ["--seeds", "2", "--samples", "70", "--batch", "32"]

@pytest.fixture(scope="module")
def judge():
    return evaluate.Judge(2)

def gaussian(mean, root, n):
    """n points whose mean and covariance are exactly mean and root root^T."""
    x = torch.randn(n, len(mean), generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return torch.linalg.qr(x - x.mean(0)).Q * (n - 1) ** 0.5 @ root.mT + mean

def test_frechet_distance_of_gaussians_is_the_closed_form():
    a, b, m = torch.tensor([[1.0, 2.0, 0.5], [0.3, 2.0, 1.5], [1.0, -2.0, 3.0]]).double()
    found = evaluate.frechet(gaussian(m, a.diag(), 400), gaussian(0 * m, b.diag(), 300))    # they commute
    assert found == pytest.approx(14 + float((a - b).square().sum()), abs=1e-10)
    # turned against each other: the root by eigen-decomposition of the symmetric product
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()).Q
    x, y = gaussian(m, turn @ a.diag(), 350), gaussian(0 * m, b.diag(), 300)
    values, vectors = np.linalg.eigh(np.cov(x.T.numpy()))
    root = vectors * np.sqrt(values) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ np.cov(y.T.numpy()) @ root)).sum()
    assert evaluate.frechet(x, y) == pytest.approx(14 + float((a * a + b * b).sum()) - 2 * cross, abs=1e-10)

def test_frechet_distance_to_itself_is_0_also_where_features_are_dead_or_few():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 40:], x[:, 30:35] = 0, x[:, :5]
    for part in (x, x[:20]):
        assert abs(evaluate.frechet(part, part)) < 1e-9 and abs(evaluate.frechet(part, part.flip(0))) < 1e-9
    assert evaluate.frechet(x, x[:99]) == pytest.approx(evaluate.frechet(x[:99], x), abs=1e-9)

def test_training_digits_score_perfectly_but_as_memorised_held_out_ones_as_new_and_degraded_ones_worse(judge):
    (held, _), (x0, label) = evaluate.digits("val"), evaluate.digits("train")
    found = judge(x0, label)
    assert abs(found["fd"]) < 1e-9 and found["nearest"] == 0 and found["agreement"] >= 0.97
    assert judge.real["held_out"]["agreement"] >= 0.97
    assert judge.features.shape == (1500, 64) and evaluate.CLASSIFIER.stat().st_size < 300_000
    for half in (held[::2], held[1::2]):
        assert evaluate.nearest(half, x0) / judge.unit == pytest.approx(1, abs=0.1)
    assert 0 < judge.real["halves"]["fd"] < judge.real["held_out"]["fd"] < 3
    assert judge(x0.roll(1, dims=3), label)["fd"] > 10                                  # shifted by a pixel
    assert judge((x0 + x0.flip(0)) / 2, label)["fd"] > 10                               # blended
    assert judge(x0, (label + 1) % 10)["agreement"] < 0.02
    assert judge(3 * x0, label) == judge((3 * x0).clamp(-1, 1), label)

def test_the_file_holds_every_figure_with_what_made_it(runs, judge, capsys):
    evaluate.main([str(runs / "dmd2"), *FEW])
    found = json.loads((runs / "dmd2/eval/0000002.json").read_text())
    assert [found[k] for k in ("run", "checkpoint", "method", "data")] == ["dmd2", 2, "dmd2", "digits"]
    assert found["classifier"]["sha256"] == evaluate.file_hash(evaluate.CLASSIFIER)
    assert [s["file"] for s in found["sources"].values()] == [str(runs / "sft/checkpoints/0000002.pth")]
    assert found["real"] == judge.real
    for row, about in zip(found["results"], (("ema_slow", 1, 1), ("teacher", 18, 35)), strict=True):
        assert (row["net"], row["steps"], row["calls"]) == about
        assert (row["checkpoint"], row["samples"], row["seeds"], row["guidance"]) == (2, 70, [0, 1], 1.0)
        for key in ("fd", "agreement", "nearest"):
            assert row[key] == pytest.approx(np.mean(row[key + "_each"]))
            assert row[key + "_std"] == pytest.approx(np.std(row[key + "_each"], ddof=1))
    # seed 1 again, by the trainer's own function
    run, label = sample.load_run(runs / "dmd2"), evaluate.digits("train")[1][:70]
    net = sample.load_net(run, "ema_slow", "cpu")
    x0 = draw_samples(run.method, net, run.cfg, list(range(70)), label, 1, 1, torch.device("cpu"))
    for key, value in judge(x0, label).items():
        assert found["results"][0][key + "_each"][1] == pytest.approx(value, abs=1e-4)
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["net", "ema_slow", "teacher", "real halves", "held out"]

def test_all_scores_every_checkpoint_and_a_frozen_teacher_once(runs, monkeypatch):
    scored = spy(monkeypatch, evaluate, "score")
    evaluate.main([str(runs / "dmd2"), *FEW, "--all"])
    assert [(args[0].it, args[2]) for args, _ in scored] == [(1, "ema_slow"), (1, "teacher"), (2, "ema_slow")]
    first, second = (json.loads((runs / f"dmd2/eval/{it:07d}.json").read_text())["results"] for it in (1, 2))
    assert first[1]["fd"] == second[1]["fd"] and first[0]["fd"] != second[0]["fd"]

def test_two_ranks_give_the_figures_of_one_for_every_net_and_step_count(runs):
    args = [str(runs / "sft"), *FEW, "--net", "ema,student", "--steps", "1,3"]
    file = runs / "sft/eval/0000002.json"
    evaluate.main(args)
    one = json.loads(file.read_text())
    file.unlink()
    ranks(2, evaluate.main, args)
    two = json.loads(file.read_text())
    assert [(r["net"], r["steps"], r["calls"]) for r in two["results"]] == [
        ("ema", 1, 1), ("ema", 3, 5), ("student", 1, 1), ("student", 3, 5)]
    for a, b in zip(one.pop("results"), two.pop("results")):
        for key in ("fd", "agreement", "nearest"):
            assert b[key + "_each"] == pytest.approx(a[key + "_each"], abs=1e-6)
    assert one == two

@pytest.mark.parametrize("args, sentence", [
    ("--steps 1,2", "trained for 1 steps, not for --steps 2"),
    ("--steps one", "--steps 'one' is not a list"),
    ("--net student,emma", "--net emma is not in"),
    ("--samples 1501", "--samples 1501 from 2 to 1500"),
])
def test_bad_input_is_one_sentence(runs, args, sentence):
    refused(evaluate.main, [str(runs / "dmd2"), "--seeds", "1", *args.split()], says=[sentence])

def test_other_data_than_digits_are_refused(runs, monkeypatch):
    run = sample.load_run(runs / "sft")
    run.cfg["data"] = "cifar10.zip"
    monkeypatch.setattr(sample, "load_run", lambda *a: run)
    says = ["is a run on cifar10.zip; this version scores --data digits only"]
    refused(evaluate.main, [str(run.folder)], says=says)

@pytest.mark.slow
def test_the_tool_makes_as_good_a_classifier_from_any_seed_and_the_same_from_one():
    x0, label = evaluate.digits("val")
    nets = [make_classifier.train(seed) for seed in (1, 2, 2)]
    assert min(float((net(x0)[1].argmax(1) == label).double().mean()) for net in nets) >= 0.97
    assert all(torch.equal(v, nets[2].state_dict()[k]) for k, v in nets[1].state_dict().items())
