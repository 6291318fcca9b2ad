"""Between what the loader gives and the space a net works in.

With cfg["encoders"] == "" the data are in that space: pixels, or what tools/encode.py made of them. Otherwise
it names a folder or hub id of diffusers: StableDiffusionPipeline, StableDiffusionXLPipeline, FluxPipeline or
QwenImagePipeline, whose VAE encodes images and whose own encode_prompt does captions (lengths, masks, pooled
and padding are its), or a VAE alone (stabilityai/sd-vae-ft-mse for DiT and SiT). They are loaded once a
process, without the pipeline's net, frozen, in cfg["encoder_dtype"]; fp16 leaves a VAE that asks for it
(force_upcast) in float32.
"""
import functools
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import augment
import common
from common import BadInput

DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KNOWN = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "FluxPipeline", "QwenImagePipeline")
ABSENT = ("unet", "transformer", "scheduler", "safety_checker", "feature_extractor", "image_encoder")
TEXTS = ("text_encoder", "text_encoder_2")


def encode(raw, cfg, device):
    """Raw batch -> dict(x0 (B, C, H, W) float32 in the net's space, cond, uncond, id), on `device`.

    uint8 v -> v / 127.5 - 1 (as EDM). Augmentations that the loader drew are applied here (x0 may then leave
    [-1, 1]) and both conditions carry their labels, augment (B, augment.dim(cfg)). Pairs come with the states
    x_t on the teacher's way to x0, path (B, P, C, H, W), at the times path_t (P,); path[:, 0] is sigma z.
    Latents of a VAE are mean + std eps, eps of the default generator, and the mean where gradients are off
    (validation). Those that are stored are latent (B, C, H, W), or moments (B, 2 C, H, W): mean and std.
    """
    cond, uncond = conditions(raw["label"], cfg, device, raw)
    put = lambda v: v.to(device, non_blocking=True)                                              # noqa: E731
    if "latent" in raw:
        x0 = put(raw["latent"]).float()
    elif "moments" in raw:
        x0 = posterior(put(raw["moments"]))
    elif "vae_moments" in raw:                          # as the VAE gives them, not scaled yet
        x0 = posterior(scaled(put(raw["vae_moments"]), loaded(cfg).vae))
    else:
        x0 = pixels(put(raw["image"]))
        if "augment" in raw:
            x0, labels = augment.apply(x0, raw["augment"], augment.chosen(cfg))
            cond["augment"] = uncond["augment"] = labels
        if cfg.get("encoders"):
            x0 = posterior(moments(x0, cfg, device))
    batch = dict(x0=x0, cond=cond, uncond=uncond, id=put(raw["id"]))
    if "path" in raw:
        batch["path"] = put(raw["path"])
        batch["path_t"] = torch.cat([common.t_like(t, x0[:1]) for t in raw["path_t"]])
    return batch


def pixels(image):
    return image.float() / 127.5 - 1 if image.dtype == torch.uint8 else image.float()


@torch.no_grad()
def decode(x0, cfg):
    """x0 (B, C, H, W) -> uint8, clipped; the inverse of encode for every uint8 value. Latents go through the
    VAE of cfg["encoders"], one at a time; without one their first three channels are shown."""
    if cfg.get("encoders"):
        device = torch.device(cfg.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        with using(("vae",), cfg, device) as found:
            shift, scale = affine(found.vae, device)
            z = (x0.to(device).float() / scale + shift).to(found.vae.dtype)
            z = z[:, :, None] if found.video else z     # (B, C, 1, H, W)
            x0 = torch.cat([found.vae.decode(each).sample.flatten(2, -3).float().to(x0.device)
                            for each in z.split(1)])
    elif x0.shape[1] not in (1, 3):
        x0 = x0[:, :3]
    return (x0.float() * 127.5 + 128).clip(0, 255).to(torch.uint8)


# ---------------------------------------------------------------- conditions

def conditions(labels, cfg, device, texts={}):
    """Labels (B,) (tensor or list of int) -> (cond, uncond), each dict(label int64 (B,)), -1 = none:
    everywhere if cfg["classes"] is 0, and in uncond.

    texts adds text (B, L, D), pooled (B, P), text_mask (B, L) to both: from its caption, a list of B str, or
    as stored, cond and uncond, dicts of them (uncond's B may be 1). What is not stored as uncond is
    encoded: texts["negative"], a list of B str, or cfg["negative_prompt"].
    """
    labels, classes = torch.as_tensor(labels, dtype=torch.int64), cfg.get("classes", -1)
    if classes == 0:
        labels = torch.full_like(labels, -1)
    elif classes > 0 and len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadInput(f"classes are 0 to {classes - 1} (-1 = none), not {labels.min()} to {labels.max()}")
    labels = labels.to(device, non_blocking=True)
    cond, uncond = dict(label=labels), dict(label=torch.full_like(labels, -1))
    encoded = cfg.get("encoders") and source(cfg)[0]    # of a pipeline, not of a VAE alone
    if "cond" in texts:
        told = {k: v.to(device, non_blocking=True) for k, v in texts["cond"].items()}
    elif "caption" in texts and encoded:
        told = prompts(texts["caption"], cfg, device)
    else:
        return cond, uncond
    if texts.get("uncond"):
        blank = {k: v.to(device, non_blocking=True) for k, v in texts["uncond"].items()}
    elif encoded:
        blank = negative(cfg, device) if "negative" not in texts else prompts(texts["negative"], cfg, device)
    elif cfg.get("guidance", 1) == 1:
        blank = {k: torch.zeros_like(v) for k, v in told.items()}
    else:
        raise BadInput(f"--guidance {cfg['guidance']} needs the embedding of a negative prompt, which the "
                       "data lack; give it as --data_constants uncond=FILE.safetensors, or give --encoders")
    for part, given in zip((cond, uncond), level(told, blank)):
        part |= {k: v.expand(len(labels), *v.shape[1:]) for k, v in given.items()}
    return cond, uncond


def level(*parts):
    """Conditions with texts of one length, the longest, and then masks where those lengths differ or any has
    a mask: what is added is zeros, not seen."""
    longest = max(part["text"].shape[1] for part in parts)
    if all("text_mask" not in part and part["text"].shape[1] == longest for part in parts):
        return parts

    def padded(part):
        text = part["text"]                             # (B, L, D)
        more, mask = longest - text.shape[1], part.get("text_mask", text.new_ones(text.shape[:2]))
        return part | dict(text=F.pad(text, (0, 0, 0, more)), text_mask=F.pad(mask.float(), (0, more)))
    return [padded(part) for part in parts]


@torch.no_grad()
def prompts(texts, cfg, device):
    """B str -> dict of text (B, L, D), and pooled or text_mask where the pipeline has them, in its type."""
    with using(TEXTS, cfg, device) as found:
        encode_prompt, how = found.pipe.encode_prompt, dict(device=device, num_images_per_prompt=1)
        if found.kind == "QwenImagePipeline":
            text, mask = encode_prompt(list(texts), max_sequence_length=512, **how)
            return dict(text=text, text_mask=text.new_ones(text.shape[:2]) if mask is None else mask.to(text))
        if found.kind == "FluxPipeline":
            text, pooled, _ = encode_prompt(list(texts), max_sequence_length=512, **how)
            return dict(text=text, pooled=pooled)
        text, _, *pooled = encode_prompt(list(texts), do_classifier_free_guidance=False, **how)
        return dict(text=text, pooled=pooled[0]) if pooled else dict(text=text)


def negative(cfg, device):
    """cfg["negative_prompt"] as `prompts` of one text; "" as in the official pipelines: zeros where theirs
    says so (SDXL's force_zeros_for_empty_prompt), Qwen-Image's blank, else an empty text."""
    found, text = loaded(cfg), cfg.get("negative_prompt", "")
    if (text, str(device)) not in found.negatives:
        blank = prompts([text or (" " if found.kind == "QwenImagePipeline" else "")], cfg, device)
        if not text and found.pipe.config.get("force_zeros_for_empty_prompt"):
            blank = {k: torch.zeros_like(v) for k, v in blank.items()}
        found.negatives[text, str(device)] = blank
    return found.negatives[text, str(device)]


# ---------------------------------------------------------------- VAE

@torch.no_grad()
def moments(x, cfg, device):
    """x (B, 1 or 3, H, W) in [-1, 1] -> mean and std of the latents in the net's space, float32, (B, 2 C, H /
    f, W / f)."""
    with using(("vae",), cfg, device) as found:
        x = x.expand(-1, 3, -1, -1).to(device, found.vae.dtype)
        given = found.vae.encode(x[:, :, None] if found.video else x).latent_dist
        mean, std = given.mean.float(), (given.logvar.float() / 2).exp()
        both = torch.cat([mean, std], dim=1)
        return scaled(both[:, :, 0] if found.video else both, found.vae)


def posterior(moments):
    mean, std = moments.float().chunk(2, dim=1)
    return mean + std * torch.randn_like(mean) if torch.is_grad_enabled() else mean


def scaled(moments, vae):
    shift, scale = affine(vae, moments.device)
    mean, std = moments.float().chunk(2, dim=1)
    return torch.cat([(mean - shift) * scale, std * scale], dim=1)


def affine(vae, device):
    """(shift, scale), each (C or 1, 1, 1): the net sees (latent - shift) scale."""
    c = vae.config
    column = lambda v: torch.tensor(v, dtype=torch.float32, device=device).reshape(-1, 1, 1)     # noqa: E731
    return (column(c.get("latents_mean") or c.get("shift_factor") or 0.0),
            c.get("scaling_factor", 1.0) / column(c.get("latents_std") or 1.0))


# ---------------------------------------------------------------- loading

@contextmanager
def speaking(name):
    """diffusers, or BadInput in one sentence where it or what is asked of it fails."""
    try:
        import diffusers
        import transformers                             # noqa: F401
    except ImportError as e:
        raise BadInput(f"--encoders {name} needs diffusers and transformers ({e}); pip install diffusers "
                       "transformers sentencepiece") from e
    try:
        yield diffusers
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as e:
        said = " ".join(str(e).split())[:300]
        raise BadInput(f"--encoders {name} cannot be loaded ({type(e).__name__}: {said}); give the folder or "
                       "hub id of a diffusers pipeline or VAE") from e


def source(cfg):
    """(name of the pipeline's class, "" for a VAE alone; its parts; the VAE's config file): no weights."""
    return described(cfg["encoders"], cfg.get("offline", False))


@functools.lru_cache
def described(name, offline):
    with speaking(name) as diffusers:
        index, where = {}, {}
        try:
            index = diffusers.DiffusionPipeline.load_config(name, local_files_only=offline)
            where = dict(subfolder="vae")
        except OSError:                                 # no model_index.json
            pass
        vae = diffusers.AutoencoderKL.load_config(name, local_files_only=offline, **where)
    kind = index.get("_class_name", "")
    if kind not in ("", *KNOWN):
        raise BadInput(f"--encoders {name} is a {kind}; known are {', '.join(KNOWN)} and a VAE alone")
    return kind, [part for part in index if part[0] != "_"], vae


def space(shape, kind, cfg):
    """Shape (C, H, W) of x0 that samples of this shape and kind ("image", "moments", ...) become."""
    c, h, w = shape
    if kind == "image" and cfg.get("encoders"):
        vae, f = source(cfg)[2], reduction(cfg)
        return vae.get("latent_channels", vae.get("z_dim", 4)), h // f, w // f
    return (c // 2 if "moments" in kind else c, h, w)


def reduction(cfg):
    vae = source(cfg)[2]
    return 2 ** len(vae.get("temperal_downsample") or vae["block_out_channels"][1:])


def image_shape(cfg):
    """(C, H, W) of the images that cfg["net"] is trained on, or None where there is no such key."""
    if not cfg.get("net"):
        return None
    c, h, w = net_shape(cfg["net"])
    return (3, h * reduction(cfg), w * reduction(cfg)) if cfg.get("encoders") else (c, h, w)


@functools.lru_cache
def net_shape(spec):
    with torch.device("meta"):
        return common.make_net(spec).x_shape


def loaded(cfg):
    if not cfg.get("encoders"):
        raise BadInput("such data need the scale of a VAE: give its --encoders")
    return load(cfg["encoders"], cfg.get("encoder_dtype", "bf16"), cfg.get("offline", False))


@functools.lru_cache(maxsize=1)
def load(name, dtype, offline):
    kind, parts, _ = described(name, offline)
    how = dict(dtype=DTYPES[dtype], local_files_only=offline)
    with speaking(name) as diffusers:
        if kind:
            how |= {part: None for part in parts if part in ABSENT}
            pipe = diffusers.DiffusionPipeline.from_pretrained(name, **how)
        else:
            pipe = SimpleNamespace(vae=diffusers.AutoModel.from_pretrained(name, **how))
    for part in ("vae", *TEXTS):
        if (model := getattr(pipe, part, None)) is not None:
            model.eval().requires_grad_(False)
    if pipe.vae.dtype == torch.float16 and pipe.vae.config.get("force_upcast"):
        pipe.vae.float()
    return SimpleNamespace(kind=kind, pipe=pipe, vae=pipe.vae, negatives={},
                           video="temperal_downsample" in pipe.vae.config)


@contextmanager
def using(parts, cfg, device):
    """What is loaded, with these parts on the device; afterwards, under encoder_offload, off it again."""
    found, device = loaded(cfg), torch.device(device)
    models = [m for part in parts if (m := getattr(found.pipe, part, None)) is not None]
    for model in models:
        model.to(device)
    with torch.autocast(device.type, enabled=False):
        yield found
    for model in models if cfg.get("encoder_offload") else ():
        model.to("cpu")
