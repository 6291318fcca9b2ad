"""Knowledge distillation: the pairs that tools/make_pairs.py makes, what refuses them, the closed forms."""
import math
import shutil
import threading
import time
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
from nets import encoders
from run import refused, setup, spy
from test_flow_maps import Exact
from test_methods import Affine, Gauss, labelled

# ---- the pair maker
def solved(net, **meta):
    """x at the times of the path, x0: each (4, 1, 8, 8)."""
    meta = dict(labels=[0] * 4, classes=10, seed=0, shape=(1, 8, 8), guidance=1.0, solver="heun") | meta
    return torch.from_numpy(make_pairs.solve(net, meta, range(4), "cpu")).double().unbind(1)

@pytest.mark.parametrize("schedule, solver, known", [
    ("edm", "heun", {5: 0.0157236, 10: 0.00762248, 18: 0.00659531, 40: 0.00631096, 80: 0.00626432}),
    ("rf", "euler", {2: 0.2, 4: 0.34054, 50: 0.485397}), ("rf", "heun", {7: 0}), ("edm", "euler", {20: 0})])
def test_a_teacher_of_gaussian_data_maps_by_the_product_of_its_steps(schedule, solver, known):
    edm, start = schedule == "edm", 80.0 if schedule == "edm" else 1.0
    slope = lambda t: (t / (0.25 + t * t) if edm else       # v' / v of v^2 = alpha^2 s^2 + sigma^2, s = 0.5
                       (t - (1 - t) / 4) / ((1 - t) ** 2 / 4 + t * t))
    for steps, more in ((n, more) for n in known for more in ((), (0.7, 0.3))):
        u = np.linspace(0, 1, steps) if edm else np.arange(steps) / steps
        grid = (80 ** (1 / 7) + u * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 if edm else 1 - u
        grid, factor, at = sorted({*np.round(grid, 12), *more}, reverse=True), 1.0, {}
        for t, t_next in zip(grid, [*grid[1:], 0.0]):
            at[t], h, c = factor, t_next - t, slope(t)
            again = slope(t_next) * (1 + h * c) if solver == "heun" and t_next else c
            factor *= 1 + h * (c + again) / 2
        net = Gauss(0.0, 0.5, schedule, "x0" if edm else "flow")
        x, *states, x0 = solved(net, steps=steps, solver=solver, path_t=[start, *more])
        assert x.std() == pytest.approx(start, rel=0.2)     # the noise is scaled
        for expected, state in zip([*map(at.get, more), factor], [*states, x0]):
            assert torch.allclose(state, expected * x, rtol=1e-6, atol=1e-6)
        assert more or not known[steps] or factor == pytest.approx(known[steps], rel=5e-6)

def test_guidance_is_in_the_pairs_and_two_points_are_reached():
    m, s, w = 0.4, 0.5, 2.0                             # under guidance the target is N(w m, s^2)
    x, x0 = solved(Gauss(m, s), steps=40, path_t=[80.0], guidance=w)
    assert torch.allclose(x0, w * m + s / math.hypot(s, 80) * (x - w * m), atol=0.02)
    net = Gauss(0.0, 0.5)
    net.forward = lambda x, t, cond: torch.tanh(x / common.expand(t, x) ** 2)
    x, x0 = solved(net, steps=300, path_t=[80.0])
    assert torch.allclose(x0, x.sign(), atol=1e-3)

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
    for option, words in (("--guidance=2", "with guidance 1.0, not 2.0"), ("--seed=1", "with seed 0"),
                          ("--pairs=51", "with pairs 50"), ("--path_t=80", "with path_t"),
                          ("--pairs=1", "--pairs 1 must"),
                          (f"--teacher={other}", "with weights"), ("--path_t=2,3", "--path_t 2,3 must"),
                          ("--path_t=1001", "at most 1000 (schedule edm)"),
                          ("--solver=rk4", "solver 'rk4' is not known")):
        refused(make, folder, option, says=[words])
    assert make(folder) == whole

def test_of_two_makers_with_other_settings_that_start_at_once_one_is_refused(tmp_path, monkeypatch):
    read, answers = data.pairs_meta, []
    monkeypatch.setattr(data, "pairs_meta", lambda folder: (read(folder), time.sleep(0.2))[0])
    def start(seed):
        try:
            make_pairs.write_meta(tmp_path, dict(path_t=[80.0], pairs=2, seed=seed))
        except common.BadInput as e:
            answers.append(str(e))
    threads = [threading.Thread(target=start, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 1 and "made with seed" in answers[0]

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
    z = batch["path"][:, 0] / 80
    far = lambda seed: (z - common.noise_fn(seed, ids, (1, 8, 8), "cpu")(0)).abs().max()
    assert far(common.hash_seed("pairs", 0)) < 1e-6 and far(0) > 1      # not the noise of evaluate.py
    pytest.importorskip("upath")
    make("memory://pairs")                              # a store of fsspec's
    assert np.array_equal(data.load(dict(data="memory://pairs")).get(7)[0], train.get(7)[0])

# ---- what is refused before any work
@pytest.mark.parametrize("changes, words", [
    (dict(data="digits"), ["kd trains on pairs", "tools/make_pairs.py --net toy:tiny"]),
    (dict(data="nowhere"), ["nowhere does not exist", "`torchrun tools/make_pairs.py --out nowhere`"]),
    (dict(val_every=5, val_data="digits"), ["kd trains on pairs"]), (dict(guidance=2.0), ["guidance 1.0"]),
    (dict(net="toy:tiny,schedule=rf,pred=flow", t_list=(0.9,)), ["schedule edm, this run has rf"]),
    (dict(t_list=(2.5,)), ["student's steps are at [2.5]", "--path_t 2.5"]), (dict(norm="l3"), ["l2, l1"]),
    (dict(target="state"), ["x0, next"]), (dict(steps=2, t_list=(80.0, 2.51)), ["2.51"]),
    (dict(steps=2, t_list=()), ["are at [80.0, 2.526"]), (dict(steps=5), ["--steps 5"]),
    (dict(val_settings=("steps=2;t_list=80,3",)), ["[80.0, 3.0]"]), (dict(xflip=True), ["--xflip"]),
    (dict(augment=0.1), ["--augment"])])
def test_pairs_that_are_not_the_students_are_one_sentence(changes, words, outputs):
    method, cfg = setup("kd", data=run.pairs("toy:tiny"))
    refused(trainer.train, method, cfg | changes, says=words)
    assert not outputs.exists()

def test_pairs_whose_noise_is_not_scaled_are_refused():
    method, cfg = setup("kd")
    rows = np.load(file := Path(cfg["data"], "0000000.npy"))
    rows[:, 0] /= 80
    np.save(file, rows)
    refused(trainer.train, method, cfg, says=["standard deviation of 0.99", "not 80", "sigma z"])

# ---- the method on N(0, 0.5^2)
def pairs(schedule, ts):
    """A batch on the exact ODE, x at ts and x0, in float64."""
    torch.manual_seed(0)
    alpha, sigma = common.alpha_sigma(schedule, ts := torch.tensor(ts, dtype=torch.float64))
    v = (alpha ** 2 / 4 + sigma ** 2).sqrt()
    x = torch.randn(64, 1, 16, 16).double() * sigma[0] / v[0]
    return labelled(x / 2) | dict(path=x[:, None] * v.reshape(-1, 1, 1, 1), path_t=ts)

@pytest.mark.parametrize("schedule, t, slope", [("edm", 80.0, 0.00624988), ("rf", 1.0, 0.5)])
def test_the_linear_student_of_exact_pairs_has_the_teachers_slope_and_no_loss(schedule, t, slope):
    """One Newton step of a quadratic loss. Unscaled noise would give 0.5 in place of 0.00625 on edm."""
    method, cfg = setup("kd", t_list=(t,))
    for scale in (1, t):                                # the second: noise as it was drawn
        batch, student = pairs(schedule, [t]), Affine(0.0, 0.0, schedule, learn=True).double()
        batch["path"] /= scale
        def loss(std):
            student.std.data.fill_(std)
            value = method.step(dict(student=student), batch, 0, cfg)[0]
            return value.item(), torch.autograd.grad(value, student.std)[0].item()
        g0, g1 = loss(0.0)[1], loss(1.0)[1]
        assert g0 / (g0 - g1) / t == pytest.approx(slope * scale, rel=1e-6)
        assert loss(g0 / (g0 - g1))[0] < 1e-12

@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("schedule, ts", [
    ("edm", (80.0, 2.5, 0.8, 0.4)), ("rf", (0.999, 0.937, 0.833, 0.624))])
def test_the_exact_consistency_function_has_no_loss_at_any_step(schedule, ts, norm):
    method, cfg = setup("kd", steps=4, t_list=ts, norm=norm)
    batch, student, seen = pairs(schedule, list(ts)), Exact(0.0, 0.5, schedule).double(), []
    student.register_forward_pre_hook(lambda net, args: seen.append(args[:2]))
    assert method.step(dict(student=student), batch, 0, cfg)[0] < 1e-7
    (x_t, t), = seen                                    # one call, each sample at a step of its own
    assert {*t.tolist()} == {*ts}
    assert torch.equal(x_t, batch["path"][range(64), [ts.index(v) for v in t.tolist()]])
    expected = 0.5 * batch["x0"].square() if norm == "l2" else batch["x0"].abs()
    loss = method.step(dict(student=student), batch | dict(x0=2 * batch["x0"]), 0, cfg)[0]
    assert torch.allclose(loss, expected.mean(), rtol=1e-6)

@pytest.mark.parametrize("schedule, ts", [("edm", (80.0, 2.5, 0.8)), *(
    (schedule, (0.999, 0.7, 0.2)) for schedule in ("rf", "trig", "sd"))])
def test_the_next_target_takes_ddim_along_the_path(schedule, ts):
    method, seen = setup("kd")[0], []
    path, x0 = torch.randn(5, 3, 1, 4, 4).double(), torch.randn(5, 1, 4, 4).double()
    z = path[:, 0].clone()
    path[:, 0] *= common.alpha_sigma(schedule, ts[0])[1]
    batch = dict(x0=x0, path=path, path_t=torch.tensor(ts, dtype=torch.float64))
    y = {t: method.next_target(batch, *method.state(batch, [*ts], k), [*ts], k, schedule)
         for t, k in zip(ts, torch.arange(3)[:, None].expand(3, 5))}
    out = common.few_step(lambda x, t: seen.append(x) or y[t[0].item()], lambda k: z, [*ts, 0.0], schedule,
                          method.SAMPLERS["next"])
    assert torch.allclose(torch.stack(seen, 1), path) and torch.equal(out, x0)

def test_a_student_samples_by_its_target_with_its_own_steps(monkeypatch):
    net, noise = Exact(0.0, 0.5), common.train_noise((64, 1, 16, 16), "cpu")
    batch, calls = labelled(torch.zeros(64, 1, 16, 16)), spy(monkeypatch, common, "few_step")
    for target, kind in (("x0", "sde"), ("next", "ode")):
        method, cfg = setup("kd", steps=4, target=target)
        x = method.sample(net, noise, batch, cfg, 4)
        assert calls[-1][0][2:] == ([80.0, 2.5, 0.8, 0.4, 0.0], "edm", kind)
        assert target == "next" or x.std().item() == pytest.approx(0.5, rel=0.02)
        refused(method.sample, net, noise, batch, cfg, 2, says=["trained for 4 steps, not for --steps 2"])

def test_a_run_on_pairs_of_the_digits_is_scored_also_without_them(capsys):
    method, cfg = setup("kd", max_iter=2, steps=4, target="next", val_every=2, sample_every=2)
    folder = run.run(method, cfg).folder
    out = capsys.readouterr().out
    assert "WARNING" not in out and f"score it: python evaluate.py {folder}" in out
    torch.save({k: v + 1 for k, v in torch.load(cfg["teacher"]).items()}, folder / "other.pth")
    run.run(method, cfg | dict(name="other", max_iter=1, teacher=str(folder / "other.pth")))
    assert f"are of --net toy:tiny --teacher {cfg['teacher']}, other weights" in capsys.readouterr().out
    shutil.rmtree(cfg["data"])
    evaluate.main([str(folder), "--samples=20", "--seeds=1"])
    assert "(kd): 20 samples" in capsys.readouterr().out
