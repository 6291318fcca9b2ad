"""TCM: truncated consistency models, Lee 2024 (arXiv 2410.14895). Two stages, two runs. Any step count.

    stage 1    ordinary consistency training over all noise levels, r of t by ECT's map (see cm.py)
    stage 2    on [t', t_max] alone, from stage 1's student; T = that student, frozen
               f(x, t) = student(x, t) where t >= t', else T(x, t)
               x_t = alpha_t x0 + sigma_t eps,  x_r the same at r < t, by the map at its cap
               l = w(t, r) rho(|student(x_t, t) - sg[f(x_r, r)]|)
               loss = mean of l over the interior, t ~ log-Student-t,
                      + boundary_weight mean of l at the boundary, t = t', so r < t'

Boundary samples are boundary_prob of each slice, rounded down; of a slice too small for one, one by chance,
so often that the mean is right. They hold the student to T: a constant has no other loss. Without dropout a
sample of x_r goes through the one net it needs; with it both nets see the whole batch, so that all passes
share their masks (T has dropout too). FastGen's stage 2 goes through the map's stages again.

    python train.py methods/tcm.py && python train.py methods/tcm.py --preset stage2     both stages
    python train.py methods/tcm.py --preset stage2 --stage1 outputs/fewstep/digits/cm#ema   after cm.py
    torchrun --nproc_per_node 8 train.py methods/tcm.py --preset cifar10_stage1          then --preset cifar10
"""
import torch

import common

config = dict(
    recipes="tcm",
    stage1="",                       # student of stage 1, path[#entry]; "" = this run is stage 1
    teacher="assets/digits.pth",     # stage 1: the student's start; "" = from scratch
    max_iter=8000, batch_size=64,
    lr=1e-3, lr_schedule="cosine:0.01", warmup=100,     # paper: constant
    optimizer="radam", betas=(0.9, 0.99), weight_decay=0.0,         # adamw, adam, radam; moments; 0 = off
    dropout=0.0,                     # of the nets; paper: 0.2 for CIFAR-10; 0 = off
    t_dist="lognormal",              # p(t) of stage 1; common.t_quantile lists them
    t_mean=-0.4, t_std=1.6,          # of ln t (lognormal, logt; paper: -1.1, 2.0), or of the logit
    t_shift=5.0,                     # of "shifted"
    t_min=0.0, t_max=0.0,            # bounds of t; 0 = the schedule's own; t_max also in stage 2
    tail_t_dist="logt", tail_t_mean=0.0, tail_t_std=0.2,            # p(t) of stage 2, from t' up
    transition=1.0,                  # t'
    boundary_prob=0.25, boundary_weight=0.1,    # part of the batch at t', 0 = none; weight of its loss
    q=2.0,                           # 1 - r / t is q^-(stage + 1) at high noise
    kimg_per_stage=64,               # thousands of images per stage of the map
    ratio_cap=0.99,                  # r / t at high noise, at most, and in stage 2; paper: 0.999 for CIFAR-10
    huber_c=0.0,                     # rho(d) = sqrt(d^2 + c^2) - c; 0 = d: it learns medians, large c means
    loss_weight="gap",               # 1 / (t - r); common.consistency_loss lists others
    t_list=(80.0, 1.0),              # noise levels of the sampler's steps, where it has as many
    ema=("ema:power=0.1",),
)

cifar10 = dict(
    net="edm:cifar10", data="cifar10-32x32.zip", classes=0, teacher="edm-cifar10-32x32-uncond-vp.pth",
    lr=1e-4, lr_schedule="constant", warmup=0, betas=(0.9, 0.999), clip=0.0, tf32=False, dropout=0.2,
    t_mean=-1.1, t_std=2.0, ratio_cap=0.999, huber_c=1e-8, batch_size=512, kimg_per_stage=12800,
    save_every=5000, val_every=5000, sample_every=5000,
    ema=("ema:0.9999", "ema_99995:0.99995", "ema_9996:0.9996"))
presets = dict(
    stage2=dict(stage1="outputs/fewstep/digits/tcm#ema", max_iter=3000, lr=1e-4, huber_c=2.0),
    # the paper's, as its code has them: 25 k iterations per stage of the map; assumption: 350 k in all
    cifar10_stage1=cifar10 | dict(max_iter=350000),
    cifar10=cifar10 | dict(stage1="outputs/fewstep/cifar10-32x32/tcm_cifar10_stage1", batch_size=1024,
                           max_iter=300000, lr=5e-5),
)


def build(cfg):
    student, stage1 = (common.make_net(cfg["net"], label_dim=cfg["classes"], dropout=cfg["dropout"])
                       for _ in range(2))
    # values that only step() reads are refused here, before any work
    common.check(cfg, q=(1.001, 1e9), kimg_per_stage=(1, 1e9), ratio_cap=(0, 0.99999), huber_c=(0, 100),
                 transition=(1e-6, 1e9), boundary_prob=(0, 0.999), loss_weight=common.consistency_weights)
    common.no_guidance(cfg["guidance"], "TCM")
    common.check_noise(student, **times(cfg, "tail_" if cfg["stage1"] else ""))
    for steps in (cfg["steps"], len(cfg["t_list"]) or 1):
        if levels(student, cfg, steps)[-2] < cfg["transition"] and cfg["stage1"]:
            raise common.BadInput(f"--t_list {cfg['t_list']} goes below --transition {cfg['transition']}, "
                                  "where stage 2 does not train")
    nets = dict(student=student.train())
    return nets | dict(stage1=stage1.train().requires_grad_(False)) if cfg["stage1"] else nets


def init(cfg):
    if cfg["stage1"]:
        return dict(stage1=cfg["stage1"], student="stage1")
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    return (stage2_step if cfg["stage1"] else stage1_step)(nets, batch, it, cfg)


def stage1_step(nets, batch, it, cfg):
    student, x0, cond = nets["student"], batch["x0"], batch["cond"]                         # (B, C, H, W)
    # draw t and eps; r by the curriculum
    t = common.sample_t(len(x0), schedule=student.schedule, device=x0.device, **times(cfg))
    ratio = common.ect_ratio(it * cfg["batch_size"], cfg["q"], cfg["kimg_per_stage"], cfg["ratio_cap"])
    r = common.ect_r(student.schedule, t, ratio)                                            # (B,)
    # predict; at r = 0 the target is the data
    f_t, x_r = predict(student, x0, t, r, cond)
    with torch.no_grad():
        f_r = common.predict(student, x_r, r, cond, "x0")
    f_r = torch.where(common.expand(r, x_r) > 0, f_r, x_r)
    # compare
    cm = compare(student, f_t, f_r, t, r, cfg).mean()
    return cm, dict(cm=cm)


def stage2_step(nets, batch, it, cfg):
    student, stage1, x0, cond = nets["student"], nets["stage1"], batch["x0"], batch["cond"]
    # draw t, boundary first, and r; on the CPU, which must know how many samples each net gets
    n, count = boundary(len(x0), cfg)
    t = common.sample_t(len(x0), schedule=student.schedule, device="cpu", **times(cfg, "tail_"))
    t[:n] = cfg["transition"]
    r = common.ect_r(student.schedule, t, cfg["ratio_cap"])
    # those whose target is stage 1's come first, boundary items before the others
    below = r < cfg["transition"]
    order, split = below.logical_not().long().argsort(stable=True), int(below.sum())
    t, r = (s[order].to(common.t_like(0, x0), non_blocking=True) for s in (t, r))           # (B,)
    # predict
    f_t, x_r = predict(student, x0, t, r, cond)
    with torch.no_grad():
        f_r = targets(student, stage1, x_r, r, cond, split, cfg["dropout"])
    # compare
    loss = compare(student, f_t, f_r, t, r, cfg)
    at_boundary, interior = loss[:n].sum() / (count or 1), loss[n:].sum() / (len(x0) - count)
    return interior + cfg["boundary_weight"] * at_boundary, dict(cm=interior, boundary=at_boundary)


def boundary(size, cfg):
    """Number of boundary samples of a slice, and the one to divide by: the same, or on average if below 1."""
    mean = size * cfg["boundary_prob"]
    return (int(mean), int(mean)) if mean >= 1 else (int(torch.rand(()) < mean), mean)


def predict(student, x0, t, r, cond):
    """Noise x0 to t and r by one eps; -> f(x_t, t) and x_r. The dropout masks come again afterwards. The pass
    with gradient comes first, as autocast keeps what it has cast."""
    eps = torch.randn_like(x0)
    x_t, x_r = (common.add_noise(student.schedule, x0, eps, s) for s in (t, r))
    with common.repeated(x0.device):
        return common.predict(student, x_t, t, cond, "x0"), x_r


def targets(student, stage1, x_r, r, cond, split, dropout):
    """f(x_r, r): of stage 1 for the first `split` samples, of the student for the rest. Both are called."""
    if dropout:
        with common.repeated(x_r.device):
            early = common.predict(stage1, x_r, r, cond, "x0")
        return torch.cat([early[:split], common.predict(student, x_r, r, cond, "x0")[split:]])
    return torch.cat([common.predict(net, x_r[part], r[part], {k: v[part] for k, v in cond.items()}, "x0")
                      for net, part in ((stage1, slice(split)), (student, slice(split, None)))])


def compare(net, f_t, f_r, t, r, cfg):
    return common.consistency_loss(f_t, f_r, net.schedule, t, r, cfg["loss_weight"], cfg["huber_c"],
                                   sigma_data=getattr(net, "sigma_data", 0.5))              # (B,)


def levels(net, cfg, steps):
    """Those of t_list if it has as many; else, and after stage 2 none is below t', from t_max to t'."""
    given, top = tuple(t for t in cfg["t_list"] if t)[:steps], cfg["t_max"] or common.t_range(net.schedule)[1]
    if len(given) < steps and cfg["stage1"]:
        given = common.karras(steps, cfg["transition"], top).tolist()
    return common.t_list(net.schedule, steps, given if len(given) == steps else (), cfg["t_max"])


def times(cfg, part=""):
    return dict(dist=cfg[f"{part}t_dist"], mean=cfg[f"{part}t_mean"], std=cfg[f"{part}t_std"],
                shift=cfg["t_shift"], t_min=cfg["transition" if part else "t_min"], t_max=cfg["t_max"])


def sample(net, noise, batch, cfg, steps):
    """From pure noise, noised again between the steps; any step count."""
    return common.few_step(net, noise, levels(net, cfg, steps), batch["cond"])
