"""Knowledge distillation: the pairs that tools/make_pairs.py makes, what refuses them, the closed forms."""
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import data
import evaluate
import make_pairs
import run
import trainer
from gauss import Exact, Gauss, labelled
from nets import encoders
from run import load, refused, setup, spy

# ---- the pair maker
@pytest.mark.parametrize("schedule, solver, known", [
    ("edm", "heun", {5: 0.0157236, 10: 0.00762248, 18: 0.00659531, 40: 0.00631096, 80: 0.00626432}),
    ("rf", "euler", {2: 0.2, 4: 0.34054, 50: 0.485397}), ("rf", "heun", {}), ("edm", "euler", {})])
def test_a_teacher_of_gaussian_data_maps_by_the_product_of_its_steps(schedule, solver, known):
    pred, start = dict(edm=("x0", 80.0), rf=("flow", 1.0))[schedule]
    def solved(mean=0.0, **meta):
        """x at the times of the path, x0: each (4, 1, 8, 8)."""
        meta = dict(labels=[0] * 4, classes=10, seed=0, shape=(1, 8, 8), guidance=1.0, solver=solver) | meta
        pairs = make_pairs.solve(Gauss(mean, 0.5, schedule, pred), meta, range(4), "cpu")
        return torch.from_numpy(pairs).double().unbind(1)
    for steps, factor in known.items():
        x, x0 = solved(steps=steps, path_t=[start])
        assert x.std() == pytest.approx(start, rel=0.2)                         # the noise is scaled
        assert torch.allclose(x0, factor * x, rtol=5e-6, atol=1e-6)
    x, *states, _ = solved(steps=200, path_t=(path_t := [start, 0.7, 0.3]))
    alpha, sigma = common.alpha_sigma(schedule, torch.tensor(path_t, dtype=torch.float64))
    v = torch.hypot(alpha / 2, sigma)                   # the exact ODE keeps x / v
    for state, ratio in zip(states, v[1:] / v[0], strict=True):
        assert torch.allclose(state, ratio * x, rtol=1e-2)
    x, x0 = solved(0.4, steps=200, path_t=[start], guidance=2.0)                # of N(w m, s^2)
    assert torch.allclose(x0, 0.8 + 0.5 / v[0] * (x - alpha[0] * 0.8), atol=0.1)

def make(folder, *argv):
    """7 files of 50 pairs; -> {name: bytes} of what is in the folder."""
    make_pairs.main(["--net=toy:tiny", f"--teacher={run.teacher('toy:tiny')}", f"--out={folder}",
                     "--pairs=50", "--shard=8", "--batch=5", "--steps=2", *argv])
    return {f.name: f.read_bytes() for f in Path(folder).glob("[!.]*.*")}

@pytest.mark.slow
def test_any_number_of_ranks_makes_the_same_pairs(tmp_path):
    whole = make(tmp_path / "one")
    assert run.ranks(2, make, tmp_path / "two") == [whole, whole]

def test_what_is_there_is_kept_and_a_folder_made_otherwise_is_refused(tmp_path, monkeypatch):
    folder, other = tmp_path / "one", tmp_path / "other.pth"
    whole = make(folder)
    (folder / "0000002.npy").unlink()
    (folder / "0000005.npy").write_bytes(whole["0000005.npy"][:-9])
    refused(data.load, dict(data=str(folder)), says=["0000002.npy is missing or not whole"])
    calls = spy(monkeypatch, make_pairs, "solve")
    assert make(folder) == whole and len(whole) == 8 and len(calls) == 4    # the batches of two files
    torch.save({k: v + 1 for k, v in torch.load(run.teacher("toy:tiny")).items()}, other)
    for option, words in (("--guidance=2", "with guidance 1.0, not 2.0"),
                          ("--path_t=2,3", "--path_t 2,3 must"), (f"--teacher={other}", "with weights"),
                          ("--path_t=1001", "at most 1000 (schedule edm)")):
        refused(make, folder, option, says=[words])
    assert make(folder) == whole

def test_a_pair_has_the_datas_label_noise_of_its_own_and_a_twentieth_is_held_out(tmp_path):
    make(tmp_path)
    cfg = dict(data=str(tmp_path), batch_size=6)
    train, held, label = data.load(cfg), data.load(cfg, "val"), data.load(dict(data="digits")).label
    label = label[data.indices(0, range(50), len(label))]               # shuffled: data may be class-sorted
    assert (len(train), len(held), train.classes) == (48, 2, 10)
    assert [*train.label, *held.label] == label.tolist()
    raw = next(data.Loader(train, cfg))
    batch, ids = encoders.encode(raw, dict(classes=10), "cpu"), raw["id"].tolist()
    assert batch["path"].shape == (6, 4, 1, 8, 8) and batch["path_t"].tolist() == [80, 2.5, 0.8, 0.4]
    assert batch["cond"]["label"].tolist() == label[ids].tolist()
    far = lambda s: (batch["path"][:, 0] / 80 - common.noise_fn(s, ids, (1, 8, 8), "cpu")(0)).abs().max()
    assert far(common.hash_seed("pairs", 0)) < 1e-6 and far(0) > 1      # not the noise of evaluate.py
    pytest.importorskip("upath")
    make("memory://pairs")                              # a store of fsspec's
    assert np.array_equal(data.load(dict(data="memory://pairs")).get(7)[0], train.get(7)[0])

def test_pairs_that_are_not_the_students_are_one_sentence(outputs):
    method, cfg = setup("kd")
    for changes, word in (
            (dict(data="digits"), "tools/make_pairs.py --net toy:tiny"),
            (dict(data="nowhere"), "make_pairs.py --net toy:tiny --data DATA --teacher PATH --out nowhere"),
            (dict(guidance=2.0), "guidance 1.0"), (dict(xflip=True), "--xflip"),
            (dict(val_every=5, val_data="digits"), "kd trains on pairs"),
            (dict(net="toy:tiny,schedule=rf,pred=flow", t_list=(0.9,)), "schedule edm, this run has rf"),
            (dict(val_settings=("steps=2;t_list=80,3",)), "80.0, 3.0"),
            (dict(t_list=(2.5,)), "--path_t 2.5")):
        refused(trainer.train, method, cfg | changes, says=[word])
    rows = np.load(file := Path(cfg["data"], "0000000.npy"))
    rows[:, 0] /= 80
    np.save(file, rows)
    refused(trainer.train, method, cfg, says=["standard deviation of 0.99", "not 80", "sigma z"])
    assert not outputs.exists()

# ---- the method on N(0, 0.5^2)
def pairs(schedule, ts):
    """A batch on the exact ODE, x at ts and x0, in float64."""
    torch.manual_seed(0)
    alpha, sigma = common.alpha_sigma(schedule, ts := torch.tensor(ts, dtype=torch.float64))
    v = (alpha ** 2 / 4 + sigma ** 2).sqrt()
    x = torch.randn(64, 1, 16, 16).double() * sigma[0] / v[0]
    return labelled(x / 2) | dict(path=x[:, None] * v.reshape(-1, 1, 1, 1), path_t=ts)

@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("schedule, ts", [
    ("edm", (80.0, 2.5, 0.8, 0.4)), ("rf", (0.999, 0.937, 0.833, 0.624))])
def test_the_exact_consistency_function_has_no_loss_at_any_step(schedule, ts, norm):
    method, cfg = setup("kd", steps=4, t_list=ts, norm=norm)
    batch, student, seen = pairs(schedule, list(ts)), Exact(0.0, 0.5, schedule), []
    student.register_forward_pre_hook(lambda net, args: seen.append(args[1].tolist()))
    assert method.step(dict(student=student), batch, 0, cfg)[0] < 1e-7
    assert len(seen) == 1 and {*seen[0]} == {*ts}       # each sample at a step of its own
    expected = 0.5 * batch["x0"].square() if norm == "l2" else batch["x0"].abs()
    loss = method.step(dict(student=student), batch | dict(x0=2 * batch["x0"]), 0, cfg)[0]
    assert torch.allclose(loss, expected.mean(), rtol=1e-6)

@pytest.mark.parametrize("schedule, ts", [("edm", (80.0, 2.5, 0.8)), *(
    (schedule, (0.999, 0.7, 0.2)) for schedule in ("rf", "trig", "sd"))])
def test_the_next_target_takes_ddim_along_the_path(schedule, ts):
    method, seen, batch = setup("kd")[0], [], pairs(schedule, ts)
    z = batch["path"][:, 0] / common.alpha_sigma(schedule, ts[0])[1]
    y = {t: method.next_target(batch, *method.state(batch, [*ts], k), [*ts], k, schedule)
         for t, k in zip(ts, torch.arange(3)[:, None].expand(3, 64))}
    net = lambda x, t, cond: seen.append(x) or y[t[0].item()]
    net.schedule, net.pred = schedule, "x0"
    out = common.few_step(net, lambda k: z, [*ts, 0.0], {}, method.SAMPLERS["next"])
    torch.testing.assert_close(torch.stack(seen, 1), batch["path"])
    torch.testing.assert_close(out, batch["x0"])

def test_a_run_on_pairs_samples_by_its_target_and_is_scored_also_without_them(capsys, monkeypatch):
    assert load("kd").SAMPLERS["x0"] == "sde"           # as the exact consistency function needs it
    method, cfg = setup("kd", max_iter=2, steps=4, target="next", val_every=2, sample_every=2)
    calls, folder = spy(monkeypatch, common, "few_step"), run.run(method, cfg).folder
    assert "WARNING" not in capsys.readouterr().out
    torch.save({k: v + 1 for k, v in torch.load(cfg["teacher"]).items()}, folder / "other.pth")
    run.run(method, cfg | dict(name="other", max_iter=1, teacher=str(folder / "other.pth")))
    assert f"are of --net toy:tiny --teacher {cfg['teacher']}, other weights" in capsys.readouterr().out
    shutil.rmtree(cfg["data"])
    evaluate.main([str(folder), "--samples=20", "--seeds=1"])
    assert {args[2::2] == ([80.0, 2.5, 0.8, 0.4, 0.0], "ode") for args, _ in calls} == {True}
    assert "(kd): 20 samples" in capsys.readouterr().out
