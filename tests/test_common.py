"""Oracles of common.py. Data N(m, s^2) have closed forms for every quantity, in every schedule:
V = alpha^2 s^2 + sigma^2, denoiser D = m + alpha s^2 (x - alpha m) / V."""
import itertools
import math
import multiprocessing
import os
import random

import numpy as np
import pytest
import torch

import common
from common import BadInput

SCHEDULES = ("edm", "sd", "dit", "cogvideox", "cogvideox2b", "rf", "trig")
KINDS = ("x0", "eps", "v", "flow")
TIMES = dict(edm=(0.01, 0.5, 2.0, 40.0), trig=(0.1, 0.8, 1.2, 1.5))
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
f64 = torch.float64


def times(schedule):
    """Times away from the ends of the schedule and from the knots of tables."""
    return torch.tensor(TIMES.get(schedule, (0.0504, 0.2503, 0.5007, 0.9008)), dtype=f64)


def close(a, b, rtol=1e-12, atol=0.0):
    a, b = (torch.as_tensor(v, dtype=f64) for v in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=atol)


class Gaussian:
    """The exact net for data N(m, s^2), m = cond["m"] (B,), written without common.convert; counts its calls."""

    def __init__(self, schedule, pred, s=0.5):
        self.schedule, self.pred, self.s, self.sigma_data, self.seen = schedule, pred, s, s, []

    def __call__(self, x, t, cond, **kw):
        self.seen.append((t, cond))
        (a, b), (da, db) = common.alpha_sigma(self.schedule, t), common.alpha_sigma_prime(self.schedule, t)
        a, b, da, db, m = (common.expand(v.to(x), x) for v in (a, b, da, db, cond.get("m", 0 * t)))
        V = a ** 2 * self.s ** 2 + b ** 2
        x0, eps = m + a * self.s ** 2 * (x - a * m) / V, b * (x - a * m) / V
        out = {"x0": x0, "eps": eps, "v": a * eps - b * x0, "flow": da * x0 + db * eps}[self.pred]
        return dict(out=out, taps=[x0 + len(self.seen)], logvar=t.log()) if kw else out


# ---------------------------------------------------------------- schedules

@pytest.mark.parametrize("schedule, abar", [
    ("dit", {0: 0.9999, 100: 0.89514, 250: 0.52142, 500: 0.07780, 750: 0.00330, 999: 4.04e-5}),
    ("sd", {0: 0.99915, 100: 0.89422, 250: 0.67379, 500: 0.27633, 750: 0.05617, 999: 0.0046601}),
    ("sdxl", {0: 0.99915, 999: 0.0046601}),
    ("cogvideox", {0: 0.99915, 998: 1.97e-7, 999: 0.0}), ("cogvideox2b", {998: 6.2e-8, 999: 0.0})])
def test_tables_hold_the_published_abar(schedule, abar):
    alpha, sigma = common.alpha_sigma(schedule, torch.tensor(list(abar), dtype=f64) / 1000)
    assert close(alpha ** 2, list(abar.values()), rtol=5e-3, atol=5.1e-6 if schedule in ("dit", "sd", "sdxl") else 0)
    assert close(alpha ** 2 + sigma ** 2, torch.ones(len(abar)))


def test_schedules_end_where_they_should():
    ends = {s: [c.tolist() for c in common.alpha_sigma(s, torch.tensor(common.t_range(s), dtype=f64))]
            for s in SCHEDULES}
    assert ends["edm"] == [[1, 1], [0.002, 80]] and close(ends["rf"], [[1, 0.001], [0, 0.999]])
    assert close(ends["trig"], [[1, 0], [0, 1]], atol=1e-15) and close(ends["cogvideox"][1][1], 1.0)
    assert close([c[1] for c in ends["sd"]], [0.06826, 0.99767], rtol=1e-4)


@pytest.mark.parametrize("dtype", [f64, torch.float32])
def test_table_values_are_hit_at_every_multiple_of_a_thousandth(dtype):
    i = torch.arange(1000)
    table = np.sqrt(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)))
    alpha, _ = common.alpha_sigma("dit", (i.to(f64) / 1000).to(dtype))
    assert alpha.dtype == dtype and close(alpha, table, rtol=1e-13 if dtype == f64 else 2e-6, atol=1e-6 * (dtype != f64))
    assert close(common.alpha_sigma("dit", 0.25025)[0], 0.75 * table[250] + 0.25 * table[251])


@every_schedule
def test_primes_are_derivatives(schedule):
    t, h = times(schedule), 1e-5
    up, down = common.alpha_sigma(schedule, t + h), common.alpha_sigma(schedule, t - h)
    exact = common.alpha_sigma_prime(schedule, t)
    for a, b, prime in zip(up, down, exact):
        assert close((a - b) / (2 * h), prime, rtol=1e-6, atol=1e-8)
    common.alpha_table.cache_clear()  # a table first built inside a transform must serve outside it too
    for _ in range(2):
        primals, tangents = torch.func.jvp(lambda t: common.alpha_sigma(schedule, t), (t,), (torch.ones_like(t),))
        assert all(close(a, b) for a, b in zip(tangents, exact))
    assert all(torch.equal(a, b) for a, b in zip(primals, common.alpha_sigma(schedule, t)))


@every_schedule
def test_t_from_ratio_inverts_sigma_over_alpha(schedule):
    lo, hi = common.t_range(schedule)
    t = torch.cat([times(schedule), torch.linspace(lo, hi, 1001, dtype=f64)])
    alpha, sigma = common.alpha_sigma(schedule, t)
    assert close(common.t_from_ratio(schedule, sigma / alpha), t, atol=1e-12)  # idx 50, 100, ... of sd included
    assert torch.equal(common.t_from_ratio(schedule, sigma / alpha).argsort(), t.argsort())
    if schedule.startswith("cogvideox"):
        assert common.t_from_ratio(schedule, math.inf) == 0.999


@every_schedule
def test_denoisers_of_all_schedules_are_edms_at_the_time_of_equal_ratio(schedule):
    pi, mu, s = (torch.tensor(v, dtype=f64) for v in ([0.2, 0.5, 0.3], [-1.0, 0.3, 2.0], [0.1, 0.4, 0.2]))

    def denoise(name, x, t):
        alpha, sigma = (c[:, None] for c in common.alpha_sigma(name, t))
        V, far = alpha ** 2 * s ** 2 + sigma ** 2, x[:, None] - alpha * mu
        rho = torch.softmax(pi.log() - 0.5 * V.log() - far ** 2 / (2 * V), 1)
        return (rho * (mu + alpha * s ** 2 / V * far)).sum(1)
    t, x = times(schedule), torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=f64)
    alpha, sigma = common.alpha_sigma(schedule, t)
    assert close(denoise(schedule, x, t), denoise("edm", x / alpha, common.t_from_ratio("edm", sigma / alpha)))


# ---------------------------------------------------------------- predictions

@every_schedule
def test_conversions_agree_with_the_definitions_and_round_trip(schedule):
    t = times(schedule)
    x0, eps = torch.randn(2, 4, 3, 2, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    (a, b), (da, db) = common.alpha_sigma(schedule, t), common.alpha_sigma_prime(schedule, t)
    a, b, da, db = (c.view(4, 1, 1, 1) for c in (a, b, da, db))
    x_t = common.add_noise(schedule, x0, eps, t)
    preds = dict(x0=x0, eps=eps, v=a * eps - b * x0, flow=da * x0 + db * eps)
    scale = 1 + (b / a).max() + (da.abs() + db.abs()).max()
    for source, target in itertools.product(KINDS, KINDS):
        out = common.convert(schedule, x_t, preds[source], t, source, target)
        assert close(out, preds[target], rtol=0, atol=1e-12 * scale ** 2), (source, target)
        back = common.convert(schedule, x_t, out, t, target, source)
        assert close(back, preds[source], rtol=0, atol=1e-12 * scale ** 2), (source, target)


def test_conversion_stays_finite_and_keeps_its_sign_where_a_denominator_vanishes():
    x, one = torch.ones(1, 1), torch.ones(1, 1)
    assert torch.equal(common.convert("edm", 2 * x, one, torch.zeros(1, dtype=f64), "x0", "eps"), 1e6 * one)
    end = torch.tensor([0.999], dtype=f64)
    assert torch.equal(common.convert("cogvideox", 2 * x, one, end, "eps", "x0"), 1e6 * one)
    assert torch.equal(common.convert("cogvideox", x, -one, end, "v", "x0"), one)  # v prediction has no such place


def test_times_per_frame_equal_frames_noised_one_by_one():
    x0, eps = torch.randn(2, 2, 3, 5, 4, 4, generator=torch.Generator().manual_seed(0))  # (B, C, F, H, W)
    t = torch.rand(2, 5, dtype=f64)
    x_t = common.add_noise("rf", x0, eps, t)
    for f in range(5):
        assert torch.equal(x_t[:, :, f], common.add_noise("rf", x0[:, :, f], eps[:, :, f], t[:, f]))
    with pytest.raises(AssertionError):
        common.expand(t[:, :4], x0)


@every_schedule
def test_bfloat16_never_touches_t_or_the_coefficients(schedule):
    net, t = Gaussian(schedule, "eps"), times(schedule) * (0.999 / 0.9008 if schedule == "rf" else 1)
    x0, eps = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        x_t = common.add_noise(schedule, x0, eps, t)
        pred = common.predict(lambda x, t, cond: net(x, t, cond).bfloat16(), x_t, t, {}, "x0") if False else None
        net.__class__  # noqa: B018
        out = common.predict(net, x_t, t, {}, "x0")
    assert pred is None and net.seen[0][0] is t and x_t.dtype == torch.bfloat16 and out.dtype == torch.float32
    assert torch.equal(x_t, common.add_noise(schedule, x0.double(), eps.double(), t).float().bfloat16())


@pytest.mark.parametrize("schedule, t, D, velocity", [
    ("edm", 0.002, 0.99998400, 0.00799987), ("edm", 0.5, 0.5, 1.0), ("edm", 1, 0.2, 0.8),
    ("edm", 80, 3.9060974e-5, 0.012499512), ("rf", 0.25, 0.92307692, 0.30769231), ("rf", 0.5, 0.4, 1.2),
    ("rf", 0.9, 0.03076923, 1.07692308), ("rf", 1.0, 0, 1.0), ("trig", 0.2, 0.87630465, 0.52228458),
    ("trig", 0.8, 0.27388431, 0.58941773), ("trig", 1.2, 0.10048493, 0.28096764),
    ("trig", 1.5, 0.01775092, 0.05311935)])
def test_denoiser_and_velocity_of_gaussian_data(schedule, t, D, velocity):
    x, t = torch.ones(1, 1, dtype=f64), torch.tensor([t], dtype=f64)
    for kind in KINDS:
        if not (kind == "eps" and t == 1 and schedule == "rf"):  # alpha = 0: eps says nothing about x0
            assert close(common.predict(Gaussian(schedule, kind), x, t, {}, "x0").item(), D, rtol=1e-6, atol=1e-9)
            assert close(common.predict(Gaussian(schedule, kind), x, t, {}, "flow").item(), velocity, rtol=1e-6)


# ---------------------------------------------------------------- guidance

@pytest.mark.parametrize("schedule, pred", itertools.product(SCHEDULES[:4] + ("rf", "trig"), KINDS))
def test_guidance_moves_the_mean_by_its_factor_in_every_space(schedule, pred):
    if (schedule, pred) == ("cogvideox", "eps"):
        pytest.skip("eps prediction is ill-conditioned near a zero terminal SNR")
    net, t, w = Gaussian(schedule, pred), times(schedule), 3.0
    x, m = torch.randn(4, 2, dtype=f64, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.4, dtype=f64)
    for target in ("x0", "eps", "flow"):
        guided = common.predict(net, x, t, dict(m=m), target, dict(m=0 * m), w)
        assert close(guided, common.predict(net, x, t, dict(m=w * m), target), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("guidance, passes", [(0, ["uncond"]), (0.5, ["cond", "uncond"]), (1, ["cond"]),
                                              (2, ["cond", "uncond"])])
def test_guidance_costs_two_passes_only_where_it_must(guidance, passes):
    net, x, t = Gaussian("rf", "flow"), torch.ones(1, 1), torch.tensor([0.5], dtype=f64)
    cond, uncond = dict(m=torch.ones(1)), dict(m=torch.zeros(1))
    common.predict(net, x, t, cond, "x0", uncond, guidance)
    assert [["uncond", "cond"][int(c["m"])] for _, c in net.seen] == passes
    for nothing in (None, {}):
        if guidance == 1:
            common.predict(net, x, t, cond, "x0", nothing, guidance)
        else:
            with pytest.raises(BadInput, match="negative condition"):
                common.predict(net, x, t, cond, "x0", nothing, guidance)
    with_taps = common.predict(net := Gaussian("rf", "flow"), x, t, cond, "x0", uncond, guidance, taps=(0,))
    assert close(with_taps["out"], common.predict(net, x, t, cond, "x0", uncond, guidance), rtol=1e-6)
    assert close(with_taps["taps"][0], net.__call__(x, t, cond if guidance else uncond, taps=(0,))["taps"][0]
                 - len(net.seen) + 1, rtol=1e-6)


def test_condition_dropout_replaces_whole_samples():
    cond = dict(label=torch.arange(1000), text=torch.ones(1000, 3, 2), image=torch.ones(1000, 4))
    uncond = dict(label=torch.full((1000,), -1), text=torch.zeros(1000, 3, 2), image=torch.zeros(1000, 4))
    assert common.drop_condition(cond, uncond, 0.0) is cond and common.drop_condition({}, {}, 0.5) == {}
    assert all(torch.equal(v, uncond[k]) for k, v in common.drop_condition(cond, uncond, 1.0).items())
    common.seed_default(0)
    out = common.drop_condition(cond, uncond, 0.3, keep=("image",))
    dropped = out["label"] == -1
    assert out["label"].dtype == torch.int64 and 0.25 < dropped.float().mean() < 0.35
    assert torch.equal(out["text"], (~dropped).float().view(-1, 1, 1).expand(-1, 3, 2))
    assert torch.equal(out["image"], cond["image"])


# ---------------------------------------------------------------- times

def quantiles(us, dist, schedule, **params):
    return common.t_quantile(torch.tensor(us, dtype=f64), dist, schedule, **params)


def test_student_t_quantiles():
    t = quantiles([0.1, 0.25, 0.5, 0.75, 0.9], "logt", "edm", mean=0.0, std=0.2, df=0.01, t_min=1.0)
    assert close(t, [1.01267, 1.04298, 1.22115, 2.52355, 10.44437], rtol=5e-6)


@pytest.mark.parametrize("mean, std", [(-1.1, 2.0), (-1.2, 1.2), (-0.8, 1.6), (3.0, 2.0)])
def test_lognormal_quantiles_are_those_of_the_truncated_normal(mean, std):
    u = torch.linspace(0, 0.999, 50, dtype=f64)
    below = lambda t: 0.5 * torch.erfc((mean - t.log()) / std / 2 ** 0.5)  # noqa: E731
    lo, hi = below(torch.tensor(common.t_range("edm"), dtype=f64))
    t = common.t_quantile(u, "lognormal", "edm", mean=mean, std=std)
    assert close((below(t) - lo) / (hi - lo), u, rtol=1e-9, atol=1e-12) and close(t[0], 0.002, rtol=1e-9)


def test_quantiles_of_the_other_distributions():
    u = [0.0, 0.25, 0.5, 1 - 1e-12]
    assert close(quantiles(u, "uniform", "rf"), [0, 0.24975, 0.4995, 0.999], rtol=1e-9)
    assert close(quantiles(u, "uniform", "edm", t_min=1.0, t_max=5.0), [1, 2, 3, 5], rtol=1e-9)
    s = [0.24975, 0.4995]
    assert close(quantiles(u, "shifted", "rf", shift=5.0), [0, *(5 * t / (1 + 4 * t) for t in s), 0.999], rtol=1e-9)
    t = quantiles([0.0, 0.5, 0.841344746], "logitnormal", "sd", mean=-0.4, std=1.0, t_min=0.001, t_max=0.901)
    assert close(t, [0.001] + [0.001 + 0.9 / (1 + math.exp(-z)) for z in (-0.4, 0.6)], rtol=1e-8)
    t = quantiles([0.0, 1 - 1e-12], "polynomial", "edm")
    assert close(t, [0.0021015, 79.564], rtol=1e-4)
    every = quantiles([(k + 0.5) / 997 for k in range(997)], "polynomial", "edm")
    assert close(every, common.karras(1000, 0.002, 80.0).flip(0)[2:999])
    inside = quantiles(u, "polynomial", "edm", t_min=0.0032, t_max=72.1)
    assert 0.0032 <= inside[0] < 0.0033 and 71.8 < inside[-1] <= 72.1


def test_draws_are_float64_quantiles_of_the_default_generator_within_bounds():
    common.seed_default(3)
    t = common.sample_t(20000, "lognormal", "edm", "cpu", mean=-1.2, std=1.2)
    common.seed_default(3)
    assert t.dtype == f64 and torch.equal(t, quantiles(torch.rand(20000, dtype=f64).tolist(), "lognormal", "edm",
                                                       mean=-1.2, std=1.2))
    assert 0.002 <= t.min() and t.max() <= 80 and abs(t.log().mean() + 1.2) < 0.03 and abs(t.log().std() - 1.2) < 0.02
    assert common.sample_t(1000, "lognormal", "edm", "cpu", mean=6.0, std=1.0, t_max=800.0).max() > 400  # sCM


@pytest.mark.parametrize("dist, schedule, params, says", [
    ("lognormal", "rf", {}, "shifted"), ("shifted", "sd", {}, "logitnormal"), ("lognromal", "edm", {}, "lognormal"),
    ("uniform", "edn", {}, "edm"), ("uniform", "rf", dict(t_max=1.5), "1.5"), ("uniform", "rf", dict(t_min=-0.1), "t_min"),
    ("uniform", "edm", dict(t_min=5.0, t_max=1.0), "t_min"), ("shifted", "rf", dict(shift=0.5), "shift"),
    ("logt", "edm", dict(df=0.0), "df")])
def test_impossible_time_distributions_are_refused(dist, schedule, params, says):
    with pytest.raises(BadInput, match=says):
        quantiles([0.5], dist, schedule, **params)


def test_step_lists():
    assert close(common.t_list("rf", 4), [0.999, 0.74925, 0.4995, 0.24975, 0])
    assert common.t_list("edm", 1) == [80.0, 0.0] and close(common.t_list("edm", 2), [80, 2.5265, 0], rtol=1e-4)
    edm8 = [80, 38.752, 17.498, 7.080, 2.5265, 0.7464, 0.1726, 0.0266, 0]
    assert close(common.t_list("edm", 8), edm8, rtol=2e-3)
    assert close(common.t_list("trig", 2), [math.pi / 2, math.pi / 4, 0])
    for given in ((0.999, 0.5), (0.999, 0.5, 0)):
        assert common.t_list("rf", 2, given) == [0.999, 0.5, 0.0]
    for bad in ((0.999,), (0.5, 0.999), (0.5, 0.5), (1.5, 0.5), (0.5, 0.0, 0.0), (0.5, -0.1)):
        with pytest.raises(BadInput, match="--t_list"):
            common.t_list("rf", 2, bad)
    with pytest.raises(BadInput, match="--steps"):
        common.t_list("rf", 0)


# ---------------------------------------------------------------- samplers

def basis(n):
    """noise(k) = the k-th basis vector, along the batch: a linear sampler returns its coefficients of the noises."""
    return lambda k: torch.eye(n, dtype=f64)[k].view(n, 1)


@pytest.mark.parametrize("kind, std, tol", [("sde", 0.5, 1e-4), ("ode", 0.70860, 1e-5)])
def test_few_steps_of_the_exact_consistency_function(kind, std, tol):
    exact = lambda x, t: 0.5 * x / (0.25 + t ** 2).sqrt().view(-1, 1)  # noqa: E731
    out = common.few_step(exact, basis(3), [80, 2.5, 0.17, 0], "edm", kind)
    assert abs(out.norm() - std) < tol
    assert torch.count_nonzero(out) == (3 if kind == "sde" else 1)
    x, t = common.rollout(exact, basis(3), [80, 2.5, 0.17, 0], "edm", kind, 1)  # before its second call
    assert torch.equal(t, torch.full((3,), 2.5, dtype=f64)) and t.dtype == f64
    assert close(x.norm(), math.hypot(0.5, 2.5) if kind == "sde" else 2.5, rtol=1e-3)


@pytest.mark.parametrize("steps, factor", [(1, 0.0), (2, 0.2), (4, 0.34054), (50, 0.485397), (1000, 0.499260)])
def test_ode_steps_of_a_denoiser_are_euler_steps(steps, factor):
    net = Gaussian("rf", "flow")
    ts = [1 - k / steps for k in range(steps)] + [0.0]
    out = common.few_step(lambda x, t: common.predict(net, x, t, {}), basis(1), ts, "rf", "ode")
    assert close(out.item(), factor, rtol=1e-5, atol=1e-12) and len(net.seen) == steps


def test_one_step_of_a_denoiser_collapses_to_the_mean():
    net = Gaussian("edm", "x0")
    out = common.few_step(lambda x, t: common.predict(net, x, t, {}), basis(1), [80, 0], "edm")
    assert close(out.item(), 0.003125, rtol=1e-4)


@pytest.mark.parametrize("steps, factor", [(5, 0.0157236), (10, 0.00762248), (18, 0.00659531), (40, 0.00631096),
                                           (80, 0.00626432)])
@pytest.mark.parametrize("pred", ["x0", "eps"])
def test_heun_on_edm_is_karras_sampler(steps, factor, pred):
    net = Gaussian("edm", pred)
    assert close(common.heun(net, basis(1), {}, steps).item() / 80, factor, rtol=1e-5)
    assert len(net.seen) == 2 * steps - 1 and net.seen[-1][0] == 0.002


@every_schedule
def test_heun_solves_the_ode_of_every_schedule(schedule):
    m, w = 0.3, 2.0
    alpha, sigma = common.alpha_sigma(schedule, common.t_range(schedule)[1])
    exact = w * m + 0.5 * (sigma - alpha * w * m) / (0.25 * alpha ** 2 + sigma ** 2).sqrt()
    cond = dict(m=torch.tensor([m], dtype=f64))
    net = Gaussian(schedule, "v" if schedule.startswith("cog") else "eps" if schedule != "rf" else "flow")
    out = common.heun(net, basis(1), cond, 60, dict(m=torch.zeros(1, dtype=f64)), w)
    assert abs(out.item() - exact) < 0.01 and len(net.seen) == 2 * 119


# ---------------------------------------------------------------- losses

def draws(n, seed=0):
    return torch.randn(2, n, 1, dtype=f64, generator=torch.Generator().manual_seed(seed))


def gaussian_loss(net, t, x0, eps, **kw):
    return common.denoising_loss(net, x0, torch.full((len(x0),), t, dtype=f64), eps, {}, **kw).mean().item()


@pytest.mark.parametrize("schedule, t", [("edm", 0.7), ("rf", 0.6), ("trig", 0.7), ("sd", 0.4004)])
@pytest.mark.parametrize("pred", KINDS)
def test_losses_and_coefficients_at_the_optimum(schedule, t, pred):
    s, (x0, eps) = 0.5, draws(300_000)
    (a, b), (da, db) = common.alpha_sigma(schedule, t), common.alpha_sigma_prime(schedule, t)
    V = a ** 2 * s ** 2 + b ** 2
    loss, slope = {"x0": (s ** 2 * b ** 2 / V, a * s ** 2 / V), "eps": (a ** 2 * s ** 2 / V, b / V),
                   "v": (s ** 2 * (a ** 2 + b ** 2) ** 2 / V, a * b * (1 - s ** 2) / V),
                   "flow": (s ** 2 * (da * b - db * a) ** 2 / V, (a * da * s ** 2 + b * db) / V)}[pred]
    found = gaussian_loss(Gaussian(schedule, pred, s), t, s * x0, eps, weight="unit")
    assert close(found, loss.item(), rtol=0.01)
    # the loss of the net k x is a parabola in k whose lowest point is the regression of the target on x_t
    at = {}
    for k in (-1, 0, 1):
        net = lambda x, t, cond, k=k: k * x  # noqa: E731
        net.schedule, net.pred = schedule, pred
        at[k] = gaussian_loss(net, t, s * x0, eps, weight="unit")
    assert abs((at[-1] - at[1]) / (2 * (at[1] + at[-1] - 2 * at[0])) - slope) < 0.01 * max(1, abs(slope))


def test_edm_loss_is_one_at_every_noise_level():
    x0, eps = draws(300_000)
    for s, t in itertools.product((0.5, 0.75), (0.002, 0.1, 1.0, 80.0)):
        assert close(gaussian_loss(Gaussian("edm", "x0", s), t, s * x0, eps), 1.0, rtol=0.01)
    assert close(gaussian_loss(Gaussian("edm", "x0", 0.5), 1.0, 0.5 * x0, eps, sigma_data=1e9), 0.2, rtol=0.01)


@every_schedule
def test_weights_turn_each_loss_into_the_others_for_any_predictor(schedule):
    t = times(schedule)
    x0, eps = torch.randn(2, 4, 3, 2, dtype=f64, generator=torch.Generator().manual_seed(1))
    net = lambda x, t, cond: torch.tanh(x) + t.view(-1, 1, 1) / 80  # noqa: E731
    net.schedule, net.pred, names = schedule, "v", ("edm", "min_snr:5", "soft_min_snr", *KINDS)
    for pred, weight in itertools.product(KINDS, names):
        loss = common.denoising_loss(net, x0, t, eps, {}, pred, weight)
        if weight in KINDS:
            same = common.denoising_loss(net, x0, t, eps, {}, weight, "unit")
        else:
            same = common.denoising_loss(net, x0, t, eps, {}, "x0", weight)
        assert loss.shape == (4,) and close(loss, same, rtol=1e-10)
    (a, b), (da, db) = common.alpha_sigma(schedule, t), common.alpha_sigma_prime(schedule, t)
    weigh = lambda name, pred="x0": common.loss_weight(name, schedule, t, pred, 0.5)  # noqa: E731
    assert close(weigh("eps"), a ** 2 / b ** 2) and close(weigh("v"), (a ** 2 + b ** 2) ** 2 / b ** 2)
    assert close(weigh("flow"), (da * b - db * a) ** 2 / b ** 2) and close(weigh("snr"), weigh("eps"))
    assert close(weigh("min_snr:5"), (a / b).square().clamp(max=5))
    assert close(weigh("min_snr:5", "eps"), (a / b).square().clamp(max=5) * (b / a) ** 2)


def test_weights_of_edm_and_k_diffusion_on_the_raw_network():
    t, s = times("edm"), 0.75
    c_out = t * s / (t ** 2 + s ** 2).sqrt()
    on_F = lambda name: common.loss_weight(name, "edm", t, "x0", s) * c_out ** 2  # noqa: E731
    assert close(on_F("edm"), torch.ones(4)) and close(on_F("snr"), s ** 2 / (t ** 2 + s ** 2))
    assert close(on_F("soft_min_snr"), (t * s) ** 2 / (t ** 2 + s ** 2) ** 2)
    for bad in ("emd", "min_snr", "min_snr:x", "edm:5"):
        with pytest.raises(BadInput, match="loss weight"):
            common.loss_weight(bad, "edm", t, "x0")


def test_loss_with_a_log_variance_head_and_taps():
    (x0, eps), t, net = draws(4), times("edm"), Gaussian("edm", "x0")
    plain = common.denoising_loss(net, x0, t, eps, {})
    assert close(common.denoising_loss(net, x0, t, eps, {}, logvar=True), plain / t + t.log())
    loss, taps = common.denoising_loss(net, x0, t, eps, {}, taps=(0,))
    assert torch.equal(loss, plain) and len(taps) == 1
    assert common.denoising_loss(net, x0.bfloat16(), t, eps.bfloat16(), {}).dtype == torch.float32


def test_dmd_gradient_is_the_normalised_score_difference_exactly():
    x, teacher, fake = 100 * torch.randn(3, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    fake = teacher + 1e-4 * fake  # a small difference of large numbers: x - (x - grad) would lose it
    x, teacher, fake = (v.requires_grad_() for v in (x, teacher, fake))
    loss = common.dmd_loss(x, teacher, fake)
    loss.backward()
    w = 1 / ((x - teacher).abs().mean((1, 2, 3), keepdim=True) + 1e-6)
    grad = (w * (fake - teacher)).detach()
    assert torch.allclose(x.grad, grad / x.numel(), rtol=1e-6, atol=0) and teacher.grad is None and fake.grad is None
    assert close(loss.item(), 0.5 * grad.double().square().mean().item(), rtol=1e-5)
    assert common.dmd_loss(x, teacher, teacher) == 0
    assert common.dmd_loss(x.bfloat16(), teacher, fake).dtype == torch.float32


def test_score_difference_is_the_gradient_of_the_reverse_kl():
    a, b, q, s = 0.8, 0.6, 0.9, 0.5
    one, t = torch.ones(1, 1, dtype=f64), torch.tensor([math.atan2(b, a)], dtype=f64)
    fake, teacher = (common.predict(Gaussian("trig", "eps", std), one, t, {}).item() for std in (q, s))
    V = lambda std: a ** 2 * std ** 2 + b ** 2  # noqa: E731
    pull = (fake - teacher) * a * q  # E[(D_F - D_T) z] with x_t = a q z + b eps, both D linear in x_t
    kl = lambda q: 0.5 * (V(q) / V(s) - 1 - math.log(V(q) / V(s)))  # noqa: E731
    assert close([pull, pull * a * a / b ** 2], [0.254224, 0.451955], rtol=2e-6)
    assert close(pull * a * a / b ** 2, (kl(q + 1e-5) - kl(q - 1e-5)) / 2e-5, rtol=1e-6)
    for q, sign in ((0.9, 1), (0.3, -1), (0.5, 0)):  # dmd_loss drives the student's std q to the teacher's s
        std, (z, eps) = torch.tensor(q, dtype=f64, requires_grad=True), draws(2000)
        x_t, ts = common.add_noise("trig", std.detach() * z, eps, t.expand(2000)), t.expand(2000)
        D = [common.predict(Gaussian("trig", "v", v), x_t, ts, {}) for v in (s, q)]
        common.dmd_loss(std * z, *D).backward()
        assert std.grad.sign() == sign


def test_gan_losses_at_their_optima():
    zero = torch.zeros(7, 3)
    assert close(common.gan_loss_d(zero, zero).item(), 2 * math.log(2), rtol=1e-6)
    assert close(common.gan_loss_g(zero).item(), math.log(2), rtol=1e-6)
    assert common.gan_loss_d(zero, zero, "hinge") == 2 and common.gan_loss_g(zero + 3, "hinge") == -3
    assert common.gan_loss_d(zero + 2, zero - 3, "hinge") == 0 and common.gan_loss_d(zero - 1, zero, "hinge") == 3
    with pytest.raises(BadInput, match="softplus"):
        common.gan_loss_g(zero, "softpluss")
    # quadrature over equally likely quantiles of N(0, V)
    z = torch.special.ndtri((torch.arange(400_000, dtype=f64) + 0.5) / 400_000)
    Vs, q = 0.52, torch.tensor(0.9, dtype=f64, requires_grad=True)
    Vq = 0.64 * q ** 2 + 0.36
    intercept, slope = 0.5 * math.log(0.8784 / Vs), 0.5 * (1 / 0.8784 - 1 / Vs)
    assert close([intercept, slope], [0.262137, -0.392322], rtol=2e-6)
    real, fake = Vs ** 0.5 * z, Vq.sqrt() * z
    L_D = lambda c, k: common.gan_loss_d(c + k * real ** 2, c + k * fake.detach() ** 2).item()  # noqa: E731
    best = L_D(intercept, slope)
    assert close(best, 1.353747, rtol=1e-5)
    assert all(L_D(intercept + dc, slope + dk) > best for dc, dk in ((.1, 0), (-.1, 0), (0, .1), (0, -.1)))
    common.gan_loss_g(intercept + slope * fake ** 2).backward()
    assert close(q.grad.item(), 0.296919, rtol=1e-4)


def test_r1_of_a_linear_discriminator_is_its_squared_slope():
    a = torch.randn(6, dtype=f64, generator=torch.Generator().manual_seed(0))
    x_t = 5 * torch.randn(200_000, 6, dtype=f64, generator=torch.Generator().manual_seed(1))
    moved = x_t + 0.1 * torch.randn(200_000, 6, dtype=f64, generator=torch.Generator().manual_seed(2))
    assert close(common.r1_approx(x_t @ a, moved @ a).item(), 0.01 * a.square().sum().item(), rtol=0.01)


# ---------------------------------------------------------------- rates

def test_warm_up_counts_updates_and_wastes_none():
    assert close([common.lr_factor("constant", n - 1, 10, 100) for n in (1, 5, 10, 11, 100)], [0.1, 0.5, 1, 1, 1])
    assert common.lr_factor("constant", 0, 0, 100) == 1


@pytest.mark.parametrize("warmup, total, floor", [(0, 100, 0.0), (10, 100, 0.1), (0, 1, 0.2), (5, 6, 0.1)])
def test_cosine_ends_at_its_floor(warmup, total, floor):
    lrs = [common.lr_factor(f"cosine:{floor}" if floor else "cosine", n, warmup, total) for n in range(total + 3)]
    assert close(lrs[total - 1:], [floor] * 4, atol=1e-15) and lrs == lrs[:warmup] + sorted(lrs[warmup:], reverse=True)
    if total == 100:
        assert max(lrs) == 1 and close(lrs[(warmup + 99) // 2 + 1], (1 + floor) / 2, atol=0.02)


def test_inverse_square_root_decay_and_unknown_schedules():
    assert close([common.lr_factor("inv_sqrt:2000", n, 0, 0) for n in (0, 2000, 8000)], [1, 1, 0.5])
    for bad in ("cosin", "inv_sqrt", "cosine:x", "constant:0.5"):
        with pytest.raises(BadInput, match="lr_schedule"):
            common.lr_factor(bad, 0, 0, 10)


@pytest.mark.parametrize("width, gamma", [(0.01, 96.99), (0.05, 16.97), (0.10, 6.94)])
def test_power_ema_keeps_the_profile_of_its_width(width, gamma):
    entry, average, n = f"ema_p:power={width}", 0.0, 3000
    assert common.parse_ema(entry) == ("ema_p", "power", width) and common.ema_beta(entry, 1, 8) == 0
    assert abs(math.log(common.ema_beta(entry, 1000, 8)) / math.log(0.999) - 1 - gamma) < 0.006
    for k in range(1, n + 1):
        average += (1 - common.ema_beta(entry, k, 8)) * (k - average)
    assert close(average / n, (gamma + 1) / (gamma + 2), rtol=1e-3)  # 0.888 for gamma 6.94


def test_half_life_ema_halves_and_ramps_up():
    product = math.prod(common.ema_beta("ema:half_kimg=2", n, 20) for n in range(5001, 5101))  # 2000 images
    assert close(product, 0.5) and close(common.ema_beta("ema:half_kimg=500", 10, 20), 0.5 ** 2)  # 5 % of 200 images


@pytest.mark.parametrize("entry, parsed", [("ema", ("ema", "rate", 0.9999)), ("ema_2:0.5", ("ema_2", "rate", 0.5)),
                                           ("ema:half_kimg=500", ("ema", "half_kimg", 500))])
def test_ema_entries(entry, parsed):
    assert common.parse_ema(entry) == parsed
    assert parsed[1] != "rate" or common.ema_beta(entry, 7, 8) == parsed[2]


@pytest.mark.parametrize("entry", ["avg", "ema:1.0", "ema:-0.1", "ema:power=0.5", "ema:half=3", "ema:x", "ema/1:0.9"])
def test_wrong_ema_entries_are_refused(entry):
    with pytest.raises(BadInput, match="ema entry"):
        common.parse_ema(entry)


# ---------------------------------------------------------------- randomness and ranks

def test_seeds_of_different_keys_never_meet():
    assert common.hash_seed(0, 5, 1) != common.hash_seed(0, 6, 0)
    keys = [*itertools.product(range(3), range(40), range(8)), (5,), (5, 0), (5, 0, 0, 0), ("5",), ("5", 0), (2 ** 32,),
            (2 ** 32, 0), (0, 1), (-1,), ("student", "a.b"), ("fake", "a.b"), ("student.a", "b")]
    seeds = {common.hash_seed(*k) for k in keys}
    assert len(seeds) == len({s % 2 ** 32 for s in seeds}) == len(keys)  # torch's CPU generator uses 32 bits
    assert all(0 <= s < 2 ** 63 for s in seeds)
    assert common.hash_seed("shared", 0, 7) == 3972310823936059529  # checkpoints and samples depend on this function for ever


def test_noise_of_a_sample_depends_on_seed_id_and_k_alone():
    noise = common.noise_fn(3, torch.tensor([7, 2, 11]), (1, 2, 2), "cpu")
    assert noise(0).shape == (3, 1, 2, 2) and noise(0).dtype == torch.float32
    for k in (1, 0):  # whatever was drawn before
        assert torch.equal(common.noise_fn(3, [11, 7], (1, 2, 2), "cpu")(k), noise(k)[[2, 0]])
    other = [noise(1), common.noise_fn(4, [7, 2, 11], (1, 2, 2), "cpu")(0), noise(0)[[1, 2, 0]]]
    assert not any((x == noise(0)).any() for x in other)
    assert common.noise_fn(3, [], (1, 2, 2), "cpu")(0).shape == (0, 1, 2, 2)


def test_training_noise_and_shared_decisions_follow_their_seeds():
    noise = []
    for _ in range(2):
        common.seed_default(common.hash_seed(0, 5, 1))
        noise.append(common.train_noise((4, 2), "cpu"))
        drawn = [noise[-1](0), noise[-1](1), torch.rand(()), np.random.rand(), random.random()]
        assert torch.equal(noise[-1](0), drawn[0]) and not torch.equal(drawn[0], drawn[1])
        noise[-1] = drawn
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*noise))
    exits = [[torch.randint(1000, (), generator=common.shared_generator(s, it)) for it in range(9)] for s in (0, 0, 1)]
    assert exits[0] == exits[1] != exits[2] and len(set(map(int, exits[0]))) > 5


def rank_main(rank, store, queue):
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    x = torch.tensor([1.0, 4.0]) * (rank + 1)
    group = torch.distributed.group.WORLD
    queue.put((common.all_mean(x).tolist(), x.tolist(), common.from_rank0(f"of {rank}", group)))
    torch.distributed.barrier()


def test_ranks_agree_on_means_and_on_rank_0s_word(tmp_path):
    x = torch.ones(2)
    assert common.all_mean(x) is x and common.from_rank0("alone", None) == "alone"
    context = multiprocessing.get_context("fork")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, f"file://{tmp_path}/store", queue)) for r in (0, 1)]
    [r.start() for r in ranks]
    answers = sorted(queue.get(timeout=60) for _ in ranks)
    [r.join(timeout=60) for r in ranks]
    assert answers == [([1.5, 6.0], [1.0, 4.0], "of 0"), ([1.5, 6.0], [2.0, 8.0], "of 0")]


# ---------------------------------------------------------------- nets and optimizers

def test_nets_are_made_from_their_spec():
    net = common.make_net("toy:tiny,schedule=rf,pred=flow,dropout=0.25", pred="x0", r=True)
    assert (net.schedule, net.pred) == ("rf", "flow")
    x, t = torch.randn(2, *net.x_shape), torch.tensor([0.5, 0.9], dtype=f64)
    assert net(x, t, {}, r=0 * t).shape == x.shape
    assert type(net) is type(common.make_net("toy:tiny"))
    for spec, says in (("toi:tiny", "did you mean toy"), ("toy:tinny", "did you mean tiny"), ("toy", "tiny"),
                       ("toy:tiny,dropuot=0.1", "did you mean dropout"), ("toy:tiny,r", "option=value")):
        with pytest.raises(BadInput, match=says):
            common.make_net(spec)


@pytest.mark.parametrize("name, kind", [("adamw", "AdamW"), ("adam", "Adam"), ("radam", "RAdam")])
def test_optimizers_are_torchs(name, kind):
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    how = dict(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    pair = (ours, common.optimizer([ours], name, **how)), (theirs, getattr(torch.optim, kind)([theirs], **how))
    for _ in range(8):
        for p, opt in pair:
            p.grad = p.detach() ** 2 - 0.3
            opt.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) and type(pair[0][1]) is type(pair[1][1])
    with pytest.raises(BadInput, match="did you mean adam"):
        common.optimizer([ours], "adan")
