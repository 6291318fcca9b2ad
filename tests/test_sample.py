"""sample.py and evaluate.py, on runs of two iterations of the toy net (conftest.py): samples; their figures
against closed forms; the shipped classifier; what is written."""
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import evaluate
import fill
import sample
from judge import draw_samples
from run import differing, ranks, refused, saved, spy
from tools import make_classifier

CPU, FEW = torch.device("cpu"), ["--seeds", "2", "--samples", "70", "--batch", "32"]

def pixels(file):
    with Image.open(file) as picture:
        return np.array(picture), picture.text

@pytest.mark.parametrize("name", ["sft", "dmd2"])
def test_by_default_the_samples_are_those_of_the_trainers_grid(runs, name, capsys):
    sample.main([str(runs / name), "--batch", "13"])
    file = Path(capsys.readouterr().out.split(":")[0])
    (ours, text), (trainers, _) = pixels(file), pixels(runs / name / "samples/0000002.png")
    assert np.array_equal(ours, trainers)
    assert (text["run"], text["checkpoint"], text["seed"]) == (name, "2", "0-79")

def test_separate_files_are_the_samples_of_the_sheet_and_say_what_they_are(runs, tmp_path):
    args = [str(runs / "dmd2"), "--net", "ema_slow", "--classes", "3,7", "--seeds", "0-2,12", "--out"]
    sample.main([*args, str(tmp_path / "all")])
    sample.main([*args, str(tmp_path / "sheet.png")])
    sheet, text = pixels(tmp_path / "sheet.png")
    assert text["class"] == "3,7,3,3" and len(os.listdir(tmp_path / "all")) == 4
    for place, seed in enumerate((0, 1, 2, 12)):                # enlarged 8 times, 2 columns, 1 pixel gaps
        one, text = pixels(tmp_path / "all" / f"{seed:07d}.png")
        y, x = place // 2 * 9 + 1, place % 2 * 9 + 1
        assert np.array_equal(sheet[::8, ::8][y:y + 8, x:x + 8], one)
        assert text == {"run": "dmd2", "method": "dmd2", "checkpoint": "2", "net": "ema_slow", "steps": "1",
                        "guidance": "1.0", "seed": str(seed), "class": "37"[seed % 2]}

def test_only_the_wanted_net_is_made_and_no_source_is_read_for_a_student(runs, monkeypatch):
    made, read = spy(monkeypatch, fill, "draw"), spy(monkeypatch, ckpt, "read")
    run = sample.load_run(runs / "dmd2")
    assert list(run.names) == ["ema_slow", "student", "teacher", "fake_score"]
    student, average = (dict(sample.load_net(run, n, "cpu").state_dict()) for n in ("student", "ema_slow"))
    assert [args[2] for args, _ in made] == ["student", "student"] and read == []
    assert differing(student, run.state["nets"]["student"]) == []
    assert differing(average, run.state["emas"]["ema_slow"]) == [] != differing(student, average)
    assert all(p.is_meta for net in run.nets.values() for p in net.parameters())
    teacher = dict(sample.load_net(run, "teacher", "cpu").state_dict())
    assert [args[2] for args, _ in made[2:]] == ["teacher"] and len(read) == 1
    assert differing(teacher, saved(runs / "sft", 2)["nets"]["student"]) == []

def test_frozen_parts_of_a_student_and_its_average_come_from_its_source(runs):
    run, origin = sample.load_run(runs / "parts"), saved(runs / "sft", 2)["nets"]["student"]
    for name, kept in (("student", run.state["nets"]["student"]), ("ema", run.state["emas"]["ema"])):
        assert "patch.weight" not in kept
        for k, v in sample.load_net(run, name, "cpu").state_dict().items():
            assert torch.equal(v, origin[k] if k.startswith("patch.") else kept[k])

def test_guidance_reaches_the_sampler_and_no_sample_depends_on_its_batch(runs):
    def drawn(name, net, guidance, batch=1, steps=4):
        run, ids = sample.load_run(runs / name, guidance=guidance), list(range(12))
        labels, loaded = torch.tensor(ids) % 10, sample.load_net(run, net, CPU)
        return torch.cat([x0 for *_, x0 in sample.draw(run, loaded, net, ids, labels, steps, 0, batch, CPU)])
    own, off, on = (drawn("parts", "ema", guidance) for guidance in (None, 1.0, 2.0))
    assert torch.equal(own, on) and not torch.equal(off, on)
    one_by_one, in_fives = (drawn("dmd2", "teacher", 2.0, batch) for batch in (1, 5))
    torch.testing.assert_close(in_fives, one_by_one, rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize("main, run, args, words", [
    (sample, "nothing", "", "nothing holds no checkpoints; give a run folder"),
    (sample, "dmd2", "--ckpt 7", "no checkpoint 7; the newest is 2"),
    (sample, "dmd2", "--net techer", "did you mean teacher? known: ema_slow, student, teacher, fake_score"),
    (sample, "dmd2", "--steps 3", "trained for 1 steps, not for --steps 3"),
    (sample, "dmd2", "--steps 0", "--steps: 0 is"), (sample, "dmd2", f"--steps {10 ** 20}", "to 1000"),
    (sample, "dmd2", "--batch 0", "--batch: 0 is"),
    (sample, "dmd2", "--seeds 5-", "--seeds '5-' is not a list"),
    (sample, "dmd2", "--seeds 9-3", "--seeds '9-3' is not a list"),
    (sample, "dmd2", "--seeds 10000000", "--seeds '10000000' is not a list of numbers below 10000000"),
    (sample, "dmd2", "--classes 10", "--classes '10' is not a list of numbers below 10"),
    (sample, "dmd2", "--guidance 2", "--guidance 2 changes nothing for ema_slow"),
    (sample, "sft", "--guidance nan", "--guidance: nan is not a finite"),
    (sample, "dmd2", "--out {}/config.json/there", "config.json/there cannot be written to"),
    (evaluate, "dmd2", "--steps 1,2", "trained for 1 steps, not for --steps 2"),
    (evaluate, "dmd2", "--steps one", "--steps 'one' is not a list"),
    (evaluate, "dmd2", "--steps 0", "--steps: 0 is"),
    (evaluate, "dmd2", "--net student,emma", "'emma' is not known"),
    (evaluate, "dmd2", "--samples 1501", "--samples: 1501 is not a finite number from 2 to 1500"),
    (evaluate, "cifar10", "", "is a run on cifar10.zip; this version scores --data digits only")])
def test_bad_input_is_one_sentence(runs, tmp_path, monkeypatch, main, run, args, words):
    monkeypatch.chdir(tmp_path)
    if run == "cifar10":
        other = sample.load_run(runs / "sft")
        other.cfg["data"] = "cifar10.zip"
        monkeypatch.setattr(sample, "load_run", lambda *a: other)
    refused(main.main, [str(runs / run), *args.format(runs / run).split()], says=[words])
    assert list(tmp_path.iterdir()) == []

# ---- scores
@pytest.fixture(scope="module")
def judge():
    return evaluate.Judge(2)

def test_frechet_distance_of_gaussians_is_the_closed_form():
    a, b, m = torch.tensor([[1.0, 2.0, 0.5], [0.3, 2.0, 1.5], [1.0, -2.0, 3.0]]).double()
    normal = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    for turn in torch.eye(3).double(), torch.linalg.qr(normal(3, 3)).Q:       # the second do not commute
        white = (torch.linalg.qr(z - z.mean(0)).Q for z in (normal(400, 3), normal(300, 3)))
        x, y = (z * (len(z) - 1) ** 0.5 for z in white)     # mean 0 and covariance 1 exactly
        x, y = x @ a.diag() @ turn.mT + m, y @ b.diag()
        values, vectors = np.linalg.eigh(np.cov(x.T.numpy()))
        root = vectors * np.sqrt(values) @ vectors.T
        cross = np.sqrt(np.linalg.eigvalsh(root @ np.cov(y.T.numpy()) @ root)).sum()
        exact = float((m * m + a * a + b * b).sum()) - 2 * cross
        assert evaluate.frechet(x, y) == pytest.approx(exact, abs=1e-10)

def test_frechet_distance_to_itself_is_0_also_where_features_are_dead_or_few():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 40:], x[:, 30:35] = 0, x[:, :5]
    for part in (x, x[:20]):
        assert abs(evaluate.frechet(part, part.flip(0))) < 1e-9

def test_training_digits_score_perfectly_but_as_memorised_held_out_ones_as_new_and_degraded_ones_worse(judge):
    (held, _), (x0, label) = evaluate.digits("val"), evaluate.digits("train")
    found = judge(x0, label)
    assert abs(found["fd"]) < 1e-9 and found["nearest"] == 0 and found["agreement"] >= 0.97
    assert judge.real["held_out"]["agreement"] >= 0.97
    assert judge.features.shape == (1500, 64) and evaluate.CLASSIFIER.stat().st_size < 300_000
    assert evaluate.nearest(torch.tensor([[1.0], [2.0], [7.0]]), torch.zeros(1, 1)) == 2        # the median
    for half in (held[::2], held[1::2]):
        assert evaluate.nearest(half, x0) / judge.unit == pytest.approx(1, abs=0.1)
    assert 0 < judge.real["halves"]["fd"] < judge.real["held_out"]["fd"] < 3
    for worse in (x0.roll(1, dims=3), (x0 + x0.flip(0)) / 2):           # shifted by a pixel; blended
        assert judge(worse, label)["fd"] > 10
    assert judge(x0, (label + 1) % 10)["agreement"] < 0.02
    assert judge(3 * x0, label) == judge((3 * x0).clamp(-1, 1), label)

def results(folder, name="0000002"):
    return json.loads((folder / f"eval/{name}.json").read_text())

def test_the_file_holds_every_figure_with_what_made_it(runs, judge, capsys):
    evaluate.main([str(runs / "dmd2"), *FEW])
    found = results(runs / "dmd2")
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
    net = sample.load_net(run, "ema_slow", CPU)
    x0 = draw_samples(run.method, net, run.cfg, list(range(70)), label, 1, 1, CPU)
    for key, value in judge(x0, label).items():
        assert found["results"][0][key + "_each"][1] == pytest.approx(value, abs=1e-4)
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["net", "ema_slow", "teacher", "real halves", "held out"]

def test_all_scores_every_checkpoint_and_a_frozen_teacher_once(runs, tmp_path, monkeypatch):
    scored = spy(monkeypatch, evaluate, "score")
    folder = shutil.copytree(runs / "dmd2", tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    evaluate.main([str(folder), *FEW, "--all", "--steps=1"])         # the teacher keeps its own 18
    assert [(args[0].it, args[2]) for args, _ in scored] == [(1, "ema_slow"), (1, "teacher"), (2, "ema_slow")]
    first, second = (results(folder, name)["results"] for name in ("0000001", "0000002"))
    assert first[1]["fd"] == second[1]["fd"] and first[0]["fd"] != second[0]["fd"]
    about = [(r["net"], r["steps"], r["checkpoint"]) for r in second]
    assert about == [("ema_slow", 1, 2), ("teacher", 18, 2)]

def test_two_ranks_give_the_figures_of_one_for_every_net_and_step_count(runs):
    args = [str(runs / "sft"), *FEW, "--net", "ema,student", "--steps", "1,3"]
    evaluate.main(args)
    one = results(runs / "sft")
    (runs / "sft/eval/0000002.json").unlink()
    ranks(2, evaluate.main, args)
    two = results(runs / "sft")
    assert [(r["net"], r["steps"], r["calls"]) for r in two["results"]] == [
        ("ema", 1, 1), ("ema", 3, 5), ("student", 1, 1), ("student", 3, 5)]
    for a, b in zip(one.pop("results"), two.pop("results")):
        for key in ("fd", "agreement", "nearest"):
            assert b[key + "_each"] == pytest.approx(a[key + "_each"], abs=1e-6)
    assert one == two

@pytest.mark.slow
def test_the_tool_makes_as_good_a_classifier_from_any_seed_and_the_same_from_one():
    x0, label = evaluate.digits("val")
    nets = [make_classifier.train(seed) for seed in (1, 2, 2)]
    assert min(float((net(x0)[1].argmax(1) == label).double().mean()) for net in nets) >= 0.97
    assert all(torch.equal(v, nets[2].state_dict()[k]) for k, v in nets[1].state_dict().items())
