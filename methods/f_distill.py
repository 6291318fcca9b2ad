"""f-distill: DMD2 for any f-divergence of teacher and student, Xu 2025 (arXiv 2502.15681).

    student G, teacher T (frozen), fake score F (learns what the student makes), discriminator D on features
    student:  x = G(z),  x_t = alpha_t x + sigma_t eps
              r      exp(D(features(x_t))), about teacher / student if real data are as the teacher's samples,
                     over its running mean among samples of like t;  h(r) = r^2 f''(r) over its mean
              dm     gradient w (F(x_t) - T(x_t)) on x,  w = h(r) / mean|x - T(x_t)| per sample
              gan_g  softplus(-D(features(x_t')))
    fake:     dsm    denoising loss of F on x
              gan_d  softplus(D(features(x_t))) + softplus(-D(features(x0_t)))
              r1     mean (D(x0_t) - D(x0_t + r1_alpha noise))^2: approximate R1 (APT, arXiv 2501.08316)

rkl is DMD2. Means are over the ranks of a micro-step. FastGen: bins equal in t (on edm most samples in one).

    python train.py methods/f_distill.py [--steps 2]          the README's result; --max_iter 600: a short try
    torchrun --nproc_per_node 8 train.py methods/f_distill.py --preset imagenet64 --data imagenet-64x64.zip
"""
import torch

import common
from nets.discriminators import DensityRatio, make_head

config = dict(
    recipes="f_distill", teacher="assets/digits.pth",
    student="", fake_score="",       # where they start, path[#entry]; "" = the teacher
    max_iter=3600, batch_size=64,    # 600 student updates; N of the paper are N (ratio + 1) / ratio here
    update_ratio=5,                  # fake updates before each student update; at least 1
    lr=6e-4, lr_fake=1.2e-3, lr_disc=1e-3,      # student, fake score, discriminator
    lr_schedule="cosine:0.1", warmup=20,        # paper: constant, none
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    divergence="js",                 # rkl, kl, js, sf (softened rkl), neyman, sh (Hellinger), jf (Jeffreys)
    ratio_min=0.1, ratio_max=20.0,   # bounds of r
    ratio_bins=5,                    # quantiles of t, in each r is divided by its mean; 0 = neither r nor h
    ratio_ema=0.9,                   # decay of these means; 0 = those of this batch
    t_list=(2.5, 0.8, 0.4, 0.2),     # noise levels of steps 1, 2, ...; "" = equally spaced, on edm by rho 7
    student_input="simulation",      # of later steps: simulation (own samples, paper), data (noised, FastGen)
    sampler="sde",                   # between steps: sde (fresh noise), ode (the noise of the last step)
    t_dist="lognormal",              # noise levels of dsm and GAN; common.t_quantile lists them
    t_mean=-0.5, t_std=1.0, t_shift=5.0,        # of lognormal and logitnormal; of "shifted"
    t_min=0.02, t_max=10.0,          # bounds of t; 0 = the schedule's own
    dm_t_dist="polynomial",          # noise levels of dm (paper, dsm and GAN too)
    dm_t_min=0.2, dm_t_max=10.0,     # bounds of t in dm; the paper's, for edm: 0.00323 and 72.06
    fake_pred="", fake_weight="",    # space (x0, eps, v, flow) and weight of dsm; "" = as sft.py (paper)
    gan_weight=0.3,                  # of gan_g; paper: 3e-3; 0 = no GAN
    gan_d_weight=0.1,                # of gan_d; paper: 1e-2; 0 = the discriminator does not learn
    gan_loss="softplus",             # softplus: its D is the log of a ratio
    gan_features="fake_score",       # encoder of: fake_score (paper; gan_d trains it too), teacher (FastGen)
    gan_taps=(0, 1),                 # encoder features for the discriminator; "" = the last
    gan_same_noise=False,            # real samples get the t and eps of the generated ones
    r1_weight=0.0, r1_alpha=0.1,     # of r1, 0 = off; and the size of its perturbation
    ema=("ema:power=0.15",),
)

# h(r) = r^2 f''(r) of D_f(teacher, student) = E_student[f(r)]
weights = dict(rkl=torch.ones_like, kl=lambda r: r, js=lambda r: r / (r + 1), sf=lambda r: 1 / (r + 1),
               neyman=lambda r: 2 / r, sh=lambda r: r.sqrt() / 2, jf=lambda r: 1 + r)


def build(cfg):
    student, teacher, fake_score = (common.make_net(cfg["net"], label_dim=cfg["classes"]) for _ in range(3))
    nets = dict(student=student, teacher=teacher.eval().requires_grad_(False), fake_score=fake_score)
    # values that only step() reads are refused here, before any work
    levels(student, cfg)
    common.check(cfg, update_ratio=(1, 1e9), student_input=("simulation", "data"), sampler=("sde", "ode"),
                 gan_loss=("softplus",), gan_features=("fake_score", "teacher"), divergence=weights,
                 ratio_min=(1e-6, cfg["ratio_max"]))
    for part in "", "dm_":
        common.check_noise(student, cfg["fake_pred"], cfg["fake_weight"], **times(cfg, part))
    nets["discriminator"] = make_head(teacher, taps(teacher, cfg))
    return nets | (dict(ratio=DensityRatio(cfg["ratio_bins"], cfg["ratio_ema"])) if cfg["ratio_bins"] else {})


def init(cfg):
    return dict(teacher=cfg["teacher"]) | {n: cfg[n] or "teacher" for n in ("student", "fake_score")}


def optimizers(nets, cfg):
    rates = dict(fake_score=cfg["lr_fake"], discriminator=cfg["lr_disc"])
    fake = [dict(params=nets[n].parameters(), lr=lr) for n, lr in rates.items() if n in nets]
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg),
                fake=common.optimizer(fake, **cfg))


def phase(it, cfg):
    return "student" if it % (cfg["update_ratio"] + 1) == cfg["update_ratio"] else "fake"


def step(nets, batch, it, cfg):
    return (student_step if phase(it, cfg) == "student" else fake_step)(nets, batch, it, cfg)


def student_step(nets, batch, it, cfg):
    teacher, fake_score, cond = nets["teacher"], nets["fake_score"], batch["cond"]
    # generate
    x = generate(nets["student"], batch, it, cfg)                                           # (B, C, H, W)
    # distribution matching: both scores at the re-noised sample, no graph
    t, eps = draw(x, teacher.schedule, cfg, "dm_")
    with torch.no_grad():
        x_t = common.add_noise(teacher.schedule, x, eps, t)
        of_fake = common.predict(fake_score, x_t, t, cond, "x0", taps=taps(teacher, cfg))
        of_teacher = common.predict(teacher, x_t, t, cond, "x0", batch["uncond"], cfg["guidance"],
                                    taps=taps(teacher, cfg))
    h = density_weight(nets, (of_teacher if cfg["gan_features"] == "teacher" else of_fake)["taps"], t, cfg)
    dm = common.dmd_loss(x, of_teacher["out"], of_fake["out"], h)
    if not cfg["gan_weight"]:
        return dm, dict(dm=dm)
    # GAN: at a noise level of its own
    t, eps = draw(x, teacher.schedule, cfg)
    x_t = common.add_noise(teacher.schedule, x, eps, t)
    gan_g = common.gan_loss_g(nets["discriminator"](features(nets, x_t, t, cond, cfg)), cfg["gan_loss"])
    return dm + cfg["gan_weight"] * gan_g, dict(dm=dm, gan_g=gan_g)


def fake_step(nets, batch, it, cfg):
    fake_score, cond, x0 = nets["fake_score"], batch["cond"], batch["x0"]
    discriminator = nets.get("discriminator") if cfg["gan_d_weight"] else None
    # generate
    with torch.no_grad():
        x = generate(nets["student"], batch, it, cfg)
    # denoising loss of the fake score on it; the features are of the same pass, which saves one
    t, eps = draw(x, fake_score.schedule, cfg)
    own = dict(taps=taps(fake_score, cfg)) if discriminator and cfg["gan_features"] == "fake_score" else {}
    dsm = common.denoising_loss(fake_score, x, t, eps, cond, cfg["fake_pred"], cfg["fake_weight"], **own)
    dsm, feats = dsm if own else (dsm, None)
    loss = dsm.mean()
    logs = dict(dsm=loss)
    if discriminator:
        # discriminator: generated against real
        feats = feats or features(nets, common.add_noise(fake_score.schedule, x, eps, t), t, cond, cfg)
        t, eps = (t, eps) if cfg["gan_same_noise"] else draw(x0, fake_score.schedule, cfg)
        x0_t = common.add_noise(fake_score.schedule, x0, eps, t)
        logits = discriminator(features(nets, x0_t, t, cond, cfg))
        logs["gan_d"] = common.gan_loss_d(logits, discriminator(feats), cfg["gan_loss"])
        loss = loss + cfg["gan_d_weight"] * logs["gan_d"]
    if discriminator and cfg["r1_weight"]:
        # approximate R1: the noised sample moves, its noise level does not
        moved = x0_t + cfg["r1_alpha"] * torch.randn_like(x0_t)
        logs["r1"] = common.r1_approx(logits, discriminator(features(nets, moved, t, cond, cfg)))
        loss = loss + cfg["r1_weight"] * logs["r1"]
    return loss, logs


def density_weight(nets, feats, t, cfg):
    """h(r) (B,), from features of samples at t; 1 for rkl, and where the discriminator is not trained."""
    if cfg["divergence"] == "rkl" or not cfg["gan_d_weight"]:
        return 1.0
    with torch.no_grad():
        r = common.wide(nets["discriminator"](feats)).mean(1).exp().clamp(cfg["ratio_min"], cfg["ratio_max"])
    if not cfg["ratio_bins"]:
        return weights[cfg["divergence"]](r)
    bins = common.t_bin(t, cfg["ratio_bins"], schedule=nets["teacher"].schedule, **times(cfg, "dm_"))
    h = weights[cfg["divergence"]](nets["ratio"](r, bins))
    return h / common.all_mean(h.mean())


def generate(student, batch, it, cfg):
    """x0 of the student at one of its steps; under simulation an exit step that is equal on all ranks."""
    k = int(torch.randint(cfg["steps"], (), generator=common.shared_generator(cfg["seed"], it)))
    return common.student_call(student, batch["x0"], levels(student, cfg), batch["cond"],
                               cfg["student_input"], cfg["sampler"], k)


def levels(net, cfg):
    return common.t_list(net.schedule, cfg["steps"], cfg["t_list"][:cfg["steps"]])


def times(cfg, part=""):
    return dict(dist=cfg[f"{part}t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"],
                t_min=cfg[f"{part}t_min"], t_max=cfg[f"{part}t_max"])


def draw(x, schedule, cfg, part=""):
    t = common.sample_t(len(x), schedule=schedule, device=x.device, **times(cfg, part))     # (B,)
    return t, torch.randn_like(x)


def taps(net, cfg):
    return cfg["gan_taps"] or (net.n_taps - 1,)


def features(nets, x_t, t, cond, cfg):
    """Encoder features of the fake score or the teacher; nothing behind the last tap is computed."""
    return nets[cfg["gan_features"]](x_t, t, cond, taps=taps(nets["teacher"], cfg), stop=True)["taps"]


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise; refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return common.few_step(net, noise, levels(net, cfg), batch["cond"], cfg["sampler"])
