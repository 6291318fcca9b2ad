"""Presets beyond a paper's own, by (method, name): `--preset NAME` finds those whose method is
config["recipes"], so a copied file finds them too. A preset holds only what differs from the method's config.

FastGen's recipes carry over with its update ratio (student_update_freq k is update_ratio k - 1), its
iteration counts as they are, and its three EMAs; the first EMA listed samples.
"""
constant_emas = ("ema:0.9999", "ema_99995:0.99995", "ema_9996:0.9996")
power_emas = ("ema:power=0.01", "ema_05:power=0.05", "ema_10:power=0.1")
fastgen_ops = ("scale", "rotate_frac", "brightness", "contrast", "lumaflip", "hue", "saturation")
rare = dict(save_every=5000, val_every=5000, sample_every=5000, log_every=1000)
whole = dict(t_list=(), t_dist="polynomial", t_min=0.0, t_max=0.0, dm_t_min=0.0, dm_t_max=0.0,
             lr_schedule="constant", warmup=0)

presets = {
    # FastGen EDM/config_sft_edm_cifar10: fine-tuning of the public teacher
    ("sft", "cifar10_finetune"): rare | dict(
        net="edm:cifar10", data="cifar10-32x32.zip", teacher="edm-cifar10-32x32-cond-vp.pth", xflip=True,
        augment=0.12, augment_ops=fastgen_ops, dropout=0.13, batch_size=512, max_iter=100000, lr=2e-5,
        lr_schedule="constant", warmup=0, t_mean=-1.2, cond_dropout=0.0, ema=power_emas),
    # FastGen EDM/config_sft_edm_in64; the GradScaler starts at 16, not 65536, which only saves first skips
    ("sft", "imagenet64_finetune"): rare | dict(
        net="edm:imagenet64", data="imagenet-64x64.zip", teacher="edm-imagenet-64x64-cond-adm.pth",
        dropout=0.1, batch_size=512, max_iter=200000, lr=2e-5, lr_schedule="constant", warmup=0,
        t_mean=-1.2, cond_dropout=0.0, amp="fp16", ema=power_emas),
    # FastGen EDM/config_dmd2_in64 (FID 1.12 reported). Its fake score trains without EDM weight; here with it
    ("dmd2", "imagenet64_fastgen"): rare | whole | dict(
        net="edm:imagenet64", data="imagenet-64x64.zip", teacher="edm-imagenet-64x64-cond-adm.pth",
        batch_size=512, max_iter=600000, update_ratio=4, lr=2e-6, lr_fake=2e-6, lr_disc=2e-6,
        gan_weight=3e-3, gan_d_weight=1.0, gan_features="teacher", gan_taps=(), ema=constant_emas),
    # FastGen EDM/config_dmd2_test: its smoke recipe
    ("dmd2", "cifar10_test"): whole | dict(
        net="edm:cifar10", data="cifar10-32x32.zip", teacher="edm-cifar10-32x32-cond-vp.pth", batch_size=64,
        max_iter=5000, update_ratio=4, lr=1e-4, lr_fake=1e-4, lr_disc=1e-4,
        gan_weight=1e-3, gan_d_weight=1.0, gan_features="teacher", gan_taps=(0, 1, 2), log_every=50, ema=()),
}
