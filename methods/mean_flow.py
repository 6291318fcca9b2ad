"""MeanFlow: average velocities, Geng 2025 (arXiv 2505.13447), from scratch or from a teacher. Any step count.

    x_t = (1 - t) x0 + t eps;  u(x_t, r, t) is the mean velocity over [r, t]:  x_r = x_t - (t - r) u
    v          eps - x0, or the teacher's; guided: w v + k u(x_t, t, t | c) + (1 - w - k) u(x_t, t, t | none)
               (teacher: w v + (1 - w) v(none)); for t in the interval, of samples that kept their condition
    target     v - h (t - r) du/dt,  du/dt along (v, 0, 1) in (x, r, t),  h = min(1, it / warm-up)
    loss       mean( e / sg[e + c]^p ),  e = |u - sg[target]|^2;  opt_grad: e / sg[sqrt(e) + c]^p

A fraction of the batch, alike on all ranks, has r < t; the rest is plain flow matching and takes no JVP. Any
net: edm nets see the path through common.predict_on. Starting from a teacher, r is embedded as zero, so that
u(x_t, t, t) is its velocity. The paper's net for CIFAR-10 has no preconditioning and embeds t - r; here it
has EDM's and embeds r. FastGen sorts the v1 sampling's (t, r) and ends at t = 0.999.

    python train.py methods/mean_flow.py --max_iter 1000               two minutes, digits
    python train.py methods/mean_flow.py [--distill false]             the README's result
    torchrun --nproc_per_node 8 train.py methods/mean_flow.py --preset cifar10 --data cifar10-32x32.zip
"""
import torch

import augment
import common

config = dict(
    recipes="mean_flow",
    teacher="assets/digits.pth",     # starts the student; "" = from scratch
    distill=True,                    # v is the teacher's; false: the data's
    max_iter=4000, batch_size=64,
    lr=5e-4, lr_schedule="cosine:0.1", warmup=100,      # paper: constant
    optimizer="adam", betas=(0.9, 0.999), weight_decay=0.0,         # adamw, adam, radam; moments; 0 = off
    dropout=0.0,                     # of the student; 0 = off
    cond_dropout=0.0,                # probability of the null condition; 0 = off; paper: 0.1 with guidance
    kappa=0.0,                       # k of guidance from scratch, w is --guidance; the scale is w / (1 - k)
    guidance_interval=(0.0, 1.0),    # t with guidance
    ratio=0.75,                      # fraction of the batch with r < t
    pairs="min",                     # min: r = min(t, r) (v1); sort: t, r = max, min (v0)
    t_mean=0.0, t_std=1.4,           # of logit t; paper: -0.6, 1.6
    r_mean=-4.0, r_std=1.6,          # of logit r
    t_list=(),                       # times of steps 1, 2, ...; "" or more steps: equally spaced from 1
    jvp="apart",                     # how du/dt is made: apart, fused, difference
    jvp_step=0.005,                  # of "difference", in t; one-sided where t +- step leaves [r, 1]
    tangent_warmup=0,                # iterations; 0 = off
    loss="l2", loss_p=0.75, loss_c=1e-3,        # l2 or opt_grad; p; c
    loss_rms=False,                  # e is the mean over the dimensions, not the sum
    ema=("ema:power=0.1",),
)

published = dict(teacher="", distill=False, lr_schedule="constant", warmup=0, clip=0.0, ema=("ema:0.9999",),
                 save_every=10000, val_every=10000, sample_every=10000)
latents = published | dict(data="imagenet-256-sd.zip", data_scale=0.18215, batch_size=1024,
                           max_iter=1200000, lr=1e-4, betas=(0.9, 0.95), cond_dropout=0.1, ratio=0.25,
                           pairs="sort", t_mean=-0.4, t_std=1.0, r_mean=-0.4, r_std=1.0, loss_p=1.0,
                           loss_c=1.0)
unscaled = ",reverse=false,learn_sigma=false,r_kind=diff"
presets = dict(
    # 200 epochs of warm-up, EDM's augmentations without vertical flips and rotations
    cifar10=published | dict(
        net="edm:cifar10", data="cifar10-32x32.zip", classes=0, batch_size=1024, max_iter=800000, lr=6e-4,
        warmup=9765, dropout=0.2, augment=0.12, augment_ops=("xflip", "scale", "aniso", "translate_frac"),
        t_mean=-0.6, t_std=1.6, r_mean=-4.0, r_std=1.6),
    # DiTs that embed t and t - r, unscaled; scales w / (1 - k) = 2 and 2.5
    imagenet256_b=latents | dict(net="dit:sit_b2" + unscaled, kappa=0.5),
    imagenet256_xl=latents | dict(
        net="dit:sit_xl2" + unscaled, guidance=0.2, kappa=0.92, guidance_interval=(0.0, 0.75)),
)


def build(cfg):
    options = dict(augment_dim=augment.dim(cfg)) if augment.dim(cfg) else {}
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"], r=True, **options)
    nets = dict(student=student.train())
    if cfg["distill"]:
        if not cfg["teacher"]:
            raise common.BadInput("--distill true needs a --teacher PATH; --distill false trains without")
        if cfg["kappa"]:
            raise common.BadInput(f"--kappa {cfg['kappa']} is for --distill false; use --guidance")
        nets["teacher"] = common.make_net(cfg["net"], label_dim=cfg["classes"]).eval().requires_grad_(False)
    # values that only step() reads are refused here, before any work
    common.check(cfg, cond_dropout=(0, 1), ratio=(0, 1), tangent_warmup=(0, 1e9), loss_p=(0, 10),
                 pairs=("min", "sort"), loss=("l2", "opt_grad"),
                 **dict.fromkeys(("jvp_step", "t_std", "r_std", "loss_c"), (1e-6, 100)))
    low, high = (*cfg["guidance_interval"], 0, 0)[:2]
    if not 0 <= cfg["kappa"] < 1 or not low < high or len(cfg["guidance_interval"]) != 2:
        raise common.BadInput(f"--kappa {cfg['kappa']} must be in [0, 1), --guidance_interval "
                              f"{cfg['guidance_interval']} two times, ascending")
    for steps in (cfg["steps"], len(cfg["t_list"]) or 1):
        levels(cfg, steps)
    common.check_jvp(cfg["jvp"], cfg["parallel"], cfg["amp"])
    return nets


def init(cfg):
    return {net: cfg["teacher"] for net in ("student", "teacher")[:1 + cfg["distill"]] if cfg["teacher"]}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    x0 = batch["x0"]                                                                        # (B, C, H, W)
    # condition dropout; `given` is 1 where the condition stayed
    one = x0.new_ones(len(x0))
    cond = common.drop_condition(batch["cond"] | dict(given=one), batch["uncond"] | dict(given=0 * one),
                                 cfg["cond_dropout"])
    # draw t, r and eps: the first n have r < t
    n = int(cfg["ratio"] * len(x0) + torch.rand((), generator=common.shared_generator(cfg["seed"], it)))
    t, r = draw(x0, n, cfg)
    eps = torch.randn_like(x0)
    x_t = common.add_noise("rf", x0, eps, t)
    # velocity
    v = velocity(nets, x_t, t, eps - x0, cond, batch["uncond"], cfg)
    # u, and du/dt where r < t; u in one call, unless both are to share dropout masks or a graph
    h = min(1.0, it / cfg["tangent_warmup"]) if cfg["tangent_warmup"] else 1.0
    whole = lambda: mean_velocity(nets["student"], cond, slice(None))(x_t, t, r)            # noqa: E731
    whole = None if cfg["dropout"] or cfg["jvp"] == "fused" else whole
    us, target, gap = [], v, t - r
    if n:
        along = v[:n], torch.ones_like(t[:n]), torch.zeros_like(t[:n])
        up, down = (m[:n].clamp(max=cfg["jvp_step"]) for m in (1 - t, gap))
        (u,), dudt = common.value_and_tangent(mean_velocity(nets["student"], cond, slice(n)),
                                              (x_t[:n], t[:n], r[:n]), along, cfg["jvp"], up, down, whole)
        us, target = [u], torch.cat([v[:n] - h * common.expand(gap, v)[:n] * dudt, v[n:]])
    if n == 0 or n < len(x0) and not whole:
        us += mean_velocity(nets["student"], cond, slice(n, None))(x_t[n:], t[n:], r[n:])
    # adaptive weight
    error = (torch.cat(us) - target).square().flatten(1)
    e = error.mean(1) if cfg["loss_rms"] else error.sum(1)                                  # (B,)
    size = e.detach() if cfg["loss"] == "l2" else e.detach().sqrt()
    loss = (e / (size + cfg["loss_c"]) ** cfg["loss_p"]).mean()
    parts = dict(mse=error[:n], fm=error[n:])
    return loss, dict(mf=loss) | {k: part.mean() for k, part in parts.items() if len(part)}


def mean_velocity(net, cond, part):
    """u(x_t, t, r) of a part of the batch, as a tuple."""
    own = {k: c[part] for k, c in cond.items()}
    return lambda x, t, r: (common.predict_on("rf", net, x, t, own, "flow", r=r),)


def draw(x, n, cfg):
    """t and r (B,), r = t from sample n on."""
    t, r = (common.sample_t(len(x), "logitnormal", "rf", x.device, mean=cfg[f"{k}_mean"], std=cfg[f"{k}_std"],
                            t_max=1.0) for k in ("t", "r"))
    if cfg["pairs"] == "sort":
        t, r = torch.maximum(t, r), torch.minimum(t, r)
    return t, torch.cat([torch.minimum(t, r)[:n], t[n:]])


@torch.no_grad()
def velocity(nets, x_t, t, v, cond, uncond, cfg):
    """The guided velocity that u(x_t, t, t) is to be: of the data (v = eps - x0) or of the teacher."""
    student, teacher, (low, high) = nets["student"], nets.get("teacher"), cfg["guidance_interval"]
    def at(net, cond):
        kw = dict(r=t) if net is student else {}
        return common.predict_on("rf", net, x_t, t, cond, "flow", **kw)
    v, w, k = at(teacher, cond) if teacher else v, cfg["guidance"], cfg["kappa"]
    if w == 1 and not k:
        return v
    # where the condition was dropped, or outside the interval, nothing is guided
    on = common.expand((low <= t) & (t <= high) & (cond["given"] > 0), v)
    guided = w * v + (k * at(student, cond) if k else 0)
    if w + k != 1:
        guided = guided + (1 - w - k) * at(teacher or student, uncond)
    return torch.where(on > 0, guided, v)


def levels(cfg, steps):
    given = cfg["t_list"] if len(cfg["t_list"]) >= steps else [1 - k / steps for k in range(steps)]
    return common.t_list("rf", steps, given[:steps])


def sample(net, noise, batch, cfg, steps):
    """x_r = x_t - (t - r) u from noise at t = 1; any step count."""
    ts = levels(cfg, steps)
    x = ts[0] * noise(0)
    for t, r in zip(ts, ts[1:]):
        t, r = common.t_like(t, x), common.t_like(r, x)
        u = common.predict_on("rf", net, x, t, batch["cond"], "flow", r=r)
        x = x - common.expand(t - r, x) * u
    return x
