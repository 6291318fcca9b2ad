"""Oracles of common.py, many of them closed forms for data N(m, s^2) in every schedule."""
import itertools
import math
import random

import numpy as np
import pytest
import torch

from common import (KINDS, add_noise, alpha_sigma, alpha_table, check_jvp, curve, denoising_loss, dmd_loss,
    ema_beta, gan_loss_d, gan_loss_g, hash_seed, heun, loss_weight, lr_factor, noise_fn, optimizer, parse_ema,
    predict, sample_t, seed_default, shared_generator, t_from_ratio, t_list, t_quantile, t_range, train_noise)
from gauss import Gauss
from run import refused

f64, nan, inf = torch.float64, math.nan, math.inf
tensor = lambda *values: torch.tensor(values, dtype=f64)
randn = lambda *shape, seed=0: torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(seed))
of_class, none = (dict(label=torch.tensor(label)) for label in (0, -1))         # for a batch of any size

@pytest.fixture(params=("edm", "sd", "dit", "cogvideox", "cogvideox2b", "rf", "trig"))
def schedule(request):
    return request.param

def times(schedule):
    """4 times away from the ends of the schedule and from the knots of tables."""
    inner = dict(edm=(0.01, 0.5, 2.0, 40.0), trig=(0.1, 0.8, 1.2, 1.5))
    return tensor(*inner.get(schedule, (0.0504, 0.2503, 0.5007, 0.9008)))

def close(a, b, rtol=1e-12, atol=0.0):
    a, b = torch.as_tensor(a, dtype=f64), torch.as_tensor(b, dtype=f64)
    return a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=atol)

# ---- schedules
def test_tables_hold_the_published_abar_and_the_other_schedules_end_where_they_should():
    for schedule, abar, atol in (
            ("dit", {0: 0.9999, 100: 0.89514, 250: 0.52142, 500: 0.07780, 750: 0.00330, 999: 4.04e-5}, 5e-6),
            ("sd", {0: 0.99915, 100: 0.89422, 250: 0.67379, 500: 0.27633, 750: 0.05617, 999: 0.00466}, 5e-6),
            ("cogvideox", {998: 1.97e-7, 999: 0.0}, 1e-9), ("cogvideox2b", {998: 6.2e-8, 999: 0.0}, 1e-9)):
        alpha, sigma = alpha_sigma(schedule, tensor(*abar) / 1000)
        assert close(alpha ** 2, tensor(*abar.values()), 0, atol), schedule
        assert close(alpha ** 2 + sigma ** 2, 1 + 0 * alpha) and t_range(schedule) == (0, 0.999)
    for schedule, *ends in (("edm", (1, 1), (0.002, 80)), ("rf", (1, 0.001), (0, 0.999)),
                            ("trig", (1, 0), (0, 1))):
        assert close(torch.stack(alpha_sigma(schedule, tensor(*t_range(schedule)))), ends, 0, 1e-12)

def test_primes_are_derivatives_and_t_from_ratio_inverts_sigma_over_alpha(schedule):
    t, h, f = times(schedule), 1e-5, lambda t: torch.stack(alpha_sigma(schedule, t))
    exact = torch.stack(curve(schedule, t)[2:])
    assert close((f(t + h) - f(t - h)) / (2 * h), exact, rtol=1e-6, atol=1e-8)
    alpha_table.cache_clear()  # a table first built inside a transform must serve outside it too
    for _ in range(2):
        assert close(torch.func.jvp(f, (t,), (torch.ones_like(t),))[1], exact)
    t = torch.cat([t, torch.linspace(*t_range(schedule), 1001, dtype=f64)])     # idx 50, 100, ... of sd too
    alpha, sigma = f(t)
    assert close(t_from_ratio(schedule, sigma / alpha), t, atol=1e-12)
    assert schedule[:3] != "cog" or t_from_ratio(schedule, inf) == 0.999

# ---- predictions
def test_conversions_and_guidance_are_exact_for_gaussian_data_and_bfloat16_never_touches_t(schedule):
    t, (x, eps), m = times(schedule), randn(2, 4, 2), randn(4)
    a, b, da, db = curve(schedule, t)
    tol = 1e-12 * (1 + (b / a).max() + (da.abs() + db.abs()).max()) ** 2
    assert close(add_noise(schedule, x, eps, t), a[:, None] * x + b[:, None] * eps)
    for pred, target, w in itertools.product(KINDS, KINDS, (0, 0.5, 1, 3)):     # w multiplies the mean
        guided = predict(Gauss(m, 0.5, schedule, pred), x, t, of_class, target, none, w)
        exact = Gauss(w * m, 0.5, schedule, target)(x, t, of_class)
        assert close(guided, exact, 0, tol), (pred, target, w)
    half, net = (x.bfloat16(), eps.bfloat16()), Gauss(m, 0.5, schedule, "v")
    with torch.autocast("cpu", torch.bfloat16):
        x_t, out = add_noise(schedule, *half, t), predict(net, half[0], t, of_class, "x0")
    assert x_t.dtype == torch.bfloat16 and out.dtype == torch.float32
    x, eps = (v.double() for v in half)
    assert close(x_t, add_noise(schedule, x, eps, t), rtol=2 ** -8, atol=1e-5)
    assert close(out, predict(net, x, t, of_class, "x0"), rtol=1e-6, atol=1e-6)

# ---- times
@pytest.mark.parametrize("dist, schedule, params, u, t", [
    ("uniform", "rf", {}, (0, 0.25, 1), (0, 0.24975, 0.999)),
    ("shifted", "rf", dict(shift=5.0, t_min=0.001), (0, 0.249 / 0.998, 1), (5 / 1004, 0.625, 0.999)),
    ("logitnormal", "sd", dict(mean=-0.4, t_min=0.001, t_max=0.901), (0, 0.5, 0.8413447460685429),
     (0.001, 0.001 + 0.9 / (1 + math.exp(0.4)), 0.001 + 0.9 / (1 + math.exp(-0.6)))),
    ("lognormal", "edm", dict(mean=-1.2, std=1.2), (0, 0.1, 0.9), (0.002, 0.0647143, 1.401947)),
    ("lognormal", "edm", dict(mean=3.0, std=2.0), (0, 0.5, 0.9), (0.002, 10.766951, 51.09656)),
    ("logt", "edm", dict(mean=0.0, std=0.2, df=0.01, t_min=1.0), (0.1, 0.25, 0.5, 0.75, 0.9),
     (1.01267, 1.04298, 1.22115, 2.52355, 10.44437)),
    ("polynomial", "edm", {}, (0, 0.5, 1 - 1e-12), (0.0021015, 2.5265, 79.564))])
def test_quantiles_are_those_of_the_distribution_and_draws_are_quantiles(dist, schedule, params, u, t):
    rtol = dict(polynomial=1e-3, logt=5e-6, lognormal=1e-6).get(dist, 1e-9)
    assert close(t_quantile(tensor(*u), dist, schedule, **params), tensor(*t), rtol)
    seed_default(3)
    drawn = sample_t(99, dist, schedule, "cpu", **params)
    seed_default(3)                     # of the default generator, in float64
    assert torch.equal(drawn, t_quantile(torch.rand(99, dtype=f64), dist, schedule, **params))

def test_step_lists():
    assert close(t_list("rf", 4), [0.999, 0.74925, 0.4995, 0.24975, 0])
    assert close(t_list("trig", 2), [math.pi / 2, math.pi / 4, 0]) and t_list("edm", 1) == [80.0, 0.0]
    edm8 = [80, 38.752, 17.498, 7.080, 2.5265, 0.7464, 0.1726, 0.0266, 0]
    assert close(t_list("edm", 8), edm8, rtol=2e-3)
    assert t_list("rf", 2, (0.999, 0.5)) == t_list("rf", 2, (0.999, 0.5, 0)) == [0.999, 0.5, 0.0]

@pytest.mark.parametrize("says, f", [
    ("--t_list", lambda: t_list("rf", 2, (0.5, 0.999))), ("--t_list", lambda: t_list("rf", 2, (nan, 0.5))),
    ("needs 0 <= t_min", lambda: t_quantile(tensor(0.5), "uniform", "rf", t_max=1.5)),
    ("lr_schedule", lambda: lr_factor("cosine:nan", 0, 0, 10)),
    ("ema entry", lambda: parse_ema("ema:power=0.5")),
    ("negative condition", lambda: predict(Gauss(0, 1), tensor(1), tensor(0.5), {}, "x0", {}, 2)),
    ("--betas", lambda: optimizer([torch.zeros(1)], betas=(0.9, nan))),
    ("--jvp difference or", lambda: check_jvp("apart", "fsdp", "")), ("--amp", lambda: check_jvp(
        "difference", "fsdp", "bf16"))])
def test_what_would_train_wrong_is_refused_by_name(says, f, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")     # which lacks forward mode under shards
    refused(f, says=[says])

# ---- samplers
def test_heun_converges_to_the_guided_ode_map_of_every_schedule(schedule):
    m, w, (alpha, sigma) = 0.3, 2.0, alpha_sigma(schedule, t_range(schedule)[1])
    exact = w * m + 0.5 * (sigma - alpha * w * m) / (0.25 * alpha ** 2 + sigma ** 2).sqrt()
    net, calls = Gauss(m, 0.5, schedule, "v" if schedule[:3] == "cog" else "eps"), []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    one = lambda k: torch.ones(1, 1, dtype=f64)
    errors = [abs(heun(net, one, of_class, n, none, w).item() - exact) for n in (50, 200)]
    assert errors[0] < 0.06 and errors[1] < 0.4 * errors[0] and len(calls) == 2 * (99 + 399)

# ---- losses
def test_weights_turn_each_loss_into_the_others_for_any_predictor(schedule):
    t, (x0, eps) = times(schedule), randn(2, 4, 3, 2)
    a, b = alpha_sigma(schedule, t)
    net = lambda x, t, cond: torch.tanh(x) + t.view(-1, 1, 1) / 80
    net.schedule, net.pred = schedule, "v"
    for pred, weight in itertools.product(KINDS, ("edm", "min_snr:5", "soft_min_snr", *KINDS)):
        loss = denoising_loss(net, x0, t, eps, {}, pred, weight)
        same = (weight, "unit") if weight in KINDS else ("x0", weight)
        assert loss.shape == (4,) and close(loss, denoising_loss(net, x0, t, eps, {}, *same), rtol=1e-10)
    error = (predict(net, add_noise(schedule, x0, eps, t), t, {}, "x0") - x0).square().mean((1, 2))
    assert close(denoising_loss(net, x0, t, eps, {}, "x0", "unit"), error)
    weigh, snr, data = lambda name: loss_weight(name, schedule, t, "x0", 0.75), (a / b) ** 2, 0.75 ** 2
    assert close(weigh("snr"), snr) and close(weigh("min_snr:5"), snr.clamp(max=5))
    assert close(weigh("edm"), snr + 1 / data) and close(weigh("soft_min_snr"), 1 / (1 / snr + data))
    net = Gauss(0, 0.5, schedule)
    plain, learned = (denoising_loss(net, x0, t, eps, {}, **kw) for kw in ({}, dict(logvar=True)))
    assert close(learned, plain / t + t.log())          # the net's log-variance is ln t

def test_dmd_gradient_is_the_normalised_score_difference_exactly():
    x, teacher, fake = 100 * randn(3, 2, 3, 4).float()
    fake = teacher + 1e-4 * fake  # a small difference of large numbers: x - (x - grad) would lose it
    [v.requires_grad_() for v in (x, teacher, fake.detach_())]
    loss = dmd_loss(x, teacher, fake)
    loss.backward()
    grad = ((fake - teacher) / ((x - teacher).abs().mean((1, 2), keepdim=True) + 1e-6)).detach()
    assert close(x.grad, grad / x.numel(), rtol=1e-6) and teacher.grad is None and fake.grad is None
    assert close(loss.item(), 0.5 * grad.double().square().mean().item(), rtol=1e-5)

def test_gan_losses_are_means_of_softplus_or_hinge():
    real, fake = tensor(2, 0.5), tensor(-3, 1)
    for kind, g, d in (("softplus", 1.68092452, 0.98142702), ("hinge", 1.0, 1.25)):
        assert close([gan_loss_g(fake, kind), gan_loss_d(real, fake, kind)], [g, d], rtol=1e-8)

# ---- rates
@pytest.mark.parametrize("warmup, total, floor", [(0, 100, 0.0), (10, 100, 0.1), (5, 6, 0.1)])
def test_warm_up_wastes_no_update_inv_sqrt_decays_and_cosine_ends_at_its_floor(warmup, total, floor):
    assert close([lr_factor("constant", n - 1, 10, 100) for n in (1, 5, 10, 11)], [0.1, 0.5, 1, 1])
    assert close([lr_factor("inv_sqrt:2000", n, 0, 0) for n in (0, 2000, 8000)], [1, 1, 0.5])
    lrs = [lr_factor(f"cosine:{floor}", n, warmup, total) for n in range(total + 3)]
    assert close(lrs[total:], [floor] * 3, atol=1e-15) and lrs[total - 1] > floor    # the last still moves
    assert total < 100 or max(lrs) == 1 and close(lrs[(warmup + 100) // 2], (1 + floor) / 2, atol=0.01)

def test_power_ema_keeps_the_profile_of_its_width_and_a_half_life_halves_and_ramps_up():
    for width, gamma in (0.05, 16.97), (0.10, 6.94):
        betas = [ema_beta(f"ema_p:power={width}", n, 8) for n in (1, 1000)]
        assert betas[0] == 0 and abs(math.log(betas[1]) / math.log(0.999) - 1 - gamma) < 0.006
    assert ema_beta("ema", 7, 8) == 0.9999 and ema_beta("ema_2:0.5", 1, 8) == 0.5
    product = math.prod(ema_beta("ema:half_kimg=2", n, 20) for n in range(5001, 5101))  # 2000 images
    assert close([product, ema_beta("ema:half_kimg=500", 10, 20)], [0.5, 0.25])  # 20 images, 5 % of 200: 10

# ---- randomness
def test_seeds_of_different_keys_never_meet():
    keys = [*itertools.product(range(3), range(40), range(8)), (5,), (5, 0), ("5",), (-1,), (2 ** 32,)]
    seeds = {hash_seed(*k) for k in keys}
    assert len({s % 2 ** 32 for s in seeds}) == len(keys) and max(seeds) < 2 ** 63  # the CPU uses 32 bits
    assert hash_seed("shared", 0, 7) == 3972310823936059529  # runs and samples depend on it for ever

def test_noise_differs_by_k_and_that_of_training_depends_on_the_reseed_alone():
    noise = noise_fn(3, torch.tensor([7, 2, 11]), (1, 2, 2), "cpu")
    assert not (noise(1) == noise(0)).any() and noise(1) is noise(1)
    def draws():
        seed_default(hash_seed(0, 5, 1))
        noise, numbers = train_noise((4, 2), "cpu"), [np.random.rand(), random.random()]
        return noise(1), noise(0), noise(1), torch.rand(1), tensor(*numbers)
    first = draws()
    assert all(map(torch.equal, first, draws()))
    assert torch.equal(first[0], first[2]) and not (first[0] == first[1]).any()
    a, b, c = (torch.randint(10 ** 9, (), generator=shared_generator(0, it)) for it in (3, 3, 4))
    assert a == b != c
