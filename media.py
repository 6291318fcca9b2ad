"""What the bytes of a file hold: an image, a clip, tensors, a text. Its name says which."""
import io
import json

import numpy as np
import torch

from common import BadInput, known

IMAGES, VIDEOS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"), (".mp4", ".webm", ".mov")


def value(name, content, clip=None):
    """Image uint8 (1 or 3, H, W); of a gif or video, where clip = (frames, fps) asks for it, uint8
    (3, frames, H, W); tensors, never a pickle's code; text, int, json."""
    import safetensors.torch
    end = "." + name.lower().rpartition(".")[2]
    if clip and end in (".gif", *VIDEOS):
        return video(name, content, *clip)
    kinds = dict.fromkeys(IMAGES, image) | {
        ".npy": lambda b: torch.from_numpy(np.load(io.BytesIO(b))), ".safetensors": safetensors.torch.load,
        ".pth": lambda b: torch.load(io.BytesIO(b), "cpu", weights_only=True),
        ".txt": bytes.decode, ".cls": int, ".json": json.loads}
    known(f"{name}: file type", end, kinds)
    return kinds[end](content)


def image(content):
    """Grey stays one channel, of 16 bits scaled by 1/257; transparent pixels are laid over white."""
    from PIL import Image, ImageOps
    found = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if found.mode.startswith("I"):                      # 16-bit grey, which convert("L") would clip
        return np.round(np.asarray(found).astype(np.float64) / 257).clip(0, 255).astype(np.uint8)[None]
    grey = found.mode in ("1", "L", "LA", "La")
    if found.has_transparency_data:
        found = found.convert("RGBA")
        found = Image.alpha_composite(Image.new("RGBA", found.size, "white"), found)
    return np.atleast_3d(np.array(found.convert("L" if grey else "RGB"))).transpose(2, 0, 1)


def video(name, content, frames, fps):
    """The first frames at this rate, of 0 fps each picture once; BadInput where it ends before them."""
    found, seconds = [], 0.0
    for i, (seconds, read) in enumerate(stills(name, content)):
        while len(found) < frames and (len(found) / fps < seconds - 1e-6 if fps else len(found) <= i):
            found.append(read().transpose(2, 0, 1))
        if len(found) == frames:
            return np.stack(found, axis=1)
    need = f" at --data_fps {fps:g}, which end after {(frames - 1) / fps:.2f} s" if fps else ""
    raise BadInput(f"{name} has {len(found)} frames in {seconds:.2f} s, but --net takes {frames}{need}; leave"
                   " it out, give a higher rate, or fewer frames by the net's x_shape")


def stills(name, content):
    """(second until which it is seen, read() -> (H, W, 3) uint8) of each picture of a video."""
    if name.lower().endswith(".gif"):
        from PIL import Image, ImageSequence
        seconds = 0.0
        for picture in ImageSequence.Iterator(Image.open(io.BytesIO(content))):
            seconds += (picture.info.get("duration") or 100) / 1000
            yield seconds, lambda: np.asarray(picture.convert("RGB"))
        return
    try:
        import av
    except ImportError as e:
        raise BadInput(f"{name} needs the PyAV library ({e}); pip install av") from e
    with av.open(io.BytesIO(content)) as container:
        stream, first = container.streams.video[0], None
        stream.thread_type = "AUTO"
        for picture in container.decode(stream):
            first = picture.time if first is None else first
            yield (picture.time - first + 1 / float(stream.average_rate),
                   lambda: picture.to_ndarray(format="rgb24"))


def cut(found, shape):
    """uint8 (c, [f,] h, w) -> (C, [F,] H, W) = shape: short side by bicubic, centre cut, grey to C channels;
    an image is a clip of one frame. Others, and where shape is None, stay as they are."""
    from PIL import Image, ImageOps
    if shape is None or found.dtype != np.uint8 or found.shape == shape:
        return found
    frames = found.shape[1:-2] or shape[1:-2] and (1,)
    planes = np.stack([ImageOps.fit(Image.fromarray(plane), shape[:-3:-1], Image.BICUBIC)
                       for plane in found.reshape(-1, *found.shape[-2:])])
    planes = planes.reshape(len(found), *frames, *shape[-2:])
    return np.repeat(planes, shape[0], axis=0) if len(found) == 1 else planes
