"""f_distill and LADD: closed forms on Gaussians: teacher N(0, 0.5^2), student N(0, 0.9^2) unless said."""
import math

import pytest
import torch

import common
import run
from nets.discriminators import DensityRatio
from run import batch_of, differing, load, nets_of, phases, refused, saved, setup, spy, turn
from test_methods import Affine, Gauss, labelled, one_step

# f with D_f(p, q) = E_q[f(p / q)]; d D_f / dq of N(0, 0.8^2) against N(0, q^2) at q = 1, noised with
# alpha 0.8, sigma 0.6; E_q[h] of teacher and student, noised alike
DIVERGENCES = dict(
    rkl=(lambda r: -r.log(), 0.191601, 1.0),
    kl=(lambda r: r * r.log(), 0.147456, 1.0),
    js=(lambda r: r * r.log() - (r + 1) * ((r + 1) / 2).log(), 0.0813718, 0.484588),
    sf=(lambda r: (r + 1) * (0.5 + 0.5 / r).log(), 0.110229, 0.515412),
    neyman=(lambda r: (1 - r) ** 2 / r, 0.573235, 2 * 1.380182),
    sh=(lambda r: (1 - r.sqrt()) ** 2, 0.0829719, 0.983158 / 2),
    jf=(lambda r: (r - 1) * r.log(), 0.339057, 2.0))
T = math.acos(0.8)                                      # trig: alpha 0.8, sigma 0.6
AT = dict(t_list=(), t_dist="uniform", t_min=T, t_max=T + 1e-9)
DM_AT = dict(dm_t_dist="uniform", dm_t_min=T, dm_t_max=T + 1e-9, gan_weight=0.0)

class Seen(Gauss):
    """Its features are its input."""
    n_taps = 1
    def forward(self, x_t, t, cond={}, taps=(), stop=False):
        out = super().forward(x_t, t, cond)
        return dict(out=out, taps=[x_t]) if taps else out

class Critic(torch.nn.Module):
    """log p / q of teacher and student at alpha 0.8, sigma 0.6: a head per element, or one for their sum."""
    def __init__(self, net, total):
        super().__init__()
        self.std, self.total = [net.std], total         # a list hides the parameter
    def forward(self, features, cond=None):
        v_p, v_q = (0.64 * std ** 2 + 0.36 for std in (0.5, self.std[0].item()))
        logits = (0.5 * math.log(v_q / v_p) + 0.5 * features[0] ** 2 * (1 / v_q - 1 / v_p)).flatten(1)
        return logits.sum(1, keepdim=True) if self.total else logits

class Heads(torch.nn.Module):
    """Learns a x^2 + b x of every element."""
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
    def forward(self, features, cond=None):
        x = features[0].flatten(1)
        return self.w[0] * x ** 2 + self.w[1] * x

def gaussians(name, shape=(4096, 1, 1, 1), q=0.9, **changes):
    """(method, cfg, nets, batch): a student q z, the exact scores and the exact critic."""
    method, cfg = setup(name, **dict(AT, weight_decay=0.0) | changes)
    student, fake = Affine(0.0, q, "trig", learn=True), Seen(0.0, q, "trig", learn=True)
    held = dict(student=student, teacher=Seen(0.0, 0.5, "trig"), fake_score=fake,
                discriminator=Critic(fake, name == "f_distill"), ratio=DensityRatio(1, 0.0))
    return method, cfg, held, labelled(0.5 * torch.randn(shape, generator=torch.manual_seed(0)))

def tail(method, cfg, held, batch, n):
    """Mean (std, mean) of the student over the last fifth of n iterations."""
    opts, path = method.optimizers(held, cfg), []
    for it in range(n):
        turn(held, opts, method.phase(it, cfg))
        method.step(held, batch | dict(x0=0.5 * torch.randn_like(batch["x0"])), it, cfg)[0].backward()
        opts[method.phase(it, cfg)].step()
        path.append((held["student"].std.item(), held["student"].mean.item()))
    return torch.tensor(path[-n // 5:]).mean(0).tolist()

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
    f, slope, mean = DIVERGENCES[name]
    h, x = load("f_distill").weights[name], torch.linspace(-10, 10, 40001, dtype=torch.float64)
    density = lambda v: torch.exp(-x ** 2 / (2 * v)) / (2 * math.pi * v) ** 0.5
    over = lambda y: torch.trapezoid(y, x).item()
    v, p = 0.64 * 0.64 + 0.36, density(0.64 * 0.64 + 0.36)
    ours = over(density(1.0) * h(p / density(1.0)) * (x / v - x) * 0.64 * x)
    below, above = (over(q * f(p / q)) for q in (density(0.64 * q ** 2 + 0.36) for q in (1 - 1e-4, 1 + 1e-4)))
    assert ours == pytest.approx(slope, rel=1e-5) == pytest.approx((above - below) / 2e-4, rel=1e-4)
    assert over(density(0.8784) * h(density(0.52) / density(0.8784))) == pytest.approx(mean, rel=1e-5)
    rises = h(torch.linspace(0.1, 20, 50)).diff().sign().unique().tolist()
    assert rises == [dict(rkl=0.0, sf=-1.0, neyman=-1.0).get(name, 1.0)]

@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n != "rkl"])
def test_dm_is_weighed_by_h_of_the_ratio_at_its_own_noised_sample(name, monkeypatch):
    method, cfg, held, batch = gaussians("f_distill", divergence=name, ratio_min=1e-6, ratio_max=1e6, **DM_AT)
    losses, noised, weight = spy(monkeypatch, common, "dmd_loss"), spy(monkeypatch, common, "add_noise"), {}
    for bins in (0, 1):
        method.step(held, batch, 5, cfg | dict(ratio_bins=bins))
        x_t = noised[-1][1].flatten()
        r = torch.exp(0.5 * math.log(0.8784 / 0.52) + 0.5 * x_t ** 2 * (1 / 0.8784 - 1 / 0.52))
        weight[bins] = load("f_distill").weights[name](r / r.mean() if bins else r)
    torch.testing.assert_close(losses[0][0][3], weight[0])
    torch.testing.assert_close(losses[1][0][3], weight[1] / weight[1].mean())   # whose mean is 1

@pytest.mark.parametrize("schedule, dist", [
    ("edm", "polynomial"), ("edm", "lognormal"), ("edm", "logt"), ("rf", "shifted"), ("sd", "logitnormal")])
def test_as_many_samples_fall_into_every_bin(schedule, dist):
    t = common.sample_t(20000, dist, schedule, "cpu")
    bins = common.t_bin(t, 10, dist=dist, schedule=schedule)
    assert bins.bincount(minlength=10).tolist() == pytest.approx([2000] * 10, rel=0.1)
    assert (bins[t.argsort()].diff() >= 0).all()

def test_ratios_are_divided_by_running_means_that_move_with_gradients_only():
    net = DensityRatio(3, 0.75)
    r, bins = torch.tensor([2.0, 4.0, 1.0]), torch.tensor([0, 0, 2])
    with torch.no_grad():
        torch.testing.assert_close(net(r, bins), torch.tensor([2 / 1.5, 4 / 1.5, 1.0]))
    assert net.means.tolist() == [1, 1, 1]
    for factor in (1.0, math.nan):                      # an empty bin stays, and what is not finite stays out
        net(factor * r, bins)
        assert net.means.tolist() == [1.5, 1, 1]
    for changes, says in ((dict(ratio_ema=1.0), "decay 1.0"), (dict(ratio_bins=-1), "-1 bins"),
                          (dict(ratio_min=0.0), "--ratio_min"), (dict(divergence="tv"), "js")):
        method, cfg = setup("f_distill", **dict(ratio_bins=2) | changes)
        refused(nets_of, method, cfg, says=[says])

def train_f_distill(**changes):
    result = run.run(*setup("f_distill", ratio_bins=3, update_ratio=1, max_iter=8, lr_disc=0.1, **changes))
    return {n: dict(result.nets[n].state_dict()) for n in ("student", "ratio")}

def test_its_means_survive_a_resume_are_the_same_on_every_rank_and_unmoved_by_validation(outputs, capsys):
    plain = train_f_distill(name="plain", val_every=1)
    train_f_distill(name="again", stop_at=4)
    assert not torch.equal(saved(outputs / "again", 4)["nets"]["ratio"]["means"], torch.ones(3))
    assert differing(train_f_distill(name="again"), plain) == []
    ours, others = run.ranks(2, train_f_distill)
    assert differing(ours, others) == [] and not torch.equal(ours["ratio"]["means"], torch.ones(3))
    assert "not the same on every rank" not in capsys.readouterr().out

@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "js", "sh", "neyman"])
def test_f_distill_converges_to_the_teachers_gaussian(name):
    args = gaussians("f_distill", (256, 1, 2, 2), divergence=name, ratio_bins=1, lr=1e-2, lr_fake=2e-2,
                     gan_d_weight=0.0, update_ratio=2, **DM_AT)
    assert tail(*args, 1500) == pytest.approx([0.5, 0.0], abs=0.02)

# ---- the GAN of LADD (and of DMD2)
@pytest.mark.parametrize("kind, q, gan_d, gan_g, slope", [
    ("softplus", 0.5, 2 * math.log(2), math.log(2), 0.0), ("hinge", 0.5, 2.0, 0.0, 0.0),
    ("softplus", 0.9, 1.353747, None, 0.296919)])
def test_the_exact_critic_has_its_known_losses_and_slope(kind, q, gan_d, gan_g, slope):
    method, cfg, held, batch = gaussians("ladd", (4096, 1, 8, 8), q, gan_loss=kind, r1_weight=0.0)
    at = phases(method, cfg)
    loss = method.step(held, batch, at["student"], cfg)[0]
    loss.backward()                                     # through the teacher's features into the student
    assert gan_g is None or loss.item() == pytest.approx(gan_g, abs=1e-6)
    assert held["student"].std.grad.item() == pytest.approx(slope, rel=0.01)
    assert method.step(held, batch, at["fake"], cfg)[0].item() == pytest.approx(gan_d, rel=2e-3)

@pytest.mark.parametrize("name", ["dmd2", "f_distill", "ladd"])
def test_r1_of_a_linear_critic_is_the_size_of_its_gradient_at_any_noise(name):
    """0.01 |a|^2; FastGen, which moves the clean image, has (t^2 + 0.01) |a|^2."""
    features = {} if name == "ladd" else dict(gan_features="teacher")
    method, cfg, held, batch = gaussians(name, (8192, 1, 4, 4), r1_weight=1.0, **features)
    scale = (13.17 / 16) ** 0.5                                     # |a|^2 is 13.17
    linear = lambda features, cond=None: features[0].flatten(1).sum(1, keepdim=True) * scale
    r1 = method.step(held | dict(discriminator=linear), batch, 0, cfg)[1]["r1"]
    assert r1.item() == pytest.approx(0.1317, rel=0.05)

@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["dmd2", "ladd"])
def test_real_samples_share_the_noise_of_generated_ones_if_asked(name, same, monkeypatch):
    method, cfg = setup(name, gan_same_noise=same, r1_weight=0.0)
    held, noised = nets_of(method, cfg), spy(monkeypatch, common, "add_noise")
    one_step(method, held, cfg, phases(method, cfg)["fake"])
    (_, x, eps, t), (_, x0, eps_real, t_real) = noised[-2][0], noised[-1][0]
    assert torch.equal(x0, batch_of(cfg)["x0"]) and not torch.equal(x, x0)
    assert torch.equal(eps, eps_real) == torch.equal(t, t_real) == same

def test_the_papers_noise_levels_of_rf_are_the_same_ratios_on_edm():
    u = torch.linspace(0.02, 0.95, 50, dtype=torch.float64)
    rf = common.t_quantile(u, "logitnormal", "rf", mean=1.0, std=1.0, t_max=1.0)
    edm = common.t_quantile(u, "lognormal", "edm", mean=1.0, std=1.0, t_max=1000.0)
    torch.testing.assert_close(rf / (1 - rf), edm)

@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softplus", "hinge"])
def test_ladd_converges_to_the_datas_gaussian(kind):
    method, cfg, held, batch = gaussians("ladd", (256, 1, 8, 8), gan_loss=kind, lr=5e-3, lr_disc=2e-2,
                                         update_ratio=2)
    held |= dict(discriminator=Heads())
    assert tail(method, cfg, held, batch, 2000) == pytest.approx([0.5, 0.0], abs=0.03)
