"""sample.py and evaluate.py, on runs of two iterations of the toy net; figures against closed forms."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import evaluate
import sample
from judge import draw_samples
from run import differing, ranks, refused, saved, spy

CPU, FEW = torch.device("cpu"), ["--seeds", "2", "--samples", "70", "--batch", "32"]

def pixels(file):
    with Image.open(file) as picture:
        return np.array(picture), picture.text

def test_by_default_the_samples_are_those_of_the_trainers_grid(runs, capsys):
    for name in "sft", "dmd2":
        sample.main([str(runs / name), "--batch", "13"])
        file = Path(capsys.readouterr().out.split(":")[0])
        assert np.array_equal(pixels(file)[0], pixels(runs / name / "samples/0000002.png")[0])

def test_separate_files_have_the_pixels_of_the_sheet(runs, tmp_path):
    args = [str(runs / "dmd2"), "--net", "ema_slow", "--classes", "3,7", "--seeds", "12", "--out"]
    sample.main([*args, str(tmp_path)])
    sample.main([*args, str(tmp_path / "sheet.png")])
    one, text = pixels(tmp_path / "0000012.png")                # the sheet is enlarged 8 times
    assert np.array_equal(pixels(tmp_path / "sheet.png")[0][::8, ::8][1:9, 1:9], one)
    assert (text["net"], text["seed"], text["class"]) == ("ema_slow", "12", "3")

def test_every_net_has_its_weights_frozen_parts_those_of_its_source_and_no_more_is_read(runs, monkeypatch):
    read, run, origin = spy(monkeypatch, ckpt, "read"), sample.load_run(runs / "dmd2"), saved(runs / "sft", 2)
    held, origin = dict(student=run.state["nets"]["student"], **run.state["emas"]), origin["nets"]["student"]
    assert list(run.names) == ["ema_slow", "student", "teacher", "fake_score"]
    for name in "student", "ema_slow":
        assert differing(dict(sample.load_net(run, name, "cpu").state_dict()), held[name]) == []
    assert read == [] and differing(held["student"], held["ema_slow"])
    assert all(p.is_meta for net in run.nets.values() for p in net.parameters())
    assert differing(dict(sample.load_net(run, "teacher", "cpu").state_dict()), origin) == []
    run = sample.load_run(runs / "parts")
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

def test_bad_input_is_one_sentence(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes("café au lait".encode("latin1"))
    for main, args, words in (
            (sample, "--net techer", "did you mean teacher? known: ema_slow, student, teacher, fake_score"),
            (sample, "--guidance 2", "--guidance 2 changes nothing for ema_slow"),
            (sample, "--negative dog", "--negative 'dog' is for nets that take prompts"),
            (sample, "--prompts nosuch.txt", "toy:tiny takes no prompts"),
            (sample, "--stpes 2", "--stpes 2; --help"),
            (evaluate, "--steps 1,2", "trained for 1 steps, not for --steps 2")):
        refused(main.main, [str(runs / "dmd2"), *args.split()], says=[words])
    for prompts, words in (("nosuch/prompts", "nosuch/prompts does not exist"),
                           ("nosuch.txt", "does not exist"),
                           ("latin1.txt", "latin1.txt is not UTF-8 (invalid continuation byte at byte 3)")):
        refused(sample.read_prompts, prompts, says=[words])
    assert list(tmp_path.iterdir()) == [tmp_path / "latin1.txt"]
    assert sample.read_prompts("a cat / a dog") == ["a cat / a dog"]

# ---- scores
@pytest.fixture(scope="module")
def judge():
    return evaluate.Judge(2)

def test_frechet_distance_is_the_closed_form_of_two_gaussians():
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=draw).double()
    x, y = (normal(n, 3) @ normal(3, 3) + normal(3) for n in (400, 300))
    (m, a), (n, b) = ((z.mean(0).numpy(), np.cov(z.T.numpy())) for z in (x, y))
    exact = ((m - n) ** 2).sum() + np.trace(a + b) - 2 * np.sqrt(np.linalg.eigvals(a @ b).real).sum()
    assert evaluate.frechet(x, y) == pytest.approx(exact, abs=1e-10)
    p, q = ((torch.tensor(mean), evaluate.root(torch.tensor(c))) for mean, c in ((m, a), (n, b)))
    assert evaluate.distance(*p, *q) == pytest.approx(exact, rel=1e-9)
    few = evaluate.root(torch.cov(torch.randn(9, 4, generator=draw).double()))              # of rank 3
    assert abs(evaluate.distance(few[0], few, few[0], few)) < 1e-12

def test_training_digits_score_perfectly_but_as_memorised_held_out_ones_as_new_and_degraded_ones_worse(judge):
    (held, _), (x0, label) = evaluate.digits("val"), evaluate.digits("train")
    found = judge(x0, label)
    assert abs(found["fd"]) < 1e-9 and found["nearest"] == 0 and found["agreement"] >= 0.97
    assert evaluate.nearest(torch.tensor([[1.0], [2.0], [7.0]]), torch.zeros(1, 1)) == 2        # the median
    assert evaluate.nearest(held[::2], x0) / judge.unit == pytest.approx(1, abs=0.1)
    assert 0 < judge.real["real halves"]["fd"] < judge.real["held out"]["fd"] < 3
    for worse in (x0.roll(1, dims=3), (x0 + x0.flip(0)) / 2):           # shifted by a pixel; blended
        assert judge(worse, label)["fd"] > 10
    assert judge(x0, (label + 1) % 10)["agreement"] < 0.02
    assert judge(3 * x0, label) == judge((3 * x0).clamp(-1, 1), label)

def results(folder):
    return json.loads((folder / "eval/0000002.json").read_text())

def test_the_file_holds_every_figure_with_what_made_it(runs, judge):
    evaluate.main([str(runs / "dmd2"), *FEW])
    found = results(runs / "dmd2")
    assert [s["file"] for s in found["sources"].values()] == [str(runs / "sft/checkpoints/0000002.pth")]
    rows = [[row[key] for key in ("net", "steps", "calls", "seeds")] for row in found["results"]]
    assert rows == [["ema_slow", 1, 1, [0, 1]], ["teacher", 18, 35, [0, 1]]]
    # seed 1 again, by the trainer's own function
    run, label = sample.load_run(runs / "dmd2"), evaluate.digits("train")[1][:70]
    net, row = sample.load_net(run, "ema_slow", CPU), found["results"][0]
    x0 = draw_samples(run.method, net, run.cfg, list(range(70)), label, 1, 1, CPU)
    for key, value in judge(x0, label).items():
        each = row[key + "_each"]
        assert each[1] == pytest.approx(value, abs=1e-4)
        assert [row[key], row[key + "_std"]] == pytest.approx([np.mean(each), np.std(each, ddof=1)])

def test_two_ranks_give_the_figures_of_one_for_every_net_and_step_count(runs):
    args, found = [str(runs / "sft"), *FEW, "--net", "ema,student", "--steps", "1,3"], []
    for main in evaluate.main, lambda args: ranks(2, evaluate.main, args):
        main(args)
        found.append(results(runs / "sft"))
        (runs / "sft/eval/0000002.json").unlink()
    one, two = (each.pop("results") for each in found)
    assert [(r["net"], r["steps"], r["calls"]) for r in two] == [
        ("ema", 1, 1), ("ema", 3, 5), ("student", 1, 1), ("student", 3, 5)] and found[0] == found[1]
    for a, b in zip(one, two, strict=True):
        for key in ("fd", "agreement", "nearest"):
            assert b[key + "_each"] == pytest.approx(a[key + "_each"], abs=1e-6)
