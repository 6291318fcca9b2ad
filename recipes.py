"""Presets beyond a paper's own, by (method, name): `--preset NAME` finds those whose method is
config["recipes"], so a copied file finds them too. A preset holds only what differs from the method's config.

FastGen's recipes carry over with its update ratio (student_update_freq k is update_ratio k - 1), iteration
counts and three EMAs, of which the first samples. Where a paper has other values they are the paper's, or
FastGen's with the reason. In all: moments and weights are float32 also where FastGen keeps both in bf16,
fp16's scaler starts at 65536, not 16 (a few more skips), uniform t has all of its range, a fake score is
trained in its net's own space, and where FastGen sets no global batch one is assumed. Of video, FastGen sets
one (64: here in all) and leaves many at a million iterations (here a sibling's, or 10,000); its negative
prompt for Wan and Cosmos is one of its own (here their authors'); its discriminators of several resolutions
are one conv3d head per tap; noise levels of dm are within 2 - 98 %, as in the papers.
"""


def hub(repository, negative=""):
    """Weights, VAE and text encoders of a public pipeline."""
    return dict(teacher=repository, encoders=repository, negative_prompt=negative)


def rates(lr):
    return dict(lr=lr, lr_fake=lr, lr_disc=lr)


constant_emas = ("ema:0.9999", "ema_99995:0.99995", "ema_9996:0.9996")
power_emas = ("ema:power=0.01", "ema_05:power=0.05", "ema_10:power=0.1")
rare = dict(save_every=5000, val_every=5000, sample_every=5000, log_every=1000)
often = dict(save_every=500, val_every=500, sample_every=500)
constant = dict(lr_schedule="constant", warmup=0)
big = dict(amp="bf16", parallel="fsdp", recompute=True)

# ---- nets, with their data and weights
cifar10 = rare | dict(net="edm:cifar10", data="cifar10-32x32.zip", teacher="edm-cifar10-32x32-cond-vp.pth")
cifar10_uncond = cifar10 | dict(classes=0, teacher="edm-cifar10-32x32-uncond-vp.pth")
imagenet64 = rare | dict(net="edm:imagenet64", data="imagenet-64x64.zip",
                         teacher="edm-imagenet-64x64-cond-adm.pth")
# EDM2's data are resized in its own way; in the consistency methods dropout is at resolutions 16 and 8 alone
edm2_s = rare | dict(net="edm2:imagenet64_s", data="imagenet-64x64-edmv2.zip", teacher="edm2-img64-s-fid.pth")
edm2_xl = edm2_s | dict(net="edm2:imagenet64_xl", teacher="edm2-img64-xl-fid.pth")
edm2_s_drop = edm2_s | dict(net="edm2:imagenet64_s,dropout_res=16", dropout=0.4)
edm2_xl_drop = edm2_xl | dict(net="edm2:imagenet64_xl,dropout_res=16", dropout=0.5)
dit_xl = dict(net="dit:dit_xl2", data="imagenet-256-sd.zip", data_scale=0.18215, amp="bf16",
              teacher="DiT-XL-2-256x256.pt")
sit_xl = dit_xl | dict(net="dit:sit_xl2", teacher="SiT-XL-2-256x256.pt")
sd15 = rare | hub("stable-diffusion-v1-5/stable-diffusion-v1-5") | dict(
    net="sd:sd15", data="captioned-512", amp="bf16")
sdxl = rare | big | hub("stabilityai/stable-diffusion-xl-base-1.0") | dict(
    net="sd:sdxl", data="captioned-1024-latents")
flux = often | big | hub("black-forest-labs/FLUX.1-dev") | dict(
    net="flux:dev,x_shape=(16,64,64)", data="captioned-512")
qwen_image = often | big | hub("Qwen/Qwen-Image", " ") | dict(
    net="qwen_image:base,x_shape=(16,64,64)", data="captioned-512", guidance=4.0)


# clips are videos with a .txt beside each (mp4, webm, gif), or tars that tools/encode.py made of them
def wan(repository, net, **more):
    return often | big | hub(f"Wan-AI/{repository}", "neg_prompt_wan") | dict(
        net=f"wan:{net}", data="clips-480p", data_fps=16.0, guidance=5.0) | more


def cosmos(size):
    return often | big | hub(f"hf://nvidia/Cosmos-Predict2.5-{size.upper()}@diffusers/base/post-trained",
                             "neg_prompt_cosmos") | dict(
        net=f"cosmos_predict2:2.5_{size}", data="clips-480p-93", data_fps=16.0, guidance=3.0, max_iter=10000)


wan_1b = wan("Wan2.1-T2V-1.3B-Diffusers", "t2v_1_3b")
wan_14b = wan("Wan2.1-T2V-14B-Diffusers", "t2v_14b")
wan_i2v = wan("Wan2.1-I2V-14B-480P-Diffusers", "i2v_14b")
wan22_i2v = wan("Wan2.2-TI2V-5B-Diffusers", "ti2v_5b", data="clips-704p", data_fps=24.0)
wan22_t2v = wan22_i2v | dict(net="wan:ti2v_5b,first=")          # no first frame is given
control = dict(depth_model="depth-anything/Depth-Anything-V2-Large-hf")
vace = wan("Wan2.1-VACE-1.3B-diffusers", "vace_1_3b", **control)
vace_14b = wan("Wan2.1-VACE-14B-diffusers", "vace_14b", **control)
cogvideox = often | big | hub("THUDM/CogVideoX-5b") | dict(
    net="cogvideox:5b", data="clips-480x720-49", data_fps=8.0, guidance=6.0)
cogvideox_2b = cogvideox | hub("THUDM/CogVideoX-2b") | dict(net="cogvideox:2b")

# ---- methods: fine-tuning of public weights
sft = constant | dict(batch_size=512, lr=2e-5, t_mean=-1.2, cond_dropout=0.0, ema=power_emas)
# the paper, from scratch: lr 1e-2 (XL: 7e-3), inv_sqrt:35000, batch 2048, 1024 (XL: 640) Mi images
sft_edm2 = sft | dict(lr=1e-4, betas=(0.9, 0.99), amp="fp16", t_mean=-0.8, t_std=1.6, logvar=True, steps=32,
                      max_iter=150000)
# FastGen never drops the text, but samples with guidance
sft_text = constant | dict(optimizer="adamw", weight_decay=0.01, lr=1e-5, batch_size=256, max_iter=100000,
                           dropout=0.0, t_dist="uniform", steps=50, ema=())
sft_dit = sft_text | rare | dict(weight_decay=0.0, max_iter=400000, guidance=4.0, steps=25,
                                 ema=constant_emas[:2], save_every=10000, val_every=10000, sample_every=10000)
sft_video = sft_text | dict(batch_size=64, max_iter=5000)
sft_cosmos, sft_wan = sft_video | dict(max_iter=10000, steps=35), sft_video | dict(lr=5e-5)
# the student's own weights are the bidirectional ones; FastGen never begins with a clean prefix
sft_causal = constant | dict(lr=5e-5, batch_size=64, max_iter=5000, chunk=3, window=0, t_dist="uniform",
                             t_shift=5.0, steps=50, ema=())

# ---- methods: consistency
plain = constant | dict(clip=0.0, tf32=False, ema=constant_emas)
ect = plain | dict(optimizer="adam", lr_schedule="inv_sqrt:2000", t_mean=-0.8, q=4.0, ratio_cap=0.9961,
                   huber_c=0.06, loss_weight="c_out_sq", t_list=(80.0, 1.526), ema=power_emas)
cm = ect | dict(distill=False, kimg_per_stage=3200, lr=1e-3)
tcm_stage1 = ect | dict(amp="fp16", batch_size=2048, max_iter=150000, kimg_per_stage=20480,
                        ema=("ema:power=0.05",))
tcm = ect | dict(amp="fp16", batch_size=1024, max_iter=400000, lr_schedule="inv_sqrt:8000")
scm = plain | dict(batch_size=512, lr=1e-4, t_mean=-1.0, t_max=0.0, tangent_rms=True, tangent_warmup=10000,
                   t_list=(80.0, 0.821))
scm_imagenet64 = scm | dict(batch_size=1024, max_iter=600000, lr=7e-5, lr_schedule="inv_sqrt:35000",
                            optimizer="adam", adam_eps=1e-11, t_std=1.6, t_list=(80.0, 1.1))

# ---- methods: distribution matching; FastGen's turns and GAN, and the paper's for latents
fastgen_gan = dict(update_ratio=4, gan_d_weight=1.0, gan_features="teacher", gan_taps=())
levels = dict(t_list=(), t_min=0.0, t_max=0.0)
dmd2 = constant | fastgen_gan | levels | dict(t_dist="polynomial", dm_t_min=0.0, dm_t_max=0.0,
                                              ema=constant_emas)
dmd2_text = constant | levels | dict(t_dist="uniform", dm_t_dist="uniform", dm_t_min=0.02, dm_t_max=0.98,
                                     gan_d_weight=1e-2, gan_taps=(), ema=())
dmd2_sd15 = sd15 | dmd2_text | dict(batch_size=2048, update_ratio=10, guidance=1.75)
dmd2_sdxl = sdxl | dmd2_text | rates(5e-7) | dict(
    batch_size=128, max_iter=22800, guidance=8.0, gan_weight=5e-3)
f_distill = fastgen_gan | dict(ratio_bins=10, ratio_ema=0.0)
# of Flux and Qwen-Image no paper has a recipe: FastGen's, but later steps from own samples, not noised data
dmd2_flow = dmd2_text | fastgen_gan | rates(1e-5) | dict(
    steps=4, max_iter=5000, gan_weight=0.03, gan_same_noise=True)
four, taps_30, taps_40 = (0.999, 0.937, 0.833, 0.624), (15, 22, 29), (21, 30, 39)
dmd2_video = dmd2_flow | dict(t_list=four, sampler="ode", t_dist="shifted", dm_t_dist="shifted")
dmd2_two = dmd2_video | dict(steps=2, t_list=(0.999, 0.833))
# CogVideoX at the noise levels that these times have in Wan's schedule; FastGen takes the times themselves
dmd2_cogvideox = dmd2_flow | dict(t_list=(0.999, 0.881, 0.735, 0.482), sampler="ode", max_iter=10000)
kd = constant | dict(lr=7e-5, batch_size=64, max_iter=6000, t_list=(0.999,), ema=())
# a student that samples in chunks; FastGen's averages are frozen copies, here they are Self-Forcing's
causal = rates(5e-6) | dict(chunk=3, window=0, t_list=four, batch_size=64, max_iter=5000, update_ratio=4,
                            betas=(0.9, 0.999), gan_weight=3e-3, gan_taps=taps_30)
ode_init = "Self-Forcing/checkpoints/ode_init.pt#generator"
runs = "outputs/fewstep"
sdxl_1step = f"{runs}/captioned-1024-latents/dmd2_sdxl_1step"
tcm_edm2 = f"{runs}/imagenet-64x64-edmv2/tcm_edm2"

# ---- the presets, by method; FastGen's experiment first
of_sft = dict(
    # EDM/config_sft_edm_cifar10, _in64: fine-tuning of the public teacher. Flips and colours are not the
    # augmentations that the teacher's nine labels stand for; here they are EDM's
    cifar10_finetune=cifar10 | sft | dict(augment=0.12, dropout=0.13, max_iter=100000),
    imagenet64_finetune=imagenet64 | sft | dict(max_iter=200000, amp="fp16"),
    # EDM2/config_sft_s, _xl, with the paper's dropout and learned log-variance
    edm2_s=edm2_s | sft_edm2 | dict(batch_size=1024, dropout=0.0), edm2_xl=edm2_xl | sft_edm2,
    # DiT/config_sft_dit_xl, _sit_xl; for DiT with the paper's betas of noise (FastGen's are Stable
    # Diffusion's) and uniform t. The half of DiT's output that is a variance gets no gradient. Samples take
    # FastGen's 50 steps of DDIM, SiT's 25 of Heun's method, as many calls
    dit_xl=dit_xl | sft_dit | dict(steps=50), sit_xl=sit_xl | sft_dit,
    # SD15, SDXL (crops of 512 for a net at 1024; here 1024), Flux, QwenImage/config_sft (its data set is not
    # shipped). Flux embeds its guidance (3.5), so it drops no text
    sd15=sd15 | sft_text | dict(guidance=7.5),
    sdxl=sdxl | sft_text | dict(data="captioned-1024", guidance=7.5),
    flux=flux | sft_text | dict(batch_size=128, max_iter=10000, cond_dropout=0.0),
    qwen_image=qwen_image | sft_text | dict(batch_size=128, max_iter=5000),
    # CogVideoX/config_sft (_5b differs in the batch alone), CosmosPredict2/config_sft, _14b, _v2w
    cogvideox_5b=cogvideox | sft_video | dict(lr=2e-5), cosmos=cosmos("2b") | sft_cosmos,
    cosmos_14b=cosmos("14b") | sft_cosmos, cosmos_v2w=cosmos("2b") | sft_cosmos | dict(given_frames=1),
    # WanI2V/config_sft_14b, _wan22_5b, WanT2V/config_sft, _14b, WanV2V/config_sft, _14b
    wan_i2v_14b=wan_i2v | sft_wan, wan22_i2v_5b=wan22_i2v | sft_wan, wan=wan_1b | sft_wan,
    wan_14b=wan_14b | sft_wan, vace=vace | sft_wan, vace_14b=vace_14b | sft_wan | dict(offload=True))
of_causal_sft = dict(
    # the causal ones of WanI2V, WanT2V, WanV2V
    wan_i2v_14b=wan_i2v | sft_causal, wan22_i2v_5b=wan22_i2v | sft_causal, wan_fastgen=wan_1b | sft_causal,
    wan_14b=wan_14b | sft_causal, vace=vace | sft_causal)
of_kd = dict(
    # SDXL/config_kd: pairs at t = 0.999, where the DMD2 paper's net is told 0.399 (not possible here: pairs
    # have states at the steps' own times). Assumption: guidance as DMD2's
    sdxl=sdxl | kd | dict(data="outputs/pairs/sdxl", lr=1e-5, batch_size=128, guidance=8.0),
    # CogVideoX/config_kd; WanT2V/config_kd, _kd_path, no causal KD (methods/causal_kd.py has CausVid's)
    cogvideox_2b=cogvideox_2b | kd | dict(data="outputs/pairs/cogvideox_2b", lr=1e-4),
    wan=wan_1b | kd | dict(data="outputs/pairs/wan"),
    wan_4steps=wan_1b | kd | dict(data="outputs/pairs/wan_4steps", steps=4, t_list=four, max_iter=10000))
of_cm = dict(
    # EDM/config_cm_cifar10 (FID 2.92 reported), _in64. FastGen's r is at least 0.002; here 0 is reached
    cifar10_fastgen=cifar10_uncond | plain | dict(
        dropout=0.2, batch_size=512, max_iter=350000, lr=1e-4, distill=False, betas=(0.9, 0.999), t_mean=-1.1,
        t_std=2.0, huber_c=1e-8, kimg_per_stage=6400, ratio_cap=0.999, t_list=(80.0, 0.821)),
    imagenet64_fastgen=imagenet64 | cm | dict(dropout=0.2, batch_size=1024, max_iter=1000000, amp="fp16"),
    # EDM2/config_cm_s (FID 4.05 reported), _xl: ECT's stages in images, not in iterations
    edm2_s=edm2_s_drop | cm | dict(batch_size=1024, max_iter=150000),
    edm2_xl=edm2_xl_drop | cm | dict(batch_size=1024, max_iter=150000, lr=7e-4))
of_scm = dict(
    # EDM/config_scd_cifar10, _sct_cifar10 (FID 3.22; 3.23 reported), _scd_in64
    cifar10_fastgen=cifar10_uncond | scm | dict(max_iter=500000),
    cifar10_sct_fastgen=cifar10_uncond | scm | dict(distill=False, dropout=0.2, t_max=800.0, max_iter=350000),
    imagenet64_fastgen=imagenet64 | scm_imagenet64 | dict(clip=10.0, amp="bf16"),
    # EDM2/config_scm_xl, which sets no iterations; with public weights' time embedding it may be unstable
    edm2_xl=edm2_xl_drop | scm_imagenet64 | dict(distill=False, dropout=0.45, amp="fp16", ema=power_emas))
of_tcm = dict(
    # NVlabs/TCM and EDM2/config_tcm_s, _xl: both stages (one-step FID 2.88, 2.20; TCM's README has 800 k
    # iterations). FastGen's first stage is its CM, with shorter stages; here TCM's
    edm2_s_stage1=edm2_s_drop | tcm_stage1, edm2_xl_stage1=edm2_xl_drop | tcm_stage1 | dict(lr=7e-4),
    edm2_s=edm2_s_drop | tcm | dict(stage1=f"{tcm_edm2}_s_stage1", lr=5e-4),
    edm2_xl=edm2_xl_drop | tcm | dict(stage1=f"{tcm_edm2}_xl_stage1", lr=1e-4))
of_mean_flow = dict(
    # EDM/config_mf_cifar10 (FID 2.82 reported), without preconditioning there
    cifar10_fastgen=cifar10_uncond | plain | dict(
        teacher="", distill=False, batch_size=1024, max_iter=1000000, lr=6e-4, warmup=9765, dropout=0.2,
        augment=0.12, augment_ops=("xflip", "scale", "aniso", "translate_frac"), pairs="sort", t_mean=-0.6,
        t_std=1.6),
    # WanT2V/config_mf, untuned by its own words: there r < t always, t has ImageNet-64's mean, not the one
    # derived for this resolution, and a difference makes du/dt, which is lost where 1000 t is embedded
    wan=wan_1b | plain | dict(
        guidance=3.0, lr=1e-5, lr_schedule="inv_sqrt:2000", optimizer="adamw", betas=(0.9, 0.99),
        max_iter=10000, pairs="sort", t_mean=0.73, t_std=1.6, r_mean=0.73, tangent_warmup=2000,
        loss="opt_grad", loss_p=1.0, loss_c=10.0, loss_rms=True, parallel="ddp", ema=("ema:power=0.01",)))
of_dmd2 = dict(
    # EDM/config_dmd2_cifar10 (FID 1.99 reported), which no paper has; _in64 (FID 1.12 reported), whose fake
    # score trains without EDM weight, here with it; _test: a short try
    cifar10=cifar10 | dmd2 | rates(1e-4) | dict(
        batch_size=2048, max_iter=100000, gan_weight=1e-3, gan_taps=(0, 1, 2)),
    imagenet64_fastgen=imagenet64 | dmd2 | rates(2e-6) | dict(
        batch_size=512, max_iter=600000, gan_weight=3e-3),
    cifar10_test=cifar10 | dmd2 | rates(1e-4) | often | dict(
        max_iter=5000, gan_weight=1e-3, gan_taps=(0, 1, 2), ema=(), log_every=100),
    # SD 1.5, the paper's two stages (40 k iterations, then 5 k with the GAN); SD15/config_dmd2 is one of
    # 100 k at lr 1e-5 with the GAN from the start, and reports no FID
    sd15=dmd2_sd15 | rates(1e-5) | dict(max_iter=44000, gan_weight=0.0),
    sd15_gan=dmd2_sd15 | rates(5e-7) | dict(
        student=f"{runs}/captioned-512/dmd2_sd15", fake_score=f"{runs}/captioned-512/dmd2_sd15#fake_score",
        max_iter=5500, gan_weight=1e-3),
    # SDXL, the paper's 19 k iterations of four steps, and of one after KD. SDXL/config_dmd2 is one step
    # without KD at lr 5e-5, which is the paper's for LoRA
    sdxl=dmd2_sdxl | dict(steps=4, t_list=(0.999, 0.749, 0.499, 0.249)),
    sdxl_1step=dmd2_sdxl | dict(student=f"{runs}/sdxl/kd_sdxl"),
    # Flux, QwenImage, CogVideoX/config_dmd2, CosmosPredict2/config_dmd2, _14b (which lost its taps), _v2w
    flux=flux | dmd2_flow | dict(gan_taps=(28,)),
    qwen_image=qwen_image | dmd2_flow | dict(gan_taps=(30,), offload=True),
    cogvideox_5b=cogvideox | dmd2_cogvideox | dict(gan_taps=(21, 31, 41)),
    cosmos=dmd2_video | cosmos("2b") | dict(gan_taps=(13, 20, 27)),
    cosmos_14b=dmd2_video | cosmos("14b") | dict(gan_taps=(17, 26, 35), offload=True),
    cosmos_v2w=dmd2_video | cosmos("2b") | dict(gan_taps=(13, 20, 27), given_frames=1),
    # WanI2V/config_dmd2_14b, _wan22_5b, WanT2V/config_dmd2, _14b, _wan22_5b, WanV2V/config_dmd2
    wan_i2v_14b=wan_i2v | dmd2_two | dict(gan_taps=taps_40),
    wan22_i2v_5b=wan22_i2v | dmd2_two | dict(gan_taps=taps_30),
    wan=wan_1b | dmd2_video | dict(max_iter=6000, gan_taps=taps_30),
    wan_14b=wan_14b | dmd2_two | dict(gan_taps=taps_40),
    wan22_5b=wan22_t2v | dmd2_two | dict(gan_taps=taps_30),
    vace=vace | dmd2_video | dict(guidance=4.0, gan_taps=taps_30, ema=("ema:0.9999",)))
of_f_distill = dict(
    # EDM, SD15, SDXL/config_f_distill_*, by the paper's authors (FID 1.85; 1.11 for EDM): DMD2's but for the
    # divergence; SDXL goes on from DMD2's one step. WanT2V/config_fdistill: at the levels of one step
    cifar10=of_dmd2["cifar10"] | dict(divergence="kl", ratio_bins=10, ratio_ema=0.0),
    imagenet64=of_dmd2["imagenet64_fastgen"] | dict(ratio_bins=10, ratio_ema=0.5),
    sd15=dmd2_sd15 | f_distill | rates(1e-5) | dict(update_ratio=9, max_iter=100000, gan_weight=1e-3),
    sdxl=dmd2_sdxl | f_distill | dict(
        student=sdxl_1step, fake_score=f"{sdxl_1step}#fake_score", max_iter=25000),
    wan=wan_1b | dmd2_text | f_distill | rates(5e-5) | dict(max_iter=10000, gan_weight=1e-3, gan_taps=(15,)))
of_ladd = dict(
    # WanT2V/config_ladd. R1 as its own comment says (0.1 there, 100 to 1000 recommended)
    wan=wan_1b | constant | levels | dict(
        guidance=1.0, lr=2e-6, lr_disc=4e-6, betas=(0.9, 0.999), max_iter=10000, steps=4, update_ratio=1,
        t_list=four, t_dist="shifted", gan_loss="softplus", gan_taps=taps_30, gan_cond=False, ema=()))
of_causvid = dict(
    # WanT2V/config_causvid; CausVid's wan_causal_dmd_warp_4step_cfg2: as its preset wan, four steps by shift
    # 8, less guidance
    wan_fastgen=wan_1b | causal | rates(5e-5) | dict(
        student=ode_init, gan_weight=1e-3, clean_prefix=0.0, ema=("ema:0.99",)),
    wan_4steps=wan_1b | rates(2e-6) | dict(
        student=f"{runs}/wan/causal_kd_wan", chunk=3, window=0, t_list=(0.999, 0.96, 0.8889, 0.7273),
        t_shift=8.0, guidance=3.0, clean_prefix=0.0, batch_size=64, max_iter=6000, ema=("ema:0.99",)))
of_self_forcing = dict(
    # WanT2V/config_sf, _14b, WanV2V/config_sf
    wan_fastgen=wan_1b | causal | dict(frames_max=0, student=ode_init),
    wan_14b=wan_14b | causal | dict(
        frames_max=0, student=f"{runs}/clips-480p/causal_sft_wan_14b", gan_taps=taps_40),
    vace=vace | causal | dict(frames_max=0, student=f"{runs}/clips-480p/causal_sft_vace", guidance=4.0))

presets = {(method, name): preset for method, own in dict(
    sft=of_sft, causal_sft=of_causal_sft, kd=of_kd, cm=of_cm, scm=of_scm, tcm=of_tcm, mean_flow=of_mean_flow,
    dmd2=of_dmd2, f_distill=of_f_distill, ladd=of_ladd, causvid=of_causvid,
    self_forcing=of_self_forcing).items() for name, preset in own.items()}
