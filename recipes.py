"""Presets beyond a paper's own, by (method, name): `--preset NAME` finds those whose method is
config["recipes"], so a copied file finds them too. A preset holds only what differs from the method's config.

FastGen's recipes carry over with its update ratio (student_update_freq k is update_ratio k - 1), its
iteration counts as they are, and its three EMAs; the first EMA listed samples.
"""
constant_emas = ("ema:0.9999", "ema_99995:0.99995", "ema_9996:0.9996")
power_emas = ("ema:power=0.01", "ema_05:power=0.05", "ema_10:power=0.1")
fastgen_ops = ("scale", "rotate_frac", "brightness", "contrast", "lumaflip", "hue", "saturation")
rare = dict(save_every=5000, val_every=5000, sample_every=5000, log_every=1000)
constant = dict(lr_schedule="constant", warmup=0)

cifar10 = rare | dict(net="edm:cifar10", data="cifar10-32x32.zip", teacher="edm-cifar10-32x32-cond-vp.pth")
cifar10_uncond = cifar10 | dict(classes=0, teacher="edm-cifar10-32x32-uncond-vp.pth")
imagenet64 = rare | dict(net="edm:imagenet64", data="imagenet-64x64.zip",
                         teacher="edm-imagenet-64x64-cond-adm.pth")

sft = constant | dict(batch_size=512, lr=2e-5, t_mean=-1.2, cond_dropout=0.0, ema=power_emas)
dmd2 = constant | dict(t_list=(), t_dist="polynomial", t_min=0.0, t_max=0.0, dm_t_min=0.0, dm_t_max=0.0,
                       update_ratio=4, gan_d_weight=1.0, gan_features="teacher", ema=constant_emas)
scm = constant | dict(batch_size=512, lr=1e-4, clip=0.0, tf32=False, t_mean=-1.0, t_max=0.0, tangent_rms=True,
                      tangent_warmup=10000, t_list=(80.0, 0.821), ema=constant_emas)
tcm = rare | dict(
    net="edm2:imagenet64_s", data="imagenet-64x64.zip", teacher="edm2-img64-s.pth", amp="fp16",
    optimizer="adam", betas=(0.9, 0.99), warmup=0, clip=0.0, tf32=False, dropout=0.4, t_mean=-0.8, t_std=1.6,
    q=4.0, ratio_cap=0.9961, huber_c=0.06, loss_weight="c_out_sq", kimg_per_stage=20480, t_list=(80.0, 1.526))

presets = {
    # FastGen EDM/config_sft_edm_cifar10: fine-tuning of the public teacher
    ("sft", "cifar10_finetune"): cifar10 | sft | dict(
        xflip=True, augment=0.12, augment_ops=fastgen_ops, dropout=0.13, max_iter=100000),
    # FastGen EDM/config_sft_edm_in64; the GradScaler starts at 16, not 65536, which only saves first skips
    ("sft", "imagenet64_finetune"): imagenet64 | sft | dict(dropout=0.1, max_iter=200000, amp="fp16"),
    # FastGen EDM/config_dmd2_cifar10 (FID 1.99 reported); the paper has no CIFAR-10 recipe
    ("dmd2", "cifar10"): cifar10 | dmd2 | dict(
        batch_size=2048, max_iter=100000, lr=1e-4, lr_fake=1e-4, lr_disc=1e-4, gan_weight=1e-3,
        gan_taps=(0, 1, 2)),
    # FastGen EDM/config_dmd2_in64 (FID 1.12 reported). Its fake score trains without EDM weight; here with it
    ("dmd2", "imagenet64_fastgen"): imagenet64 | dmd2 | dict(
        batch_size=512, max_iter=600000, lr=2e-6, lr_fake=2e-6, lr_disc=2e-6, gan_weight=3e-3, gan_taps=()),
    # FastGen EDM/config_cm_cifar10 (FID 2.92 reported). Its r is at least 0.002; here 0 is reached
    ("cm", "cifar10_fastgen"): cifar10_uncond | constant | dict(
        dropout=0.2, batch_size=512, max_iter=350000, lr=1e-4, clip=0.0, distill=False, betas=(0.9, 0.999),
        tf32=False, t_mean=-1.1, t_std=2.0, huber_c=1e-8, kimg_per_stage=6400, ratio_cap=0.999,
        t_list=(80.0, 0.821), ema=constant_emas),
    # FastGen EDM/config_cm_in64, which sets no global batch
    ("cm", "imagenet64_fastgen"): imagenet64 | dict(
        distill=False, dropout=0.2, batch_size=1024, max_iter=1000000, optimizer="adam", lr=1e-3,
        lr_schedule="inv_sqrt:2000", warmup=0, clip=0.0, amp="fp16", tf32=False, t_mean=-0.8,
        huber_c=0.06, loss_weight="c_out_sq", q=4.0, kimg_per_stage=3200, ratio_cap=0.9961,
        t_list=(80.0, 1.526), ema=power_emas),
    # FastGen EDM/config_scd_cifar10, config_sct_cifar10 (FID 3.22; 3.23 reported), config_scd_in64
    ("scm", "cifar10_fastgen"): cifar10_uncond | scm | dict(max_iter=500000),
    ("scm", "cifar10_sct_fastgen"): cifar10_uncond | scm | dict(
        distill=False, dropout=0.2, t_max=800.0, max_iter=350000),
    ("scm", "imagenet64_fastgen"): imagenet64 | scm | dict(
        batch_size=1024, max_iter=600000, lr=7e-5, lr_schedule="inv_sqrt:35000", optimizer="adam",
        adam_eps=1e-11, clip=10.0, amp="bf16", t_std=1.6, t_list=(80.0, 1.1)),
    # NVlabs/TCM and FastGen EDM2/config_tcm_s: both stages on EDM2-S (one-step FID 2.88)
    ("tcm", "imagenet64_stage1"): tcm | dict(
        batch_size=2048, max_iter=150000, lr=1e-3, lr_schedule="inv_sqrt:2000", ema=("ema:power=0.05",)),
    ("tcm", "imagenet64"): tcm | dict(
        stage1="outputs/fewstep/imagenet-64x64/tcm_imagenet64_stage1", batch_size=1024, max_iter=400000,
        lr=5e-4, lr_schedule="inv_sqrt:8000", ema=power_emas),
    # FastGen EDM/config_mf_cifar10 (FID 2.82 reported), without preconditioning there
    ("mean_flow", "cifar10_fastgen"): cifar10_uncond | dict(
        teacher="", distill=False, batch_size=1024, max_iter=1000000, lr=6e-4, lr_schedule="constant",
        warmup=9765, clip=0.0, tf32=False, dropout=0.2, augment=0.12,
        augment_ops=("xflip", "scale", "aniso", "translate_frac"), pairs="sort", t_mean=-0.6, t_std=1.6,
        t_list=(), ema=constant_emas),
}
# FastGen EDM/config_f_distill_*, by the paper's authors (FID 1.85; 1.11): DMD2's but for the divergence
presets |= {
    ("f_distill", "cifar10"): presets["dmd2", "cifar10"] | dict(
        divergence="kl", ratio_bins=10, ratio_ema=0.0),
    ("f_distill", "imagenet64"): presets["dmd2", "imagenet64_fastgen"] | dict(
        divergence="js", ratio_bins=10, ratio_ema=0.5),
}
