"""DMD2: improved distribution matching distillation, Yin 2024 (arXiv 2405.14867). One- to few-step students.

    student G, teacher T (frozen), fake score F (learns what the student makes), discriminator D on features
    student:  x = G(z),  x_t = alpha_t x + sigma_t eps
              dm     gradient w (F(x_t) - T(x_t)) on x,  w = 1 / mean|x - T(x_t)| per sample  (x0 predictions)
              gan_g  softplus(-D(features(x_t')))
    fake:     dsm    denoising loss of F on x
              gan_d  softplus(D(features(x_t))) + softplus(-D(features(x0_t)))
              r1     mean (D(x0_t) - D(x0_t + r1_alpha noise))^2: approximate R1 (APT, arXiv 2501.08316)

The student's turn is it % (update_ratio + 1) == update_ratio. Features: the fake score's encoder, which gan_d
then also trains (paper), or the teacher's (FastGen, LADD). The generated features come out of the pass that
computes dsm, at its noise level: the same expectation for one pass less. Several steps: the input of step k
is what the student makes of noise in k steps without gradient (backward simulation, paper) or noised data.

    python train.py methods/dmd2.py --max_iter 600                    under a minute, digits
    python train.py methods/dmd2.py [--steps 2]                       the README's result
    torchrun --nproc_per_node 8 train.py methods/dmd2.py --preset imagenet64 --data imagenet-64x64.zip
"""
import torch

import common
from nets.discriminators import UNetHead

config = dict(
    recipes="dmd2",
    teacher="assets/digits.pth",
    max_iter=3600,                   # = 600 student updates; N of the paper are N (ratio + 1) / ratio here
    batch_size=64,
    update_ratio=5,                  # fake updates per student update; at least 1
    lr=6e-4,                         # student
    lr_fake=1.2e-3,                  # fake score
    lr_disc=1e-3,                    # discriminator
    lr_schedule="cosine:0.1",        # paper: constant
    warmup=20,
    optimizer="adamw",               # adamw, adam, radam
    betas=(0.9, 0.999),              # of the optimizer's two moments
    weight_decay=0.01,               # 0 = off
    t_list=(2.5, 0.8, 0.4),          # noise levels of steps 1, 2, ...; "" = equally spaced, on edm by rho 7
    student_input="simulation",      # of the later steps: simulation (paper), or data (noised data, FastGen)
    sampler="sde",                   # between steps: sde (fresh noise), ode (the noise of the last step)
    t_dist="lognormal",              # noise levels of dsm and GAN; common.t_quantile lists them
    t_mean=-0.5,                     # of lognormal and logitnormal
    t_std=1.0,                       # of the same
    t_shift=5.0,                     # of "shifted"
    t_min=0.02,                      # bounds of t; 0 = the schedule's own
    t_max=10.0,                      # 0 = the schedule's own
    dm_t_dist="polynomial",          # noise levels of dm (paper, dsm and GAN too)
    dm_t_min=0.2,                    # bounds of t in dm; the paper's, for edm: 0.00323
    dm_t_max=10.0,                   # and 72.06
    fake_pred="",                    # space of the fake score's error: x0, eps, v, flow; "" = the net's own
    fake_weight="",                  # its weight; "" = edm for x0 errors on edm nets (paper), else unit
    gan_weight=0.3,                  # of gan_g; paper: 3e-3; 0 = no GAN
    gan_d_weight=0.1,                # of gan_d; paper: 1e-2; 0 = the discriminator is not trained
    gan_loss="softplus",             # softplus, hinge
    gan_features="fake_score",       # fake_score (paper), teacher (FastGen)
    gan_taps=(0, 1),                 # encoder features for the discriminator; "" = the last
    gan_same_noise=False,            # real samples get the t and eps of the generated ones
    r1_weight=0.0,                   # of r1; 0 = off
    r1_alpha=0.1,                    # size of its perturbation
    ema=("ema:power=0.15",),
)

published = dict(t_list=(), t_dist="polynomial", t_min=0.0, t_max=0.0, dm_t_min=0.0, dm_t_max=0.0,
                 lr_schedule="constant", warmup=0, save_every=5000, val_every=5000, sample_every=5000)
presets = dict(
    # The paper has no CIFAR-10 recipe: FastGen's settings (FID 1.99 reported). They differ from the paper's:
    # features of the teacher at three scales, discriminator weight 1, four fake updates per student update.
    # FastGen trains the fake score without EDM's weight; here with it.
    cifar10=published | dict(
        net="edm:cifar10", data="cifar10-32x32.zip", teacher="edm-cifar10-32x32-cond-vp.pth", batch_size=2048,
        max_iter=100000, update_ratio=4, lr=1e-4, lr_fake=1e-4, lr_disc=1e-4, gan_weight=1e-3,
        gan_d_weight=1.0, gan_features="teacher", gan_taps=(0, 1, 2),
        ema=("ema:0.9999", "ema_99995:0.99995", "ema_9996:0.9996")),
    # The paper's ImageNet-64: 7 x 40 images, bf16 (fp16 diverges), indices 20 .. 980 of 1000 for dm;
    # assumption: 200 k updates of F
    imagenet64=published | dict(
        net="edm:imagenet64", data="imagenet-64x64.zip", teacher="edm-imagenet-64x64-cond-adm.pth",
        batch_size=280, max_iter=240000, lr=2e-6, lr_fake=2e-6, lr_disc=2e-6, amp="bf16", gan_weight=3e-3,
        gan_d_weight=1e-2, gan_taps=(), dm_t_min=0.00323, dm_t_max=72.06, ema=("ema:0.9999",)),
)


def build(cfg):
    if cfg["update_ratio"] < 1:
        raise common.BadInput(f"--update_ratio {cfg['update_ratio']} must be at least 1")
    student, teacher, fake_score = (common.make_net(cfg["net"], label_dim=cfg["classes"]) for _ in range(3))
    teacher.eval().requires_grad_(False)
    nets = dict(student=student.train(), teacher=teacher, fake_score=fake_score.train())
    # values that only step() reads are refused here, before any work
    levels(student, cfg)
    for key, choices in dict(student_input=("simulation", "data"), sampler=("sde", "ode"),
                             gan_loss=("softplus", "hinge"), gan_features=("fake_score", "teacher")).items():
        common.known(f"--{key}", cfg[key], choices)
    for part in "", "dm_":
        common.check_noise(student, cfg["fake_pred"], cfg["fake_weight"], **times(cfg, part))
    if cfg["gan_weight"]:
        nets["discriminator"] = UNetHead(teacher.tap_shapes(taps(teacher, cfg))).train()
    return nets


def init(cfg):
    return dict(teacher=cfg["teacher"], student="teacher", fake_score="teacher")


def optimizers(nets, cfg):
    how = dict(name=cfg["optimizer"], betas=cfg["betas"], weight_decay=cfg["weight_decay"])
    fake = [dict(params=list(nets["fake_score"].parameters()), lr=cfg["lr_fake"])]
    if cfg["gan_weight"]:
        fake.append(dict(params=list(nets["discriminator"].parameters()), lr=cfg["lr_disc"]))
    return dict(student=common.optimizer(nets["student"].parameters(), lr=cfg["lr"], **how),
                fake=common.optimizer(fake, **how))


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
        x0_fake = common.predict(fake_score, x_t, t, cond, "x0")
        x0_teacher = common.predict(teacher, x_t, t, cond, "x0", batch["uncond"], cfg["guidance"])
    dm = common.dmd_loss(x, x0_teacher, x0_fake)
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
    shared = discriminator is not None and cfg["gan_features"] == "fake_score"
    # generate
    with torch.no_grad():
        x = generate(nets["student"], batch, it, cfg)
    # denoising loss of the fake score on it; its features come out of the same pass
    t, eps = draw(x, fake_score.schedule, cfg)
    dsm = common.denoising_loss(fake_score, x, t, eps, cond, cfg["fake_pred"], cfg["fake_weight"],
                                **(dict(taps=taps(fake_score, cfg)) if shared else {}))
    dsm, feats = dsm if shared else (dsm, None)
    dsm = dsm.mean()
    if discriminator is None:
        return dsm, dict(dsm=dsm)
    # discriminator: generated against real
    t_real, eps_real = (t, eps) if cfg["gan_same_noise"] else draw(x0, fake_score.schedule, cfg)
    x0_t = common.add_noise(fake_score.schedule, x0, eps_real, t_real)
    with torch.set_grad_enabled(shared and torch.is_grad_enabled()):    # the teacher's need no graph
        if not shared:
            feats = features(nets, common.add_noise(fake_score.schedule, x, eps, t), t, cond, cfg)
        feats_real = features(nets, x0_t, t_real, cond, cfg)
    logits_real = discriminator(feats_real)
    gan_d = common.gan_loss_d(logits_real, discriminator(feats), cfg["gan_loss"])
    loss, logs = dsm + cfg["gan_d_weight"] * gan_d, dict(dsm=dsm, gan_d=gan_d)
    if cfg["r1_weight"]:
        # approximate R1: the noised sample moves, its noise level does not
        moved = x0_t + cfg["r1_alpha"] * torch.randn_like(x0_t)
        with torch.set_grad_enabled(shared and torch.is_grad_enabled()):
            feats_moved = features(nets, moved, t_real, cond, cfg)
        logs["r1"] = common.r1_approx(logits_real, discriminator(feats_moved))
        loss = loss + cfg["r1_weight"] * logs["r1"]
    return loss, logs


def generate(student, batch, it, cfg):
    """x0 of the student at one of its steps (the same one for the whole batch under simulation)."""
    cond, x0 = batch["cond"], batch["x0"]
    x0_of = lambda x, t: common.predict(student, x, t, cond, "x0")                          # noqa: E731
    ts = levels(student, cfg)
    if cfg["steps"] > 1 and cfg["student_input"] == "data":
        k = torch.randint(cfg["steps"], (len(x0),), device=x0.device)
        t = torch.stack([common.t_like(s, x0) for s in ts[:-1]])[k, torch.arange(len(x0), device=x0.device)]
        return x0_of(common.add_noise(student.schedule, x0, torch.randn_like(x0), t), t)
    # backward simulation: an exit step equal on all ranks; one step is its case k = 0
    k = int(torch.randint(cfg["steps"], (), generator=common.shared_generator(cfg["seed"], it)))
    noise = common.train_noise(x0.shape, x0.device)
    with torch.no_grad():
        x, t = common.rollout(x0_of, noise, ts, student.schedule, cfg["sampler"], k)
    return x0_of(x, t)


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
    net = nets[cfg["gan_features"]]
    return net(x_t, t, cond, taps=taps(net, cfg), stop=True)["taps"]


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise. Refuses a step count it was not trained for."""
    if steps != cfg["steps"]:
        raise common.BadInput(f"this student was trained for {cfg['steps']} steps, not for --steps {steps}; "
                              f"leave --steps out, or train one with --steps {steps}")
    ts = levels(net, cfg)
    x0_of = lambda x, t: common.predict(net, x, t, batch["cond"], "x0")                     # noqa: E731
    return common.few_step(x0_of, noise, ts, net.schedule, cfg["sampler"])
