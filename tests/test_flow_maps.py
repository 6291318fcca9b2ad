"""sCM and MeanFlow on Gaussian data, where maps and velocities are known; forward mode through any net."""
import itertools
import math

import pytest
import torch

import common
from gauss import Exact, Gauss, Scale, fit, labelled
from run import nets_of, one_step, refused, setup, spy

f64, M, S = torch.float64, 0.4, 0.5
METHODS = ("scm", "mean_flow")
ALL = dict(edm="x0", rf="flow", trig="v", sd="eps", cogvideox="v")     # schedule: prediction
far = lambda a, b: ((a - b).norm() / b.norm()).item()
zero = lambda x: dict(label=torch.zeros(len(x)))

def gaussian(name, std=S, schedule="edm", off=0.0, n=16, dtype=f64, **changes):
    """Method, config, nets (student: exact for the guided data, but for std and off), batch of N(M, S^2)."""
    extra = dict(logvar=False, tangent="none", tangent_warmup=0, sigma_data=S) if name == "scm" else dict(
        loss_p=0.0, loss_rms=True, ratio=1.0)
    method, cfg = setup(name, **dict(guidance=1.0) | extra | changes)
    schedule = "rf" if name == "mean_flow" else schedule
    student = Exact(cfg["guidance"] * M, std, schedule, ALL[schedule], learn=True)
    student.off = off
    nets = dict(student=student, teacher=Gauss(M, S, schedule, ALL[schedule]))
    torch.manual_seed(0)
    x0 = M + S * torch.randn(64, 1, n, n)
    nets = {k: net.to(dtype) for k, net in nets.items() if cfg["distill"] or k == "student"}
    return method, cfg, nets, labelled(x0.to(dtype))

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
        t, x = torch.tensor(times, dtype=f64), torch.randn(2, 1, 2, 2, dtype=f64)
        net, there = Gauss(M, S, own, ALL[own]).double(), Gauss(M / std, S / std, path).double()
        ours = lambda x, t: common.predict_on(path, net, x, t, zero(x), target, std=std)
        same = lambda x, t: common.predict(there, x, t, zero(x), target)
        assert far(ours(x, t), same(x, t)) < 1e-8
        slopes = [torch.func.jvp(f, (x, t), (x, torch.ones_like(t)))[1] for f in (ours, same)]
        assert far(*slopes) < 1e-8 or own in ("sd", "cogvideox")        # tables, which are piecewise linear
        at = torch.tensor(ends, dtype=f64)
        assert all(v.isfinite().all() for v in torch.func.jvp(ours, (x, at), (x, torch.ones_like(at))))

@pytest.mark.parametrize("spec", ["edm:digits", "dit:sit_b2,x_shape=(1,8,8),dim=64,depth=2,heads=4"])
def test_value_and_tangent_are_of_one_net_whatever_the_way(spec):
    """The same dropout masks in both; "apart" has its tangent in float32 also under autocast."""
    net = common.make_net(spec, dropout=0.3, r=True).train()
    for p in net.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x, t = torch.randn(6, 1, 8, 8), torch.linspace(0.3, 0.9, 6, dtype=f64)
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
    for how, most in (("fused", 1e-5), ("difference", 3e-3)):
        assert max(map(far, of(how), (out, d, grad))) < 3 * most, how
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

@pytest.mark.parametrize("name", METHODS)
def test_the_datas_velocity_gives_the_teachers_tangent_on_average(name, monkeypatch):
    """The derivative is linear in dx/dt: given x_t and t the mean over the posterior is the marginal's."""
    kw = dict(off=0.1, n=64) | (dict(prior=False) if name == "scm" else {})
    (ours, (_, (x_t, t, *_), _), *_), (theirs, (_, (other, *_), _), *_) = (
        output_gradient(monkeypatch, name, distill=distill, **kw) for distill in (False, True))
    assert torch.equal(x_t, other) and (ours - theirs).std() > 0.05
    for g in (torch.ones_like(x_t), x_t, x_t ** 2 - x_t.var(), common.expand(t, x_t) * x_t):
        gap = (ours - theirs) * g
        assert abs(gap.mean()) < 4 * gap.std() / math.sqrt(gap.numel())

@pytest.mark.parametrize("changes, sizes", [
    ({}, [6, 8]), (dict(jvp="fused"), [6, 2]), (dict(dropout=0.1), [6, 6, 2]),
    (dict(jvp="difference"), [6, 6, 8])])
def test_mean_flow_takes_tangents_of_the_samples_with_r_below_t_alone(changes, sizes):
    """6 of 8; one graph of each part where they share dropout masks."""
    method, cfg = setup("mean_flow", guidance=1.0, **changes)
    nets, seen = nets_of(method, cfg), []
    nets["student"].register_forward_pre_hook(lambda net, args: seen.append(len(args[0])))
    one_step(method, nets, cfg, 5)
    assert seen == sizes

@pytest.mark.parametrize("name", METHODS)
def test_forward_mode_under_shards_is_refused_by_name_where_torch_cannot(name, monkeypatch):
    method, cfg = setup(name, classes=10, parallel="fsdp")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    refused(method.build, cfg, says=["2.13", "--jvp difference"])
    method.build(cfg | dict(jvp="difference"))
    refused(method.build, cfg | dict(jvp="difference", amp="bf16"), says=["bf16", "--amp"])

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

def test_scm_before_the_warm_up_is_diffusion_and_a_warm_up_of_0_is_none():
    for it, warmup, none in ((0, 10, True), (5, 10, False), (0, 0, False)):
        method, cfg, nets, batch = gaussian("scm", tangent_warmup=warmup)
        nets["student"] = nets["teacher"]
        assert (method.step(nets, batch, it, cfg)[1]["tangent"].item() < 1e-6) == none

def test_scm_adaptive_weight_is_the_nets_log_variance():
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
    x, t = torch.zeros(3, 1, 2, 2), torch.tensor([0.5, 0.5, 0.9], dtype=f64)
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

@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_exact_mean_velocity_samples_the_data_in_any_number_of_steps(steps):
    z = torch.randn(4, 1, 64, 64)
    method, cfg, nets, _ = gaussian("mean_flow", dtype=torch.float32)
    for ts in ((), (1.0, 0.4)):
        x = method.sample(nets["student"], lambda k: z, labelled(z), cfg | dict(t_list=ts), steps)
        assert (x - (M + S * z)).abs().max() < 1e-5

@pytest.mark.slow
@pytest.mark.parametrize("name, s, ratio, tolerance, changes", [
    ("scm", 0.3, S * torch.linspace(0.1, 1.5, 50, dtype=f64).tan(), 0.01, dict(
        tangent="normalize", tangent_warmup=300)),
    ("mean_flow", S, torch.tensor([math.inf], dtype=f64), 0.03, dict(loss_p=0.5, loss_rms=False))])
def test_a_toy_training_ends_at_the_closed_form(name, s, ratio, tolerance, changes):
    torch.manual_seed(0)
    method, cfg, *_ = gaussian(name, t_mean=-0.5, t_std=1.2, lr=2e-3, max_iter=3000, warmup=50,
                               lr_schedule="cosine:0.01", **changes)
    fit(method, cfg, nets := dict(student=Scale(), teacher=Gauss(0.0, s, "rf", "flow")), s, 1024, 1, 1, 1)
    z, t = torch.ones(len(ratio), 1, 1, 1), common.t_from_ratio("rf", ratio)
    f = common.predict(nets["student"], z, t, {}, "x0").flatten()
    assert (f - s / torch.hypot((1 - t) * s, t)).abs().max() < tolerance
