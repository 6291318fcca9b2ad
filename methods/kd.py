"""Knowledge distillation on a teacher's ODE, Luhman 2021 (arXiv 2101.02388). One- to few-step students.

    offline  z ~ N(0, I),  x_t at t = t_1 > t_2 > ... on the teacher's ODE from x = sigma z,  x0 where it ends
    loss     0.5 mean (G(x_t, t) - y)^2,  t a random step of the student, G read out as x0
    y        x0 (paper, for one step), or ("next") what takes a DDIM step from x_t to the teacher's next state

With y = x0 the student learns the teacher's consistency function at its steps, so its sampler takes fresh
noise between them; with "next" it follows the teacher's path (Salimans 2022), so its sampler is DDIM. Where
the map from noise is too steep to fit, the squared error blurs. tools/make_pairs.py makes the data, guidance
in them; a student over-fits a small set (val/student/kd is of the held-out twentieth).

    torchrun --nproc_per_node 2 tools/make_pairs.py --out outputs/pairs/digits      the pairs, under 3 minutes
    python train.py methods/kd.py --max_iter 600                                    under a minute, digits
    torchrun train.py methods/kd.py [--steps 2]                                     the README's result
"""
import torch

import common

config = dict(
    recipes="kd",
    data="outputs/pairs/digits",     # a folder of tools/make_pairs.py
    teacher="assets/digits.pth",     # where the student starts; "" = drawn at random
    guidance=1.0,                    # that of the pairs; another value is refused
    max_iter=1600, batch_size=64, lr=1e-3, lr_schedule="cosine", warmup=100,
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    t_list=(80.0, 2.5, 0.8, 0.4),    # times of steps 1, 2, ...; the pairs have states there
    target="x0",                     # x0 (paper), next (the teacher's next state)
    norm="l2",                       # l2 (paper), l1 (the authors' code on CIFAR-10)
    ema=("ema:power=0.1",),
)

presets = dict(
    # The authors' code: 25 epochs of 1,024,000 pairs (make_pairs.py --pairs 1024000; theirs are of 100 DDIM
    # steps), the absolute error in place of the paper's squared one. Their net is Ho 2020's, here EDM's
    cifar10=dict(net="edm:cifar10", data="outputs/pairs/cifar10", teacher="edm-cifar10-32x32-cond-vp.pth",
                 batch_size=512, max_iter=50000, lr=2e-4, lr_schedule="constant", warmup=5000,
                 optimizer="adam", betas=(0.9, 0.98), weight_decay=0.0, clip=0.0, norm="l1",
                 ema=("ema:0.995",), save_every=5000, val_every=5000, sample_every=5000),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"])
    # values that only step() reads are refused here, before any work
    levels(student, cfg)
    common.check(cfg, target=SAMPLERS, norm=("l2", "l1"))
    return dict(student=student.train())


def check(data, nets, cfg):
    """Pairs that are not of the student's times, schedule and guidance are refused, before any work."""
    net = nets["student"]
    common.check_pairs(data, "kd", cfg["net"], levels(net, cfg)[:-1], schedule=net.schedule,
                       guidance=cfg["guidance"], chunk=0)


def init(cfg):
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0 = nets["student"], batch["x0"]                                              # (B, C, H, W)
    # a random step of the student, from the teacher's state
    ts = levels(student, cfg)[:-1]
    k = torch.randint(len(ts), (len(x0),), device=x0.device)                                # (B,)
    x_t, t = state(batch, ts, k)
    # target
    y = x0 if cfg["target"] == "x0" else next_target(batch, x_t, t, ts, k, student.schedule)
    # regression
    error = common.predict(student, x_t, t, batch["cond"], "x0") - y
    kd = 0.5 * error.square().mean() if cfg["norm"] == "l2" else error.abs().mean()
    return kd, dict(kd=kd)


def levels(net, cfg):
    return common.t_list(net.schedule, cfg["steps"], cfg["t_list"][:cfg["steps"]])


def state(batch, ts, k):
    """The teacher's state x_t (B, C, H, W) at the student's times ts[k], and its exact t (B,)."""
    path, path_t = batch["path"], batch["path_t"]                            # (B, P, C, H, W), (P,)
    i = torch.arange(len(k), device=k.device)
    t = torch.stack([common.t_like(s, path) for s in ts])[k, i]
    at = (path_t - t[:, None]).abs().argmin(1)
    return path[i, at], path_t[at]


def next_target(batch, x_t, t, ts, k, schedule):
    """The x0 with which a DDIM step from x_t ends at the teacher's state at ts[k + 1]; in the last, x0."""
    last = k == len(ts) - 1
    x_s, s = state(batch, ts + [0.0], k + 1)            # of the last step: any
    (alpha_t, sigma_t), (alpha_s, sigma_s) = (common.alpha_sigma(schedule, u) for u in (t, s))
    ratio = sigma_s / sigma_t
    y = (x_s - common.expand(ratio, x_s) * x_t) / common.expand(alpha_s - ratio * alpha_t, x_s)
    return torch.where(last.reshape(-1, *[1] * (x_t.dim() - 1)), batch["x0"], y)


SAMPLERS = dict(x0="sde", next="ode")                  # by target


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise. Refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return common.few_step(net, noise, levels(net, cfg), batch["cond"], SAMPLERS[cfg["target"]])
