"""DMD2, f_distill and LADD on Gaussians: teacher N(0, 0.5^2), student N(0, 0.9^2) unless said."""
import math

import pytest
import torch

import common
import run
from gauss import Affine, Gauss, fit, labelled
from nets.discriminators import DensityRatio
from run import batch_of, differing, load, nets_of, one_step, phases, refused, setup, spy

# f with D_f(p, q) = E_q[f(p / q)]
DIVERGENCES = dict(
    rkl=lambda r: -r.log(), kl=lambda r: r * r.log(), jf=lambda r: (r - 1) * r.log(),
    js=lambda r: r * r.log() - (r + 1) * ((r + 1) / 2).log(), sf=lambda r: (r + 1) * (0.5 + 0.5 / r).log(),
    neyman=lambda r: (1 - r) ** 2 / r, sh=lambda r: (1 - r.sqrt()) ** 2)
T = math.acos(0.8)                                      # trig: alpha 0.8, sigma 0.6
AT = dict(t_dist="uniform", t_min=T, t_max=T + 1e-9)

class Critic(torch.nn.Module):
    """log p / q of teacher and student at alpha 0.8, sigma 0.6: a head per element, or one for their sum."""
    def __init__(self, net, total):
        super().__init__()
        self.std, self.total = [net.std], total         # a list hides the parameter
    def forward(self, features, cond=None):
        v_p, v_q = (0.64 * std ** 2 + 0.36 for std in (0.5, self.std[0].item()))
        logits = (0.5 * math.log(v_q / v_p) + 0.5 * features[0] ** 2 * (1 / v_q - 1 / v_p)).flatten(1)
        return logits.sum(1, keepdim=True) if self.total else logits

class Heads(torch.nn.Linear):
    """Learns a x^2 + b x of every element."""
    def forward(self, features, cond=None):
        x = features[0].flatten(1)
        return super().forward(torch.stack([x ** 2, x], dim=2))[:, :, 0]

def gaussians(name, shape=(4096, 1, 1, 1), q=0.9, mean=0.0, **changes):
    """(method, cfg, nets, batch): a student q z, the exact scores and the exact critic."""
    at = AT | ({} if name == "ladd" else {f"dm_{key}": value for key, value in AT.items()}) | changes
    method, cfg = setup(name, t_list=(), weight_decay=0.0, lr_schedule="constant", warmup=0, **at)
    student, fake = (kind(0.0, q, "trig", learn=True) for kind in (Affine, Gauss))
    held = dict(student=student, teacher=Gauss(mean, 0.5, "trig"), fake_score=fake,
                discriminator=Critic(fake, name == "f_distill"), ratio=DensityRatio(1, 0.0))
    return method, cfg, held, labelled(0.5 * torch.randn(shape, generator=torch.manual_seed(0)))

# ---- DMD2
def test_dmd2_has_five_turns_of_the_fake_score_before_each_of_the_student(capsys):
    turns = [load("dmd2").phase(it, dict(update_ratio=5)) for it in range(60)]
    assert turns == (["fake"] * 5 + ["student"]) * 10   # FastGen: 4, with the student first
    run.run(*setup("dmd2", max_iter=5))
    assert "--max_iter 5 ends before the first turn of phase 'student'" in capsys.readouterr().out

@pytest.mark.parametrize("q, slope", [(0.9, 0.254224), (0.5, 0.0)])
def test_dmd2_student_gradient_is_the_closed_form_and_0_where_the_fake_score_is_the_teacher(q, slope):
    """E[(F - T) z] = alpha^2 sigma^2 (q^2 - s^2) q / (V_q V_s), V_q = alpha^2 q^2 + sigma^2. w is the same
    for every sample if a sample has many elements."""
    method, cfg, held, batch = gaussians("dmd2", (64, 1, 64, 64), q, gan_weight=0.0)
    common.seed_default(0)
    method.step(held, batch, 5, cfg)[0].backward()
    c = 0.8 * 0.25 / (0.64 * 0.25 + 0.36)               # T = c x_t, x - T = q (1 - c alpha) z - c sigma eps
    gap = math.sqrt(2 / math.pi) * math.hypot(q * (1 - 0.8 * c), 0.6 * c)
    assert held["student"].std.grad.item() == pytest.approx(slope / gap, rel=0.01)
    assert held["fake_score"].std.grad is held["teacher"].std.grad is None

@pytest.mark.parametrize("kind", ["simulation", "data"])
def test_dmd2_multi_step_input_is_the_students_own_or_noised_data(kind):
    """Under autocast every weight has a gradient: what was cast without one is not used again."""
    method, cfg = setup("dmd2", steps=2, student_input=kind, gan_weight=0.0, t_list=(), update_ratio=1)
    nets, ts, calls, exits = nets_of(method, cfg), common.t_list("edm", 2), [], set()
    nets["student"].register_forward_pre_hook(
        lambda net, args: calls.append((torch.is_grad_enabled(), args[0].detach(), args[1].tolist())))
    for it in range(1, 20, 2):
        batch, inputs = batch_of(cfg, it), []
        for x0 in (batch["x0"], 0 * batch["x0"]):
            calls.clear()
            with torch.autocast("cpu", torch.bfloat16):
                grads = one_step(method, nets, cfg, it, batch | dict(x0=x0))[2]
            assert len(grads) == len([*nets["student"].parameters()])
            inputs.append(calls[-1][1])
        n = len(calls) - 1
        assert [grad for grad, *_ in calls] == [False] * n + [True]
        assert torch.equal(*inputs) == (kind == "simulation")           # does it depend on the data?
        if kind == "simulation":
            assert n == torch.randint(2, (), generator=common.shared_generator(cfg["seed"], it))
            assert [t for *_, t in calls] == [[ts[k]] * 8 for k in range(n + 1)]
        exits |= {*calls[-1][2]}
    assert exits == {*ts[:-1]}

def test_dmd2_generates_in_training_as_its_sampler_does():
    """Backward simulation to the last step: same noise, same result."""
    method, cfg = setup("dmd2", steps=3)
    batch, student = batch_of(cfg), nets_of(method, cfg)["student"]
    it = next(i for i in range(99) if torch.randint(3, (), generator=common.shared_generator(0, i)) == 2)
    common.seed_default(5)
    x = method.generate(student, batch, it, cfg)
    common.seed_default(5)
    assert torch.equal(x, method.sample(student, common.train_noise(x.shape, "cpu"), batch, cfg, 3))

# ---- f-distill
def test_rkl_is_dmd2_bit_for_bit():
    for changes in (dict(gan_features="teacher", r1_weight=0.1), dict(steps=3, guidance=2.0)):
        (a, ours), (b, theirs) = (setup(name, **changes) for name in ("f_distill", "dmd2"))
        ours |= dict(divergence="rkl", ratio_bins=4)
        sets = nets_of(a, ours), nets_of(b, theirs)
        for net in sets:
            net["fake_score"].out.weight.data.mul_(1.1)
        for it in phases(b, theirs).values():
            (loss, logs, grads), other = one_step(a, sets[0], ours, it), one_step(b, sets[1], theirs, it)
            assert differing(grads, other[2]) == [] and logs == other[1] and loss == other[0] and grads

@pytest.mark.parametrize("name", DIVERGENCES)
def test_h_makes_the_gradient_of_its_divergence(name):
    """d D_f / dq of N(0, 0.8^2) against N(0, q^2) at q = 1, noised with alpha 0.8, sigma 0.6."""
    f, h = DIVERGENCES[name], load("f_distill").weights[name]
    x = torch.linspace(-10, 10, 40001, dtype=torch.float64)
    density = lambda v: torch.exp(-x ** 2 / (2 * v)) / (2 * math.pi * v) ** 0.5
    var = lambda q: 0.64 * q ** 2 + 0.36
    of = lambda q, y: torch.trapezoid(density(var(q)) * y(density(var(0.8)) / density(var(q))), x).item()
    ours = of(1, lambda r: h(r) * (x / var(0.8) - x) * 0.64 * x)
    below, above = (of(q, f) for q in (1 - 1e-4, 1 + 1e-4))
    assert ours == pytest.approx((above - below) / 2e-4, rel=1e-4)

@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n != "rkl"])
def test_dm_is_weighed_by_h_of_the_ratio_at_its_own_noised_sample(name, monkeypatch):
    method, cfg, held, batch = gaussians("f_distill", divergence=name, ratio_min=1e-6, ratio_max=1e6,
                                         gan_weight=0.0)
    losses, noised = (spy(monkeypatch, common, f) for f in ("dmd_loss", "add_noise"))
    h = load("f_distill").weights[name]
    for bins in (0, 1):
        method.step(held, batch, 5, cfg | dict(ratio_bins=bins))
        r = held["discriminator"]([noised[-1][1]])[:, 0].exp()
        weight = h(r / r.mean()) if bins else h(r)
        torch.testing.assert_close(losses[-1][0][3], weight / weight.mean() if bins else weight)

def test_as_many_samples_fall_into_every_bin_in_the_order_of_t():
    for dist, schedule in dict(polynomial="edm", lognormal="edm", shifted="rf", logitnormal="sd").items():
        t = common.sample_t(20000, dist, schedule, "cpu").sort().values
        bins = common.t_bin(t, 10, dist=dist, schedule=schedule)
        assert bins.bincount(minlength=10).tolist() == pytest.approx([2000] * 10, rel=0.1)
        assert (bins.diff() >= 0).all()

def test_ratios_are_divided_by_running_means_that_move_with_gradients_only():
    net, r, bins = DensityRatio(3, 0.75), torch.tensor([2.0, 4.0, 1.0]), torch.tensor([0, 0, 2])
    with torch.no_grad():
        torch.testing.assert_close(net(r, bins), torch.tensor([2 / 1.5, 4 / 1.5, 1.0]))
    assert net.means.tolist() == [1, 1, 1]
    for factor in (1.0, math.nan):                      # an empty bin stays, and what is not finite stays out
        net(factor * r, bins)
        assert net.means.tolist() == [1.5, 1, 1]
    refused(DensityRatio, 3, 1.0, says=["decay 1.0"])

def train_f_distill(**changes):
    result = run.run(*setup("f_distill", ratio_bins=3, update_ratio=1, max_iter=8, lr_disc=0.1, **changes))
    return {n: dict(result.nets[n].state_dict()) for n in ("student", "ratio")}

def test_its_means_survive_a_resume_are_the_same_on_every_rank_and_unmoved_by_validation(capsys):
    plain = train_f_distill(name="plain", val_every=1)
    train_f_distill(name="again", stop_at=4)
    assert differing(train_f_distill(name="again"), plain) == []
    ours, others = run.ranks(2, train_f_distill)
    assert differing(ours, others) == [] and not torch.equal(ours["ratio"]["means"], torch.ones(3))
    assert "not the same on every rank" not in capsys.readouterr().out

# ---- the GAN
@pytest.mark.parametrize("name", ["dmd2", "ladd"])
@pytest.mark.parametrize("kind, q, gan_d, gan_g, slope", [
    ("softplus", 0.5, 2 * math.log(2), math.log(2), 0.0), ("hinge", 0.5, 2.0, 0.0, 0.0),
    ("softplus", 0.9, 1.353747, None, 0.296919)])
def test_the_exact_critic_has_its_known_losses_and_slope(name, kind, q, gan_d, gan_g, slope, monkeypatch):
    same = kind == "hinge"                              # noise of real and of generated samples
    method, cfg, held, batch = gaussians(name, (4096, 1, 8, 8), q, gan_loss=kind, gan_same_noise=same,
                                         r1_weight=0.0)
    at = phases(method, cfg)
    loss = method.step(held, batch, at["student"], cfg)[1]["gan_g"]
    loss.backward()                                     # through the features into the student
    assert gan_g is None or loss.item() == pytest.approx(gan_g, abs=1e-6)
    assert held["student"].std.grad.item() == pytest.approx(slope, rel=0.01)
    noised = spy(monkeypatch, common, "add_noise")
    assert method.step(held, batch, at["fake"], cfg)[1]["gan_d"].item() == pytest.approx(gan_d, rel=2e-3)
    (_, _, eps, _), (_, x0, eps_real, _) = noised[-2][0], noised[-1][0]
    assert torch.equal(x0, batch["x0"]) and torch.equal(eps, eps_real) == same

@pytest.mark.parametrize("name", ["dmd2", "f_distill", "ladd"])
def test_r1_of_a_linear_critic_is_the_size_of_its_gradient_at_any_noise(name):
    """0.01 |a|^2, |a|^2 = 13.17; FastGen, which moves the clean image, has (t^2 + 0.01) |a|^2."""
    features = {} if name == "ladd" else dict(gan_features="teacher")
    method, cfg, held, batch = gaussians(name, (8192, 1, 4, 4), r1_weight=1.0, **features)
    linear = lambda features, cond=None: (13.17 / 16) ** 0.5 * features[0].flatten(1).sum(1, keepdim=True)
    r1 = method.step(held | dict(discriminator=linear), batch, 0, cfg)[1]["r1"]
    assert r1.item() == pytest.approx(0.1317, rel=0.05)

@pytest.mark.slow
@pytest.mark.parametrize("name, mean, shape, tolerance, changes", [
    *(("dmd2", 0.4, (256, 1, 8, 8), 0.01, dict(guidance=w, gan_d_weight=0.0)) for w in (1.0, 2.0)),
    *(("f_distill", 0.0, (1024, 1, 2, 2), 0.02, dict(divergence=d, ratio_bins=1))
      for d in ("kl", "js", "sh", "neyman")),
    *(("ladd", 0.0, (256, 1, 8, 8), 0.03, dict(gan_loss=kind)) for kind in ("softplus", "hinge"))])
def test_a_toy_training_ends_at_the_gaussian_of_teacher_or_data(name, mean, shape, tolerance, changes):
    """Of a teacher N(m, s^2), unconditionally N(0, s^2), guidance w makes N(w m, s^2)."""
    own = dict(lr=5e-3, lr_disc=2e-2) if name == "ladd" else dict(lr=1e-2, lr_fake=2e-2, gan_weight=0.0)
    method, cfg, held, _ = gaussians(name, mean=mean, update_ratio=2, max_iter=1500, **own, **changes)
    held |= dict(discriminator=Heads(2, 1, bias=False)) if name == "ladd" else {}
    target = pytest.approx([mean * cfg["guidance"], 0.5], abs=tolerance)
    assert fit(method, cfg, held, 0.5, *shape) == target
    if name != "ladd":
        assert [p.item() for p in held["fake_score"].parameters()] == target
