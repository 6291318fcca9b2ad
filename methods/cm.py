"""CM: consistency training and distillation, Song 2023 (arXiv 2303.01469), with the curriculum and
weights of ECT, Geng 2024 (arXiv 2406.14548), or iCT, Song and Dhariwal 2024 (arXiv 2310.14189). Any steps.

    f(x_t, t) the student's x0 prediction, r < t a neighbouring time
    x_t = alpha_t x0 + sigma_t eps
    x_r = alpha_r x0 + sigma_r eps  (training), or one step of the teacher's ODE from x_t  (distillation)
    loss = mean( w(t, r) rho(|f(x_t, t) - sg[f(x_r, r)]|) ),  f(x_r, 0) = x_r  (in training x0 itself)

The target has the student's current weights and dropout masks (2023: averaged weights; LPIPS as distance).
r by ECT's map, whose gap shrinks by q every kimg_per_stage, or on a grid whose number of levels doubles, t
drawn from p(t) and rounded up: iCT's discretised lognormal. The grid's lowest level is 0, not 0.002, as EDM's
preconditioning has f(x_0, 0) = x_0. Times of other schedules are mapped and weighted by sigma / alpha.

    python train.py methods/cm.py --max_iter 600                      a minute, digits
    python train.py methods/cm.py                                     the README's result, distillation
    torchrun --nproc_per_node 8 train.py methods/cm.py --preset cifar10 --data cifar10-32x32.zip
"""
import math

import torch

import common

config = dict(
    recipes="cm",
    teacher="assets/digits.pth",     # the student's start, with distill also the teacher; "" = from scratch
    distill=True,                    # x_r by the teacher; false: from data (ECT, iCT)
    solver="heun",                   # of the teacher's step: euler, heun
    max_iter=6000, batch_size=64,
    lr=1e-3, lr_schedule="cosine:0.01", warmup=100,     # papers: constant
    optimizer="radam", betas=(0.9, 0.99), weight_decay=0.0,         # adamw, adam, radam; moments; 0 = off
    dropout=0.0,                     # of the student; ECT: 0.2 for CIFAR-10; 0 = off
    t_dist="lognormal",              # p(t); common.t_quantile lists them
    t_mean=-0.4, t_std=1.6,          # of ln t (lognormal, logt; ECT: -1.1, 2.0) or of the logit (logitnormal)
    t_shift=5.0,                     # of "shifted"
    t_min=0.0, t_max=0.0,            # bounds of t; 0 = the schedule's own
    mapping="ect",                   # r of t: ect, or grid (edm nets only)
    q=2.0,                           # ect: 1 - r / t is q^-(stage + 1) at high noise
    kimg_per_stage=24,               # ect: thousands of images per stage
    ratio_cap=0.95,                  # ect: r / t at high noise, at most; from data: 0.99 or more
    grid_start=10, grid_end=1280,    # grid: intervals at the start, doubled in equal times, up to the end's
    squared=False,                   # rho(d) = d^2, else sqrt(d^2 + c^2) - c
    huber_c=0.004,                   # c; iCT and here: 0.00054 sqrt(dimensions); 0 = the distance itself
    loss_weight="gap",               # 1 / (t - r); common.consistency_loss lists others
    t_list=(80.0, 0.8),              # noise levels of the sampler's steps; for more, or "": common.t_list's
    ema=("ema:power=0.1",),
)

published = dict(distill=False, lr=1e-4, lr_schedule="constant", warmup=0, betas=(0.9, 0.999), clip=0.0,
                 tf32=False, t_mean=-1.1, t_std=2.0, ratio_cap=0.999, save_every=5000, val_every=5000,
                 sample_every=5000)
cifar10 = published | dict(
    net="edm:cifar10", data="cifar10-32x32.zip", classes=0, teacher="edm-cifar10-32x32-uncond-vp.pth",
    dropout=0.2, batch_size=128, max_iter=200000, kimg_per_stage=3200, huber_c=0.0, t_list=(80.0, 0.821),
    ema=("ema:0.9999",))
imagenet64 = published | dict(net="edm:imagenet64", data="imagenet-64x64.zip", t_list=(80.0, 1.526),
                              teacher="edm-imagenet-64x64-cond-adm.pth")
presets = dict(
    cifar10=cifar10,                 # ECT, 200 k iterations
    cifar10_fast=cifar10 | dict(     # ECT in an hour of an A100
        q=256.0, kimg_per_stage=512000, max_iter=8000, ema=("ema:0.9993",)),
    cifar10_ict=cifar10 | dict(      # iCT; the paper's net is NCSN++
        teacher="", mapping="grid", huber_c=0.03, dropout=0.3, batch_size=1024, max_iter=400000,
        ema=("ema:0.99993",)),
    # ECT's settings, with the ADM net of EDM where the paper has EDM2's
    imagenet64=imagenet64 | dict(
        optimizer="adam", lr=1e-3, betas=(0.9, 0.99), lr_schedule="inv_sqrt:2000", dropout=0.2,
        batch_size=128, max_iter=100000, t_mean=-0.8, t_std=1.6, q=4.0, kimg_per_stage=3200,
        ratio_cap=0.9961, huber_c=0.06, loss_weight="c_out_sq", ema=("ema:power=0.1",)),
    # distillation of 2023 on 40 levels, drawn alike, with the squared l2 distance
    imagenet64_cd=imagenet64 | dict(
        distill=True, mapping="grid", grid_start=39, grid_end=39, t_dist="polynomial", lr=8e-6,
        batch_size=2048, max_iter=600000, amp="fp16", squared=True, huber_c=0.0, loss_weight="unit",
        ema=("ema:0.999943",)),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"])
    nets = dict(student=student.train())
    if cfg["distill"]:
        nets["teacher"] = common.make_net(cfg["net"], label_dim=cfg["classes"]).eval().requires_grad_(False)
    # values that only step() reads are refused here, before any work
    common.check_noise(student, **times(cfg))
    common.check(cfg, q=(1.001, 1e9), kimg_per_stage=(1, 1e9), ratio_cap=(0, 0.99999), huber_c=(0, 100),
                 grid_start=(1, 1e6), grid_end=(cfg["grid_start"], 1e6), solver=("euler", "heun"),
                 mapping=("ect", "grid") if student.schedule == "edm" else ("ect",),
                 loss_weight=common.consistency_weights)
    if cfg["distill"] and not cfg["teacher"]:
        raise common.BadInput("--distill true needs a teacher; give --teacher, or --distill false")
    if cfg["guidance"] != 1 and not cfg["distill"]:
        raise common.BadInput(f"--guidance {cfg['guidance']} is the teacher's; it needs --distill true")
    for steps in (cfg["steps"], len(cfg["t_list"]) or 1):
        levels(student, cfg, steps)
    return nets


def init(cfg):
    return {net: cfg["teacher"] for net in ("student", "teacher")[:1 + cfg["distill"]] if cfg["teacher"]}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0, cond = nets["student"], batch["x0"], batch["cond"]                         # (B, C, H, W)
    # draw t and eps; r by the curriculum
    t = common.sample_t(len(x0), schedule=student.schedule, device=x0.device, **times(cfg))     # (B,)
    eps = torch.randn_like(x0)
    t, r = neighbours(t, it, student.schedule, cfg)
    # two points of one path: of the data's, or of the teacher's ODE
    x_t = common.add_noise(student.schedule, x0, eps, t)
    x_r = (ode_step(nets["teacher"], x_t, t, r, batch, cfg) if cfg["distill"] else
           common.add_noise(student.schedule, x0, eps, r))
    # predict: the pass with gradient first, as autocast keeps what it has cast; the masks come again
    with common.repeated(x0.device):
        f_t = common.predict(student, x_t, t, cond, "x0")
    with torch.no_grad():
        f_r = common.predict(student, x_r, r, cond, "x0")
    # the boundary: at r = 0 the target is x_r itself
    f_r = torch.where(common.expand(r, x_r) > 0, f_r, x_r)
    # compare
    cm = common.consistency_loss(f_t, f_r, student.schedule, t, r, cfg["loss_weight"], cfg["huber_c"],
                                 cfg["squared"], getattr(student, "sigma_data", 0.5)).mean()
    return cm, dict(cm=cm)


def neighbours(t, it, schedule, cfg):
    """t, as it is or on the grid, and r < t, both (B,)."""
    if cfg["mapping"] == "ect":
        ratio = common.ect_ratio(it * cfg["batch_size"], cfg["q"], cfg["kimg_per_stage"], cfg["ratio_cap"])
        return t, common.ect_r(schedule, t, ratio)
    grid = common.karras(intervals(it, cfg) + 1, *common.t_range(schedule)).flip(0)         # ascending
    grid[0] = 0
    grid = grid.to(t, non_blocking=True)
    k = torch.searchsorted(grid, t).clamp(1, len(grid) - 1)
    return grid[k], grid[k - 1]


def intervals(it, cfg):
    """min(start 2^(it // part), end), part = max_iter / (log2(end / start) + 1): iCT's N(k) - 1."""
    start, end = cfg["grid_start"], cfg["grid_end"]
    return min(start * 2 ** (it // max(int(cfg["max_iter"] / (math.log2(end / start) + 1)), 1)), end)


@torch.no_grad()
def ode_step(teacher, x_t, t, r, batch, cfg):
    """x_r from x_t by one step of the guided teacher's ODE, d(x / alpha) = eps d(sigma / alpha): DDIM's, or
    Heun's, but for steps to r = 0."""
    def eps(x, s):
        return common.predict(teacher, x, s, batch["cond"], "eps", batch["uncond"], cfg["guidance"])
    (alpha_t, sigma_t), (alpha_r, sigma_r) = (common.alpha_sigma(teacher.schedule, s) for s in (t, r))
    gap = common.expand(sigma_r / alpha_r - sigma_t / alpha_t, x_t)
    alpha_t, alpha_r = common.expand(alpha_t, x_t), common.expand(alpha_r, x_t)
    eps_t = eps(x_t, t)
    x_r = alpha_r * (x_t / alpha_t + gap * eps_t)
    if cfg["solver"] == "heun":
        heun = alpha_r * (x_t / alpha_t + gap * (eps_t + eps(x_r, r)) / 2)
        x_r = torch.where(common.expand(r, x_t) > 0, heun, x_r)
    return x_r


def levels(net, cfg, steps):
    given = tuple(t for t in cfg["t_list"] if t)
    return common.t_list(net.schedule, steps, given[:steps] if steps <= len(given) else (), cfg["t_max"])


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"],
                t_min=cfg["t_min"], t_max=cfg["t_max"])


def sample(net, noise, batch, cfg, steps):
    """From pure noise, noised again between the steps; any step count."""
    return common.few_step(net, noise, levels(net, cfg, steps), batch["cond"])
