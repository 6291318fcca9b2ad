"""CM, TCM, sCM and MeanFlow on Gaussian data, where maps and velocities are known: losses, curricula, shared
masks, boundaries; forward mode through any net."""
import contextlib
import itertools
import math

import pytest
import torch

import common
import run
from gauss import Exact, Gauss, Scale, fit, labelled
from run import batch_of, differing, nets_of, one_step, refused, setup, spy

f64, M, S = lambda *values: torch.tensor(values, dtype=torch.float64), 0.4, 0.5
ALL = dict(edm="x0", rf="flow", trig="v", sd="eps", cogvideox="v")     # schedule: prediction
METHODS, FROM_DATA = ("cm", "scm", "mean_flow"), dict(distill=False, guidance=1.0)
both = pytest.mark.parametrize("name", METHODS[1:])
far = lambda a, b: ((a - b).norm() / b.norm()).item()

def gaussian(name, std=S, schedule="edm", off=0.0, n=16, **changes):
    """Method, config, nets (student: exact for the guided data, but for std and off), batch of N(M, S^2)."""
    own = dict(scm=dict(logvar=False, tangent="none", tangent_warmup=0, sigma_data=S),
               mean_flow=dict(loss_p=0.0, loss_rms=True, ratio=1.0)).get(name, {})
    method, cfg = setup(name, **dict(guidance=1.0) | own | changes)
    schedule = "rf" if name == "mean_flow" else schedule
    student = Exact(cfg["guidance"] * M, std, schedule, ALL[schedule], learn=True)
    student.off = off
    nets = dict(student=student, teacher=Gauss(M, S, schedule, ALL[schedule]))
    nets = nets if cfg["distill"] else dict(student=student)
    torch.manual_seed(0)
    return method, cfg, nets, labelled(M + S * torch.randn(64, 1, n, n).double())

def output_gradient(patch, name, it=10, **kw):
    """Gradient of the loss in the prediction, times half its size; what value_and_tangent saw; loss, logs."""
    method, cfg, nets, batch = gaussian(name, **kw)
    with patch.context() as p:
        seen = spy(p, common, "value_and_tangent")
        common.seed_default(3)
        loss, logs = method.step(nets, batch, it, cfg)
    (f, args, along, *_), (out, _) = seen[0]
    grad, = torch.autograd.grad(loss, out[0])
    return grad * grad.numel() / 2, (f, args, along), loss.item(), logs

# ---- any net on another path
@pytest.mark.parametrize("path, times, ends", [
    ("edm", (0.5, 2.0), (0.002, 80)), ("rf", (0.3, 0.9), (0, 1)), ("trig", (0.4, 1.2), (0, math.pi / 2))])
@pytest.mark.parametrize("own", ALL)
def test_a_net_of_any_schedule_predicts_on_any_path_as_one_of_that_schedule(own, path, times, ends):
    for std, target in itertools.product((1.0, S), ("x0", "flow")):
        t, x = f64(*times), torch.randn(2, 1, 2, 2).double()
        net, there, cond = Gauss(M, S, own, ALL[own]), Gauss(M / std, S / std, path), labelled(x)["cond"]
        ours = lambda x, t: common.predict_on(path, net, x, t, cond, target, std=std)
        same = lambda x, t: common.predict(there, x, t, cond, target)
        assert far(ours(x, t), same(x, t)) < 1e-8
        slopes = [torch.func.jvp(f, (x, t), (x, torch.ones_like(t)))[1] for f in (ours, same)]
        assert far(*slopes) < 1e-8 or own in ("sd", "cogvideox")        # tables, which are piecewise linear
        at = f64(*ends)
        assert all(v.isfinite().all() for v in torch.func.jvp(ours, (x, at), (x, torch.ones_like(at))))

@pytest.mark.parametrize("spec", ["edm:digits", "dit:sit_b2,x_shape=(1,8,8),dim=64,depth=2,heads=4"])
def test_value_and_tangent_are_of_one_net_whatever_the_way(spec):
    """The same dropout masks in both; "apart" has its tangent in float32 also under autocast."""
    net = common.make_net(spec, dropout=0.3, r=True).train()
    for p in net.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x, t = torch.randn(6, 1, 8, 8), torch.linspace(0.3, 0.9, 6).double()
    f = lambda x, t, r: (common.predict_on("rf", net, x, t, {}, "flow", r=r),)
    along = torch.randn_like(x), torch.ones_like(t), torch.zeros_like(t)
    def of(how, amp=False):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            (out,), d = common.value_and_tangent(f, (x, t, t / 2), along, how, 1e-2, 1e-2)
        assert out.requires_grad and not d.requires_grad
        grads = torch.autograd.grad((out.float() - d).square().mean(), list(net.parameters()))
        return out.detach(), d, torch.cat([g.flatten() for g in grads])
    (out, d, grad), half = of("apart"), of("apart", amp=True)
    for how, most in (("fused", 3e-5), ("difference", 1e-2)):
        assert max(map(far, of(how), (out, d, grad))) < most, how
    assert torch.equal(half[1], d) and 1e-4 < far(half[0], out) < 0.05 and far(half[2], grad) < 0.1
    assert far(of("fused", amp=True)[1], d) < 0.1

# ---- both methods
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("name, schedule", [*zip(["scm"] * 3, ALL), ("mean_flow", "rf")])
def test_the_exact_map_of_the_guided_data_has_no_tangent(name, schedule, guidance, monkeypatch):
    kw = dict(guidance=guidance, schedule=schedule)
    for how, most in (("apart", 1e-6), ("fused", 1e-6), ("difference", 0.5)):   # along the teacher's path
        grad, _, loss, _ = output_gradient(monkeypatch, name, jvp=how, **kw)
        assert loss < (3e-4 if how == "difference" else 1e-9) and grad.abs().max() < most, how
    for wrong in (dict(off=0.1), dict(std=0.6)):
        assert output_gradient(monkeypatch, name, **kw, **wrong)[2] > 1e-4

@both
def test_the_datas_velocity_gives_the_teachers_tangent_on_average(name, monkeypatch):
    """The derivative is linear in dx/dt: given x_t and t the mean over the posterior is the marginal's."""
    kw = dict(off=0.1, n=64) | (dict(prior=False) if name == "scm" else {})
    (ours, (_, (x_t, t, *_), _), *_), (theirs, (_, (other, *_), _), *_) = (
        output_gradient(monkeypatch, name, distill=distill, **kw) for distill in (False, True))
    assert torch.equal(x_t, other) and (ours - theirs).std() > 0.05
    for g in (torch.ones_like(x_t), x_t, x_t ** 2 - x_t.var(), common.expand(t, x_t) * x_t):
        gap = (ours - theirs) * g
        assert abs(gap.mean()) < 4 * gap.std() / math.sqrt(gap.numel())

# ---- sCM
@pytest.mark.parametrize("schedule", ["edm", "rf", "trig"])
@pytest.mark.parametrize("kind", ["none", "normalize", "clip"])
def test_scm_gradient_is_cos_t_df_dt_divided_by_the_size_once_and_weighed_by_1_over_sigma(
        schedule, kind, monkeypatch):
    grad, (F, (x_t, t), (dx, dt)), loss, logs = output_gradient(monkeypatch, "scm", tangent=kind,
                                                                schedule=schedule, off=0.3)
    at = lambda c: common.expand(c, x_t)
    f = lambda x, t: at(t.cos()) * x - at(t.sin()) * S * F(x, t)[0]
    g = torch.func.jvp(f, (x_t, t), (dx, dt))[1] / at(t.sin())
    norm, w = g.flatten(1).norm(dim=1), 1 / (S * at(t.tan()))
    g = dict(none=g, clip=g.clamp(-1, 1), normalize=g / at(norm + 0.1))[kind]
    assert far(grad, -w * g) < 1e-5 and loss == pytest.approx((w * g ** 2).mean().item(), rel=1e-5)
    assert logs["tangent"].item() == pytest.approx(norm.mean().item(), rel=1e-5)

def test_scm_warms_up_from_diffusion_and_its_adaptive_weight_is_the_nets_log_variance():
    for it, warmup, none in ((0, 10, True), (5, 10, False), (0, 0, False)):
        method, cfg, nets, batch = gaussian("scm", tangent_warmup=warmup)
        nets["student"] = nets["teacher"]
        assert (method.step(nets, batch, it, cfg)[1]["tangent"].item() < 1e-6) == none
    method, cfg = setup("scm")
    nets, losses = nets_of(method, cfg), []
    for u in (0.0, 1.0):
        nets["student"].logvar_head.bias.data.fill_(u)
        losses.append(one_step(method, nets, cfg, 1000)[0].item())
    assert losses[1] == pytest.approx(losses[0] / math.e + 1, rel=1e-5)

# ---- MeanFlow
def test_mean_flow_with_r_equal_t_is_flow_matching(monkeypatch):
    method, cfg, nets, batch = gaussian("mean_flow", std=0.6, ratio=0.0, distill=False)
    noised, net = spy(monkeypatch, common, "add_noise"), lambda x, t, cond: nets["student"](x, t, cond, r=t)
    loss, logs = method.step(nets, batch, 0, cfg)
    net.schedule, net.pred = "rf", "flow"
    exact = common.denoising_loss(net, *(noised[0][0][i] for i in (1, 3, 2)), batch["cond"]).mean().item()
    assert loss.item() == pytest.approx(exact, rel=1e-9) == logs["fm"].item()

def test_mean_flow_guides_in_the_interval_alone_and_only_samples_that_have_their_condition():
    """v = w v_c + k u + (1 - w - k) v_u has the fixed point w' v_c + (1 - w') v_u, w' = w / (1 - k)."""
    method, cfg = setup("mean_flow", guidance=0.2, kappa=0.92, guidance_interval=(0.0, 0.75), distill=False)
    student = lambda x, t, cond, r: torch.where(common.expand(cond["label"] >= 0, x) > 0, 3.65, 0.4)
    student.schedule, student.pred = "rf", "flow"
    x, t = torch.zeros(3, 1, 2, 2), f64(0.5, 0.5, 0.9)
    cond = dict(label=torch.tensor([3, -1, 3]), given=torch.tensor([1.0, 0.0, 1.0]))
    v = method.velocity(dict(student=student), x, t, x + 1.7, cond, labelled(x)["uncond"], cfg)
    assert v[:, 0, 0, 0].tolist() == pytest.approx([3.65, 1.7, 1.7])

def test_mean_flow_draws_r_below_t_for_its_fraction():
    x = torch.zeros(100_000, 1)
    for pairs, equal in (("min", 0.067), ("sort", 0.0)):
        method, cfg = setup("mean_flow", pairs=pairs, t_mean=-0.6, t_std=1.6, r_mean=-4.0, r_std=1.6)
        t, r = method.draw(x, 75_000, cfg)
        assert (r <= t).all() and torch.equal(r[75_000:], t[75_000:])
        assert (r == t)[:75_000].float().mean().item() == pytest.approx(equal, abs=0.004)
        assert (abs(t.logit().mean() + 0.6) < 0.02) == (pairs == "min")     # sorted: t is the larger of both
    method, cfg, nets, batch = gaussian("mean_flow", ratio=0.3)
    single = labelled(batch["x0"][:1])                  # of one sample: whole iterations have r < t
    tangents = ["fm" not in method.step(nets, single, it, cfg)[1] for it in range(400)]
    assert sum(tangents) / 400 == pytest.approx(0.3, abs=0.07)

def test_mean_flow_losses_are_the_adaptive_l2_and_the_explicit_gradient(monkeypatch):
    of = lambda **kw: output_gradient(monkeypatch, "mean_flow", off=0.3, **kw)
    gap, _, loss, _ = of()                              # u - target
    e = gap.square().flatten(1).sum(1)
    for kw, w in ((dict(loss_p=0.75), (e + 1e-3) ** -0.75),
                  (dict(loss="opt_grad", loss_p=1.0, loss_c=0.5), 1 / (e.sqrt() + 0.5))):
        assert far(of(loss_rms=False, **kw)[0] / gap[0].numel(), common.expand(w, gap) * gap) < 1e-5
    assert of(tangent_warmup=10)[2] == loss != of(tangent_warmup=20)[2]

def test_the_exact_mean_velocity_samples_the_data_in_any_number_of_steps():
    z, (method, cfg, nets, _) = torch.randn(4, 1, 64, 64), gaussian("mean_flow")
    for steps, ts in itertools.product((1, 2, 4), ((), (1.0, 0.4))):
        x = method.sample(nets["student"], lambda k: z, labelled(z), cfg | dict(t_list=ts), steps)
        assert (x - (M + S * z)).abs().max() < 1e-5

# ---- CM and TCM: curricula, distances
@pytest.mark.parametrize("stage, pairs", [
    (0, {1: 0, 1.9459: 0, 2: 0.046377, 10: 4.998184, 80: 40}), (1, {0.5: 0, 1: 0.212117, 2: 1.023188}),
    (3, {0.1: 0.069999, 1: 0.803029, 10: 9.374773}), (7, {0.1: 0.098125, 1: 0.987689, 80: 79.6875})])
def test_ect_maps_t_to_its_published_r_by_images_seen(stage, pairs):
    ratio, later, last = (common.ect_ratio(n, 2.0, 3200, 0.999) for n in (
        3_200_000 * stage, 3_200_000 * stage + 3_199_999, 10 ** 9))
    assert ratio == later == 1 - 2.0 ** -(stage + 1) and last == 0.999
    for schedule in ("edm", "rf", "trig"):              # the same noise levels
        r = common.ect_r(schedule, common.t_from_ratio(schedule, f64(*pairs)), ratio)
        assert common.noise_level(schedule, r).tolist() == pytest.approx([*pairs.values()], abs=1e-6)

def test_the_grid_doubles_and_its_levels_are_drawn_as_the_discretised_lognormal():
    method, cfg = setup("cm", mapping="grid", max_iter=400000, t_mean=-1.1, t_std=2.0)
    assert [method.intervals(it, cfg) for it in (0, 49999, 50000, 349999, 350000)] == [10, 10, 20, 640, 1280]
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
    ways = (d, {}), (d ** 2, dict(squared=True)), ((d ** 2 + 0.09).sqrt() - 0.3, dict(huber_c=0.3))
    for weight, w in zip(common.consistency_weights, weights, strict=True):
        for rho, how in ways:
            ours = common.consistency_loss(a, b, "edm", t, r, weight, **how)
            assert torch.allclose(ours, w * rho, rtol=1e-12)
    for c, target in itertools.product((0.0, 1e-8, 0.06), (b, a * 1)):  # finite where both are the same
        loss = common.consistency_loss(a, target, "edm", t, r, "unit", c)
        grad, to = torch.autograd.grad(loss.sum(), (a, b), allow_unused=True)
        assert to is None and (grad.flatten(1).norm(dim=1) < 1 + 1e-12).all()
        assert bool(loss.any()) == bool(grad.any()) == (target is b)

# ---- Gaussian data
@pytest.mark.parametrize("distill, solver, factor, k, tol", [
    (False, "euler", (0.49 + 1.1 * 1.7) / (0.49 + 1.7 ** 2), 0.374860, 3e-3),
    (True, "euler", 0.698225, 0.374860, 1e-5), (True, "heun", 0.713575, 0.383102, 1e-5)])
def test_one_update_has_its_known_optimum(distill, solver, factor, k, tol, monkeypatch):
    """s 0.7, t 1.7, r 1.1: k_t = k_r factor, by the data in the mean as by the teacher's Euler step."""
    method, cfg = setup("cm", distill=distill, solver=solver, squared=True, loss_weight="unit", guidance=1.0)
    monkeypatch.setattr(method, "neighbours", lambda t, *_: (0 * t + 1.7, 0 * t + 1.1))
    student, slopes, k_t = Exact(0.0, 0.7), [], torch.nn.Parameter(torch.zeros(()))
    student.register_forward_hook(lambda net, args, f: k_t * args[0] if args[1][0] > 1.4 else f)
    batch = labelled(0.7 * torch.randn(64, 1, 64, 64, generator=torch.manual_seed(0)))
    for value in (0.0, 1.0):                            # f(x, t) = k_t x: the loss is quadratic in k_t
        common.seed_default(0)
        k_t.data.fill_(value)
        loss = method.step(dict(student=student, teacher=Gauss(0.0, 0.7)), batch, 0, cfg)[0]
        slopes.append(torch.autograd.grad(loss, k_t)[0].item())
    best = slopes[0] / (slopes[0] - slopes[1])
    assert best == pytest.approx(0.7 / math.hypot(0.7, 1.1) * factor, rel=tol) == pytest.approx(k, rel=tol)

@pytest.mark.parametrize("schedule", ["edm", "rf", "trig"])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_the_teachers_step_is_guided_alike_on_every_schedule_and_ends_in_its_denoiser(schedule, solver):
    method, cfg = setup("cm", distill=True, solver=solver, guidance=2.5)
    z, batch = torch.randn(4, 1, 8, 8, dtype=torch.float64), labelled(torch.zeros(4, 1, 8, 8))
    u, v = f64(0.4, 1.7, 3.0, 0.3), f64(0.3, 1.1, 0.0, 0.0)             # noise levels
    t, r = (common.t_from_ratio(schedule, level) for level in (u, v))
    a_t, a_r = (common.expand(common.alpha_sigma(schedule, s)[0], z) for s in (t, r))
    x_r = method.ode_step(Gauss(0.4, 0.5, schedule), a_t * z, t, r, batch, cfg)
    one = method.ode_step(Gauss(1.0, 0.5), z, u, v, batch, cfg | dict(guidance=1.0))    # of N(w m, s^2)
    assert torch.allclose(x_r / a_r, one, atol=1e-6)
    assert torch.allclose(one[2:], Gauss(1.0, 0.5)(z, u, batch["cond"])[2:], atol=1e-6)

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

def test_boundary_counts_and_losses_are_right_and_finite_at_any_slice_size():
    """FastGen's mean over an empty boundary is NaN on slices below 4."""
    method, cfg = setup("tcm")
    nets = nets_of(method, cfg)
    for size in (1, 3, 4, 7):
        n, count = torch.tensor([method.boundary(size, cfg) for _ in range(2000)]).double().unbind(1)
        assert n.unique().tolist() == ([0, 1] if size < 4 else [1]) and (count == min(size / 4, 1)).all()
        assert n.mean().item() == pytest.approx(count[0].item(), abs=0.05)
        for p in (0.0, 0.25):
            loss, logs, grads = one_step(method, nets, cfg | dict(batch_size=size, boundary_prob=p), 0)
            assert all(v.isfinite().all() for v in (loss, *grads.values())) and (p or logs["boundary"] == 0)

def test_the_boundary_is_0_at_the_solution_and_not_elsewhere():
    method, cfg = setup("tcm", batch_size=64, tail_t_dist="uniform", ratio_cap=0.999, loss_weight="unit",
                        huber_c=1.0)                    # E d^2 is (t' - r)^2 times the posterior's spread
    batch, exact = labelled(S * torch.randn(64, 1, 16, 16)), Exact(0.0, S)
    at = lambda student: method.step(dict(student=student, stage1=exact), batch, 0, cfg)[1]["boundary"]
    assert at(exact) < 1e-3 and at(Gauss(0.3, 0.0)) > 1         # a constant

def test_a_run_starts_from_no_checkpoint_of_its_own_and_stays_with_its_first_stage(outputs):
    first, other = (run.run(*setup("cm", name=name, max_iter=1, save_every=1)).folder for name in ("a", "b"))
    stage2 = lambda **more: setup("tcm", name="two", save_every=1, **more)
    run.run(*stage2(stage1=f"{first}#ema", max_iter=1))
    for source in (f"{other}#ema", ""):
        refused(run.run, *stage2(stage1=source, max_iter=2), says=["--stage1", "--name NEW"])
    run.run(*stage2(stage1=f"{first}#ema", max_iter=2))
    own = f"{first}/checkpoints/0000001.pth"
    refused(run.run, *setup("cm", name="a", teacher=own, max_iter=2), says=[own, "own folder", "--name NEW"])

# ---- toy trainings
LEVELS = f64(0.05, 0.2, 0.5, 1, 3, 10, 80)              # of noise; CM's map there, by ECT's chain at its end
CHAIN = f64(0.9863, 0.8309, 0.5128, 0.2862, 0.0991, 0.0299, 0.0037)
NEAR = (f64(0.01, *[0.005] * 6) * (1 + LEVELS)).clamp(max=0.02)
SOME = common.t_from_ratio("rf", S * torch.linspace(0.1, 1.5, 50).double().tan())
onto = lambda s, t: s / torch.hypot((1 - t) * s, t)

@pytest.mark.slow
@pytest.mark.parametrize("name, s, t, exact, tolerance, changes", [
    ("cm", 0.3, common.t_from_ratio("rf", LEVELS), CHAIN * (1 + LEVELS), NEAR, dict(
        kimg_per_stage=400, ratio_cap=1 - 2.0 ** -8, squared=True, lr_schedule="cosine", warmup=0,
        max_iter=4000, t_dist="logitnormal", t_mean=-1.1, t_std=2.0, distill=False, batch_size=1000)),
    ("scm", 0.3, SOME, onto(0.3, SOME), 0.01, dict(tangent="normalize", tangent_warmup=300)),
    ("mean_flow", S, f64(1), f64(S), 0.03, dict(loss_p=0.5, loss_rms=False))], ids=METHODS)
def test_a_toy_training_ends_at_the_closed_form(name, s, t, exact, tolerance, changes):
    """Of a student of rf, whose logit-normal times have the noise levels of edm's lognormal ones."""
    torch.manual_seed(0)
    method, cfg, *_ = gaussian(name, **dict(t_mean=-0.5, t_std=1.2, lr=2e-3, max_iter=3000, warmup=50,
                                            lr_schedule="cosine:0.01") | changes)
    fit(method, cfg, nets := dict(student=Scale(), teacher=Gauss(0.0, s, "rf", "flow")), s, 1024, 1, 1, 1)
    f = common.predict(nets["student"], torch.ones(len(t), 1, 1, 1), t, {}, "x0").flatten()
    assert ((f - exact).abs() < tolerance).all(), f
