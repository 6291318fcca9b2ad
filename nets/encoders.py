"""Between what the loader gives and the space a net works in.

With cfg["encoders"] == "" the data are in that space: pixels, or what tools/encode.py made of them. Otherwise
it names a pipeline of diffusers (folder or hub id), whose VAE encodes images and whose own encode_prompt does
captions, or a VAE alone (stabilityai/sd-vae-ft-mse for DiT and SiT), loaded once a process, frozen. What a
video net sees of a clip besides the text is made of the clip itself: `seen`, `given`.
"""
import functools
import json
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import augment
import common
from common import BadInput

# pipelines and the tokens of a caption, as trained, where the tokenizer takes as many
KNOWN = dict(
    StableDiffusionPipeline=512, StableDiffusionXLPipeline=512, FluxPipeline=512, QwenImagePipeline=512,
    WanPipeline=512, WanImageToVideoPipeline=512, WanVACEPipeline=512, CogVideoXPipeline=226,
    Cosmos2TextToImagePipeline=512, Cosmos2VideoToWorldPipeline=512, Cosmos2_5_PredictBasePipeline=512)
TEXTS, DTYPES = ("text_encoder", "text_encoder_2"), {"": torch.float32, "bf16": torch.bfloat16}
TEXT_KEYS = ("text", "pooled", "text_mask")             # what differs between cond and uncond, with the label
ABSENT = ("unet", "transformer", "transformer_2", "scheduler", "feature_extractor")
# negative prompts by FastGen's names: those that the authors of Wan and of Cosmos give
NEGATIVE = json.loads((Path(__file__).parent.parent / "assets" / "negative_prompts.json").read_text())


def encode(raw, cfg, device):
    """Raw batch -> dict(x0 (B, C, [F,] H, W) float32 in the net's space, cond, uncond, id), on `device`.
    uint8 v -> v / 127.5 - 1 (as EDM). Augmentations that the loader drew are applied here (x0 may then leave
    [-1, 1]) and both conditions carry their labels, augment (B, augment.dim(cfg)). Pairs come with the states
    x_t on the teacher's way to x0, path (B, P, C, H, W), at the times path_t (P,); path[:, 0] is sigma z.
    Stored are latent (B, C, ...) or moments (B, 2 C, ...), mean and std as the net sees them; x0 is mean +
    std eps, eps of the default generator, and the mean where gradients are off (validation). Frames that the
    net is given are those of its condition, without that noise."""
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
    clean = cond.get("condition_frames", cond.get("first_frame"))
    if clean is not None and (n := given(cfg)):
        x0 = torch.cat([clean[:, :, :n], x0[:, :, n:]], dim=2)
    x0 = x0.contiguous()                                # forward-mode GroupNorm takes no channels-last
    batch = dict(x0=x0, cond=cond, uncond=uncond, id=put(raw["id"]))
    if "path" in raw:
        batch["path"] = put(raw["path"])
        batch["path_t"] = torch.cat([common.t_like(t, x0[:1]) for t in raw["path_t"]])
    return batch


def scaled(x):
    return x.float() / 127.5 - 1 if x.dtype == torch.uint8 else x.float()


@torch.no_grad()
def decode(x0, cfg):
    """x0 (B, C, [F,] H, W) -> uint8, clipped; the inverse of encode for every uint8 value. Latents go through
    the VAE of cfg["encoders"], one at a time; without one their first three channels are shown."""
    if cfg.get("encoders"):
        with using(cfg, cfg["device"] or "cuda" * torch.cuda.is_available() or "cpu") as found:
            x0 = torch.cat([from_latents(each, found) for each in x0.split(1)])
    x0 = x0[:, :3] if x0.dim() > 3 else x0
    return (x0.float() * 127.5 + 128).clip(0, 255).to(torch.uint8)


def from_latents(z, found):
    """Latents (B, C, [F,] h, w) as the net sees them -> pixels in about [-1, 1], on z's device."""
    shift, scale, device = *(v.reshape(-1, *[1] * (z.dim() - 2)) for v in found.affine), found.vae.device
    x = (z.to(device).float() / scale.to(device) + shift.to(device)).to(found.vae.dtype)
    still = found.video and z.dim() == 4                # an image is a clip of one frame
    x = found.vae.decode(x[:, :, None] if still else x).sample.to(z.device)
    return x[:, :, 0] if still else x


def to_latents(x, found):
    """Pixels (B, 3, [F,] H, W) in [-1, 1] -> mean and std (B, C, [F,] h, w), as the net sees them."""
    shift, scale = (v.reshape(-1, *[1] * (x.dim() - 2)).to(x.device) for v in found.affine)
    still = found.video and x.dim() == 4
    x = x.to(found.vae.dtype)
    given = found.vae.encode(x[:, :, None] if still else x).latent_dist
    mean, logvar = (v[:, :, 0] if still else v for v in (given.mean, given.logvar))
    return (mean.float() - shift) * scale, (logvar.float() / 2).exp() * scale


@torch.no_grad()
def last_frame(x0, cfg):
    """The last frame of a clip x0 (B, C, F, h, w) as the first one of another: (B, C, 1, h, w). The VAEs of
    video encode a first frame as an image, so there its pixels are encoded anew."""
    if not cfg.get("encoders"):
        return x0[:, :, -1:]
    with using(cfg, x0.device) as found:
        return to_latents(from_latents(x0, found)[:, :, -1:], found)[0]


def conditions(labels, cfg, device, texts={}):
    """Labels (B,) (tensor or list of int) -> (cond, uncond), each dict(label int64 (B,)), -1 = none:
    everywhere if cfg["classes"] is 0, and in uncond. texts adds text (B, L, D), pooled (B, P), text_mask
    (B, L): of its caption, B str, or as stored in its cond and uncond (B or 1). What is not stored of uncond
    is of its negative, B str, or the config's. Both get what `frames` makes of its clips."""
    labels, classes = torch.as_tensor(labels, dtype=torch.int64), cfg.get("classes", -1)
    if classes == 0:
        labels = torch.full_like(labels, -1)
    elif classes > 0 and len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadInput(f"classes are 0 to {classes - 1} (-1 = none), not {labels.min()} to {labels.max()}")
    labels = labels.to(device, non_blocking=True)
    more = frames(texts, cfg, device)
    cond, uncond = dict(label=labels) | more, dict(label=torch.full_like(labels, -1)) | more
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
    parts = ({k: v.to(device, non_blocking=True) for k, v in part.items() if k in TEXT_KEYS}
             for part in (told, blank))
    return tuple(whole | {k: v.expand(len(labels), *v.shape[1:]) for k, v in part.items()}
                 for whole, part in zip((cond, uncond), level(*parts)))


def level(*parts):
    """The parts with texts (B, L, D) of one length; with text_mask where lengths differ or any has one."""
    longest = max(part["text"].shape[1] for part in parts)
    if all("text_mask" not in part and part["text"].shape[1] == longest for part in parts):
        return parts
    masks = (part.get("text_mask", part["text"].new_ones(part["text"].shape[:2])) for part in parts)
    return [part | dict(text=F.pad(part["text"], (0, 0, 0, n)), text_mask=F.pad(mask, (0, n)))
            for part, mask in zip(parts, masks) for n in [longest - mask.shape[1]]]


# ---------------------------------------------------------------- what a video net looks at besides text

@functools.lru_cache
def net_of(spec):
    """The net on the meta device, for its plain attributes."""
    with torch.device("meta"):
        return common.make_net(spec)


def given(cfg):
    """How many of a clip's first latent frames the net is given."""
    net = net_of(cfg["net"])
    if getattr(net, "video2world", False):
        return cfg.get("given_frames", 0)
    return int(net.first == "replace" if getattr(net, "first", "") else bool(cfg.get("first_frame")))


def asks(cfg):
    """Whether the net looks at something of a clip, so that samples need clips, too."""
    net = net_of(cfg["net"])
    return bool(given(cfg) or any(getattr(net, key, 0) for key in ("first", "image_dim", "control")))


@torch.no_grad()
def frames(raw, cfg, device):
    """What goes into both conditions, {} for most nets: of clips raw["image"] (B, c, [F,] H, W), or as stored
    in raw["cond"], what `seen` makes; of these clips or stored latents, without noise, first_frame
    (B, C, 1, h, w), or condition_frames (B, C, T, h, w) and condition_mask (B, 1, T, 1, 1). A VAE of videos
    makes a latent frame of its pixels and those before, so whole clips begin with the same ones."""
    net = net_of(cfg["net"]) if cfg.get("net") else None
    if net is None or len(net.x_shape) < 4:
        return {}
    clip = next((raw[k] for k in ("image", "moments", "latent") if k in raw), None)
    clip = clip[:, :, None] if clip is not None and clip.dim() == 4 else clip
    pixels = "image" in raw and bool(cfg.get("encoders"))
    found = {k: v.to(device).float() for k, v in raw.get("cond", {}).items() if k not in TEXT_KEYS}
    if pixels:
        found = seen(clip, cfg, device) | found
    if "control" in found:                              # with VACE's mask, 1 where a clip is to be made
        control = found["control"]
        found["control"] = F.pad(control, (0,) * 7 + (net.control - control.shape[1],), value=1.0)
    if clip is None or not (n := given(cfg)):
        return found
    if pixels:
        stride = factors(described(cfg["encoders"], cfg["offline"])[1])[2]
        clip = moments(clip[:, :, :1 + stride * (n - 1)], cfg, device)
    first, total = scaled(clip[:, :net.x_shape[0], :n].to(device)), net.x_shape[1]
    if not getattr(net, "video2world", False):
        return found | dict(first_frame=first)
    mask = (torch.arange(total, device=device) < n).float()[:, None, None].expand(len(first), 1, -1, 1, 1)
    return found | dict(condition_frames=F.pad(first, (0, 0, 0, 0, 0, total - n)), condition_mask=mask)


@torch.no_grad()
def seen(clips, cfg, device):
    """What only pixels (B, 1 or 3, F, H, W) give: first_frame (B, C, T, h, w), the first one and then grey
    ones, as many as the net takes; CLIP's states of that frame, image (B, N, D); control (B, 2 C, T, h, w), a
    grey clip and the depth."""
    net, x = net_of(cfg["net"]), scaled(clips.to(device)).expand(-1, 3, -1, -1, -1)
    c, total, found = net.x_shape[0], shapes(cfg)[1], {}
    grey = x.new_zeros(x[:, :, :1].shape).expand(-1, -1, total, -1, -1)
    if getattr(net, "first", "") == "concat":
        found["first_frame"] = moments(torch.cat([x[:, :, :1], grey[:, :, 1:]], dim=2), cfg, device)[:, :c]
    if getattr(net, "image_dim", 0):
        with using(cfg, device, ("image_encoder",)) as loaded:
            found["image"] = loaded.pipe.encode_image(pictures(x[:, :, 0]), device).float()
    if getattr(net, "control", 0):
        if not cfg.get("depth_model"):
            raise BadInput(f"--net {cfg['net']} needs a control; give --depth_model, a depth estimation of "
                           "transformers, or tars of tools/encode.py")
        parts = moments(grey[:1], cfg, device), moments(depth(x, cfg), cfg, device)
        found["control"] = torch.cat([part[:, :c].expand(len(x), -1, -1, -1, -1) for part in parts], dim=1)
    return found


def pictures(x):
    """Pixels (N, 3, H, W) in [-1, 1] as N uint8 tensors, which transformers' processors take."""
    return [(127.5 * v + 127.5).round().byte().cpu() for v in x]


def depth(x, cfg):
    """Clips (B, 3, F, H, W) in [-1, 1] -> their depth by cfg["depth_model"], alike; far is -1, near 1 in each
    clip (assumption)."""
    model, processor = depth_model(cfg["depth_model"], cfg["offline"])
    model, (b, _, f, *size) = model.to(x.device), x.shape
    near = torch.cat([model(**processor(images=still, return_tensors="pt").to(x.device)).predicted_depth
                      for still in pictures(x.transpose(1, 2).flatten(0, 1))])                  # (B F, h, w)
    near = F.interpolate(near[:, None], size, mode="bilinear").view(b, 1, f, *size)
    low, high = near.amin((2, 3, 4), True), near.amax((2, 3, 4), True)
    return (2 * (near - low) / (high - low).clamp(min=1e-6) - 1).expand(-1, 3, -1, -1, -1)


@functools.lru_cache(maxsize=1)
def depth_model(name, offline):
    cure = "give one of transformers such as depth-anything/Depth-Anything-V2-Large-hf"
    with speaking("--depth_model", name, cure):
        import transformers
        kinds = transformers.AutoModelForDepthEstimation, transformers.AutoImageProcessor
        model, processor = (kind.from_pretrained(name, local_files_only=offline) for kind in kinds)
    return model.eval().requires_grad_(False), processor


# ---------------------------------------------------------------- texts, latents, sizes

@torch.no_grad()
def prompts(texts, cfg, device):
    """B str, or names of NEGATIVE -> dict of text (B, L, D), and pooled or text_mask where the pipeline has
    them, in its type."""
    with using(cfg, device, TEXTS) as found:
        sd, texts = "Diffusion" in found.kind, [NEGATIVE.get(text, text) for text in texts]
        own = dict(num_images_per_prompt=1) if sd else dict(max_sequence_length=KNOWN[found.kind])
        if found.kind not in ("FluxPipeline", "QwenImagePipeline"):
            own["do_classifier_free_guidance"] = False
        text, other, *more = found.pipe.encode_prompt(texts, device=device, **own)
        other, key = more[0] if sd and more else other, "text_mask" if "Qwen" in found.kind else "pooled"
        return dict(text=text) if other is None else {"text": text, key: other.to(text)}


def cut(texts, cfg):
    """[a line on how many of the texts are longer than what the encoders take], [] if none is."""
    pipe = load(cfg["encoders"], cfg["encoder_dtype"], cfg["offline"]).pipe if texts else None
    long = {}
    for tokenizer in filter(None, (getattr(pipe, part, None) for part in ("tokenizer", "tokenizer_2"))):
        limit = min(tokenizer.model_max_length, KNOWN[type(pipe).__name__])
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
    """Pixels (B, 1 or 3, [F,] H, W) -> mean and std of their latents, as the net sees them, (B, 2 C, [T,] h,
    w). Clips one at a time."""
    with using(cfg, device) as found:
        x = scaled(x.to(device)).expand(-1, 3, *[-1] * (x.dim() - 2))
        parts = x.split(1 if x.dim() == 5 else len(x))
        return torch.cat([torch.cat(to_latents(part, found), dim=1) for part in parts])


def shapes(cfg, shape=None, kind="image"):
    """(C, [F,] H, W) of the pixels that cfg["net"] is trained on; or of the x0 that a sample of a kind
    becomes."""
    vae = described(cfg["encoders"], cfg["offline"])[1] if cfg.get("encoders") else None
    channels, space, time = factors(vae) if vae else (0, 1, 1)
    c, *t, h, w = shape or net_of(cfg["net"]).x_shape
    if shape is None:
        return 3 if vae else c, *(time * (n - 1) + 1 for n in t), h * space, w * space
    if kind == "image" and vae:
        return channels, *((n - 1) // time + 1 for n in t), h // space, w // space
    return c // (2 if kind == "moments" else 1), *t, h, w


def check(cfg, texts):
    """BadInput where the VAE of cfg["encoders"] is not the net's, or texts have no text encoder."""
    if not cfg.get("encoders"):
        return
    index, vae = described(cfg["encoders"], cfg["offline"])
    c, given = factors(vae)[0], net_of(cfg["net"]).x_shape[0]
    if c != given:
        raise BadInput(f"--encoders {cfg['encoders']} has a VAE of {c} channels, --net {cfg['net']} takes "
                       f"{given}; give the pipeline, or the VAE, that belongs to the net")
    if texts and not index:
        raise BadInput(f"--encoders {cfg['encoders']} is a VAE alone and texts need encoders; give the whole "
                       "pipeline")


def factors(vae):
    """Channels of a latent, how many pixels it is high and wide, and frames long, by the config of a VAE."""
    if "temperal_downsample" in vae:                    # Wan's, also Qwen-Image's and Cosmos'
        halved = vae["temperal_downsample"]
        return vae.get("z_dim"), 2 ** len(halved) * (vae.get("patch_size") or 1), 2 ** sum(halved)
    halved = len(vae["block_out_channels"]) - 1
    return vae.get("latent_channels"), 2 ** halved, vae.get("temporal_compression_ratio", 1)


@contextmanager
def speaking(flag, name, cure=f"give the folder or hub id of one of {', '.join(KNOWN)}, or of a VAE"):
    """Gives diffusers; what fails inside is BadInput: the libraries raise all kinds of errors."""
    try:
        import diffusers
        import transformers
        for library in diffusers, transformers:         # they warn of every batch with a caption that is cut
            library.utils.logging.set_verbosity_error(), library.utils.logging.disable_progress_bar()
        yield diffusers
    except Exception as e:
        if isinstance(e, ImportError):
            cure = "pip install diffusers transformers sentencepiece ftfy"
        raise BadInput(f"{flag} {name} cannot be used ({' '.join(str(e).split())[:300]}); {cure}") from e


def located(name, offline):
    """What diffusers calls a folder, ID, or hf://ID@REVISION of the hub, and further arguments."""
    if Path(name).is_dir():
        return name, {}
    name, _, revision = name.removeprefix("hf://").partition("@")
    return name, dict(revision=revision or None, local_files_only=offline)


@functools.lru_cache
def described(name, offline):
    """(index of the pipeline, {} for a VAE alone; config of the VAE)."""
    index, (name, how) = {}, located(name, offline)
    with speaking("--encoders", name) as diffusers:
        with suppress(OSError):                         # no model_index.json
            index, how = diffusers.DiffusionPipeline.load_config(name, **how), how | dict(subfolder="vae")
        if index.get("_class_name", "FluxPipeline") not in KNOWN:
            raise ValueError(f"it is a {index['_class_name']}")
        for part in index if Path(name).is_dir() else ():       # transformers makes an empty one of nothing
            if part.startswith("tokenizer") and index[part][0] and not (Path(name) / part).is_dir():
                raise ValueError(f"it lacks the folder {part}, which its model_index.json names")
        return index, diffusers.AutoencoderKL.load_config(name, **how)


@functools.lru_cache(maxsize=1)
def load(name, dtype, offline):
    (index, vae), (name, how) = described(name, offline), located(name, offline)
    how["dtype"] = DTYPES[dtype]
    kind, video = index.get("_class_name", ""), "temperal_downsample" in vae or factors(vae)[2] > 1
    with speaking("--encoders", name) as diffusers, torch.random.fork_rng(devices=[]):  # weights are drawn
        if kind.startswith("Wan"):
            import ftfy  # noqa: F401           Wan's captions are mended by it, or not at all, without a word
        if index:
            parts = (*ABSENT, "safety_checker", *["image_encoder"] * ("ImageToVideo" not in kind))
            if "Cosmos" in kind:                        # they refuse to be built without their guardrails
                sys.modules[getattr(diffusers, kind).__module__].CosmosSafetyChecker = lambda: None
            if kind.startswith(("Wan", "Cosmos")):      # their VAE and CLIP, as trained, in float32
                how["dtype"] = dict(vae=torch.float32, image_encoder=torch.float32, default=how["dtype"])
            absent = {part: None for part in parts if part in index}
            pipe = diffusers.DiffusionPipeline.from_pretrained(name, **absent, **how)
        else:
            pipe = SimpleNamespace(vae=diffusers.AutoModel.from_pretrained(name, **how))
    models = {part: model.eval().requires_grad_(False) for part in ("vae", "image_encoder", *TEXTS)
              if (model := getattr(pipe, part, None))}
    get, row = pipe.vae.config.get, lambda v: torch.tensor(v).float().reshape(-1)                # noqa: E731
    shift = row(get("latents_mean") or get("shift_factor") or 0.0)          # the net: (latent - shift) scale
    scale = get("scaling_factor", 1.0) / row(get("latents_std") or 1.0)
    return SimpleNamespace(kind=kind, pipe=pipe, vae=pipe.vae, models=models, negatives={}, video=video,
                           affine=(shift, scale))


@contextmanager
def using(cfg, device, parts=("vae",)):
    """What is loaded, with these parts on the device; under encoder_offload they leave it afterwards."""
    found = load(cfg["encoders"], cfg["encoder_dtype"], cfg["offline"])
    models = [model.to(device) for part in parts if (model := found.models.get(part))]
    with torch.autocast(torch.device(device).type, enabled=False):
        yield found
    for model in models if cfg["encoder_offload"] else ():
        model.to("cpu")
