"""Every command of README.md: run in small form, in its order, or refused in a sentence where it needs more."""
import importlib
import re
import shlex
import shutil
from pathlib import Path

import trainer
from run import refused

TEXT = (trainer.ROOT / "README.md").read_text()
RUN = "outputs/fewstep/digits/dmd2"
TINY = "--net edm:digits --max_iter 2 --batch_size 8 --workers 0 --val_every 0 --device cpu --wandb disabled"
FEW = "--seeds 0-3 --device cpu"
# command: options that make it small, or (what its refusal says where it cannot run), or None: why it is left out
HERE = {
    "pip install -r requirements.txt": None,            # of this machine
    "pip install s3fs universal_pathlib boto3 'moto[server]'": None,
    "pip install diffusers transformers webdataset": None,
    "pip install ftfy av sentencepiece": None,
    "pip install s3fs universal_pathlib": None,
    "pytest": None,                                     # is what runs this
    "pytest -m slow": None,
    "pytest tests/test_methods.py": None,
    "torchrun train.py methods/dmd2.py": TINY,
    "python evaluate.py outputs/fewstep/digits/dmd2": "--seeds 1 --samples 20 --device cpu",
    "python evaluate.py RUN": "--seeds 1 --samples 20 --net student --device cpu",
    "python evaluate.py RUN --steps N": ("--steps",),
    "torchrun train.py methods/NAME.py": ("methods/NAME.py",),
    "torchrun --nproc_per_node 2 tools/make_pairs.py --out outputs/pairs/digits": "--pairs 8 --steps 2",
    "python tools/table.py": "--help",                  # trains every method
    "python tools/presets.py": "sft/cifar10",
    "cp methods/dmd2.py methods/mine.py": "",
    "torchrun train.py methods/mine.py": TINY,
    "torchrun tools/encode.py": ("--encoders",),        # needs a VAE
    "python tools/convert_edm.py edm-cifar10-32x32-cond-vp.pkl OUT.pth": ("edm-cifar10",),      # a public file
    "python tools/export.py RUN#ema FOLDER": "",
    "torchrun --nproc_per_node 8 tools/encode.py --net sd:sdxl --data photos --encoders "
    "stabilityai/stable-diffusion-xl-base-1.0 --out captioned-1024-latents": ("photos",),
    "torchrun --nproc_per_node 8 train.py methods/dmd2.py --preset sdxl": ("captioned-1024-latents",),
    "python sample.py outputs/fewstep/captioned-1024-latents/dmd2_sdxl --prompts prompts.txt --encoders "
    "stabilityai/stable-diffusion-xl-base-1.0": ("dmd2_sdxl",),
    "python tools/export.py outputs/fewstep/captioned-1024-latents/dmd2_sdxl#ema sdxl-few-step": ("dmd2_sdxl",),
    "torchrun --nproc_per_node 8 train.py ...": ("...",),
    "python tools/export.py RUN#ema ema.safetensors": "",
    "sbatch tools/slurm.sbatch methods/dmd2.py --max_iter 100000": None,        # tests/test_preempt.py
    "sbatch --nodes=4 tools/slurm_nodes.sbatch ...": None,
    "pkill -USR1 -P $launcher": None,                   # tests/test_preempt.py
    "kubectl apply -f tools/kubernetes.yaml": None,
    "python train.py": None,                            # a name of it
    "python sample.py outputs/fewstep/digits/dmd2": FEW,
    "python sample.py RUN --net teacher --classes 3 --seeds 0-15 --out threes.png": "--steps 2 --device cpu",
    "torchrun --nproc_per_node 8 sample.py RUN --seeds 0-49999 --out FOLDER": FEW,
    "python sample.py RUN --frames 16 --fps 8 --out clips.mp4": ("--frames",),  # digits do not move
    "python sample.py RUN --prompts p.txt --given stills --segments 3 --out clips.mp4": ("prompts",),      # digits have none
    "python evaluate.py RUN --all --steps 1": "--seeds 1 --samples 20 --net student --device cpu",
    "python tools/bench.py methods/dmd2.py": "--blocks 2 --iters 1 --batch_size 8 --workers 0 --device cpu",
    "python train.py methods/dmd2.py": "--dry_run --device cpu"}

def commands(text):
    """Those of code blocks, a line each, and of `...` in sentences, without comments and the parts of &&."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    said = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    lines = [line for block in blocks for line in block.splitlines()] + [" ".join(s.split()) for s in said]
    parts = [re.sub(r"^[\w ]+: (?=python )", "", part.split("  #")[0].strip())
             for line in lines for part in line.split(" && ")]
    return [p for p in parts if re.match(r"(python|torchrun|pip|pytest|sbatch|kubectl|cp|pkill)\b", p)]

def call(command, options):
    words = shlex.split(re.sub(r"\bRUN\b", RUN, command))
    if words[0] == "cp":
        source, mine = (Path(word) for word in words[1:])
        return mine.write_text(source.read_text().replace('gan_loss="softplus"', 'gan_loss="hinge"'))   # edit
    words = [w for i, w in enumerate(words) if "nproc_per_node" not in w + words[i - 1]][1:]
    main = importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main
    given = {w for w in options.split() if w.startswith("--")}      # ours count
    kept = [w for i, w in enumerate(words) if i and w not in given and words[i - 1] not in given]
    try:
        main(kept + options.split())
    except SystemExit as e:
        assert e.code == 0 and options == "--help"

def test_the_test_knows_every_command_and_no_other():
    assert {*commands(TEXT)} ^ {*HERE} == set()

def test_every_command_runs_in_small_form_or_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trainer.ROOT / "methods", "methods")
    order = sorted((c for c in HERE if HERE[c] is not None), key=lambda c: not c.endswith(" methods/dmd2.py"))
    for command in order:
        if isinstance(how := HERE[command], tuple):
            refused(call, command, "", says=how)
        else:
            call(command, how)
    assert (tmp_path / RUN / "checkpoints/0000002.pth").exists() and (tmp_path / "threes.png").exists()
    assert (tmp_path / "ema.safetensors").exists()
    assert '"gan_loss": "hinge"' in (tmp_path / RUN).with_name("mine").joinpath("config.json").read_text()
