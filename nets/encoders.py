"""Between what the loader gives and the space a net works in.

With cfg["encoders"] == "" the data are in that space: pixels, or what tools/encode.py made of them. Otherwise
it names a pipeline of diffusers (folder or hub id), whose VAE encodes images and whose own encode_prompt does
captions, so lengths, masks and padding are the official ones, or a VAE alone (stabilityai/sd-vae-ft-mse for
DiT and SiT). It is loaded once a process, frozen, without the net.
"""
import functools
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import augment
import common
from common import BadInput

KNOWN = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "FluxPipeline", "QwenImagePipeline")
TEXTS, DTYPES = ("text_encoder", "text_encoder_2"), {"": torch.float32, "bf16": torch.bfloat16}
LENGTH = 512            # tokens of a caption, the default of the pipelines, where the tokenizer takes as many
ABSENT = ("unet", "transformer", "scheduler", "safety_checker", "feature_extractor", "image_encoder")


def encode(raw, cfg, device):
    """Raw batch -> dict(x0 (B, C, H, W) float32 in the net's space, cond, uncond, id), on `device`.

    uint8 v -> v / 127.5 - 1 (as EDM). Augmentations that the loader drew are applied here (x0 may then leave
    [-1, 1]) and both conditions carry their labels, augment (B, augment.dim(cfg)). Pairs come with the states
    x_t on the teacher's way to x0, path (B, P, C, H, W), at the times path_t (P,); path[:, 0] is sigma z.
    Stored are latent (B, C, H, W) or moments (B, 2 C, H, W), mean and std as the net sees them; x0 is mean +
    std eps, eps of the default generator, and the mean where gradients are off (validation).
    """
    put = lambda v: v.to(device, non_blocking=True)                                              # noqa: E731
    (kind, x0), = ((k, scaled(put(raw[k]))) for k in ("image", "latent", "moments") if k in raw)
    cond, uncond = conditions(raw["label"], cfg, device, raw)
    if "augment" in raw:
        x0, labels = augment.apply(x0, raw["augment"], augment.chosen(cfg))
        cond["augment"] = uncond["augment"] = labels
    if kind == "image" and cfg.get("encoders"):
        kind, x0 = "moments", moments(x0, cfg, device)
    if kind == "moments":
        mean, std = x0.chunk(2, dim=1)
        x0 = mean + std * torch.randn(mean.shape, device=device) if torch.is_grad_enabled() else mean
    if cfg.get("first_frame"):
        cond["first_frame"] = uncond["first_frame"] = x0[:, :, :1]
    batch = dict(x0=x0, cond=cond, uncond=uncond, id=put(raw["id"]))
    if "path" in raw:
        batch["path"] = put(raw["path"])
        batch["path_t"] = torch.cat([common.t_like(t, x0[:1]) for t in raw["path_t"]])
    return batch


def scaled(x):
    return x.float() / 127.5 - 1 if x.dtype == torch.uint8 else x.float()


@torch.no_grad()
def decode(x0, cfg):
    """x0 (B, C, H, W) -> uint8, clipped; the inverse of encode for every uint8 value. Latents go through the
    VAE of cfg["encoders"], one at a time; without one their first three channels are shown."""
    if cfg.get("encoders"):
        with using(cfg, device := cfg["device"] or "cuda" * torch.cuda.is_available() or "cpu") as found:
            shift, scale = (v.to(device) for v in found.affine)
            z = (x0.to(device).float() / scale + shift).to(found.vae.dtype)
            z = z[:, :, None] if found.video else z     # (B, C, 1, h, w)
            x0 = torch.cat([found.vae.decode(each).sample for each in z.split(1)]).to(x0.device)
            x0 = x0[:, :, 0] if found.video else x0
    x0 = x0[:, :3] if x0.dim() == 4 else x0
    return (x0.float() * 127.5 + 128).clip(0, 255).to(torch.uint8)


@torch.no_grad()
def last_frame(x0, cfg):
    """The last frame of a clip x0 (B, C, F, h, w) as the first one of another: (B, C, 1, h, w). The VAEs of
    video encode a first frame as an image, so there its pixels are encoded anew."""
    if not cfg.get("encoders"):
        return x0[:, :, -1:]
    with using(cfg, x0.device) as found:
        shift, scale = (v.to(x0.device)[:, None] for v in found.affine)
        pixels = found.vae.decode((x0.float() / scale + shift).to(found.vae.dtype)).sample[:, :, -1:]
        return (found.vae.encode(pixels).latent_dist.mean.float() - shift) * scale


def conditions(labels, cfg, device, texts={}):
    """Labels (B,) (tensor or list of int) -> (cond, uncond), each dict(label int64 (B,)), -1 = none:
    everywhere if cfg["classes"] is 0, and in uncond.

    texts adds text (B, L, D), pooled (B, P), text_mask (B, L): of its caption, B str, or as stored in its
    cond and uncond (B or 1). What is not stored of uncond is of its negative, B str, or the config's.
    """
    labels, classes = torch.as_tensor(labels, dtype=torch.int64), cfg.get("classes", -1)
    if classes == 0:
        labels = torch.full_like(labels, -1)
    elif classes > 0 and len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadInput(f"classes are 0 to {classes - 1} (-1 = none), not {labels.min()} to {labels.max()}")
    labels = labels.to(device, non_blocking=True)
    cond, uncond = dict(label=labels), dict(label=torch.full_like(labels, -1))
    encoded = cfg.get("encoders") and "_class_name" in described(cfg["encoders"], cfg["offline"])[0]
    if "cond" not in texts and not ("caption" in texts and encoded):
        return cond, uncond
    told = texts["cond"] if "cond" in texts else prompts(texts["caption"], cfg, device)
    blank = texts.get("uncond")
    if not blank and encoded:
        blank = prompts(texts["negative"], cfg, device) if "negative" in texts else negative(cfg, device)
    if not blank and cfg.get("guidance", 1) != 1:
        raise BadInput("--guidance needs an embedded negative prompt; give --data_uncond FILE or --encoders")
    blank = blank or {k: torch.zeros_like(v) for k, v in told.items()}
    told, blank = ({k: v.to(device, non_blocking=True) for k, v in part.items()} for part in (told, blank))
    for whole, part in zip((cond, uncond), level(told, blank)):
        whole |= {k: v.expand(len(labels), *v.shape[1:]) for k, v in part.items()}
    return cond, uncond


def level(*parts):
    """The parts with texts (B, L, D) of one length; with text_mask where lengths differ or any has one."""
    longest = max(part["text"].shape[1] for part in parts)
    if all("text_mask" not in part and part["text"].shape[1] == longest for part in parts):
        return parts
    masks = [part.get("text_mask", part["text"].new_ones(part["text"].shape[:2])) for part in parts]
    more = [longest - mask.shape[1] for mask in masks]
    return [part | dict(text=F.pad(part["text"], (0, 0, 0, n)), text_mask=F.pad(mask, (0, n)))
            for part, mask, n in zip(parts, masks, more)]


@torch.no_grad()
def prompts(texts, cfg, device):
    """B str -> dict of text (B, L, D), and pooled or text_mask where the pipeline has them, in its type."""
    with using(cfg, device, TEXTS) as found:
        sd = "Diffusion" in found.kind
        own = dict(do_classifier_free_guidance=False) if sd else dict(max_sequence_length=LENGTH)
        text, other, *more = found.pipe.encode_prompt(list(texts), device=device, num_images_per_prompt=1,
                                                      **own)
        other, key = more[0] if sd and more else other, "text_mask" if "Qwen" in found.kind else "pooled"
        return dict(text=text) if other is None else {"text": text, key: other.to(text)}


def cut(texts, cfg):
    """[a line on how many of the texts are longer than what the encoders take], [] if none is."""
    pipe = load(cfg["encoders"], cfg["encoder_dtype"], cfg["offline"]).pipe if texts else None
    found = [tokenizer for part in ("tokenizer", "tokenizer_2") if (tokenizer := getattr(pipe, part, None))]
    long = {}
    for tokenizer in found:
        limit = min(tokenizer.model_max_length, LENGTH)
        long[limit] = sum(len(ids) > limit for ids in tokenizer(list(texts)).input_ids)
    told = [f"{n} are cut to {limit} tokens" for limit, n in long.items() if n]
    return [f"WARNING: of {len(texts)} texts looked at {', '.join(told)}"] if told else []


def negative(cfg, device):
    """cfg["negative_prompt"] as `prompts` of one text. "" is zeros where the pipeline's config says so
    (SDXL), a blank for Qwen-Image (its model card), else the empty text."""
    text = cfg["negative_prompt"]
    with using(cfg, device, ()) as found:
        if text not in found.negatives:
            blank = prompts([text or (" " if found.kind == "QwenImagePipeline" else "")], cfg, device)
            zero = not text and found.pipe.config.get("force_zeros_for_empty_prompt")
            found.negatives[text] = {k: torch.zeros_like(v) if zero else v for k, v in blank.items()}
        return found.negatives[text]


@torch.no_grad()
def moments(x, cfg, device):
    """Images (B, 1 or 3, H, W) -> mean and std of its latents, as the net sees them (B, 2 C, h, w)."""
    with using(cfg, device) as found:
        x = scaled(x.to(device)).to(found.vae.dtype).expand(-1, 3, -1, -1)
        given = found.vae.encode(x[:, :, None] if found.video else x).latent_dist
        mean, logvar = (v[:, :, 0] if found.video else v for v in (given.mean, given.logvar))
        shift, scale = (v.to(device) for v in found.affine)
        return torch.cat([(mean.float() - shift) * scale, (logvar.float() / 2).exp() * scale], dim=1)


def shapes(cfg, shape=None, kind="image"):
    """(C, H, W) of the images that cfg["net"] is trained on; or of the x0 that a sample of a kind becomes."""
    vae = described(cfg["encoders"], cfg["offline"])[1] if cfg.get("encoders") else None
    f = 2 ** len(vae.get("temperal_downsample") or vae["block_out_channels"][1:]) if vae else 1
    if shape is None:
        with torch.device("meta"):
            c, h, w = common.make_net(cfg["net"]).x_shape
        return 3 if vae else c, h * f, w * f
    if kind == "image" and vae:
        return vae.get("latent_channels", vae.get("z_dim")), shape[1] // f, shape[2] // f
    return shape[0] // (2 if kind == "moments" else 1), *shape[1:]


@contextmanager
def speaking(name):
    """Gives diffusers; what fails inside is BadInput: the libraries raise all kinds of errors."""
    try:
        import diffusers
        import transformers
        for library in diffusers, transformers:         # they warn of every batch with a caption that is cut
            library.utils.logging.set_verbosity_error(), library.utils.logging.disable_progress_bar()
        yield diffusers
    except Exception as e:
        cure = ("pip install diffusers transformers sentencepiece" if isinstance(e, ImportError) else
                f"give the folder or hub id of one of {', '.join(KNOWN)}, or of a VAE")
        raise BadInput(f"--encoders {name} cannot be used ({' '.join(str(e).split())[:300]}); {cure}") from e


@functools.lru_cache
def described(name, offline):
    """(index of the pipeline, {} for a VAE alone; config of the VAE)."""
    index, how = {}, dict(local_files_only=offline)
    with speaking(name) as diffusers:
        with suppress(OSError):                         # no model_index.json
            index, how = diffusers.DiffusionPipeline.load_config(name, **how), how | dict(subfolder="vae")
        if index.get("_class_name", KNOWN[0]) not in KNOWN:
            raise ValueError(f"it is a {index['_class_name']}")
        return index, diffusers.AutoencoderKL.load_config(name, **how)


@functools.lru_cache(maxsize=1)
def load(name, dtype, offline):
    index, how = described(name, offline)[0], dict(dtype=DTYPES[dtype], local_files_only=offline)
    with speaking(name) as diffusers, torch.random.fork_rng(devices=[]):     # weights are drawn, then read
        if index:
            absent = {part: None for part in ABSENT if part in index}
            pipe = diffusers.DiffusionPipeline.from_pretrained(name, **absent, **how)
        else:
            pipe = SimpleNamespace(vae=diffusers.AutoModel.from_pretrained(name, **how))
    models = {part: model.eval().requires_grad_(False) for part in ("vae", *TEXTS)
              if (model := getattr(pipe, part, None))}
    get, column = pipe.vae.config.get, lambda v: torch.tensor(v).float().reshape(-1, 1, 1)       # noqa: E731
    shift = column(get("latents_mean") or get("shift_factor") or 0.0)       # the net: (latent - shift) scale
    scale = get("scaling_factor", 1.0) / column(get("latents_std") or 1.0)
    return SimpleNamespace(kind=index.get("_class_name"), pipe=pipe, vae=pipe.vae, models=models,
                           negatives={}, affine=(shift, scale), video=get("temperal_downsample") is not None)


@contextmanager
def using(cfg, device, parts=("vae",)):
    """What is loaded, with these parts on the device; under encoder_offload they leave it afterwards."""
    found = load(cfg["encoders"], cfg["encoder_dtype"], cfg["offline"])
    models = [model.to(device) for part in parts if (model := found.models.get(part))]
    with torch.autocast(torch.device(device).type, enabled=False):
        yield found
    for model in models if cfg["encoder_offload"] else ():
        model.to("cpu")
