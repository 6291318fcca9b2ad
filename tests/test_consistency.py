"""CM and TCM: closed forms on Gaussian data, the curricula, shared masks, the boundaries at 0 and t'."""
import contextlib
import math

import pytest
import torch

import common
import run
from gauss import Exact, Gauss, Scale, fit, labelled, optimum
from run import batch_of, differing, nets_of, one_step, refused, setup, spy

FROM_DATA = dict(distill=False, guidance=1.0)
f64 = lambda *values: torch.tensor(values, dtype=torch.float64)         # noqa: E731

# ---- curricula, distances
@pytest.mark.parametrize("stage, pairs", [
    (0, {1: 0, 1.9459: 0, 2: 0.046377, 10: 4.998184, 80: 40}), (1, {0.5: 0, 1: 0.212117, 2: 1.023188}),
    (3, {0.1: 0.069999, 1: 0.803029, 10: 9.374773}), (7, {0.1: 0.098125, 1: 0.987689, 80: 79.6875})])
def test_ect_maps_t_to_its_published_r_by_images_seen(stage, pairs):
    ratio, later, last = (common.ect_ratio(n, 2.0, 3200, 0.999) for n in (
        3_200_000 * stage, 3_200_000 * stage + 3_199_999, 10 ** 9))
    assert ratio == later == 1 - 2.0 ** -(stage + 1) and last == 0.999
    t, r = f64(*pairs), common.ect_r("edm", f64(*pairs), ratio)
    assert r.tolist() == pytest.approx([*pairs.values()], abs=1e-6) and (r < t).all()
    for schedule in ("rf", "trig"):                     # the same noise levels
        own = common.ect_r(schedule, common.t_from_ratio(schedule, t), ratio)
        assert common.noise_level(schedule, own).tolist() == pytest.approx(r.tolist(), rel=1e-9)

def test_the_grid_doubles_and_its_levels_are_drawn_as_the_discretised_lognormal():
    method, cfg = setup("cm", mapping="grid", max_iter=400000, t_mean=-1.1, t_std=2.0)
    levels = [method.intervals(it, cfg) + 1 for it in (0, 49999, 50000, 349999, 350000, 399999)]
    assert levels == [11, 11, 21, 641, 1281, 1281]
    rf = dict(classes=10, net="toy:tiny,schedule=rf", t_dist="uniform")
    refused(method.build, cfg | rf, says=["--mapping 'grid'"])
    t = common.sample_t(200000, schedule="edm", device="cpu", **method.times(cfg))
    t, r = method.neighbours(t, 0, "edm", cfg)
    grid = common.karras(11, 0.002, 80).flip(0)
    edge = torch.special.ndtr((grid.log() + 1.1) / 2.0)
    share = torch.stack([(t == level).double().mean() for level in grid[1:]])
    assert (share - edge.diff() / (edge[-1] - edge[0])).abs().max() < 0.005
    assert {*zip(t.tolist(), r.tolist())} == {*zip(grid[1:].tolist(), [0.0, *grid[1:-1].tolist()])}

def test_weights_and_distances_are_those_of_the_papers_and_gradients_are_at_most_1_long():
    t, r, c_out = f64(2.0, 3.0), f64(1.75, 2.0), f64(1 / 4.25 ** 0.5, 1.5 / 9.25 ** 0.5)
    weights = (1 / (t - r), (t - r) ** -0.5, 1 / c_out, c_out ** -2, t ** -2, f64(1, 1))
    a, b = torch.randn(2, 2, 1, 4, 4, dtype=torch.float64).requires_grad_().unbind()
    d = (a - b).square().sum((1, 2, 3)).sqrt()
    for weight, w in zip(common.consistency_weights, weights, strict=True):
        for rho, how in ((d, {}), (d ** 2, dict(squared=True)),
                         ((d ** 2 + 0.09).sqrt() - 0.3, dict(huber_c=0.3))):
            ours = common.consistency_loss(a, b, "edm", t, r, weight, **how)
            assert torch.allclose(ours, w * rho, rtol=1e-12)
    for c in (0.0, 1e-8, 0.06):                         # before weighting; finite where both are the same
        for target in (b, a * 1):
            loss = common.consistency_loss(a, target, "edm", t, r, "unit", c)
            grad, to = torch.autograd.grad(loss.sum(), (a, b), allow_unused=True)
            assert to is None and (grad.flatten(1).norm(dim=1) < 1 + 1e-12).all()
            assert bool(loss.any()) == bool(grad.any()) == (target is b)

# ---- Gaussian data
@pytest.mark.parametrize("distill, solver, factor, k, tol", [
    (False, "euler", (0.49 + 1.1 * 1.7) / (0.49 + 1.7 ** 2), 0.374860, 3e-3),
    (True, "euler", 0.698225, 0.374860, 1e-5), (True, "heun", 0.713575, 0.383102, 1e-5)])
def test_one_update_has_its_known_optimum_and_its_gradient_holds_the_target(distill, solver, factor, k, tol,
                                                                            monkeypatch):
    """s 0.7, t 1.7, r 1.1: k_t = k_r factor, by the data in the mean as by the teacher's Euler step."""
    method, cfg = setup("cm", distill=distill, solver=solver, squared=True, loss_weight="unit", guidance=1.0)
    monkeypatch.setattr(method, "neighbours", lambda t, *_: (0 * t + 1.7, 0 * t + 1.1))
    seen, student = spy(monkeypatch, common, "consistency_loss"), Exact(0.0, 0.7)
    k_t = torch.nn.Parameter(torch.zeros(()))           # f(x, t) = k_t x, the map at r
    student.register_forward_hook(lambda net, args, f: k_t * args[0] if args[1][0] > 1.4 else f)
    batch = labelled(0.7 * torch.randn(64, 1, 64, 64, generator=torch.manual_seed(0)))
    def loss():
        common.seed_default(0)
        return method.step(dict(student=student, teacher=Gauss(0.0, 0.7)), batch, 0, cfg)[0]
    best = optimum(loss, k_t)
    assert best == pytest.approx(0.7 / math.hypot(0.7, 1.1) * factor, rel=tol) == pytest.approx(k, rel=tol)
    k_t.data.fill_(0.6)
    grad, (f_t, f_r, *_) = torch.autograd.grad(loss(), k_t)[0].item(), seen[-1][0]
    assert grad == pytest.approx((2 * (f_t - f_r) * f_t / 0.6).sum((1, 2, 3)).mean().item(), rel=1e-5)

@pytest.mark.parametrize("schedule", ["edm", "rf", "trig"])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_the_teachers_step_is_guided_alike_on_every_schedule_and_ends_in_its_denoiser(schedule, solver):
    method, cfg = setup("cm", distill=True, solver=solver, guidance=2.5)
    z, batch = torch.randn(4, 1, 8, 8, dtype=torch.float64), labelled(torch.zeros(4, 1, 8, 8))
    u, v = f64(0.4, 1.7, 3.0, 0.3), f64(0.3, 1.1, 0.0, 0.0)
    t, r = (common.t_from_ratio(schedule, level) for level in (u, v))
    alpha_t, alpha_r = (common.expand(common.alpha_sigma(schedule, s)[0], z) for s in (t, r))
    x_r = method.ode_step(Gauss(0.4, 0.5, schedule), alpha_t * z, t, r, batch, cfg)
    one = method.ode_step(Gauss(1.0, 0.5), z, u, v, batch, cfg | dict(guidance=1.0))    # of N(w m, s^2)
    assert torch.allclose(x_r / alpha_r, one, atol=1e-6)
    assert torch.allclose(one[2:], common.predict(Gauss(1.0, 0.5), z, u, batch["cond"])[2:], atol=1e-6)

@pytest.mark.parametrize("name, changes", [
    ("cm", {}), ("tcm", dict(stage1="")), ("tcm", {}), ("scm", dict(t_list=(80.0, 2.0), t_max=0.0))])
def test_any_number_of_steps_keeps_the_spread_of_an_exact_consistency_function(name, changes):
    method, cfg = setup(name, **changes)
    net, batch = Exact(0.0, 0.5), labelled(torch.zeros(16, 1, 64, 64))
    for steps in (1, 2, 3, 4, 9):
        ts = method.levels(net, cfg, steps)
        assert len(ts) == steps + 1 and (steps != 2 or ts[:2] == [*cfg["t_list"]])
        assert cfg.get("stage1", "") == "" or ts[-2] >= cfg["transition"] - 1e-9        # below it is T's part
        x0 = method.sample(net, common.train_noise((16, 1, 64, 64), "cpu"), batch, cfg, steps)
        assert x0.std().item() == pytest.approx(0.5, rel=0.01)

@pytest.mark.slow
def test_cm_training_reaches_the_ect_chain_of_gaussian_data():
    """Data N(0, s^2): at the curriculum's end f = k(t) x, k(t) = k(r) (s^2 + r t) / (s^2 + t^2), k(0) = 1.
    The student is of rf, whose logit-normal times have the noise levels of edm's lognormal ones."""
    s, levels = 0.3, f64(0.05, 0.2, 0.5, 1, 3, 10, 80)
    k, t = torch.ones_like(levels), levels
    while t.max() > 1e-9:
        r = common.ect_r("edm", t, 1 - 2.0 ** -8)
        k, t = k * (s ** 2 + r * t) / (s ** 2 + t ** 2), r
    assert k.tolist() == pytest.approx((0.9863, 0.8309, 0.5128, 0.2862, 0.0991, 0.0299, 0.0037), abs=6e-5)
    method, cfg = setup("cm", **FROM_DATA, batch_size=1000, kimg_per_stage=400, ratio_cap=1 - 2.0 ** -8,
                        squared=True, lr=2e-3, lr_schedule="cosine", warmup=0, max_iter=4000,
                        t_dist="logitnormal", t_mean=-1.1, t_std=2.0)
    torch.manual_seed(0)
    fit(method, cfg, nets := dict(student=Scale()), s, 1000, 1, 1, 1)
    x = (1 / (1 + levels)).float().reshape(-1, 1, 1, 1)         # of rf, where edm has 1
    f = common.predict(nets["student"], x, common.t_from_ratio("rf", levels), {}, "x0").flatten()
    assert ((f - k).abs() < f64(0.01, *[0.005] * 6)).all(), f

# ---- the boundary at 0, masks
def test_at_r_0_the_target_is_the_data_itself(monkeypatch):
    """FastGen keeps r at 0.002: no target is data. At stage 0 every t below ln 7 has r = 0."""
    method, cfg = setup("cm", batch_size=64, **FROM_DATA)
    nets, batch, seen = nets_of(method, cfg), batch_of(cfg), spy(monkeypatch, common, "consistency_loss")
    one_step(method, nets, cfg, 0, batch)
    f_t, f_r, _, t, r = seen[0][0][:5]
    assert torch.equal(r == 0, t < math.log(7)) and 20 < (r == 0).sum() < 64
    assert torch.equal(f_r[r == 0], batch["x0"][r == 0]) and not torch.equal(f_t, f_r)

@pytest.mark.parametrize("name, changes, below", [
    ("cm", {}, 0), ("tcm", {}, 0), ("tcm", dict(t_max=1 + 1e-13, t_list=(), tail_t_dist="uniform"),
                                        1e-12)])
def test_equal_inputs_have_no_loss_under_dropout_as_all_passes_share_masks(name, changes, below, monkeypatch):
    """below: so close to t' that x_r is x_t, with stage 1's net, of the same weights, for the target."""
    method, cfg = setup(name, dropout=0.5, **changes)
    monkeypatch.setattr(common, "ect_r", lambda schedule, t, ratio: t - below)
    nets = nets_of(method, cfg)
    assert one_step(method, nets, cfg, 0)[0] == 0
    monkeypatch.setattr(common, "repeated", lambda device: contextlib.nullcontext())
    assert one_step(method, nets, cfg, 0)[0] > 0

# ---- TCM
def test_tcm_stage_1_is_cm_bit_for_bit():
    (cm, cfg), (tcm, own) = setup("cm", dropout=0.3, **FROM_DATA), setup("tcm", stage1="")
    own |= {key: cfg[key] for key in ("t_mean", "t_std", "kimg_per_stage", "ratio_cap", "huber_c", "dropout")}
    for it in (0, 5000, 50000):
        (a, _, grads), (b, _, others) = (
            one_step(method, nets_of(method, c), c, it) for method, c in ((cm, cfg), (tcm, own)))
        assert a == b and differing(grads, others) == []

@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_below_t_the_target_is_stage_1s_and_a_sample_passes_the_net_it_needs(dropout, monkeypatch):
    method, cfg = setup("tcm", net="edm:digits", batch_size=16, dropout=dropout)
    nets, calls = nets_of(method, cfg), []
    assert differing(*(net.state_dict() for net in nets.values())) == [] and nets["stage1"].training
    for key, net in nets.items():
        net.register_forward_hook(lambda net, args, f, key=key: calls.append((key, len(f), f)))
    for p in nets["student"].parameters():
        p.data.mul_(1.1)
    seen = spy(monkeypatch, common, "consistency_loss")
    one_step(method, nets, cfg, 0)
    f_t, f_r, _, t, r = seen[0][0][:5]
    below = int((r < 1).sum())
    assert 4 <= below < 16 and (t[:4] == 1).all() and torch.equal(r < 1, torch.arange(16) < below)
    keys, sizes, (first, stage1, student) = zip(*calls)
    assert keys == ("student", "stage1", "student")
    assert sizes == ((16, 16, 16) if dropout else (16, below, 16 - below))
    assert torch.equal(f_t, first) and torch.equal(f_r[:below], stage1[:below])
    assert torch.equal(f_r[below:], student[below - 16:])

@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_boundary_counts_and_losses_are_right_and_finite_at_any_slice_size(dropout):
    """FastGen's mean over an empty boundary is NaN on slices below 4."""
    method, cfg = setup("tcm", dropout=dropout)
    nets = nets_of(method, cfg)
    for size in (1, 2, 3, 4, 7, 8):
        n, count = torch.tensor([method.boundary(size, cfg) for _ in range(2000)]).double().unbind(1)
        assert n.unique().tolist() == ([0, 1] if size < 4 else [size // 4])
        assert count.unique().tolist() == [size / 4 if size < 4 else size // 4]
        assert n.mean().item() == pytest.approx(count[0].item(), abs=0.05)
        for p in (0.0, 0.25):
            loss, logs, grads = one_step(method, nets, cfg | dict(batch_size=size, boundary_prob=p), 0)
            assert loss.isfinite() and all(g.isfinite().all() for g in grads.values())
            assert p or logs["boundary"] == 0

def test_the_boundary_alone_keeps_the_student_from_a_constant_and_is_0_at_the_solution():
    method, cfg = setup("tcm", batch_size=64, tail_t_dist="uniform", ratio_cap=0.999)
    batch, exact = labelled(0.5 * torch.randn(64, 1, 16, 16)), Exact(0.0, 0.5)
    for weight in (0.0, 0.1):
        constant = Gauss(0.3, 0.0, learn=True)          # of data without spread
        now = cfg | dict(boundary_weight=weight)
        loss, logs = method.step(dict(student=constant, stage1=exact), batch, 0, now)
        loss.backward()
        assert logs["cm"] == 0 and logs["boundary"] > 1 and (abs(constant.mean.grad) > 0.1) == bool(weight)
    cfg |= dict(loss_weight="unit", huber_c=1.0)        # E d^2 is (t' - r)^2 times the posterior's spread
    assert method.step(dict(student=exact, stage1=exact), batch, 0, cfg)[1]["boundary"] < 1e-3

def test_a_run_starts_from_no_checkpoint_of_its_own_and_stays_with_its_first_stage(outputs):
    first, other = (run.run(*setup("cm", name=name, max_iter=1, save_every=1)).folder for name in ("a", "b"))
    stage2 = lambda **more: setup("tcm", name="two", save_every=1, **more)
    run.run(*stage2(stage1=f"{first}#ema", max_iter=1))
    for source in (f"{other}#ema", ""):
        refused(run.run, *stage2(stage1=source, max_iter=2), says=["--stage1", "--name NEW"])
    run.run(*stage2(stage1=f"{first}#ema", max_iter=2))
    own = f"{first}/checkpoints/0000001.pth"
    refused(run.run, *setup("cm", name="a", teacher=own, max_iter=2), says=[own, "own folder", "--name NEW"])
