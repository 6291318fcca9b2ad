"""Causal fine-tuning: a block-causal video net learns to denoise a chunk given the earlier ones.

    x_t = alpha_t x0 + sigma_t eps,  t ~ p(t) of its own for every chunk of frames
    loss = mean( w(t) |net(x_t, t, c) - target|^2 ),  one pass under the block-causal mask

forcing "diffusion" (Chen 2024, arXiv 2407.01392): context is as noisy as its own t has it. Clean context,
which is what the sampler shows, has no weight in that, so clean_prefix of the clips start with a random
number of clean chunks (t = 0) that the loss leaves out. "teacher": a random chunk is noisy, those before it
are clean, the loss is its own. That is the loss of the clean|noisy double sequence of Causal Forcing (arXiv
2602.02214), with its gradient through the clean context (keys read from a cache would train no net to write
them), but one chunk of n a pass, where the double sequence has all n for twice the tokens.
With one chunk of all frames this is methods/sft.py. cond_dropout: there, too.

    python train.py methods/causal_sft.py                           the causal teacher of the moving digits
    torchrun --nproc_per_node 8 train.py methods/causal_sft.py --net wan:t2v_1_3b --chunk 3 --data DATA
"""
import math

import torch

import common

config = dict(
    recipes="causal_sft", net="wan:digits", data="moving_digits",
    teacher="",                  # weights to start from, of a bidirectional net too; "" = drawn at random
    chunk=2,                     # frames that are denoised together; Wan: 3
    max_iter=15000, batch_size=16,      # a batch of 32 gets less far in the same time
    lr=4e-3, lr_schedule="cosine", warmup=200,
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    dropout=0.0,                 # of the net; 0 = off
    cond_dropout=0.1,            # probability of the null condition; 0 = off
    cond_keep=("first_frame",),  # condition keys that are never dropped; "" = none
    forcing="diffusion",         # diffusion, teacher
    clean_prefix=0.5,            # probability of a clean beginning (diffusion); 0 = off
    t_dist="shifted",            # p(t); common.t_quantile lists them
    t_mean=0.0, t_std=1.0,       # of ln t (lognormal, logt) or of the logit (logitnormal)
    t_shift=3.0,                 # of "shifted", and of the sampler's steps; Wan: 5
    t_min=0.0, t_max=0.0,        # bounds of t; 0 = the schedule's own
    pred="",                     # space of the error: x0, eps, v, flow; "" = the net's own
    loss_weight="",              # "" = unit; bell (Self-Forcing's code: middle times); see common.loss_weight
    steps=32,                    # of the sampler (DDIM), in every chunk
    context_noise=0.0,           # t of the finished chunks in the sampler's cache
    window=8, sink=0,            # frames it sees, its own included, and first ones besides; 0 = all
    ema=("ema:power=0.05",),
)

presets = dict(
    # Causal Forcing's ar_diffusion, the teacher of causal pairs: at least 2000 iterations of up to 64 clips
    wan=dict(net="wan:t2v_1_3b", data="clips-480p", teacher="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", chunk=3,
             window=0, forcing="teacher", loss_weight="bell", t_shift=5.0, cond_dropout=0.0, batch_size=64,
             max_iter=2000, lr=2e-6, lr_schedule="constant", warmup=0, betas=(0.0, 0.999), guidance=6.0,
             steps=50, amp="bf16", parallel="fsdp", recompute=True, save_every=500, val_every=0,
             sample_every=500),
)


def build(cfg):
    options = dict(label_dim=cfg["classes"], dropout=cfg["dropout"])
    student = common.make_net(cfg["net"], chunk=cfg["chunk"], **options)
    # values that only step() reads are refused here, before any work
    common.check(cfg, cond_dropout=(0, 1), clean_prefix=(0, 1), forcing=("diffusion", "teacher"))
    common.check_window(student, cfg["window"], cfg["sink"])
    common.check_noise(student, cfg["pred"], cfg["loss_weight"].replace("bell", ""), **times(cfg))
    return dict(student=student.train())


def init(cfg):
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0 = nets["student"], batch["x0"]                                              # (B, C, F, H, W)
    # condition dropout
    cond = common.drop_condition(batch["cond"], batch["uncond"], cfg["cond_dropout"], cfg["cond_keep"])
    # draw t, of its own for every chunk, and eps
    params = dict(schedule=student.schedule, device=x0.device) | times(cfg)
    t = common.per_chunk(lambda n: common.sample_t(n, **params), x0, student.chunk)         # (B, F)
    eps = torch.randn_like(x0)
    # clean context
    t, weight = forced(x0, t, student, cfg)
    # denoise and compare
    if cfg["loss_weight"] == "bell":
        weight = weight * bell_of(t, student.schedule, cfg)
    dsm = common.denoising_loss(student, x0, t, eps, cond, cfg["pred"],
                                cfg["loss_weight"].replace("bell", ""), weight).mean()
    return dsm, dict(dsm=dsm)


def forced(x0, t, student, cfg):
    """t (B, F), 0 where the context is clean, and the weight of each frame's error (B, F)."""
    if cfg["forcing"] == "diffusion" and not cfg["clean_prefix"]:
        return t, torch.ones_like(t)
    clean, own = common.split_at_chunk(x0, student.chunk)
    if cfg["forcing"] == "diffusion":
        clean = clean & (torch.rand(len(x0), 1, device=x0.device) < cfg["clean_prefix"])
        own = ~clean
    return torch.where(clean, 0.0, t), common.over_frames(own)


def bell_of(t, schedule, cfg):
    """exp(-2 (t - 1/2)^2) less its value at t = 1, over its mean under p(t)."""
    u = torch.linspace(0, 0.999, 1000, dtype=t.dtype, device=t.device)
    bell = lambda t: torch.exp(-2 * (t - 0.5) ** 2) - math.exp(-0.5)                        # noqa: E731
    return bell(t) / bell(common.t_quantile(u, schedule=schedule, **times(cfg))).mean()


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"],
                t_min=cfg["t_min"], t_max=cfg["t_max"])


def sample(net, noise, batch, cfg, steps):
    """DDIM in every chunk, with guidance; any step count."""
    u = torch.arange(steps, 0, -1, dtype=torch.float64, device="cpu") / steps
    ts = (common.t_range(net.schedule)[1] * cfg["t_shift"] * u / (1 + (cfg["t_shift"] - 1) * u)).tolist()
    return common.causal_rollout(net, noise, [*ts, 0.0], batch["cond"], "ode", window=cfg["window"],
                                 sink=cfg["sink"], context_noise=cfg["context_noise"],
                                 first=batch["cond"].get("first_frame"), uncond=batch["uncond"],
                                 guidance=cfg["guidance"])
