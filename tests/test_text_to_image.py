"""Text to image in miniature: tiny random pipelines with vocabularies made here, captions, tars, encode.py."""
import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import common
import data
import fill
import run
import trainer
from nets import encoders

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("webdataset")
sys.path.insert(0, str(trainer.ROOT / "tools"))

WORDS = "a b c cat dog red blue on the mat".split()
NETS = dict(
    sdxl="sd:sdxl,x_shape=(4,8,8),width=16,mult=(1,2),depths=(0,1),heads=(2,2),groups=4,layers=1,text_dim=40,"
         "pooled_dim=24,id_dim=8",
    flux="flux:dev,x_shape=(4,8,8),depth=1,single_depth=1,dim=32,heads=2,axes=(4,6,6),text_dim=16,"
         "pooled_dim=16")

def clip(kind, size):
    config = transformers.CLIPTextConfig(
        vocab_size=300, hidden_size=size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=size, bos_token_id=298, eos_token_id=299, pad_token_id=299)
    return getattr(transformers, kind)(config)

def clip_tokenizer():
    letters = [chr(i) for i in range(97, 123)]
    pieces = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(pieces)} | {"<|startoftext|>": 298, "<|endoftext|>": 299}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)

def t5():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *(("▁" + w, -2.0) for w in WORDS)]
    pieces += [(chr(i), -5.0) for i in range(97, 123)] + [("▁", -4.0)]
    tokenizer = transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return tokenizer, transformers.T5EncoderModel(config)

def pipeline(name):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, scaling_factor=0.13, sample_size=16,
        shift_factor=0.1 if name == "flux" else None)
    if name == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            vae, clip("CLIPTextModel", 16), clip("CLIPTextModelWithProjection", 24), clip_tokenizer(),
            clip_tokenizer(), unet=None, scheduler=diffusers.EulerDiscreteScheduler())
    tokenizer, text = t5()
    return diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, clip("CLIPTextModel", 16),
                                  clip_tokenizer(), text, tokenizer, transformer=None)
