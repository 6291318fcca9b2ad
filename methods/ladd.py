"""LADD: latent adversarial diffusion distillation, Sauer 2024 (arXiv 2403.12015). One- to few-step students.

    student G, teacher T (frozen), discriminator D: heads on several of T's features; no other loss
    student:  x = G(z),  x_t = alpha_t x + sigma_t eps
              gan_g  hinge: -D(features(x_t)), through T into G
    fake:     gan_d  hinge: relu(1 + D(features(x_t))) + relu(1 - D(features(x0_t)))
              r1     mean (D(x0_t) - D(x0_t + r1_alpha noise))^2: approximate R1 (APT, arXiv 2501.08316)

The paper's x0 are samples of the teacher (here: what --data holds). Its heads also see t; these find it in
the features. Its t, logit-normal(1, 1) on rf, is lognormal(1, 1) on edm: high noise judges the whole, low
noise the details.

    python train.py methods/ladd.py [--steps 2]               the README's result; --max_iter 600: a short try
"""
import torch

import common
from nets.discriminators import make_head

config = dict(
    recipes="ladd", teacher="assets/digits.pth",
    max_iter=6000, batch_size=64,    # iterations of both phases
    update_ratio=2,                  # updates of the discriminator before each student update; at least 1
    lr=2e-4, lr_disc=4e-3,           # student, discriminator
    lr_schedule="cosine:0.1", warmup=20,        # FastGen: constant, none
    optimizer="adamw", betas=(0.5, 0.99), weight_decay=0.01,        # adamw, adam, radam; moments; 0 = off
    t_list=(2.5, 0.8, 0.4, 0.2),     # noise levels of steps 1, 2, ...; "" = equally spaced, on edm by rho 7
    student_input="data",            # of later steps: data (noised, paper), simulation (own samples)
    sampler="sde",                   # between steps: sde (fresh noise), ode (the noise of the last step)
    t_dist="lognormal",              # noise levels of the features; common.t_quantile lists them
    t_mean=-0.7, t_std=1.2, t_shift=5.0,        # of lognormal and logitnormal, paper: 1, 1; of "shifted"
    t_min=0.02, t_max=10.0,          # bounds of t; 0 = the schedule's own
    gan_loss="hinge",                # hinge (paper), softplus (FastGen)
    gan_taps=(),                     # features with heads; "" = all (paper)
    gan_cond=True,                   # heads see label and text (paper); FastGen's do not
    gan_same_noise=True,             # real samples get the t and eps of the generated ones
    r1_weight=100.0, r1_alpha=0.1,   # of r1, 0 = off (paper); and the size of its perturbation
    ema=("ema:power=0.15",),
)


def build(cfg):
    student, teacher = (common.make_net(cfg["net"], label_dim=cfg["classes"]) for _ in range(2))
    nets = dict(student=student, teacher=teacher.eval().requires_grad_(False))
    # values that only step() reads are refused here, before any work
    levels(student, cfg)
    common.check(cfg, update_ratio=(1, 1e9), student_input=("simulation", "data"), sampler=("sde", "ode"),
                 gan_loss=("softplus", "hinge"))
    common.check_noise(student, **times(cfg))
    common.no_guidance(cfg["guidance"], "LADD")
    nets["discriminator"] = make_head(teacher, taps(teacher, cfg), cfg["gan_cond"])
    return nets


def init(cfg):
    return dict(teacher=cfg["teacher"], student="teacher")


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg),
                fake=common.optimizer(nets["discriminator"].parameters(), **cfg | dict(lr=cfg["lr_disc"])))


def phase(it, cfg):
    return "student" if it % (cfg["update_ratio"] + 1) == cfg["update_ratio"] else "fake"


def step(nets, batch, it, cfg):
    return (student_step if phase(it, cfg) == "student" else fake_step)(nets, batch, it, cfg)


def student_step(nets, batch, it, cfg):
    # generate
    x = generate(nets["student"], batch, it, cfg)                                           # (B, C, H, W)
    # GAN
    t, eps = draw(x, nets["teacher"].schedule, cfg)
    x_t = common.add_noise(nets["teacher"].schedule, x, eps, t)
    gan_g = common.gan_loss_g(logits(nets, x_t, t, batch["cond"], cfg), cfg["gan_loss"])
    return gan_g, dict(gan_g=gan_g)


def fake_step(nets, batch, it, cfg):
    schedule, cond, x0 = nets["teacher"].schedule, batch["cond"], batch["x0"]
    # generate
    with torch.no_grad():
        x = generate(nets["student"], batch, it, cfg)
    # discriminator: generated against real
    t, eps = draw(x, schedule, cfg)
    generated = logits(nets, common.add_noise(schedule, x, eps, t), t, cond, cfg)
    t, eps = (t, eps) if cfg["gan_same_noise"] else draw(x0, schedule, cfg)
    x0_t = common.add_noise(schedule, x0, eps, t)
    real = logits(nets, x0_t, t, cond, cfg)
    loss = common.gan_loss_d(real, generated, cfg["gan_loss"])
    logs = dict(gan_d=loss)
    if cfg["r1_weight"]:
        # approximate R1: the noised sample moves, its noise level does not
        moved = x0_t + cfg["r1_alpha"] * torch.randn_like(x0_t)
        logs["r1"] = common.r1_approx(real, logits(nets, moved, t, cond, cfg))
        loss = loss + cfg["r1_weight"] * logs["r1"]
    return loss, logs


def generate(student, batch, it, cfg):
    """x0 of the student at one of its steps; under simulation an exit step that is equal on all ranks."""
    k = int(torch.randint(cfg["steps"], (), generator=common.shared_generator(cfg["seed"], it)))
    return common.student_call(student, batch["x0"], levels(student, cfg), batch["cond"],
                               cfg["student_input"], cfg["sampler"], k)


def levels(net, cfg):
    return common.t_list(net.schedule, cfg["steps"], cfg["t_list"][:cfg["steps"]])


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"],
                t_min=cfg["t_min"], t_max=cfg["t_max"])


def draw(x, schedule, cfg):
    t = common.sample_t(len(x), schedule=schedule, device=x.device, **times(cfg))           # (B,)
    return t, torch.randn_like(x)


def taps(net, cfg):
    return cfg["gan_taps"] or tuple(range(net.n_taps))


def logits(nets, x_t, t, cond, cfg):
    """D on the teacher's features (B, heads); nothing behind the last tap is computed."""
    teacher = nets["teacher"]
    return nets["discriminator"](teacher(x_t, t, cond, taps=taps(teacher, cfg), stop=True)["taps"], cond)


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise; refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return common.few_step(net, noise, levels(net, cfg), batch["cond"], cfg["sampler"])
