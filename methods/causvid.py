"""CausVid, Yin 2024 (arXiv 2412.07772): a causal few-step student, trained on noised data.

    student G (causal), teacher T and fake score F (bidirectional), optionally a discriminator D on features
    x        G of a clip of the data, each chunk noised to a step of its own (the last of them: not at all),
             in one pass under the block-causal mask, with gradient through all frames
    student  dm     gradient w (F(x_t) - T(x_t)) on x,  w = 1 / mean|x - T(x_t)| per clip  (x0 predictions)
             gan_g  softplus(-D(features(x_t')))
    fake     dsm    denoising loss of F on x, of the flow
             gan_d  softplus(D(features(x_t))) + softplus(-D(features(x0_t)))

t is one value per clip. The sampler sees finished chunks of its own through the KV cache, training sees
noised ones of the data: methods/self_forcing.py closes that gap. clean_prefix of the clips (paper: none) are
clean before a random chunk, which brings training half-way: less drift at the end of the moving digits.

    python train.py methods/causvid.py                              moving digits
    torchrun --nproc_per_node 8 train.py methods/causvid.py --preset wan --data latents/{000..099}.tar
"""
import torch

import common
from nets.discriminators import make_head

config = dict(
    recipes="causvid", net="wan:digits", data="moving_digits", teacher="assets/moving_digits.pth",
    student="assets/moving_digits_causal.pth", fake_score="",     # where they start; "" = the teacher
    chunk=2, steps=4,                # frames made at once (paper: 3, or 1), and the steps of each chunk
    max_iter=1200, batch_size=16,    # 200 student updates
    update_ratio=5,                  # fake updates before each student update; at least 1
    lr=2.5e-4, lr_fake=1e-3, lr_disc=2e-4,      # student, fake score, discriminator
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.01,       # adamw, adam, radam; moments; 0 = off
    t_list=(0.999, 0.9375, 0.8333, 0.625),      # times of steps 1, 2, ...: 1, .75, .5, .25, shifted by 5
    sampler="sde",                   # between steps: sde (fresh noise), ode (the noise of the last step)
    clean_prefix=0.75,               # probability of a clean beginning, as in sampling; paper: 0
    context_noise=0.0,               # t of the finished chunks in the sampler's cache
    window=8, sink=0,                # frames it sees, its own included, and first ones besides; 0 = all
    t_dist="shifted",                # noise levels of dm, dsm and GAN; common.t_quantile lists them
    t_mean=0.0, t_std=1.0, t_shift=5.0,         # of lognormal and logitnormal; of "shifted"
    t_min=0.02, t_max=0.98,          # t is clamped to these: w explodes where nothing is left to predict
    fake_pred="flow", fake_weight="",           # space (x0, eps, v, flow) and weight of dsm; "" = as sft.py
    guidance_skip=(),                # blocks that the teacher's unconditional pass skips; "" = none
    gan_weight=0.0,                  # of gan_g; FastGen: 3e-3; 0 = no GAN
    gan_d_weight=1.0,                # of gan_d; 0 = the discriminator does not learn
    gan_taps=(),                     # features of the fake score for the discriminator; "" = the last
    ema=("ema:0.95",),               # 0.99 still holds much of where it started
)

presets = dict(
    # The authors' wan_causal_dmd: 64 clips of 21 frames, times by shift 8, their guidance 3.5 is 4.5 here;
    # assumption: 1000 student updates, where they saw it saturate. --student: as self_forcing.py
    wan=dict(net="wan:t2v_1_3b", data="clips-480p", teacher="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
             student="outputs/fewstep/wan/causal_kd_wan", chunk=3, window=0, steps=3,
             t_list=(0.999, 0.757, 0.522), t_shift=8.0, guidance=4.5, clean_prefix=0.0, batch_size=64,
             max_iter=6000, lr=2e-6, lr_fake=2e-6, amp="bf16", parallel="fsdp", recompute=True,
             ema=("ema:0.99",), save_every=600, val_every=0, sample_every=600),
)


def build(cfg):
    student = common.make_net(cfg["net"], label_dim=cfg["classes"], chunk=cfg["chunk"])
    teacher, fake_score = (common.make_net(cfg["net"], label_dim=cfg["classes"], chunk=0) for _ in range(2))
    nets = dict(student=student, teacher=teacher.eval().requires_grad_(False), fake_score=fake_score)
    # values that only step() reads are refused here, before any work
    if not student.chunk or teacher.chunk or fake_score.chunk:
        raise common.BadInput(f"--chunk {cfg['chunk']} must be above 0 and is the student's alone; --net "
                              f"{cfg['net']} takes none")
    levels(student, cfg)
    common.check(cfg, update_ratio=(1, 1e9), sampler=("sde", "ode"), clean_prefix=(0, 1))
    common.check_window(student, cfg["window"], cfg["sink"])
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
    """x0 of noised data: every chunk from a random step of the sampler's, or clean."""
    x0, ts = batch["x0"], levels(student, cfg)
    k = common.per_chunk(lambda n: torch.randint(len(ts), (n,), device=x0.device), x0, student.chunk) # (B, F)
    if cfg["clean_prefix"]:
        clean = torch.rand(len(x0), 1, device=x0.device) < cfg["clean_prefix"]
        k = torch.where(clean & common.split_at_chunk(x0, student.chunk)[0], len(ts) - 1, k)
    t = torch.cat([common.t_like(s, x0[:1]) for s in ts])[k]
    known = common.expand((k > 0).float(), x0) * x0     # the first step's input is pure noise, as in sampling
    x_t = common.add_noise(student.schedule, known, torch.randn_like(x0), t)
    return common.predict(student, x_t, t, batch["cond"], "x0")


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
    """Encoder features of the fake score; nothing behind the last tap is computed."""
    return nets["fake_score"](x_t, t, cond, taps=taps(nets["fake_score"], cfg), stop=True)["taps"]


def sample(net, noise, batch, cfg, steps):
    """The student's steps, from pure noise, in every chunk; refuses a step count it was not trained for."""
    common.check_steps(steps, cfg["steps"])
    return common.causal_rollout(net, noise, levels(net, cfg), batch["cond"], cfg["sampler"],
                                 window=cfg["window"], sink=cfg["sink"], context_noise=cfg["context_noise"],
                                 first=batch["cond"].get("first_frame"))
