"""Every family of nets as small as its golden fixture, and diffusers' class of it with the same weights."""
from typing import NamedTuple

import pytest
import torch

import fill
import golden_recipe
from common import make_net

f64 = torch.float64

class Family(NamedTuple):
    spec: str
    options: dict       # make it as small as the fixture of its name
    can: str            # of label, r, logvar, skip, cache
    cond: dict = {}     # shapes of further condition tensors that it uses, without the batch
    model: str = ""     # diffusers' class, made by the config in the fixture
    config: dict = {}   # ... with these changes, or `fixture`, the name of another

EDM = dict(x_shape=(3, 8, 8), label_dim=4, width=8, mult=(1, 2), blocks=4, attn=(4,), augment_dim=9)
NCSNPP = EDM | dict(mult=(1, 2, 2), blocks=1, fourier=True, residual=True, resample=(1, 3, 3, 1),
                    noise_mult=2)
ADM = EDM | dict(width=64, blocks=3, attn=(8, 4), augment_dim=0, adm=True, emb_mult=2)
EDM2 = dict(x_shape=(3, 8, 8), label_dim=4, width=16, mult=(1, 2), blocks=3, attn=(4,), head_dim=8,
            logvar_dim=16)
DIT = dict(x_shape=(4, 8, 8), dim=32, depth=3, heads=4, label_dim=10)
SD = dict(x_shape=(4, 8, 8), width=32, mult=(1, 2, 2), text_dim=24, groups=8)
SDXL = SD | dict(depths=(0, 2, 3), heads=(2, 4, 8), pooled_dim=16, id_dim=8)
QWEN = dict(x_shape=(4, 6, 10), depth=3, heads=2, dim=32, axes=(4, 6, 6), text_dim=24)
FLUX = QWEN | dict(x_shape=(4, 4, 6), depth=2, single_depth=2, pooled_dim=20)
WAN = dict(x_shape=(4, 3, 4, 6), depth=3, dim=48, heads=4, hidden=64, text_dim=16, freq=32)
VIDEO = dict(x_shape=(4, 3, 4, 6), depth=2, dim=32, heads=2)
COG, COSMOS = VIDEO | dict(time_dim=12, text_dim=10), VIDEO | dict(rank=8, text_dim=12, eps=1e-5)
TEXT, UNET2D, WAN3D = dict(text=(8, 16)), "UNet2DConditionModel", "WanTransformer3DModel"
GIVEN = dict(condition_frames=(4, 3, 4, 6), condition_mask=(1, 3, 1, 1))
COG3D, COSMOS3D = "CogVideoXTransformer3DModel", "CosmosTransformer3DModel"
FAMILIES = dict(
    edm_ddpmpp=Family("edm:cifar10", EDM, "label r logvar", dict(augment=(9,))),
    edm_ncsnpp=Family("edm:cifar10", NCSNPP, "label r logvar", dict(augment=(9,))),
    edm_adm=Family("edm:cifar10", ADM, "label r logvar"),
    edm2=Family("edm2:imagenet64_s", EDM2, "label r logvar"),
    dit=Family("dit:dit_s2", DIT, "label r logvar"),
    sit=Family("dit:sit_s2", DIT | dict(r_kind="diff"), "label r logvar"),
    sd15=Family("sd:sd15", SD | dict(depths=(1, 1, 0), heads=(4, 4, 4)), "r logvar", dict(text=(7, 24)),
                UNET2D),
    sdxl=Family("sd:sdxl", SDXL, "r logvar", dict(text=(7, 24), pooled=(16,), time_ids=(6,)), UNET2D),
    flux=Family("flux:dev", FLUX, "r logvar", dict(text=(5, 24), pooled=(20,), guidance=()),
                "FluxTransformer2DModel"),
    qwen=Family("qwen_image:base", QWEN, "r logvar", dict(text=(5, 24), text_mask=(5,)),
                "QwenImageTransformer2DModel"),
    wan_t2v=Family("wan:t2v_1_3b", WAN, "r logvar skip", TEXT, WAN3D),
    wan_causal=Family("wan:t2v_14b", WAN | dict(chunk=2), "r logvar skip cache", TEXT),
    wan_digits=Family("wan:digits", WAN | dict(label_dim=4, text_dim=0, patch=1), "label r logvar skip"),
    wan22_ti2v=Family("wan:ti2v_5b", WAN, "r logvar skip", TEXT | dict(first_frame=(4, 1, 4, 6)), WAN3D),
    wan_i2v=Family("wan:i2v_14b", WAN | dict(image_dim=20), "r logvar skip",
                   dict(text=(512, 16), image=(257, 20), first_frame=(4, 3, 4, 6)), WAN3D),
    wan_vace=Family("wan:vace_1_3b", WAN | dict(control=24, hints=(0, 2)), "r logvar skip",
                    TEXT | dict(control=(24, 3, 4, 6)), "WanVACETransformer3DModel"),
    cogvideox2b=Family("cogvideox:2b", COG, "r logvar skip", dict(text=(5, 10)), COG3D),
    cogvideox5b=Family("cogvideox:5b", COG, "r logvar skip", dict(text=(5, 10)), COG3D),
    cosmos2_t2i=Family("cosmos_predict2:t2i_2b", COSMOS, "r logvar skip", dict(text=(7, 12), fps=()),
                       COSMOS3D),
    cosmos2_v2w=Family("cosmos_predict2:v2w_2b", COSMOS, "r logvar skip", dict(text=(7, 12)) | GIVEN,
                       COSMOS3D, dict(fixture="cosmos2_t2i", in_channels=5, rope_scale=(1, 3, 3))),
    cosmos25=Family("cosmos_predict2:2.5_2b", COSMOS | dict(text_dim=20, text_proj=12), "r logvar skip",
                    dict(text=(7, 20)) | GIVEN, COSMOS3D),
    toy=Family("toy:tiny", dict(label_dim=4), "label r logvar skip"),
    toy_rf=Family("toy:tiny,schedule=rf,pred=flow", dict(label_dim=4, text_dim=3), "label r logvar skip",
                  dict(text=(5, 3))),
    toy_video=Family("toy:video", dict(label_dim=4), "label r logvar skip cache"))

def spec(name, **changes):
    """--net of a family of that size."""
    family = FAMILIES[name]
    return ",".join([family.spec, *(f"{k}={v}" for k, v in (family.options | changes).items())])

def make(family, **options):
    return make_net(family.spec, **family.options | options)

def draws(family, batch=2, dtype=torch.float32):
    """Its conditions."""
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(batch, *shape, generator=generator, dtype=f64).to(dtype)
            for key, shape in family.cond.items()}

def shake(net, seed=0):
    """Moves every parameter off its start, so that no zero-initialised layer makes a test vacuous."""
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return net

def near(a, b, tolerance=2e-5):
    return a.shape == b.shape and (a - b).abs().max() <= tolerance

def close(a, b, tolerance=1e-5):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)

def load(net, weights, layout="public"):
    """A net with all of these weights, but for what it knowingly drops; what they lack is computed."""
    names = fill.theirs(net, layout)
    own = {names.get(key, key): v for key, v in weights.items()}
    own = {key: a for key, v in own.items() if (a := fill.adapt(net, key, v)) is not None}
    left, unknown = net.load_state_dict(own, strict=False)
    assert not unknown and all(key.endswith(("pos_embed", "resample_filter")) for key in left)
    return net.eval()

def pair(name, changes={}, **options):
    """diffusers' class with random weights, changes in its config, and ours with the same weights."""
    diffusers, family = pytest.importorskip("diffusers"), FAMILIES[name]
    config = family.config | changes
    config = golden_recipe.load(config.pop("fixture", name))[0]["config"] | config
    torch.manual_seed(0)
    ref = getattr(diffusers, family.model)(**config).eval()
    return ref if "sd" in name else shake(ref), load(make(family, **options), ref.state_dict())
