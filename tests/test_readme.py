"""Every command in README.md's blocks: run in small form, or refused in a sentence where it needs more."""
import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import trainer
from run import refused

RUN, SDXL = "outputs/fewstep/digits/dmd2", "outputs/fewstep/captioned-1024-latents/dmd2_sdxl"
PIPELINE = "stabilityai/stable-diffusion-xl-base-1.0"
TINY = "--max_iter 2 --batch_size 8 --workers 0 --val_every 0 --device cpu --wandb disabled"
FEW = "--seeds 1 --samples 20 --net student --device cpu"
# command: options that make it small; (what its refusal says where it cannot run,); None where it is left out
HERE = {
    "pip install -r requirements.txt": None, "pytest": None,    # of the machine; runs this test
    "torchrun train.py methods/dmd2.py": TINY,
    f"python evaluate.py {RUN}": "--seeds 1 --samples 20 --device cpu",
    # photos, public weights, eight GPUs
    f"torchrun --nproc_per_node 8 tools/encode.py --net sd:sdxl --data photos --encoders {PIPELINE} --out "
    f"captioned-1024-latents": ("photos does not exist",),
    "torchrun --nproc_per_node 8 train.py methods/dmd2.py --preset sdxl": ("captioned-1024-latents",),
    f"python sample.py {SDXL} --prompts prompts.txt --encoders {PIPELINE}": (f"{SDXL} does not exist",),
    f"python tools/export.py {SDXL}#student sdxl-few-step": (f"{SDXL} does not exist",),
    f"python sample.py {RUN}": "--seeds 0-3 --device cpu",
    "python sample.py RUN --net teacher --classes 3 --seeds 0-15 --out threes.png": "--steps 2 --device cpu",
    "torchrun --nproc_per_node 8 sample.py RUN --seeds 0-49999 --out FOLDER": "--seeds 0-3 --device cpu",
    # of digits, which do not move and have no prompts
    "python sample.py RUN --frames 16 --fps 8 --out clips.mp4": ("--frames",),
    "python sample.py RUN --prompts p.txt --given stills --segments 3 --out clips.mp4": ("prompts",),
    "python evaluate.py RUN --all --steps 1": FEW,
    # the library is not there, or its weights are not, or the file
    "torchrun --nproc_per_node 8 evaluate.py RUN --seeds 3 --ref cifar10-32x32.npz --inception weights.pth":
        (),
    "python evaluate.py RUN --ref photos --save_ref photos.npz --samples 10000": (),
    'python tools/plot.py RUN RUN --keys "loss,norm*" --out curves.png':
        "--keys loss_*,norm*" if importlib.util.find_spec("matplotlib") else ("pip install matplotlib",),
    "python tools/bench.py methods/dmd2.py": "--blocks 2 --iters 1 --batch_size 8 --workers 0 --device cpu"}

def call(command, options=""):
    """Its main, in this process, with the options; a key that is in both has ours."""
    words = shlex.split(re.sub(r"\bRUN\b", RUN, command).replace("--nproc_per_node 8 ", ""))
    given = {word for word in options.split() if word.startswith("--")}
    kept = [w for before, w in zip(words[1:], words[2:]) if not {before, w} & given]
    importlib.import_module(words[1].removesuffix(".py").replace("/", ".")).main(kept + options.split())

def test_every_command_runs_in_small_form_or_is_refused_in_a_sentence(tmp_path, monkeypatch):
    blocks = re.findall(r"^```\w*\n(.*?)^```", (trainer.ROOT / "README.md").read_text(), re.S | re.M)
    parts = [re.sub(r"^score it: ", "", part.split("  #")[0].strip())
             for block in blocks for line in block.splitlines() for part in line.split(" && ")]
    found = [p for p in parts if re.match(r"(python|torchrun|pip|pytest|sbatch|kubectl|cp) ?", p)]
    assert {*found} ^ {*HERE} == set()                  # a new command needs a line above
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trainer.ROOT / "methods", "methods")
    for command in dict.fromkeys(found):
        if isinstance(how := HERE[command], tuple):
            refused(call, command, says=how)
        elif how is not None:
            call(command, how)
    assert Path(RUN, "checkpoints/0000002.pth").exists() and Path("threes.png").exists()
    assert len([*Path("FOLDER").rglob("*.png")]) == 4
    # "Add a method": copy, edit, run
    monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", "outputs")        # bench.py has set one of its own
    text = shutil.copy("methods/dmd2.py", "methods/mine.py")
    Path(text).write_text(Path(text).read_text().replace('gan_loss="softplus"', 'gan_loss="hinge"'))
    call("torchrun train.py methods/mine.py", TINY)
    assert '"gan_loss": "hinge"' in Path(RUN).with_name("mine").joinpath("config.json").read_text()
