"""Supervised fine-tuning: denoising score matching / flow matching. Makes teachers, from scratch or from weights.

    x_t = alpha_t x0 + sigma_t eps,  t ~ p(t)
    loss = mean( w(t) |net(x_t, t, c) - target|^2 ),  target and w by prediction type (common.denoising_loss)

Karras 2022 (arXiv 2206.00364) for edm nets: x0 error with w = 1/sigma_data^2 + 1/t^2, which is a unit-weight error of
the raw network; without it (FastGen) low noise levels are hardly trained. Other nets: their own target, weight 1.
With probability cond_dropout a sample's condition is the null condition (Ho 2022), so that guidance works later.

    python train.py methods/sft.py --max_iter 1000           a minute: a teacher for the digits in the making
    python train.py methods/sft.py                           the shipped teacher, assets/README.md has its figures
    torchrun --nproc_per_node 8 train.py methods/sft.py --preset cifar10 --data cifar10-32x32.zip
"""
import torch

import augment
import common

config = dict(
    recipes="sft",
    max_iter=12000,
    batch_size=128,
    lr=1e-3,                     # as EDM for CIFAR-10
    lr_schedule="cosine",
    warmup=200,
    optimizer="adam",            # adamw, adam, radam
    betas=(0.9, 0.999),          # of the optimizer's two moments
    weight_decay=0.0,            # 0 = off
    dropout=0.1,                 # of the net; EDM: 0.13 for CIFAR-10
    cond_dropout=0.1,            # probability of the null condition; 0 = off
    cond_keep=(),                # condition keys that are never dropped; "" = none
    t_dist="lognormal",          # common.t_quantile lists them; edm nets: lognormal
    t_mean=-1.2,                 # of ln t (lognormal) or of the logit (logitnormal)
    t_std=1.2,                   # of the same
    t_shift=5.0,                 # of "shifted"
    t_min=0.0,                   # bounds of t; 0 = the schedule's own
    t_max=0.0,                   # 0 = the schedule's own
    pred="",                     # space of the error: x0, eps, v, flow; "" = the net's own
    loss_weight="",              # "" = edm for x0 errors on edm nets, else unit; common.loss_weight lists them
    logvar=False,                # a learned log-variance per noise level scales the loss (EDM2)
    steps=18,                    # of the Heun sampler: 2 * 18 - 1 = 35 network calls
    ema=("ema:power=0.05",),     # EDM: half_kimg=500
)

presets = dict(
    # Karras 2022, table 7: 200 M images; with EDM's augmentations of CIFAR-10
    cifar10=dict(net="edm:cifar10", data="cifar10-32x32.zip", augment=0.12, dropout=0.13,
                 batch_size=512, max_iter=390625, lr=1e-3, lr_schedule="constant", warmup=19531, cond_dropout=0.0,
                 clip=0.0, ema=("ema:half_kimg=500",), save_every=10000, val_every=10000, sample_every=10000),
    # Karras 2022, table 7: 2500 M images, ADM in fp16
    imagenet64=dict(net="edm:imagenet64", data="imagenet-64x64.zip", dropout=0.1, batch_size=4096, max_iter=610352,
                    lr=1e-4, lr_schedule="constant", warmup=2441, cond_dropout=0.0, clip=0.0, amp="fp16",
                    ema=("ema:half_kimg=50000",), save_every=5000, val_every=5000, sample_every=5000),
)


def build(cfg):
    dim = augment.dim(cfg)
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"],
                              **(dict(augment_dim=dim) if dim else {}), **(dict(logvar=True) if cfg["logvar"] else {}))
    return dict(student=student.train())


def init(cfg):
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), cfg["optimizer"], cfg["lr"], cfg["betas"],
                                         weight_decay=cfg["weight_decay"]))


def step(nets, batch, it, cfg):
    student, x0 = nets["student"], batch["x0"]                          # (B, C, H, W)
    # condition dropout
    cond = common.drop_condition(batch["cond"], batch["uncond"], cfg["cond_dropout"], cfg["cond_keep"])
    # draw t and eps
    t = common.sample_t(len(x0), cfg["t_dist"], student.schedule, x0.device, mean=cfg["t_mean"], std=cfg["t_std"],
                        shift=cfg["t_shift"], t_min=cfg["t_min"], t_max=cfg["t_max"])       # (B,)
    eps = torch.randn_like(x0)
    # denoise and compare
    loss = common.denoising_loss(student, x0, t, eps, cond, cfg["pred"], cfg["loss_weight"],
                                 **(dict(logvar=True) if cfg["logvar"] else {}))            # (B,)
    return loss.mean(), dict(dsm=loss.mean())


def sample(net, noise, batch, cfg, steps):
    """Heun's method with 2 steps - 1 network calls (twice that with guidance); any step count."""
    return common.heun(net, noise, batch["cond"], steps, batch["uncond"], cfg["guidance"])
