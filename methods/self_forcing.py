"""Self-Forcing, Huang 2025 (arXiv 2506.08009): a causal few-step student, trained on its own rollouts.

    student G (causal), teacher T and fake score F (bidirectional), optionally a discriminator D on features
    x        chunk after chunk: G's few-step sampler to a random step, the same in all chunks, context being
             the KV cache of what it made before; gradient through that last call of each chunk alone
    student  dm     gradient w (F(x_t) - T(x_t)) on x,  w = 1 / mean|x - T(x_t)| per clip  (x0 predictions)
             gan_g  softplus(-D(features(x_t')))
    fake     dsm    denoising loss of F on x, of the flow
             gan_d  softplus(D(features(x_t))) + softplus(-D(features(x0_t)))

t is one value per clip. Without the GAN (as published) the data give conditions and the clip's shape alone.
With frames_max above the data's frames, rollouts have a random number of further chunks and the last window
is scored; its first chunk is context without a gradient, its first frame encoded anew as an image where there
is a VAE. The authors' code adds 0.5 % noise to the context at t = 0 and lets a gradient into the cache.

    python train.py methods/self_forcing.py                         moving digits
    torchrun --nproc_per_node 8 train.py methods/self_forcing.py --preset wan --data latents/{000..099}.tar
"""
import torch

import common
from nets import encoders
from nets.discriminators import make_head

config = dict(
    recipes="self_forcing", net="wan:digits", data="moving_digits", teacher="assets/moving_digits.pth",
    student="assets/moving_digits_causal.pth", fake_score="",     # where they start; "" = the teacher
    teacher_net="",                  # the teacher's, where it is another one; "" = net
    chunk=2, steps=4,                # frames made at once (paper: 3, or 1), and the steps of each chunk
    max_iter=1800, batch_size=16,    # 300 student updates
    update_ratio=5,                  # fake updates before each student update; at least 1
    lr=5e-4, lr_fake=1e-3, lr_disc=2e-4,        # student, fake score, discriminator
    optimizer="adamw", betas=(0.0, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    t_list=(0.999, 0.9375, 0.8333, 0.625),      # times of steps 1, 2, ...: 1, .75, .5, .25, shifted by 5
    sampler="sde",                   # between steps: sde (fresh noise), ode (the noise of the last step)
    last_step_only=False, grad_chunks=0,        # exit at the last step; chunks with a gradient, 0 = all
    context_noise=0.0,               # t of the finished chunks in the cache
    window=8, sink=0,                # frames a chunk sees, and first frames it sees besides; 0 = all
    frames_max=16,                   # longest rollout; 0 = the data's frames
    first_frame=False,               # clips go on from the data's first frame, cond["first_frame"]
    t_dist="shifted",                # noise levels of dm, dsm and GAN; common.t_quantile lists them
    t_mean=0.0, t_std=1.0, t_shift=5.0,         # of lognormal and logitnormal; of "shifted"
    t_min=0.02, t_max=0.98,          # t is clamped to these: w explodes where nothing is left to predict
    fake_pred="flow", fake_weight="",           # space (x0, eps, v, flow) and weight of dsm; "" = as sft.py
    guidance_skip=(),                # blocks that the teacher's unconditional pass skips; "" = none
    gan_weight=0.0,                  # of gan_g; FastGen: 3e-3; 0 = no GAN
    gan_d_weight=1.0,                # of gan_d; 0 = the discriminator does not learn
    gan_taps=(),                     # features of the fake score for the discriminator; "" = the last
    ema=("ema:0.99",),
)

presets = dict(
    # The authors' self_forcing_dmd: 64 clips of 21 frames, 600 iterations = 120 student updates, average from
    # iteration 200; their guidance 3 is 4 here. --student: of an ODE regression (causal_kd.py)
    wan=dict(net="wan:t2v_1_3b", data="clips-480p", teacher_net="wan:t2v_14b",
             teacher="Wan-AI/Wan2.1-T2V-14B-Diffusers",
             student="outputs/fewstep/wan/causal_kd_wan", fake_score="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
             chunk=3, window=0, frames_max=0, guidance=4.0, batch_size=64, max_iter=720, lr=2e-6,
             lr_fake=4e-7, amp="bf16", parallel="fsdp", recompute=True, save_every=60, val_every=0,
             sample_every=60),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], chunk=cfg["chunk"])
    teacher, fake_score = (common.make_net(spec or cfg["net"], label_dim=cfg["classes"], chunk=0)
                           for spec in (cfg["teacher_net"], ""))
    nets = dict(student=student, teacher=teacher.eval().requires_grad_(False), fake_score=fake_score)
    # values that only step() reads are refused here, before any work
    if not student.chunk or teacher.chunk or fake_score.chunk:
        raise common.BadInput(f"--chunk {cfg['chunk']} must be above 0 and is the student's alone; --net "
                              f"{cfg['net']} and --teacher_net take none")
    levels(student, cfg)
    common.check(cfg, update_ratio=(1, 1e9), sampler=("sde", "ode"))
    common.check_noise(teacher, cfg["fake_pred"], cfg["fake_weight"], **times(cfg))
    if cfg["gan_weight"]:
        nets["discriminator"] = make_head(fake_score, taps(fake_score, cfg))
    return nets


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
    x = generate(nets["student"], batch, it, cfg)                                           # (B, C, F, H, W)
    # distribution matching: both scores at the re-noised sample, no graph
    t, eps = draw(x, teacher.schedule, cfg)
    with torch.no_grad():
        x_t = common.add_noise(teacher.schedule, x, eps, t)
        x0_fake = common.predict(fake_score, x_t, t, cond, "x0")
        x0_teacher = common.predict(teacher, x_t, t, cond, "x0", batch["uncond"], cfg["guidance"],
                                    dict(skip=cfg["guidance_skip"]))
    dm = common.dmd_loss(x, x0_teacher, x0_fake)
    if not cfg["gan_weight"]:
        return dm, dict(dm=dm)
    # GAN: at a noise level of its own
    t, eps = draw(x, teacher.schedule, cfg)
    x_t = common.add_noise(teacher.schedule, x, eps, t)
    gan_g = common.gan_loss_g(nets["discriminator"](features(nets, x_t, t, cond, cfg)))
    return dm + cfg["gan_weight"] * gan_g, dict(dm=dm, gan_g=gan_g)


def fake_step(nets, batch, it, cfg):
    fake_score, cond, x0 = nets["fake_score"], batch["cond"], batch["x0"]
    discriminator = nets.get("discriminator") if cfg["gan_d_weight"] else None
    # generate
    with torch.no_grad():
        x = generate(nets["student"], batch, it, cfg)
    # denoising loss of the fake score on it; the features are of the same pass, which saves one
    t, eps = draw(x, fake_score.schedule, cfg)
    own = dict(taps=taps(fake_score, cfg)) if discriminator else {}
    dsm = common.denoising_loss(fake_score, x, t, eps, cond, cfg["fake_pred"], cfg["fake_weight"], **own)
    if not discriminator:
        return dsm.mean(), dict(dsm=dsm.mean())
    # discriminator: generated against real
    (dsm, feats), (t, eps) = dsm, draw(x0, fake_score.schedule, cfg)
    x0_t = common.add_noise(fake_score.schedule, x0, eps, t)
    gan_d = common.gan_loss_d(discriminator(features(nets, x0_t, t, cond, cfg)), discriminator(feats))
    return dsm.mean() + cfg["gan_d_weight"] * gan_d, dict(dsm=dsm.mean(), gan_d=gan_d)


def generate(student, batch, it, cfg):
    """The last frames of a rollout, as many as the data have, to a random step that all ranks share."""
    b, c, frames, *size = batch["x0"].shape
    shared = common.shared_generator(cfg["seed"], it)
    call, more = (int(torch.randint(n, (), generator=shared)) for n in (
        cfg["steps"], max(cfg["frames_max"] - frames, 0) // student.chunk + 1))
    noise = common.train_noise((b, c, frames + more * student.chunk, *size), batch["x0"].device)
    # of a longer clip the window's first chunk gets no gradient
    most = (frames - 1) // student.chunk if more else cfg["grad_chunks"]
    x = rollout(student, noise, batch["cond"], cfg, call=cfg["steps"] - 1 if cfg["last_step_only"] else call,
                grad_chunks=min(most, cfg["grad_chunks"] or most))
    first, rest = x[:, :, :1 - frames], x[:, :, 1 - frames:]
    return torch.cat([encoders.last_frame(first, cfg), rest], 2) if more else x


def rollout(net, noise, cond, cfg, **kw):
    """Training's and sampling's: the cache, the steps and what a chunk sees are the same."""
    return common.causal_rollout(net, noise, levels(net, cfg), cond, cfg["sampler"], window=cfg["window"],
                                 sink=cfg["sink"], context_noise=cfg["context_noise"],
                                 first=cond.get("first_frame"), **kw)


def levels(net, cfg):
    return common.t_list(net.schedule, cfg["steps"], cfg["t_list"][:cfg["steps"]])


def times(cfg):
    return dict(dist=cfg["t_dist"], mean=cfg["t_mean"], std=cfg["t_std"], shift=cfg["t_shift"])


def draw(x, schedule, cfg):
    t = common.sample_t(len(x), schedule=schedule, device=x.device, **times(cfg))           # (B,)
    return t.clamp(cfg["t_min"], cfg["t_max"]), torch.randn_like(x)


def taps(net, cfg):
    return cfg["gan_taps"] or (net.n_taps - 1,)


def features(nets, x_t, t, cond, cfg):
    return nets["fake_score"](x_t, t, cond, taps=taps(nets["fake_score"], cfg), stop=True)["taps"]


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise, in every chunk; refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return rollout(net, noise, batch["cond"], cfg)
