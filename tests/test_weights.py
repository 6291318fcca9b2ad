"""Public weights into nets and students back out: folders of diffusers, the hub, layouts of keys."""
import importlib
import json
import resource
import shutil

import pytest
import torch

import ckpt
import export
import golden_recipe
import logs
import run
import sample
import trainer
from common import make_net
from run import differing, refused
from test_public_nets import PAIRS, SDS, pair, unet

@pytest.fixture(params=["flux", "sdxl"])
def public(request, tmp_path, monkeypatch):
    """(diffusers' net, spec of ours, folder that diffusers wrote in four or more files)."""
    if request.param == "flux":
        reference, _, net = pair("flux")
        spec, size = "flux:public", PAIRS["flux"]
    else:
        _, reference, net = unet("sdxl")
        spec, size = "sd:public", importlib.import_module("nets.sd").sizes["sdxl"] | SDS["sdxl"]
    monkeypatch.setitem(importlib.import_module(f"nets.{spec.split(':')[0]}").sizes, "public", size)
    held = sum(p.nbytes for p in reference.parameters())
    reference.save_pretrained(tmp_path / "model", max_shard_size=held // 4)
    return reference, spec, tmp_path / "model"

def filled(source, spec, **options):
    """The net `spec` from a source, as a run fills it."""
    with torch.device("meta"):
        model = make_net(spec, **options)
    pinned = ckpt.resolve(source)
    return sample.frozen(dict(net=model), dict(net=source), {source: ckpt.read(pinned)})["net"], pinned

def test_a_folder_a_pipeline_and_the_hub_give_the_weights_bit_for_bit(public, tmp_path, monkeypatch):
    reference, spec, folder = public
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) >= 4
    net, pinned = filled(str(folder), spec)
    assert differing(net.state_dict(), reference.state_dict()) == []
    more = filled(str(folder), spec, r=True, logvar=True)[0].state_dict()   # heads that the source lacks
    assert differing({k: more[k] for k in reference.state_dict()}, reference.state_dict()) == []
    # a pipeline: the denoiser's sub-folder, also by name, its half-precision copy left alone
    part = "transformer" if spec.startswith("flux") else "unet"
    shutil.copytree(folder, tmp_path / "snap" / part)
    (tmp_path / "snap" / "model_index.json").write_text("{}")
    (tmp_path / "snap" / part / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"not to be read")
    for source in (str(tmp_path / "snap"), f"{tmp_path}/snap#{part}"):
        assert differing(filled(source, spec)[0].state_dict(), reference.state_dict()) == []
    # the hub: kept with its revision, which a resume asks for again
    asked = []
    def snapshot_download(repo, revision, **kw):
        asked.append((repo, revision))
        return str(tmp_path / "snap")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    net, pinned = filled("some-org/some.model", spec)
    assert differing(net.state_dict(), reference.state_dict()) == []
    assert pinned["file"] == "hf://some-org/some.model@snap" and ("some-org/some.model", "snap") in asked
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: 1 / 0)
    refused(ckpt.resolve, "some-org/none", says=["some-org/none", "hub"])

def test_what_does_not_fit_or_is_not_whole_is_named(public):
    from safetensors.torch import load_file, save_file
    reference, spec, folder = public
    (first, *rest), pinned = sorted(folder.glob("*.safetensors")), ckpt.resolve(str(folder))
    weights = load_file(first)
    key = next(iter(weights))
    save_file(weights | {"nobody.knows": torch.ones(2), key: torch.ones(3)}, first)
    refused(filled, str(folder), spec, says=["1 unknown (nobody.knows)", f"1 misshapen ({key} (3,)"])
    refused(ckpt.read, pinned, says=["not the file it was"])
    del weights[key]
    save_file(weights, first)
    refused(filled, str(folder), spec, says=[f"1 missing ({key})"])
    first.write_bytes(first.read_bytes()[:200])
    refused(filled, str(folder), spec, says=[first.name, "whole"])
    first.unlink()
    refused(filled, str(folder), spec, says=[first.name])

def test_an_exported_student_loads_into_diffusers_and_back_here(
        public, tmp_path, monkeypatch, capsys):
    reference, spec, folder = public
    net, pinned = filled(str(folder), spec, logvar=True)
    for p in net.parameters():
        p.data.add_(0.01)
    cfg = dict(net=spec, teacher=str(folder), classes=0, steps=4, t_list=(0.9, 0.5), guidance=3.5,
               max_iter=9)
    state = dict(
        format=ckpt.FORMAT, it=9, method="dmd2", config=cfg, nets=dict(student=net.state_dict()), optims={},
        emas=dict(ema={k: 2 * v for k, v in net.state_dict().items()}), sources={str(folder): pinned},
        shards=dict(index={}, count=0, stamp=""))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    ckpt.save(tmp_path / "run/checkpoints/0000009.pth", state)
    run = f"{tmp_path}/run/checkpoints/0000009.pth"
    monkeypatch.setattr(export, "SHARD", sum(v.nbytes for v in net.parameters()) // 3)
    refused(export.main, [f"{run}#nosuch", f"{tmp_path}/out"], says=["no entry nosuch"])
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    export.main([f"{run}#ema", f"{tmp_path}/out"])
    theirs = type(reference).from_pretrained(tmp_path / "out").state_dict()
    want = {k: 2 * v for k, v in net.state_dict().items() if k in theirs}
    assert differing(theirs, want) == [] and len(want) == len(theirs)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
    assert differing(filled(f"{tmp_path}/out", spec, logvar=True)[0].state_dict(), state["emas"]["ema"]) == []
    record = json.loads((tmp_path / "out" / "fewstep.json").read_text())
    assert record == dict(method="dmd2", net=spec, steps=4, t_list=[0.9, 0.5], guidance=3.5,
                          max_iter=9, schedule=net.schedule, pred=net.pred, entry="ema", it=9)
    refused(export.main, [run, f"{tmp_path}/other"], says=["#ema"])
    refused(export.main, [f"{run}#ema", f"{tmp_path}/out"], says=["exists"])
    # a run whose teacher is that run: its config.json names the folder
    state["config"], state["sources"] = cfg | dict(teacher=run), {run: ckpt.resolve(f"{run}#ema")}
    ckpt.save(tmp_path / "0000009.pth", state)
    (tmp_path / "run/config.json").write_text(json.dumps(cfg | dict(sources={str(folder): pinned})))
    for name, said in ("second", False), ("third", True):
        export.main([f"{tmp_path}/0000009.pth#ema", f"{tmp_path}/{name}"])
        assert (tmp_path / name / "config.json").exists() != said
        assert ("copy the public model's" in capsys.readouterr().out) == said
        (tmp_path / "run/config.json").unlink(missing_ok=True)

@pytest.mark.parametrize("name, layout", [("dit", "public"), ("fastgen_dit_r_abs", "fastgen")])
def test_keys_of_other_layouts_are_found_out(name, layout, tmp_path, monkeypatch):
    _, _, weights = golden_recipe.load(name)
    options = dict(x_shape=(4, 8, 8), dim=32, depth=3, heads=4, label_dim=10)
    if layout == "fastgen":
        options |= dict(learn_sigma=False, r=True, logvar=True)
    whole = make_net("dit:dit_s2", **options)
    ckpt.save(tmp_path / "weights.pth", weights | dict(pos_embed=whole.pos_embed))
    net, _ = filled(f"{tmp_path}/weights.pth", "dit:dit_s2", **options)
    assert len(net.state_dict()) == len(weights) + 1
    x, want = golden_recipe.tensor("x", (2, 4, 8, 8)), golden_recipe.load(name)[1]["out"][:, :4]
    t, r = torch.tensor([0.75, 0.2]), dict(r=torch.tensor([0.5, 0.1]).double()) if layout == "fastgen" else {}
    t = t.double() if r else torch.tensor([0.25, 0.999]).double()
    assert (net(x, t, dict(label=torch.tensor([3, -1])), **r) - want).abs().max() < 2e-5

BIG = "dit:dit_xl2,depth=10,x_shape=(1,8,8),learn_sigma=False"              # 244 M parameters

def write_big(folder):
    from diffusers.utils import SAFETENSORS_WEIGHTS_NAME as name
    from huggingface_hub import save_torch_state_dict
    folder.mkdir()
    save_torch_state_dict(make_net(BIG, label_dim=10).state_dict(), folder, filename_pattern=name.replace(
        ".safetensors", "{suffix}.safetensors"), max_shard_size="200MB")
    return sum(f.stat().st_size for f in folder.iterdir()) / 1e9

def loading(folder, parallel):
    """GB that the process grew by, at its peak, until its net was filled."""
    peak, found = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, []
    idle = peak()
    def filled(*args):
        found.append(peak() - idle)
        raise KeyboardInterrupt                         # that is all
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(logs, "describe", filled)
        trainer.train(*run.setup("sft", net=BIG, teacher=str(folder), parallel=parallel, batch_size=2, ema=(),
                                 name=f"big_{parallel}", t_dist="uniform"))
    return found[0]

@pytest.mark.slow
def test_loading_needs_one_model_or_one_shard(tmp_path):
    """At most 1.3 times the model on one process, its shard and a quarter on each of two."""
    size, = run.ranks(1, write_big, tmp_path / "big")
    one, two = run.ranks(1, loading, tmp_path / "big", "ddp"), run.ranks(2, loading, tmp_path / "big", "fsdp")
    print(f"GB: the files {size:.3f}, one process {one[0]:.3f}, each of two {two[0]:.3f} {two[1]:.3f}")
    assert one[0] < 1.3 * size and max(two) < 0.75 * size
