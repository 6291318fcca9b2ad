"""Public weights into nets and students back out: folders of diffusers, the hub, layouts of keys."""
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
from families import FAMILIES, load, make, pair, spec
from run import differing, refused

@pytest.fixture(params=["flux", "sdxl"])
def public(request, tmp_path):
    """(diffusers' net, --net of ours, folder that diffusers wrote in four or more files)."""
    reference, _ = pair(request.param)
    size = sum(p.nbytes for p in reference.parameters())
    reference.save_pretrained(tmp_path / "model", max_shard_size=size // 4)
    return reference, spec(request.param), tmp_path / "model"

def filled(source, net, **options):
    """The net from a source, as a run fills it."""
    with torch.device("meta"):
        model = make_net(net, **options)
    pinned = ckpt.resolve(source)
    return sample.frozen(dict(net=model), dict(net=source), {source: ckpt.read(pinned)})["net"], pinned

def same(source, net, reference, **options):
    """Are they the reference's weights, bit for bit?"""
    own, want = filled(source, net, **options)[0].state_dict(), reference.state_dict()
    return differing({k: own[k] for k in (want if options else own)}, want) == []

def test_a_folder_a_pipeline_and_the_hub_give_the_weights_bit_for_bit(public, tmp_path, monkeypatch):
    reference, net, folder = public
    assert len(sorted(folder.glob("*.safetensors"))) >= 4 and same(str(folder), net, reference)
    assert same(str(folder), net, reference, r=True, logvar=True)           # heads that the source lacks
    # a pipeline: the denoiser's sub-folder, also by name, its half-precision copy left alone
    part = "transformer" if net.startswith("flux") else "unet"
    shutil.copytree(folder, tmp_path / "snap" / part)
    (tmp_path / "snap" / "model_index.json").write_text("{}")
    (tmp_path / "snap" / part / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"not to be read")
    assert same(f"{tmp_path}/snap", net, reference) and same(f"{tmp_path}/snap#{part}", net, reference)
    # the hub: kept with its revision, which a resume asks for again
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, revision, **kw: asked.append(
        (repo, revision)) or f"{tmp_path}/snap")
    assert same("some-org/some.model", net, reference) and ("some-org/some.model", "snap") in asked
    assert ckpt.resolve("some-org/some.model")["file"] == "hf://some-org/some.model@snap"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: 1 / 0)
    refused(ckpt.resolve, "some-org/none", says=["some-org/none", "hub"])

@pytest.mark.parametrize("public", ["flux"], indirect=True)
def test_what_does_not_fit_or_is_not_whole_is_named(public):
    from safetensors.torch import load_file, save_file
    _, net, folder = public
    (first, *_), pinned = sorted(folder.glob("*.safetensors")), ckpt.resolve(str(folder))
    weights = load_file(first)
    key = next(iter(weights))
    save_file(weights | {"nobody.knows": torch.ones(2), key: torch.ones(3)}, first)
    refused(filled, str(folder), net, says=["1 unknown (nobody.knows)", f"1 misshapen ({key} (3,)"])
    refused(ckpt.read, pinned, says=["not the file it was"])
    del weights[key]
    save_file(weights, first)
    refused(filled, str(folder), net, says=[f"1 missing ({key})"])
    first.write_bytes(first.read_bytes()[:200])
    refused(filled, str(folder), net, says=[first.name, "whole"])
    first.unlink()
    refused(filled, str(folder), net, says=[first.name])

def test_an_exported_student_loads_into_diffusers_and_back_here(public, tmp_path, monkeypatch, capsys):
    reference, spec, folder = public
    net, pinned = filled(str(folder), spec, logvar=True)
    for p in net.parameters():
        p.data.add_(0.01)
    cfg = dict(net=spec, teacher=str(folder), classes=0, steps=4, t_list=(0.9, 0.5), guidance=3.5, max_iter=9)
    ema = {k: 2 * v for k, v in net.state_dict().items()}
    state = dict(format=ckpt.FORMAT, it=9, method="dmd2", config=cfg, nets=dict(student=net.state_dict()),
                 optims={}, emas=dict(ema=ema), sources={str(folder): pinned},
                 shards=dict(index={}, count=0, stamp=""))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    run, out = f"{tmp_path}/run/checkpoints/0000009.pth", tmp_path / "out"
    ckpt.save(tmp_path / "run/checkpoints/0000009.pth", state)
    monkeypatch.setattr(export, "SHARD", sum(v.nbytes for v in net.parameters()) // 3)
    refused(export.main, [f"{run}#nosuch", str(out)], says=["no entry nosuch"])
    refused(export.main, [run, str(out)], says=["#ema"])
    assert not out.exists()
    export.main([f"{run}#ema", str(out)])
    theirs = type(reference).from_pretrained(out).state_dict()
    assert differing(theirs, {k: v for k, v in ema.items() if k in theirs}) == []
    assert differing(filled(str(out), spec, logvar=True)[0].state_dict(), ema) == []
    assert len(list(out.glob("*.safetensors"))) >= 3
    assert json.loads((out / "fewstep.json").read_text()) == dict(
        method="dmd2", net=spec, steps=4, t_list=[0.9, 0.5], guidance=3.5, max_iter=9, schedule=net.schedule,
        pred=net.pred, entry="ema", it=9)
    refused(export.main, [f"{run}#ema", str(out)], says=["exists"])
    # a run whose teacher is that run: its config.json names the folder
    state["config"], state["sources"] = cfg | dict(teacher=run), {run: ckpt.resolve(f"{run}#ema")}
    ckpt.save(tmp_path / "0000009.pth", state)
    (tmp_path / "run/config.json").write_text(json.dumps(cfg | dict(sources={str(folder): pinned})))
    for name, said in ("second", False), ("third", True):
        export.main([f"{tmp_path}/0000009.pth#ema", f"{tmp_path}/{name}"])
        assert (tmp_path / name / "config.json").exists() != said
        assert ("copy the public model's" in capsys.readouterr().out) == said
        (tmp_path / "run/config.json").unlink(missing_ok=True)

@pytest.mark.parametrize("name, layout, options", [
    ("dit", "public", {}), ("fastgen_dit_r_abs", "fastgen", dict(learn_sigma=False, r=True, logvar=True))])
def test_keys_of_other_layouts_are_found_out(name, layout, options, tmp_path):
    weights = golden_recipe.load(name)[2]
    want = load(make(FAMILIES["dit"], **options), weights, layout)
    ckpt.save(tmp_path / "weights.pth", weights | dict(pos_embed=want.pos_embed))
    net, _ = filled(f"{tmp_path}/weights.pth", spec("dit"), **options)
    assert differing(net.state_dict(), want.state_dict()) == []

BIG = "dit:dit_xl2,depth=10,x_shape=(1,8,8),learn_sigma=False"              # 244 M parameters

def write_big(folder):
    from huggingface_hub import save_torch_state_dict
    folder.mkdir()
    save_torch_state_dict(make_net(BIG, label_dim=10).state_dict(), folder, max_shard_size="200MB",
                          filename_pattern="diffusion_pytorch_model{suffix}.safetensors")
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
