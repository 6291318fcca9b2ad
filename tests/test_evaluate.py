"""evaluate.py: the figures against closed forms, the shipped classifier, and what is written."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_sample import ROOT, runs  # noqa: F401  (a fixture)

import ckpt
import evaluate
import sample
import trainer
from common import BadInput
from tools import make_classifier

FEW = ["--seeds", "2", "--num", "70", "--batch", "32"]


@pytest.fixture(scope="module")
def judge():
    return evaluate.Judge(2)


def gaussian(mean, root, n=400):
    """n points whose mean and covariance are exactly mean and root root^T."""
    x = torch.randn(n, len(mean), generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    q = torch.linalg.qr(x - x.mean(0)).Q * (n - 1) ** 0.5
    return q @ root.mT + mean


def test_frechet_distance_of_gaussians_is_the_closed_form():
    a, b = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([0.3, 2.0, 1.5]).double()
    m = torch.tensor([1.0, -2.0, 3.0]).double()
    found = evaluate.frechet(gaussian(m, a.diag()), gaussian(0 * m, b.diag(), 300))     # covariances commute
    assert found == pytest.approx(14 + float((a - b).square().sum()), abs=1e-10)
    # turned against each other: the root by eigen-decomposition of the symmetric product
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()).Q
    x, y = gaussian(m, turn @ a.diag(), 350), gaussian(0 * m, b.diag())
    values, vectors = np.linalg.eigh(np.cov(x.T.numpy()))
    root = vectors * np.sqrt(values) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ np.cov(y.T.numpy()) @ root)).sum()
    assert evaluate.frechet(x, y) == pytest.approx(14 + float((a * a + b * b).sum()) - 2 * cross, abs=1e-10)


def test_frechet_distance_to_itself_is_0_also_where_features_are_dead_or_few():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 40:] = 0
    x[:, 30:35] = x[:, :5]
    for part in (x, x[:20]):
        assert abs(evaluate.frechet(part, part)) < 1e-9
        assert abs(evaluate.frechet(part, part.flip(0))) < 1e-9
    assert evaluate.frechet(x, x[:100]) == pytest.approx(evaluate.frechet(x[:100], x), abs=1e-9)


def test_the_classifier_is_right_on_97_percent_of_held_out_digits(judge):
    assert judge.real["held_out"]["agreement"] >= 0.97
    assert judge.classifier(judge.train)[0].shape == (1500, 64)
    assert evaluate.CLASSIFIER.stat().st_size < 300_000


def test_copies_of_the_training_digits_score_perfectly_and_count_as_memorised(judge):
    found = judge(*evaluate.digits("train"))
    assert abs(found["fd"]) < 1e-9 and found["nearest"] == 0 and found["agreement"] >= 0.97


def test_held_out_digits_count_as_new_and_degraded_ones_score_worse_than_real_halves(judge):
    (held, _), (x0, label) = evaluate.digits("val"), evaluate.digits("train")
    assert judge.real["held_out"]["nearest"] == 1
    for half in (held[::2], held[1::2]):
        assert evaluate.nearest(half, x0) / judge.unit == pytest.approx(1, abs=0.1)
    halves = judge.real["halves"]["fd"]
    assert 0 < halves < judge.real["held_out"]["fd"] < 3
    assert judge(x0.roll(1, dims=3), label)["fd"] > 5 * halves                          # shifted by a pixel
    assert judge((x0 + x0.flip(0)) / 2, label)["fd"] > 5 * halves                       # blended
    assert judge(x0, (label + 1) % 10)["agreement"] < 0.02


def test_samples_are_scored_in_the_range_of_the_data(judge):
    x0, label = evaluate.digits("train")
    assert judge(3 * x0, label) == judge((3 * x0).clamp(-1, 1), label)


def test_the_file_holds_every_figure_with_what_made_it(runs, judge, capsys):           # noqa: F811
    evaluate.main([str(runs / "dmd2"), *FEW])
    found = json.loads((runs / "dmd2/eval/0000002.json").read_text())
    assert (found["run"], found["checkpoint"], found["method"], found["data"]) == ("dmd2", 2, "dmd2", "digits")
    assert found["classifier"]["sha256"] == evaluate.file_hash(evaluate.CLASSIFIER)
    assert [s["file"] for s in found["sources"].values()] == [str(runs / "sft/checkpoints/0000002.pth")]
    assert found["real"] == json.loads(json.dumps(judge.real))
    student, teacher = found["results"]
    for row, about in ((student, ("ema_slow", 1, 1)), (teacher, ("teacher", 18, 35))):
        assert (row["net"], row["steps"], row["calls"]) == about
        assert (row["checkpoint"], row["num"], row["seeds"], row["guidance"]) == (2, 70, [0, 1], 1.0)
        for key in ("fd", "agreement", "nearest"):
            assert row[key] == pytest.approx(np.mean(row[key + "_each"]))
            assert row[key + "_std"] == pytest.approx(np.std(row[key + "_each"], ddof=1))
    # seed 1 again, by the trainer's own function
    run, label = sample.load_run(runs / "dmd2"), evaluate.digits("train")[1][:70]
    net = sample.load_net(run, "ema_slow", "cpu")
    with torch.no_grad():
        x0 = trainer.draw_samples(run.method, net, run.cfg, list(range(70)), label, 1, 1, torch.device("cpu"))
    for key, value in judge(x0, label).items():
        assert student[key + "_each"][1] == pytest.approx(value, abs=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["net", "ema_slow", "teacher", "real halves", "held out"]


def test_all_scores_every_checkpoint_and_a_frozen_teacher_once(runs, monkeypatch):     # noqa: F811
    names, score = [], evaluate.score
    monkeypatch.setattr(evaluate, "score", lambda run, net, name, *a: names.append(name) or score(run, net, name, *a))
    evaluate.main([str(runs / "dmd2"), *FEW, "--all"])
    assert names == ["ema_slow", "teacher", "ema_slow"]
    first, second = (json.loads((runs / f"dmd2/eval/{it:07d}.json").read_text())["results"] for it in (1, 2))
    assert first[1] == second[1] | dict(checkpoint=1) and first[0] != second[0]


def test_an_sft_run_has_rows_for_the_step_counts_and_nets_asked_for(runs):             # noqa: F811
    evaluate.main([str(runs / "sft"), *FEW, "--net", "ema,student", "--steps", "1,3"])
    rows = json.loads((runs / "sft/eval/0000002.json").read_text())["results"]
    assert [(r["net"], r["steps"], r["calls"]) for r in rows] == [
        ("ema", 1, 1), ("ema", 3, 5), ("student", 1, 1), ("student", 3, 5)]


def test_two_ranks_give_the_figures_of_one(runs):                                      # noqa: F811
    args = [str(runs / "sft"), *FEW, "--steps", "2"]
    evaluate.main(args)
    file = runs / "sft/eval/0000002.json"
    one = json.loads(file.read_text())
    file.unlink()
    env = os.environ | dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29677", OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, ROOT / "evaluate.py", *args], env=env | dict(RANK=str(r)))
             for r in range(2)]
    assert [p.wait(timeout=120) for p in ranks] == [0, 0]
    two = json.loads(file.read_text())
    for a, b in zip(one.pop("results"), two.pop("results")):
        for key in ("fd", "agreement", "nearest"):
            assert b[key + "_each"] == pytest.approx(a[key + "_each"], abs=1e-6)
    assert one == two


@pytest.mark.parametrize("args, sentence", [
    ("--steps 1,2", "trained for 1 steps, not for --steps 2"),
    ("--steps one", "--steps 'one' is not a list"),
    ("--net student,emma", "--net emma is not in"),
    ("--num 1501", "--num 1501 from 2 to 1500"),
    ("--ckpt 5", "no checkpoint 5; the nearest is 2"),
])
def test_bad_input_is_one_sentence(runs, args, sentence):                              # noqa: F811
    with pytest.raises(BadInput, match=sentence):
        evaluate.main([str(runs / "dmd2"), "--seeds", "1", *args.split()])


def test_other_data_than_digits_are_refused(runs, tmp_path):                           # noqa: F811
    state = ckpt.load(ckpt.path(runs / "sft/checkpoints", 2))
    state["config"]["data"] = "cifar10.zip"
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, ckpt.path(tmp_path / "checkpoints", 2))
    (tmp_path / "method.py").write_text((runs / "sft/method.py").read_text())
    with pytest.raises(BadInput, match="is a run on cifar10.zip; this version scores --data digits only"):
        evaluate.main([str(tmp_path)])


@pytest.mark.slow
def test_the_tool_makes_a_classifier_as_good_from_any_seed_and_the_same_from_one():
    x0, label = evaluate.digits("val")
    nets = [make_classifier.train(seed) for seed in (1, 2, 2)]
    for net in nets:
        assert (net(x0)[1].argmax(1) == label).double().mean() >= 0.97
    assert all(torch.equal(v, nets[2].state_dict()[k]) for k, v in nets[1].state_dict().items())
