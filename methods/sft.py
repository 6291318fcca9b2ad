"""Supervised fine-tuning: denoising score matching / flow matching. Makes teachers, from scratch or weights.

    x_t = alpha_t x0 + sigma_t eps,  t ~ p(t)
    loss = mean( w(t) |net(x_t, t, c) - target|^2 ),  target and w by prediction type (common.denoising_loss)

Karras 2022 (arXiv 2206.00364) for edm nets: x0 error with w = 1/sigma_data^2 + 1/t^2, a unit-weight error of
the raw network; without it (FastGen) low noise levels are hardly trained. Other nets: own target, weight 1.
cond_dropout is the probability of the null condition per sample (Ho 2022), so that guidance works later.

    python train.py methods/sft.py --max_iter 600             a minute or two: a teacher in the making
    python train.py methods/sft.py                            the shipped teacher (assets/README.md)
    torchrun --nproc_per_node 8 train.py methods/sft.py --preset cifar10 --data cifar10-32x32.zip
"""
import torch

import augment
import common

config = dict(
    recipes="sft", max_iter=5000, batch_size=128,
    lr=1e-3, lr_schedule="cosine", warmup=200,      # the rate is EDM's for CIFAR-10
    optimizer="adam", betas=(0.9, 0.999), weight_decay=0.0,     # adamw, adam, radam; moments; 0 = off
    dropout=0.1,                 # of the net; EDM: 0.13 for CIFAR-10; 0 = off
    cond_dropout=0.1,            # probability of the null condition; 0 = off
    cond_keep=(),                # condition keys that are never dropped; "" = none
    t_dist="lognormal",          # p(t); common.t_quantile lists them
    t_mean=-0.4, t_std=1.2,      # of ln t (lognormal, logt; EDM: -1.2, 1.2) or of the logit (logitnormal)
    t_shift=5.0,                 # of "shifted"
    t_min=0.0, t_max=0.0,        # bounds of t; 0 = the schedule's own
    pred="",                     # space of the error: x0, eps, v, flow; "" = the net's own
    loss_weight="",              # "" = edm for x0 errors on edm nets, else unit; see common.loss_weight
    logvar=False,                # a learned log-variance per noise level scales the loss (EDM2)
    steps=18,                    # of the family's sampler; Heun's: 2 * 18 - 1 = 35 network calls
    ema=("ema:power=0.05",),     # EDM: half_kimg=500
)

published = dict(t_mean=-1.2, save_every=10000, val_every=10000, sample_every=10000)
presets = dict(
    # Karras 2022, table 7: 200 M images; with EDM's augmentations, flips among them
    cifar10=published | dict(
        net="edm:cifar10", data="cifar10-32x32.zip", augment=0.12, dropout=0.13, batch_size=512,
        max_iter=390625, lr=1e-3, lr_schedule="constant", warmup=19531, cond_dropout=0.0, clip=0.0,
        ema=("ema:half_kimg=500",)),
    # Karras 2022, table 7: 2500 M images, ADM in fp16
    imagenet64=published | dict(
        net="edm:imagenet64", data="imagenet-64x64.zip", dropout=0.1, batch_size=4096, max_iter=610352,
        lr=1e-4, lr_schedule="constant", warmup=2441, cond_dropout=0.0, clip=0.0, amp="fp16",
        ema=("ema:half_kimg=50000",)),
)


def build(cfg):
    options = dict(augment_dim=augment.dim(cfg), logvar=cfg["logvar"])
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"],
                              **{k: v for k, v in options.items() if v})
    # values that only step() reads are refused here, before any work
    common.check(cfg, cond_dropout=(0, 1))
    common.check_noise(student, cfg["pred"], cfg["loss_weight"], **times(cfg))
    return dict(student=student.train())


def init(cfg):
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0 = nets["student"], batch["x0"]                                              # (B, C, H, W)
    # condition dropout
    cond = common.drop_condition(batch["cond"], batch["uncond"], cfg["cond_dropout"], cfg["cond_keep"])
    # draw t and eps
    t = common.sample_t(len(x0), schedule=student.schedule, device=x0.device, **times(cfg))     # (B,)
    eps = torch.randn_like(x0)
    # denoise and compare
    kw = dict(logvar=True) if cfg["logvar"] else {}
    dsm = common.denoising_loss(student, x0, t, eps, cond, cfg["pred"], cfg["loss_weight"], **kw).mean()
    return dsm, dict(dsm=dsm)


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"],
                t_min=cfg["t_min"], t_max=cfg["t_max"])


def sample(net, noise, batch, cfg, steps):
    """As its samples will be drawn when it is a teacher: by the public pipeline's sampler where the net's
    family has one, else by Heun's (2 steps - 1 network calls, twice that with guidance); any step count."""
    return common.teacher_sample(net, noise, batch["cond"], steps, batch["uncond"], cfg["guidance"])
