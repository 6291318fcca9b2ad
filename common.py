"""What two or more methods share with the same meaning: functions of tensors and numbers.

    x_t = alpha(t) x0 + sigma(t) eps      t = 0 is data, larger t is noisier, in every schedule
    x0   the data                         v     alpha eps - sigma x0
    eps  unit noise                       flow  alpha' x0 + sigma' eps   (' is d/dt)

    schedule     alpha(t)                 t              nets
    edm          1                        0.002 .. 80    EDM, EDM2 (sigma = t)
    sd, sdxl     table, SD's betas        0 .. 0.999     SD1.5, SDXL
    dit          table, linear betas      0 .. 0.999     DiT
    cogvideox    table, zero final SNR    0 .. 0.999     CogVideoX 5B (cogvideox2b: the 2B, SNR shift 3)
    rf           1 - t                    0 .. 0.999     SiT, Flux, Wan, ... (sigma = t)
    trig         cos t                    0 .. pi/2      sCM (sigma = sin t)

Times are float64 (B,), or (B, F) with one per frame; float32 on MPS, which has no float64. Coefficients are
computed in that type and applied in at least float32: in bfloat16 a t of 0.999 would be 1.
"""
import ast
import contextlib
import difflib
import functools
import importlib
import math
import random
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F


class BadInput(Exception):
    """Input that cannot work, in one sentence: the value, what was expected, the cure. train.py exits 2."""


def known(what, value, names):
    """BadInput, with the nearest and all names, unless value is one of them."""
    if value not in names:
        hint = "".join(f"did you mean {n}? " for n in difflib.get_close_matches(str(value), list(names), 1))
        raise BadInput(f"{what} {value!r} is not known; {hint}known: {', '.join(names)}")


def number(what, text, low=-math.inf, high=math.inf):
    """float(text), finite and from low to high, or BadInput."""
    try:
        value = float(text)
    except (ValueError, TypeError, OverflowError):
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f" from {low:g} to {high:g}" if math.isfinite(low) else ""
        raise BadInput(f"{what}: {text!r} is not a finite number{bounds}")
    return value


def check(cfg, **allowed):
    """BadInput unless the value of every key is one of its names or a number of its range (low, high)."""
    for key, values in allowed.items():
        if isinstance(next(iter(values)), str):
            known(f"--{key}", cfg[key], values)
        else:
            number(f"--{key}", cfg[key], *values)


# ---------------------------------------------------------------- schedules
# name: t_min, t_max of training and sampling; the largest t that may be asked for (sCM trains to 800 on edm)
schedules = dict(edm=(0.002, 80.0, 1000.0), rf=(0.0, 0.999, 1.0), trig=(0.0, math.pi / 2, math.pi / 2),
                 **dict.fromkeys(("sd", "sdxl", "dit", "cogvideox", "cogvideox2b"), (0.0, 0.999, 0.999)))


def t_range(schedule):
    """(t_min, t_max): the range of training and sampling unless told otherwise."""
    known("schedule", schedule, schedules)
    return schedules[schedule][:2]


@functools.lru_cache(maxsize=None)
def alpha_table(schedule, device, dtype):
    """alpha at t = i / 1000, i = 0 .. 999, from the betas in the hub's scheduler configs, in float64."""
    known("schedule", schedule, schedules)
    scaled_linear = np.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2
    abar = np.cumprod(1 - (np.linspace(1e-4, 0.02, 1000) if schedule == "dit" else scaled_linear))
    if schedule.startswith("cogvideox"):  # SNR shift, then zero final SNR: the order of diffusers' scheduler
        k = 3.0 if schedule == "cogvideox2b" else 1.0
        q = np.sqrt(abar / (k + (1 - k) * abar))
        abar = ((q - q[-1]) * q[0] / (q[0] - q[-1])) ** 2
    return torch.from_numpy(np.sqrt(abar)).to(device, dtype)


def wide(x):
    """x, or a number, as a tensor of at least float32."""
    x = x if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def curve(schedule, t):
    """alpha, sigma, d alpha/dt, d sigma/dt in t's shape and dtype, float32 at least.
    Tables: alpha linear between its 1000 values (slope there: to the right), sigma = sqrt(1 - alpha^2)."""
    t = wide(t)
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    if schedule == "edm":
        return one, t, zero, one
    if schedule == "rf":
        return 1 - t, t, -one, one
    if schedule == "trig":
        return t.cos(), t.sin(), -t.sin(), t.cos()
    table, pos = alpha_table(schedule, t.device, t.dtype), (1000 * t).clamp(0, 999)
    i = pos.detach().long().clamp(max=998)
    rise = table[i + 1] - table[i]
    alpha = table[i] + (pos - i) * rise
    sigma = (1 - alpha ** 2).sqrt()
    return alpha, sigma, 1000 * rise, -1000 * rise * alpha / sigma


def alpha_sigma(schedule, t):
    """alpha, sigma of `curve`."""
    return curve(schedule, t)[:2]


def interp(x, xs, ys):
    """Piecewise linear y(x) through (xs, ys), xs ascending, extended beyond the ends."""
    i = torch.searchsorted(xs, x.detach().contiguous()).clamp(1, len(xs) - 1)
    return ys[i - 1] + (x - xs[i - 1]) * ((ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1]))


def noise_level(schedule, t):
    """sigma / alpha, which is t on edm."""
    alpha, sigma = alpha_sigma(schedule, t)
    return sigma / alpha


def t_from_ratio(schedule, ratio):
    """The t at which sigma / alpha has this value (inf allowed): from one schedule's times to another's."""
    ratio = wide(ratio)
    if schedule in ("edm", "rf", "trig"):
        return {"edm": ratio, "rf": 1 - 1 / (1 + ratio), "trig": ratio.atan()}[schedule]
    alphas = alpha_table(schedule, ratio.device, ratio.dtype).flip(0)
    ts = torch.arange(999, -1, -1, device=ratio.device, dtype=ratio.dtype) / 1000
    return interp((1 + ratio ** 2).rsqrt(), alphas, ts).clamp(0, 0.999)


def t_like(value, x):
    """One time for the whole batch x: (B,) float64 (float32 on MPS)."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.full((len(x),), float(value), dtype=dtype, device=x.device)


# ---------------------------------------------------------------- noising and predictions
def expand(a, x):
    """Coefficients (B,) or (B, F) shaped to multiply x (B, C, [F,] H, W), in x's dtype, float32 at least."""
    frames = a.shape[1:]
    assert len(a) == len(x) and frames in ((), x.shape[2:3]), (a.shape, x.shape)
    shape = (len(a), 1, *frames, *[1] * (x.dim() - 3)) if frames else (len(a), *[1] * (x.dim() - 1))
    return a.reshape(shape).to(torch.promote_types(x.dtype, torch.float32))


def add_noise(schedule, x0, eps, t):
    """x_t = alpha x0 + sigma eps, in x0's dtype."""
    alpha, sigma = alpha_sigma(schedule, t)
    return (expand(alpha, x0) * x0 + expand(sigma, x0) * eps).to(x0.dtype)


KINDS = ("x0", "eps", "v", "flow")


def mix(kind, schedule, t):
    """p, q, det with kind = p x0 + q eps; det = alpha q - sigma p solves (x_t, kind) for (x0, eps)."""
    known("prediction", kind, KINDS)
    alpha, sigma, *prime = curve(schedule, t)
    zero, one = torch.zeros_like(sigma), torch.ones_like(sigma)
    p, q = {"x0": (one, zero), "eps": (zero, one), "v": (-sigma, alpha), "flow": prime}[kind]
    return p, q, alpha * q - sigma * p


def convert(schedule, x_t, pred, t, source, target):
    """A prediction of type `source` as type `target`, of "x0" "eps" "v" "flow", in at least float32.
    With p, q, det and P, Q, Det of `mix`, target = ((P q - Q p) x_t + Det source) / det. |det| is kept above
    1e-6: det is -sigma from x0, alpha from eps, alpha^2 + sigma^2 from v, 1 from flow on edm, rf and trig."""
    if source == target:
        return wide(pred)
    (p, q, det), (P, Q, Det) = (mix(kind, schedule, t) for kind in (source, target))
    det = det.clamp(max=-1e-6) if source == "x0" else det.clamp(min=1e-6)
    return expand((P * q - Q * p) / det, x_t) * x_t + expand(Det / det, x_t) * pred


def prediction(out):
    """The prediction in what a net returned: a tensor, or a dict where more was asked for."""
    return out["out"] if isinstance(out, dict) else out


def predict(net, x_t, t, cond, target="x0", uncond=None, guidance=1.0, uncond_kw={}, **kw):
    """The net's prediction as `target`, guided; kw goes to the net. One pass at guidance 0 or 1, else two, of
    which the unconditional one takes uncond_kw too: a cache of its own, skip for skip-layer guidance.
    Where kw makes the net return a dict so does this, with all but "out" from the first, conditional pass.
    BadInput where guidance needs a negative condition and `uncond` is empty."""
    if guidance != 1 and not uncond:
        raise BadInput(f"guidance {guidance} needs a negative condition (uncond {uncond}); use --guidance 1")
    out = net(x_t, t, cond if guidance else uncond, **kw)
    pred = prediction(out)
    if guidance not in (0, 1):
        pred = wide(pred)
        pred = pred + (guidance - 1) * (pred - prediction(net(x_t, t, uncond, **kw | uncond_kw)))
    pred = convert(net.schedule, x_t, pred, t, net.pred, target)
    return {**out, "out": pred} if isinstance(out, dict) else pred


@functools.lru_cache
def level_range(schedule):
    """The noise levels at both ends of t_range, at most 1e4: floats."""
    ends = torch.tensor(t_range(schedule), dtype=torch.float64, device="cpu")
    return noise_level(schedule, ends).clamp(max=1e4).tolist()


def predict_on(schedule, net, x_t, t, cond, target, uncond=None, guidance=1.0, std=1.0, top=0.0, **kw):
    """`predict` for x_t = alpha x0 / std + sigma eps of any schedule, by a net that may have another: it sees
    its own noised sample of the same noise level (and r, if in kw, likewise), kept within the range of its
    times, or below `top`, so that nothing is inf * 0. Differentiable in x_t, t and r, in forward mode too."""
    if (net.schedule, std) == (schedule, 1):
        return predict(net, x_t, t, cond, target, uncond, guidance, **kw)
    low, high = level_range(net.schedule)

    def own(t):
        alpha, sigma = alpha_sigma(schedule, t)
        return t_from_ratio(net.schedule, (std * sigma / alpha).clamp(low, top or high))
    t_net, (alpha, sigma) = own(t), alpha_sigma(schedule, t)
    a, b = alpha_sigma(net.schedule, t_net)
    c = ((a ** 2 + b ** 2) / ((alpha / std) ** 2 + sigma ** 2)).sqrt()
    if "r" in kw:
        kw["r"] = own(kw["r"])
    out = predict(net, expand(c, x_t) * x_t, t_net, cond, "x0", uncond, guidance, **kw)
    pred = convert(schedule, x_t, prediction(out) / std, t, "x0", target)
    return {**out, "out": pred} if isinstance(out, dict) else pred


def value_and_tangent(f, args, tangents, how="apart", up=0.01, down=0.01, value=None):
    """f(*args), a tuple of tensors, and the derivative of its first along the tangents, without a graph, with
    the same dropout masks. value(): in the place of f(*args), but for "fused".
    apart       a forward-mode pass without graph, in float32 under autocast too, then f
    fused       one forward-mode pass for both; its graph holds the tangent's
    difference  (f(args + up tangents) - f(args - down tangents)) / (up + down), steps (B,) or numbers
    Relative errors, DiTs of random weights on CPUs: apart 3e-7 (3e-5 where they embed 1000 t, 0.002 to 0.025
    on weights in bf16), fused in bf16 0.001 to 0.02, difference 3e-5 to 3e-4 (1000 t, or bf16: useless)."""
    if how == "fused":
        out, tangent = torch.func.jvp(f, args, tangents)
        return out, tangent[0].detach()
    first, device = lambda *a: f(*a)[0], args[0].device
    with torch.no_grad(), torch.autocast(device.type, enabled=False), repeated(device):
        if how == "apart":
            tangent = torch.func.jvp(first, args, tangents)[1]      # bare dual numbers: wrong under --compile
        else:
            up, down = (torch.as_tensor(h, device=device).expand(len(args[0])) for h in (up, down))
            moved = lambda h: first(*(a + expand(h, a).to(a.dtype) * d for a, d in zip(args, tangents)))
            with repeated(device):
                ahead = moved(up)
            tangent = (ahead - moved(-down)) / expand(up + down, ahead)
    return value() if value else f(*args), tangent


def check_jvp(how, parallel, amp):
    """BadInput where the kind of value_and_tangent is unknown, cannot run or would be rounding errors."""
    known("--jvp", how, ("apart", "fused", "difference"))
    if parallel == "fsdp" and how == "difference" and amp:
        raise BadInput(f"--jvp difference is lost in rounding where weights are gathered in {amp}; use --jvp "
                       "apart, --parallel ddp or --amp \"\"")
    if parallel == "fsdp" and how != "difference" and torch.__version__ < "2.13":
        raise BadInput(f"--jvp {how} under --parallel fsdp needs torch 2.13, not {torch.__version__}; use "
                       "--jvp difference or --parallel ddp")


# ---------------------------------------------------------------- times: p(t), step lists
def karras(n, t_min, t_max, rho=7.0):
    """EDM's n noise levels, descending from t_max to t_min: float64 (n,). Karras 2022, eq. 5."""
    u = torch.linspace(0, 1, n, dtype=torch.float64, device="cpu")
    lo, hi = t_min ** (1 / rho), t_max ** (1 / rho)
    return ((hi + u * (lo - hi)) ** rho).clamp(t_min, t_max)


@functools.lru_cache(maxsize=16)
def student_t(df, lo, hi, device, dtype):
    """cdf, z of Student's t cut to [lo, hi], nodes dense at 0: df 0.01 is a spike on a log-uniform tail."""
    y = np.linspace(math.asinh(lo / 1e-4), math.asinh(hi / 1e-4), 200_000)
    z = 1e-4 * np.sinh(y)
    mass = (1 + z ** 2 / df) ** (-(df + 1) / 2) * np.cosh(y)
    cdf = np.concatenate([[0.0], np.cumsum(mass[1:] + mass[:-1])])
    return torch.from_numpy(cdf / cdf[-1]).to(device, dtype), torch.from_numpy(z).to(device, dtype)


@functools.lru_cache(maxsize=16)
def polynomial(lo, hi, device, dtype):
    """Points 2 .. 998 of the 1000-point grid that lie in [lo, hi], ascending."""
    grid = karras(1000, *t_range("edm")).flip(0)[2:999]
    return grid[(grid >= lo) & (grid <= hi)].to(device, dtype)


def t_quantile(u, dist, schedule, *, mean=0.0, std=1.0, shift=5.0, df=0.01, t_min=0.0, t_max=0.0):
    """The u-quantiles, u in [0, 1), of a distribution of t on [t_min, t_max] (0 = the schedule's own bound).
    uniform      in t                                                     any schedule
    lognormal    ln t ~ N(mean, std), truncated                           edm (EDM: -1.2, 1.2)
    logt         (ln t - mean) / std ~ Student-t(df), truncated           edm (TCM: 0, 0.2, df 0.01)
    polynomial   points 2 .. 998 of 1000 of `karras`, equally likely      edm (DMD2)
    logitnormal  t_min + (t_max - t_min) sigmoid(N(mean, std))            all but edm
    shifted      uniform, then t <- shift t / (1 + (shift - 1) t)         rf"""
    (low, high), limit = t_range(schedule), schedules[schedule][2]
    lo, hi = t_min or low, t_max or high
    has = dict(edm=("uniform", "lognormal", "logt", "polynomial"), rf=("uniform", "logitnormal", "shifted"))
    known(f"schedule {schedule}: time distribution", dist, has.get(schedule, ("uniform", "logitnormal")))
    if not 0 <= lo < hi <= limit or std <= 0 or df <= 0 or shift < 1:
        raise BadInput(f"{dist} t on {schedule} needs 0 <= t_min < t_max <= {limit}, std > 0, df > 0 and "
                       f"shift >= 1, not t_min {lo}, t_max {hi}, std {std}, df {df}, shift {shift}")
    a, b = (lo and (math.log(lo) - mean) / std), (math.log(hi) - mean) / std
    t = lo + (hi - lo) * u
    if dist == "shifted":
        t = shift * t / (1 + (shift - 1) * t)
    elif dist == "logitnormal":
        t = lo + (hi - lo) * torch.sigmoid(mean + std * torch.special.ndtri(u))
    elif dist == "polynomial":
        grid = polynomial(lo, hi, u.device, u.dtype)
        if not len(grid):
            raise BadInput(f"no point of the polynomial grid of t lies from {lo} to {hi}; widen t_min, t_max")
        t = grid[(len(grid) * u).long()]
    elif dist == "lognormal":
        below, upto = (0.5 * math.erfc(-z / math.sqrt(2)) for z in (a, b))
        t = torch.exp(mean + std * torch.special.ndtri(below + (upto - below) * u))
    elif dist == "logt":
        t = torch.exp(mean + std * interp(u, *student_t(df, a, b, u.device, u.dtype)))
    return t.clamp(lo, hi)


@functools.lru_cache(maxsize=16)
def t_edges(bins, device, dtype, **params):
    """The bins - 1 times between equally likely intervals of a p(t), params of t_quantile."""
    u = torch.arange(1, bins, dtype=torch.float64, device="cpu") / bins
    return t_quantile(u, **params).to(device, dtype)


def t_bin(t, bins, **params):
    """(B,) int64: which of `bins` equally likely intervals of a p(t), params of t_quantile, t is in."""
    return torch.bucketize(t, t_edges(bins, t.device, t.dtype, **params), right=True)


def sample_t(n, dist, schedule, device, **params):
    """n draws from the device's default generator, params of t_quantile: (n,) float64 (float32 on MPS)."""
    if torch.device(device).type == "mps":
        u = torch.rand(n, device=device).cpu().double()
        return t_quantile(u, dist, schedule, **params).float().to(device)
    return t_quantile(torch.rand(n, dtype=torch.float64, device=device), dist, schedule, **params)


def t_list(schedule, steps, given=(), trained=0.0):
    """The steps + 1 times of a few-step sampler, descending to 0.0; given: explicit ones, with or without 0,
    none above `trained`, a --t_max (0 = the schedule's). Default: equal steps from t_max; on edm FastGen's
    points of the 1000-point grid, but from 80, which one-step students are trained at, not 79.56."""
    (_, t_max), ts = t_range(schedule), [number("--t_list", t) for t in given]
    limit = float(trained) or schedules[schedule][2]
    number("--steps", steps, 1, 1000)
    if ts:
        ts = ts[:-1] if ts[-1] == 0 else ts
        if len(ts) != steps or ts[0] > limit or any(t <= s for t, s in zip(ts, ts[1:] + [0.0])):
            raise BadInput(f"--t_list {given} must hold --steps {steps} times, descending from at most "
                           f"{limit:g} ({'--t_max' if trained else f'schedule {schedule}'}) to above 0; a "
                           f"final 0 may follow, and \"\" takes equal steps")
    elif schedule == "edm":
        index = torch.linspace(998, 2, steps + 1, dtype=torch.float64, device="cpu").long()
        ts = [t_max] + karras(1000, *t_range("edm")).flip(0)[index[1:-1]].tolist()
    else:
        ts = [t_max * (steps - k) / steps for k in range(steps)]
    return ts + [0.0]


# ---------------------------------------------------------------- samplers
def rollout(x0_of, noise, ts, schedule, kind, n):
    """(x_t, t (B,)) of a few-step sampler before its call n (from 0), after n calls of x0_of(x_t, t) -> x0.
    Starts from sigma(ts[0]) noise(0). Before step k x0 is noised to ts[k], by a fresh noise(k) ("sde": exact
    for consistency functions, any ts) or the last step's noise ("ode": DDIM, for denoisers, many steps)."""
    z = noise(0)
    t = t_like(ts[0], z)
    x = add_noise(schedule, torch.zeros_like(z), z, t)
    for k in range(1, n + 1):
        x0 = x0_of(x, t)
        eps = noise(k) if kind == "sde" else convert(schedule, x, x0, t, "x0", "eps")
        t = t_like(ts[k], z)
        x = add_noise(schedule, wide(x0), eps, t)
    return x, t


def few_step(net, noise, ts, cond, kind="sde"):
    """x0 of a student's sampler over ts = t_list(...): one more call after `rollout`."""
    x0_of = functools.partial(predict, net, cond=cond)
    return x0_of(*rollout(x0_of, noise, ts, net.schedule, kind, len(ts) - 2))


def student_call(net, x0, ts, cond, kind, sampler, k):
    """x0 of a few-step student in training. "simulation": of its call k (from 0), after k own ones from noise
    without gradient. "data": from x0 noised to one of ts per sample, where there are several."""
    x0_of = functools.partial(predict, net, cond=cond)
    if kind == "data" and len(ts) > 2:
        which = torch.randint(len(ts) - 1, (len(x0),), device=x0.device)
        x0 = expand((which > 0).float(), x0) * x0       # the first step's input is pure noise, as in sampling
        t = torch.cat([t_like(s, x0[:1]) for s in ts])[which]
        return x0_of(add_noise(net.schedule, x0, torch.randn_like(x0), t), t)
    with torch.no_grad():
        x_t, t = rollout(x0_of, train_noise(x0.shape, x0.device), ts, net.schedule, sampler, k)
    return x0_of(x_t, t)


def check_steps(steps, trained):
    """BadInput where a student of `trained` steps is asked for another number."""
    if steps != trained:
        raise BadInput(f"this student was trained for {trained} steps, not for --steps {steps}; leave "
                       f"--steps out, or train one with --steps {steps}")


def check_pairs(data, method, spec, ts, hint="", **same):
    """BadInput where data are no pairs of a teacher, made with these settings and with states at times ts."""
    meta = getattr(data, "meta", None)
    if meta is None:
        raise BadInput(f"{method} trains on pairs of a teacher; give the --data FOLDER that `torchrun "
                       f"tools/make_pairs.py --net {spec} --out FOLDER` makes")
    for key, ours in same.items():
        if meta.get(key, 0) != ours:
            raise BadInput(f"{data.path} was made with {key} {meta.get(key, 0)}, this run has {ours}; they "
                           f"must be equal{hint}")
    near = [min(meta["path_t"], key=lambda p: abs(t - p)) for t in ts]
    if near[0] != meta["path_t"][0] or any(abs(t - p) > 1e-3 * t for t, p in zip(ts, near)):
        raise BadInput(f"{data.path} has states at t = {meta['path_t']}, noise at the first, but the "
                       f"student's steps are at {ts}; give --t_list of those, or make pairs with "
                       f"--path_t {','.join(f'{t:g}' for t in ts)}")


def no_guidance(guidance, method):
    """BadInput where a method that has no use for it is given a guidance."""
    if guidance != 1:
        raise BadInput(f"--guidance {guidance} is of a teacher's prediction; {method} has none: leave it out")


def heun(net, noise, cond, steps, uncond=None, guidance=1.0, at=(), order=2, **kw):
    """x0 by the teacher's ODE dx/dt = flow from sigma noise(0): Heun, 2 steps - 1 calls per condition (order
    1: Euler, one a step), on Karras 2022's grid (alg. 1) for edm, else in equal steps from t_max. The last
    step is the x0 prediction: on edm and rf Euler's; tables would end at sigma(0) > 0. at: descending times;
    it starts at the first, takes all into its grid and returns x0, [x at each]. kw goes to `predict`."""
    schedule, z = net.schedule, noise(0)
    start = at[0] if at else t_range(schedule)[1]
    ts = (karras(steps, t_range(schedule)[0], start).tolist() if schedule == "edm" else
          [start * (steps - k) / steps for k in range(steps)])
    ts = sorted({*at, *(t for t in ts if all(abs(t - a) > 1e-3 * a for a in at))}, reverse=True)
    x = add_noise(schedule, torch.zeros_like(z), z, t_like(ts[0], z))
    states = [x]
    for t, t_next in zip(ts, ts[1:]):
        d = predict(net, x, t_like(t, x), cond, "flow", uncond, guidance, **kw)
        if order == 2:
            x_euler = x + (t_next - t) * d
            d = (d + predict(net, x_euler, t_like(t_next, x), cond, "flow", uncond, guidance, **kw)) / 2
        x = x + (t_next - t) * d
        states += [x] if t_next in at else []
    x0 = predict(net, x, t_like(ts[-1], x), cond, "x0", uncond, guidance, **kw)
    return (x0, states) if at else x0


def teacher_sample(net, *args):
    """x0 as by the public pipeline: `teacher_sample` in the file of the net's family, or `heun` where it has
    none. args: noise, cond, steps, uncond, guidance."""
    files = [sys.modules.get(kind.__module__) for kind in type(net).__mro__]    # FSDP2 puts a class in front
    return next((f.teacher_sample for f in files if hasattr(f, "teacher_sample")), heun)(net, *args)


# ---------------------------------------------------------------- video: chunk after chunk
def chunks(frames, chunk):
    """Sizes of the chunks of a clip, in order: all `chunk` frames long but the first, which also takes the
    remainder: chunks(8, 3) = [5, 3], chunks(2, 3) = [2]; chunk 0 is one chunk of all frames."""
    n = max(frames // chunk, 1) if chunk else 1
    return [frames - chunk * (n - 1)] + [chunk] * (n - 1)


@functools.lru_cache                    # else a copy to the device, which waits for it, in every step
def chunk_of(frames, chunk, device):
    """The number of the chunk that each frame is in: int64 (F,)."""
    return torch.tensor([i for i, n in enumerate(chunks(frames, chunk)) for _ in range(n)], device=device)


def per_chunk(draw, x, chunk):
    """draw(n) -> (n,): a value for every sample and chunk of x (B, C, F, H, W), given per frame: (B, F)."""
    values = draw(len(x) * len(chunks(x.shape[2], chunk))).reshape(len(x), -1)
    return values[:, chunk_of(x.shape[2], chunk, x.device)]


def split_at_chunk(x, chunk):
    """A random chunk of each clip x (B, C, F, H, W): bool (B, F), the frames before it and those of it."""
    which = chunk_of(x.shape[2], chunk, x.device)
    own = torch.randint(len(chunks(x.shape[2], chunk)), (len(x), 1), device=x.device)
    return which < own, which == own


def over_frames(mask):
    """The weights with which a mean over frames is that over those of a mask (B, F) alone; 0 for none."""
    return mask.float() / mask.float().mean(1, keepdim=True).clamp(min=1e-6)


def check_window(net, window, sink):
    """BadInput where chunks of the sampler see less than they do in training under the net's mask."""
    frames, own = net.x_shape[1], (getattr(net, "window", 0), getattr(net, "sink", 0))
    if 0 < window < frames and own != (window, sink):
        raise BadInput(f"--window {window} --sink {sink} are less than the {frames} frames of training; "
                       f"leave them out, or give the net the same: --net ...,window={window},sink={sink}")


def forget(cache, sink, last):
    """A net's KV cache with its first `sink` and its `last` frames only."""
    if (n := len(cache["pos"])) <= sink + last:
        return cache
    ends = lambda v, d: torch.cat([v.narrow(d, 0, sink), v.narrow(d, n - last, last)], d)       # noqa: E731
    return dict(cache, pos=ends(cache["pos"], 0), kv=[ends(kv, 1) for kv in cache["kv"]])


def causal_rollout(net, noise, ts, cond, kind="sde", call=None, grad_chunks=0, first=None, window=0, sink=0,
                   context_noise=0.0, uncond=None, guidance=1.0):
    """x0 (B, C, F, H, W) of a causal net, F that of noise(k): `few_step`, one chunk of net.chunk frames after
    the other, from its slice of the noise, seeing the finished ones through the net's KV cache.
    call: that of the sampler (from 0) whose x0 counts, in all chunks alike; None = the last. Gradient: of it
    alone, its input and cache being constants, in the last grad_chunks chunks (0 = all). first: clean frames
    (B, C, f, H, W) that the clip begins with. window, sink: a chunk sees the first `sink` frames and, itself
    included, the last `window` (0 = all); positions stay absolute. context_noise: the t to which a finished
    chunk is noised, and at which its keys and values are written."""
    first = None if getattr(net, "first", "") else first        # such a net takes it from cond itself
    done, start, sizes = [], 0, [first.shape[2]] if first is not None else []
    sizes += chunks(noise(0).shape[2] - sum(sizes), net.chunk)
    conds = [cond if guidance else uncond] + ([uncond] if guidance not in (0, 1) else [])
    caches = [None] * len(conds)
    for left, size in zip(range(len(sizes), 0, -1), sizes):
        span = slice(start, start + size)
        if window and start:
            caches = [forget(cache, sink, max(window - size, 0)) for cache in caches]
        past = dict(start=start, cache=caches[0], uncond_kw=dict(cache=caches[-1]))
        x0_of = lambda x, t: predict(net, x, t, cond, "x0", uncond, guidance, **past)           # noqa: E731
        if first is not None and not start:
            x = first
        else:
            with torch.no_grad():
                x_t, t = rollout(x0_of, lambda k: noise(k)[:, :, span], ts, net.schedule, kind,
                                 len(ts) - 2 if call is None else call)
            with torch.set_grad_enabled(torch.is_grad_enabled() and (left <= grad_chunks or not grad_chunks)):
                x = x0_of(x_t, t)
        done.append(x)
        if left > 1:                                    # the cache of the last chunk is of no use
            with torch.no_grad():
                t = t_like(context_noise, x)
                y = add_noise(net.schedule, x, noise(len(ts) - 1)[:, :, span], t) if context_noise else x
                caches = [net(y, t, c, start=start, cache=old, write=True)["cache"]
                          for c, old in zip(conds, caches)]
        start += size
    return torch.cat(done, 2)


# ---------------------------------------------------------------- losses
def loss_weight(weight, schedule, t, pred, sigma_data=0.5):
    """The factor, in t's shape, that turns squared errors of `pred` into the loss called `weight`.
    "unit": 1. "x0" "eps" "v" "flow": as if the error were taken there, det / sigma times the error of x0.
    On the x0 error, with snr = alpha^2 / sigma^2: "snr" snr; "edm" snr + 1 / sigma_data^2 (1 on EDM's F);
    "min_snr:5" min(snr, 5); "soft_min_snr" 1 / (1 / snr + sigma_data^2) (k-diffusion)."""
    alpha, sigma = alpha_sigma(schedule, t)
    if weight in ("unit", pred):
        return torch.ones_like(sigma)
    snr, data, (name, _, gamma) = (alpha / sigma) ** 2, sigma_data ** 2, weight.partition(":")
    on_x0 = {"snr": snr, "edm": snr + 1 / data, "soft_min_snr": 1 / (1 / snr + data)}
    if name == "min_snr":
        on_x0[weight] = snr.clamp(max=number("loss weight min_snr:GAMMA", gamma, 1e-6))
    elif weight in KINDS:
        on_x0[weight] = (mix(weight, schedule, t)[2] / sigma) ** 2
    known("loss weight", weight, ["unit", *KINDS, *on_x0, "min_snr:5"])
    return on_x0[weight] / (mix(pred, schedule, t)[2] / sigma) ** 2


def denoising_loss(net, x0, t, eps, cond, pred="", weight="", frame_weight=None, **kw):
    """Weighted squared error of the net at x_t, mean over all dims but the batch: (B,) in at least float32.
    pred: the space of the error, "" = the net's own. weight as in loss_weight; "" = "edm" for x0 errors on
    edm, else "unit". frame_weight (B, F): a factor besides; where it is 0, t may be too. kw goes to the net;
    with logvar=True the loss is w err^2 / exp(u) + u, u the net's log-variance (Karras 2024); with taps=...
    returns (loss, features)."""
    pred = pred or net.pred
    weight = weight or ("edm" if net.schedule == "edm" and pred == "x0" else "unit")
    out = predict(net, add_noise(net.schedule, x0, eps, t), t, cond, pred, **kw)
    p, q, _ = mix(pred, net.schedule, t)
    error = prediction(out) - (expand(p, x0) * x0 + expand(q, x0) * eps)
    w = loss_weight(weight, net.schedule, t, pred, getattr(net, "sigma_data", 0.5))
    if frame_weight is not None:
        w = torch.where(frame_weight > 0, w * frame_weight, 0.0)        # w itself may be inf or nan at t = 0
    loss = (expand(w, error) * error ** 2).flatten(1).mean(1)  # (B,)
    if kw.get("logvar"):
        loss = loss / wide(out["logvar"]).exp() + out["logvar"]
    return (loss, out["taps"]) if kw.get("taps") else loss


def check_noise(net, pred="", weight="", **time):
    """BadInput for a p(t), a space or a weight that step() would refuse; `time` as in t_quantile."""
    t = t_quantile(torch.tensor([0.5], dtype=torch.float64, device="cpu"), schedule=net.schedule, **time)
    mix(pred or net.pred, net.schedule, t)
    loss_weight(weight or "unit", net.schedule, t, pred or net.pred)


def dmd_loss(x, x0_teacher, x0_fake, h=1.0):
    """Distribution matching: 0.5 mean((x - sg[x - w (fake - teacher)])^2), w = h / mean|x - teacher| per
    sample. Its gradient is w (fake - teacher) / numel exactly; at least float32. Yin 2024, eq. 7 and 8.
    h: a factor, or one per sample (B,)."""
    x, x0_teacher, x0_fake = wide(x), wide(x0_teacher).detach(), wide(x0_fake).detach()
    w = h / ((x.detach() - x0_teacher).abs().flatten(1).mean(1) + 1e-6)  # (B,)
    grad = expand(w, x) * (x0_fake - x0_teacher)
    return 0.5 * (x - x.detach() + grad).square().mean()  # not x - (x - grad), which rounds grad away


def gan_loss_g(logits, kind="softplus"):
    """The generator's loss on the logits (high = real) of its samples, non-saturating or hinge."""
    return F.softplus(-wide(logits)).mean() if kind == "softplus" else -wide(logits).mean()


def gan_loss_d(real, fake, kind="softplus"):
    """The discriminator's loss: mean over real + mean over fake logits; 2 ln 2 if it sees no difference."""
    cost = F.softplus if kind == "softplus" else lambda x: F.relu(1 + x)
    return cost(-wide(real)).mean() + cost(wide(fake)).mean()


def r1_approx(logits, logits_perturbed):
    """Mean squared change of the logits as the NOISED real x_t moves by std * noise: std^2 |grad D|^2 (APT).
    FastGen moves the clean image, which penalises the noise itself."""
    return (wide(logits) - wide(logits_perturbed)).square().mean()


# ---------------------------------------------------------------- consistency
def ect_ratio(images, q, kimg_per_stage, cap):
    """ECT's curriculum: r / t at high noise, 1 - q^-(stage + 1) at stage images // (1000 kimg), up to cap."""
    return min(1 - q ** -(images // (1000 * kimg_per_stage) + 1), cap)


def ect_r(schedule, t, ratio):
    """ECT's r = t (1 - (1 - ratio) (1 + 8 sigmoid(-t))) or 0 where that is negative, in noise levels."""
    level = noise_level(schedule, t)
    return t_from_ratio(schedule, (level * (1 - (1 - ratio) * (1 + 8 * torch.sigmoid(-level)))).clamp(min=0))


consistency_weights = ("gap", "sqrt_gap", "c_out", "c_out_sq", "sigma_sq", "unit")


def consistency_loss(f_t, f_r, schedule, t, r, weight="gap", huber_c=0.0, squared=False, sigma_data=0.5):
    """w rho(|f_t - sg[f_r]|), norm over all dims but the batch: (B,) in at least float32. rho(d) is d^2 where
    squared, else sqrt(d^2 + c^2) - c, which is d at c = 0. w in noise levels: gap 1 / (t - r), sqrt_gap its
    root, c_out 1 / c_out(t) with EDM's c_out = t s / sqrt(t^2 + s^2), sigma_sq 1 / t^2, ..."""
    d = torch.linalg.vector_norm((wide(f_t) - wide(f_r).detach()).flatten(1), dim=1)    # gradient 0 at 0
    rho = d ** 2 if squared else (d ** 2 + huber_c ** 2).sqrt() - huber_c if huber_c else d
    t, r = noise_level(schedule, t), noise_level(schedule, r)
    c_out, gap = t * sigma_data * (t ** 2 + sigma_data ** 2).rsqrt(), (t - r).clamp(min=1e-6)
    over = dict(gap=gap, sqrt_gap=gap.sqrt(), c_out=c_out, c_out_sq=c_out ** 2, sigma_sq=t ** 2,
                unit=torch.ones_like(t))[weight]
    return rho / over.to(rho.dtype)


# ---------------------------------------------------------------- rates as functions of counts
def lr_factor(schedule, count, warmup, total):
    """Factor on the learning rate of the update that follows `count` applied ones, of `total`.
    Linear warm-up (count + 1) / warmup: the first update is not wasted on 0, the warmup-th has the full rate.
    Times "constant", "cosine[:FLOOR]" (reached after the last update) or "inv_sqrt:N" (sqrt(N / count))."""
    name, _, value = schedule.partition(":")
    known("lr_schedule", schedule if name == "constant" else name, ("constant", "cosine", "inv_sqrt"))
    decay = 1.0
    if name == "cosine":
        floor = number("lr_schedule cosine:FLOOR", value or "0", 0, 1)
        done = (count - warmup) / (total - warmup) if total > warmup else float(count >= total)
        decay = floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) / 2
    elif name == "inv_sqrt":
        decay = max(count / number("lr_schedule inv_sqrt:N", value, 1), 1.0) ** -0.5
    return decay * min(1.0, (count + 1) / max(warmup, 1))


@functools.lru_cache
def parse_ema(entry):
    """"ema" | "ema:0.999" | "ema:power=0.05" | "ema:half_kimg=500" -> (name, "rate" or the word, value)."""
    name, _, rate = entry.partition(":")
    kind, _, value = rate.rpartition("=")
    kind, value = kind or "rate", number(f"ema entry {entry}", value or "0.9999")
    fits = {"rate": 0 <= value < 1, "power": 0 < value < 0.2886, "half_kimg": value > 0}.get(kind)
    if not (fits and name.startswith("ema") and name.isidentifier()):
        raise BadInput(f"ema entry {entry!r} is not NAME[:RATE], NAME:power=WIDTH or NAME:half_kimg=N with "
                       "NAME beginning with ema, 0 <= RATE < 1, 0 < WIDTH < 0.2886, N > 0")
    return name, kind, value


@functools.lru_cache
def power_gamma(width):
    """gamma of an average by `power` whose profile has this relative width (Karras 2024, alg. 2)."""
    return float(np.roots([1, 7, 16 - width ** -2, 12 - width ** -2]).real.max())


def ema_beta(entry, n, batch_size):
    """beta of ema <- beta ema + (1 - beta) student after the n-th (1-based) student update.
    power: (1 - 1/n)^(gamma + 1), gamma by the profile's relative width (Karras 2024, alg. 2; 0.05: 16.97).
    half_kimg: 0.5^(batch_size / h), half-life h ramped up to 5 % of the images seen (EDM)."""
    _, kind, value = parse_ema(entry)
    if kind == "power":
        return (1 - 1 / n) ** (power_gamma(value) + 1)
    if kind == "half_kimg":
        return 0.5 ** (batch_size / min(1000 * value, 0.05 * n * batch_size))
    return value


# ---------------------------------------------------------------- ranks and randomness
def all_mean(x):
    """Mean of tensor x over the ranks, detached; x itself in a single process. Every rank must call it."""
    if not dist.is_initialized():
        return x
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def everyone(value, group):
    """[value of every rank] (any small object) of a gloo group, or [value] where that is None."""
    values = [value] * (dist.get_world_size(group) if group else 1)
    if group:
        dist.all_gather_object(values, value, group=group)
    return values


def from_rank0(value, group):
    """Rank 0's value (any small object) on every rank of a gloo group, or `value` where that is None."""
    box = [value]
    if group is not None:                               # not `everyone`, whose memory grows with the ranks
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def on_rank0(f, group):
    """f() on rank 0, None on the others; a BadInput there is raised on every rank."""
    value = error = None
    try:
        value = f() if group is None or dist.get_rank() == 0 else None
    except BadInput as e:
        error = e
    if error := from_rank0(error, group):
        raise error
    return value


def hash_seed(*keys):
    """A 63-bit seed from ints and strings, unrelated for different keys (seed + it + rank would collide)."""
    words = [len(keys)]  # SeedSequence drops trailing zeros: length and fixed width tell (5,) from (5, 0)
    for key in keys:
        k = zlib.crc32(key.encode()) if isinstance(key, str) else int(key) % 2 ** 64
        words += [k % 2 ** 32, k >> 32, isinstance(key, str)]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def seed_default(seed):
    """Seeds the default generators: torch's on the CPU and the current device, numpy's, random's.
    Called before every micro-step: 30 us, torch.manual_seed takes a millisecond."""
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def repeated(device):
    """Draws made inside come again after it: two passes of a net share their dropout masks."""
    sources = [torch] + ([getattr(torch, device.type)] if device.type != "cpu" else [])
    states = [s.get_rng_state() for s in sources]
    yield
    for source, state in zip(sources, states):
        source.set_rng_state(state)


def shared_generator(seed, it):
    """CPU generator for decisions equal on all ranks (an exit step): a function of (seed, it) alone."""
    return torch.Generator().manual_seed(hash_seed("shared", seed, it))


def noise_fn(seed, ids, shape, device):
    """noise(k) -> (B, *shape) float32, each sample a function of (seed, id, k) alone, drawn on the CPU."""
    def noise(k):  # numpy's generator takes all 63 bits of a seed; torch's 32, too few for 50,000 samples
        draws = [np.random.default_rng(hash_seed(seed, int(i), k)).standard_normal(shape, np.float32)
                 for i in ids]
        return torch.from_numpy(np.stack(draws)).to(device)
    return functools.cache(noise)


def train_noise(shape, device):
    """noise(k) -> shape = (B, C, [F,] H, W) float32 from the device's default generator, one tensor per k."""
    return functools.cache(lambda k: torch.randn(shape, device=device))


# ---------------------------------------------------------------- conditions, nets, optimizers
def drop_condition(cond, uncond, p, keep=()):
    """Per sample, with probability p, uncond's entries: one mask for all keys but those in `keep`."""
    if p == 0 or not cond:
        return cond
    first = next(iter(cond.values()))
    mask = torch.rand(len(first), device=first.device) < p  # float32: a bfloat16 p is a multiple of 1/256
    return cond | {k: torch.where(mask.reshape(-1, *[1] * (v.dim() - 1)), uncond[k], v)
                   for k, v in cond.items() if k not in keep}


def make_net(spec, **options):
    """"edm:cifar10,label_dim=20" -> make("cifar10", label_dim=20) of nets/edm.py; the spec's options win."""
    head, *rest = re.split(r",(?![^(]*\))", spec)      # not inside (16, 64, 64)
    family, _, size = head.partition(":")
    files = (Path(__file__).resolve().parent / "nets").glob("*.py")
    known(f"net {spec}: family", family, sorted(f.stem for f in files if "\nmake = " in f.read_text()))
    module = importlib.import_module(f"nets.{family}")
    known(f"net {spec}: size", size, module.sizes)
    for key, given, value in (item.partition("=") for item in rest):
        if not given:
            raise BadInput(f"net {spec}: {key!r} is not of the form option=value")
        options[key] = value
        with contextlib.suppress(ValueError, SyntaxError):
            options[key] = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    if "dropout" in options:  # no constructor looks at it, the first forward pass would
        options["dropout"] = number(f"--net {spec}: dropout", options["dropout"], 0, 1)
    try:
        return module.make(size, **options)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError) as error:
        what = str(error).partition("\n")[0]            # "... got an unexpected keyword argument 'dropuot'"
        raise BadInput(f"--net {spec} cannot be built with {options} ({type(error).__name__}: {what}); see "
                       f"nets/{family}.py") from error


# The first call of these imports torch._dynamo (1.3 s) to keep torch.compile out. Nothing here compiles an
# optimizer, so they are marked as kept out already.
for _method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.state_dict,
                torch.optim.Optimizer.load_state_dict):
    if hasattr(_method, "__wrapped__"):
        setattr(_method.__wrapped__, "__dynamo_disable", _method.__wrapped__)


def optimizer(groups, optimizer="adamw", lr=1e-4, betas=(0.9, 0.999), adam_eps=1e-8, weight_decay=0.0, **_):
    """torch's "adamw", "adam" or "radam" over parameters or groups of them. Takes a whole config as **cfg."""
    kinds = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, radam=torch.optim.RAdam)
    known("optimizer", optimizer, kinds)
    how = dict(foreach=True) if optimizer == "radam" else dict(fused=True)      # 7x faster on small tensors
    try:
        first, second = map(float, betas)               # torch wants both of one kind: 0 is an int
        return kinds[optimizer](groups, lr, (first, second), adam_eps, weight_decay, **how)
    except ValueError as error:                      # "Invalid beta parameter at index 1: nan"
        raise BadInput(f"--optimizer {optimizer} cannot have these --betas, rates, decays: {error}") from None
