"""Between what the loader gives and the space a net works in. Pixel space only."""
import torch

import augment
import common
from common import BadInput


def encode(raw, cfg, device):
    """Raw batch -> dict(x0 (B, C, H, W) float32 in [-1, 1], cond, uncond, id), on `device`.

    uint8 v -> v / 127.5 - 1 (as EDM). Augmentations that the loader drew are applied here (x0 may then leave
    [-1, 1]) and both conditions carry their labels, augment (B, augment.dim(cfg)). Pairs come with the states
    x_t on the teacher's way to x0, path (B, P, C, H, W), at the times path_t (P,); path[:, 0] is sigma z.
    """
    x0 = raw["image"].to(device, non_blocking=True)
    x0 = x0.float() / 127.5 - 1 if x0.dtype == torch.uint8 else x0.float()
    cond, uncond = conditions(raw["label"], cfg, device)
    if "augment" in raw:
        x0, labels = augment.apply(x0, raw["augment"], augment.chosen(cfg))
        cond["augment"] = uncond["augment"] = labels
    batch = dict(x0=x0, cond=cond, uncond=uncond, id=raw["id"].to(device, non_blocking=True))
    if "path" in raw:
        batch["path"] = raw["path"].to(device, non_blocking=True)
        batch["path_t"] = torch.cat([common.t_like(t, x0[:1]) for t in raw["path_t"]])
    return batch


def decode(x0, cfg):
    """x0 (B, C, H, W) -> uint8, clipped; the inverse of encode for every uint8 value."""
    return (x0.float() * 127.5 + 128).clip(0, 255).to(torch.uint8)


def conditions(labels, cfg, device):
    """Labels (B,) (tensor or list of int) -> (cond, uncond), each dict(label int64 (B,)), -1 = none:
    everywhere if cfg["classes"] is 0, and in uncond."""
    labels, classes = torch.as_tensor(labels, dtype=torch.int64), cfg.get("classes", -1)
    if classes == 0:
        labels = torch.full_like(labels, -1)
    elif classes > 0 and len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadInput(f"classes are 0 to {classes - 1} (-1 = none), not {labels.min()} to {labels.max()}")
    labels = labels.to(device, non_blocking=True)
    return dict(label=labels), dict(label=torch.full_like(labels, -1))
