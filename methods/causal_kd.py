"""Causal distillation on a teacher's ODE (CausVid, arXiv 2412.07772): makes the student that DMD starts from.

    offline  x_t of a whole clip at t = t_1 > t_2 > ... on the teacher's ODE from sigma z,  x0 where it ends
    loss     0.5 mean (G(x_t, t) - x0)^2,  t a random step of the student for every chunk, or 0 (clean, and
             left out of the mean), G read out as x0, in one pass under the block-causal mask

A bidirectional teacher's x0 depends on the noise of later chunks, which G does not see: it learns a mean, and
the loss has a floor. A causal teacher's (Causal Forcing, arXiv 2602.02214) is a function of what G sees, if
the chunks before are clean: pairs "chunk" hold, chunk by chunk, the states that follow from clean chunks of
the data, the last at t = 0; one random chunk is then noisy, and the loss is its own. tools/make_pairs.py
makes the data, guidance in them; a causal net makes "chunk", another "clip".

    python tools/make_pairs.py --net wan:digits,chunk=2 --teacher assets/moving_digits_causal.pth
        --data moving_digits --path_t 0.999,0.9375,0.8333,0.625 --pairs 8000 --steps 12
        --out outputs/pairs/moving_digits
    python train.py methods/causal_kd.py                            moving digits
"""
import torch

import common

config = dict(
    recipes="causal_kd", net="wan:digits",
    data="outputs/pairs/moving_digits",         # a folder of tools/make_pairs.py
    teacher="assets/moving_digits_causal.pth",         # where the student starts; "" = drawn at random
    chunk=2, steps=4,                # frames made at once (paper: 3), and the steps of each chunk
    guidance=1.0,                    # that of the pairs; another value is refused
    pairs="chunk",                   # chunk (a causal teacher's), clip (a bidirectional one's)
    mask_clean=True,                 # clean frames are left out of the mean (clip; FastGen keeps them in)
    max_iter=3000, batch_size=16, lr=1e-3, lr_schedule="cosine", warmup=100,
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    t_list=(0.999, 0.9375, 0.8333, 0.625),      # times of steps 1, 2, ...; the pairs have states there
    context_noise=0.0,               # t of the finished chunks in the sampler's cache
    window=8, sink=0,                # frames it sees, its own included, and first ones besides; 0 = all
    ema=("ema:power=0.1",),
)

presets = dict(
    # CausVid's wan_causal_ode: 1.5 k pairs at guidance 6 and 50 Euler steps (theirs at shift 8), 128 clips
    wan=dict(net="wan:t2v_1_3b", data="outputs/pairs/wan", teacher="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
             chunk=3, window=0, pairs="clip", guidance=6.0, steps=3, t_list=(0.999, 0.757, 0.522),
             batch_size=128, lr=2e-6, lr_schedule="constant", warmup=0, amp="bf16", parallel="fsdp",
             recompute=True, save_every=500, val_every=0, sample_every=500),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], chunk=cfg["chunk"])
    # values that only step() reads are refused here, before any work
    levels(student, cfg)
    common.check(cfg, pairs=("chunk", "clip"))
    common.check_window(student, cfg["window"], cfg["sink"])
    return dict(student=student.train())


def check(data, nets, cfg):
    """Pairs that are not of the student's times, schedule and guidance are refused, before any work."""
    net, hint = nets["student"], f" (--pairs {cfg['pairs']})"
    common.check_pairs(data, "causal_kd", cfg["net"], levels(net, cfg)[:-1], hint, schedule=net.schedule,
                       guidance=cfg["guidance"], chunk=net.chunk if cfg["pairs"] == "chunk" else 0)


def init(cfg):
    return dict(student=cfg["teacher"]) if cfg["teacher"] else {}


def optimizers(nets, cfg):
    return dict(student=common.optimizer(nets["student"].parameters(), **cfg))


def step(nets, batch, it, cfg):
    student, x0, y = nets["student"], batch["x0"], batch["x0"]                              # (B, C, F, H, W)
    # a random step of the student in every chunk, or none: clean
    ts = levels(student, cfg)
    if cfg["pairs"] == "clip":
        k = per_chunk(len(ts), x0, student)                                                 # (B, F)
        weight = common.over_frames(k < len(ts) - 1)
    else:
        clean, own = common.split_at_chunk(x0, student.chunk)
        k = torch.where(clean, len(ts) - 1, per_chunk(len(ts) - 1, x0, student))
        y, weight = batch["path"][:, -1], common.over_frames(own)
    # from the teacher's state
    x_t, t = state(batch, ts, k)
    # regression
    error = common.predict(student, x_t, t, batch["cond"], "x0") - y
    if cfg["mask_clean"] or cfg["pairs"] == "chunk":
        error = common.expand(weight.sqrt(), error) * error
    kd = 0.5 * error.square().mean()
    return kd, dict(kd=kd)


def levels(net, cfg):
    return common.t_list(net.schedule, cfg["steps"], cfg["t_list"][:cfg["steps"]])


def per_chunk(n, x, net):
    return common.per_chunk(lambda m: torch.randint(n, (m,), device=x.device), x, net.chunk)


def state(batch, ts, k):
    """The teacher's state x_t (B, C, F, H, W) at the student's times ts[k], frame by frame, at the last x0;
    and its exact t (B, F)."""
    rows = torch.cat([batch["path"], batch["x0"][:, None]], 1)              # (B, P + 1, C, F, H, W)
    path_t = batch["path_t"]                                                # (P,)
    at = [(path_t - t).abs().argmin() for t in ts[:-1]]
    at = torch.stack([*at, torch.full_like(at[0], len(path_t))])[k]         # (B, F): in rows
    b, f = (torch.arange(n, device=k.device) for n in k.shape)
    return rows[b[:, None], at, :, f].transpose(1, 2), torch.cat([path_t, 0 * path_t[:1]])[at]


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise, in every chunk. Refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return common.causal_rollout(net, noise, levels(net, cfg), batch["cond"], "sde", window=cfg["window"],
                                 sink=cfg["sink"], context_noise=cfg["context_noise"],
                                 first=batch["cond"].get("first_frame"))
