"""sCM: continuous-time consistency models (sCT, sCD), Lu and Song 2024 (arXiv 2410.11081). Any step count.

    TrigFlow:  x_t = cos t x0 + sin t z,  z = s eps, s the data's std;  t = atan(sigma / s), sigma ~ p
               F from any net: f(x_t, t) = cos t x_t - sin t s F(x_t / s, t) is its x0 prediction
    dx/dt      sCD: s F_teacher(x_t / s, t), guided; sCT: cos t z - sin t x0
    tangent    g = -cos^2 t (s F - dx/dt) - r (cos t sin t x_t + s J),  J = cos t sin t dF/dt
               then g / (|g| + 0.1), or clipped;  r = min(1, it / warm-up)
    loss       mean( w / e^u mean((F - sg[F] - g)^2) + u ),  w = 1 / (s tan t) = 1 / sigma,  u(t) learned

dF/dt is along dx/dt, of the same weights with the same dropout masks (common.value_and_tangent). The paper's
teachers are trained in TrigFlow with a plain time embedding; here cos t sin t d/dt cancels the slope of ln t.

    python train.py methods/scm.py --max_iter 1000                    two minutes, digits
    python train.py methods/scm.py [--distill false]                  the README's result [sCT]
    torchrun --nproc_per_node 8 train.py methods/scm.py --preset cifar10_sct --data cifar10-32x32.zip
"""
import torch

import common

config = dict(
    recipes="scm",
    teacher="assets/digits.pth",     # starts the student; sCT: "" = from scratch
    distill=True,                    # sCD; false: sCT, from data alone
    max_iter=4000, batch_size=64,
    lr=1e-3, lr_schedule="cosine:0.1", warmup=100,      # paper: constant or inv_sqrt
    optimizer="radam", betas=(0.9, 0.99), weight_decay=0.0,         # adamw, adam, radam; moments; 0 = off
    adam_eps=1e-8,                   # ImageNet: 1e-11
    dropout=0.0,                     # of the student; 0 = off
    sigma_data=0.0,                  # s; 0 = the net's, or 0.5
    t_dist="lognormal",              # of sigma: lognormal, logt, polynomial, uniform
    t_mean=-0.2, t_std=1.4,          # of ln sigma; paper: -1.0, 1.4
    t_min=0.0, t_max=20.0,           # bounds of sigma; 0 = 0.002, 80
    t_list=(10.0, 2.0, 0.8, 0.4),    # the net's times of steps 1, 2, ...; "", or for more: common.t_list
    jvp="apart",                     # how dF/dt is made: apart, fused, difference
    jvp_step=0.01,                   # of "difference", relative in sigma
    tangent="normalize", tangent_c=0.1,         # normalize (by |g| + c), clip (to [-1, 1]), none
    tangent_rms=False,               # normalize by |g| / sqrt(dimension) (FastGen)
    tangent_warmup=500,              # iterations; paper: 10000; 0 = off
    prior=True, logvar=True,         # w = 1 / sigma, a learned u; false: 1, 0
    ema=("ema:power=0.1",),
)

published = dict(batch_size=512, lr=1e-4, lr_schedule="constant", warmup=0, t_mean=-1.0, t_std=1.4, t_max=0.0,
                 tangent_warmup=10000, clip=0.0, tf32=False, save_every=10000, val_every=10000,
                 sample_every=10000)
cifar10 = published | dict(net="edm:cifar10", data="cifar10-32x32.zip", classes=0, max_iter=400000,
                           teacher="edm-cifar10-32x32-uncond-vp.pth", ema=("ema:half_kimg=500",))
presets = dict(
    # appendix of the paper; it retrains the teachers in TrigFlow, here they are EDM's. Assumption: 400 k
    cifar10=cifar10 | dict(t_list=(80.0, 0.821)),
    cifar10_sct=cifar10 | dict(distill=False, dropout=0.2, t_list=(80.0, 0.821)),
    imagenet64=published | dict(
        net="edm:imagenet64", data="imagenet-64x64.zip", teacher="edm-imagenet-64x64-cond-adm.pth",
        batch_size=1024, max_iter=600000, lr=7e-5, lr_schedule="inv_sqrt:35000", optimizer="adam",
        adam_eps=1e-11, amp="bf16", t_std=1.6, t_list=(80.0, 1.1), ema=("ema:power=0.05",)),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"],
                              **(dict(logvar=True) if cfg["logvar"] else {}))
    nets = dict(student=student.train())
    if cfg["distill"]:
        if not cfg["teacher"]:
            raise common.BadInput("sCD needs a --teacher PATH; --distill false trains from data alone")
        nets["teacher"] = common.make_net(cfg["net"], label_dim=cfg["classes"]).eval().requires_grad_(False)
    else:
        common.no_guidance(cfg["guidance"], "sCT")
    # values that only step() reads are refused here, before any work
    common.t_quantile(torch.tensor([0.5], dtype=torch.float64, device="cpu"), schedule="edm", **times(cfg))
    common.check(cfg, tangent=("normalize", "clip", "none"), jvp_step=(1e-6, 0.5), tangent_warmup=(0, 1e9),
                 sigma_data=(0, 1e9), tangent_c=(0, 1e9))
    for steps in (cfg["steps"], len(cfg["t_list"]) or 1):
        levels(student, cfg, steps)
    common.check_jvp(cfg["jvp"], cfg["parallel"], cfg["amp"])
    return nets


def init(cfg):
    return {net: cfg["teacher"] for net in ("student", "teacher")[:1 + cfg["distill"]] if cfg["teacher"]}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0, cond = nets["student"], batch["x0"], batch["cond"]                         # (B, C, H, W)
    s = cfg["sigma_data"] or getattr(student, "sigma_data", 0.5)
    path = dict(std=s, top=cfg["t_max"])
    kw = dict(logvar=True) if cfg["logvar"] else {}
    # draw t and z
    sigma = common.sample_t(len(x0), schedule="edm", device=x0.device, **times(cfg))        # (B,)
    t, z = (sigma / s).atan(), s * torch.randn_like(x0)
    cos, sin = (common.expand(c, x0) for c in (t.cos(), t.sin()))
    x_t = cos * x0 + sin * z
    # dx/dt
    dxdt = cos * z - sin * x0
    if cfg["distill"]:
        with torch.no_grad():
            dxdt = s * common.predict_on("trig", nets["teacher"], x_t / s, t, cond, "flow", batch["uncond"],
                                         cfg["guidance"], **path)
    # F, u and J = cos t sin t dF/dt
    def F_of(x, t):
        out = common.predict_on("trig", student, x / s, t, cond, "flow", **path, **kw)
        return (out["out"], out["logvar"]) if cfg["logvar"] else (out,)
    along = cos * sin * dxdt, t.cos() * t.sin()
    (F, *u), J = common.value_and_tangent(F_of, (x_t, t), along, cfg["jvp"], cfg["jvp_step"], cfg["jvp_step"])
    # tangent
    r = min(1.0, it / cfg["tangent_warmup"]) if cfg["tangent_warmup"] else 1.0
    g = -cos ** 2 * (s * F.detach() - dxdt) - r * (cos * sin * x_t + s * J)
    norm = g.flatten(1).norm(dim=1)                                                         # (B,)
    if cfg["tangent"] == "normalize":
        size = norm / g[0].numel() ** 0.5 if cfg["tangent_rms"] else norm
        g = g / common.expand(size + cfg["tangent_c"], g)
    elif cfg["tangent"] == "clip":
        g = g.clamp(-1, 1)
    # adaptive weight
    loss = (F - F.detach() - g).square().flatten(1).mean(1)
    loss = loss / sigma.float() if cfg["prior"] else loss
    loss = loss / u[0].exp() + u[0] if cfg["logvar"] else loss
    return loss.mean(), dict(scm=loss.mean(), tangent=norm.mean())


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"],
                t_min=cfg["t_min"], t_max=cfg["t_max"])


def levels(net, cfg, steps):
    given = cfg["t_list"][:steps] if steps <= len(cfg["t_list"]) else ()
    top = torch.tensor(cfg["t_max"], dtype=torch.float64, device="cpu")                 # a sigma; 0 stays 0
    return common.t_list(net.schedule, steps, given, common.t_from_ratio(net.schedule, top))


def sample(net, noise, batch, cfg, steps):
    """Few-step consistency sampling; any step count."""
    return common.few_step(net, noise, levels(net, cfg, steps), batch["cond"])
