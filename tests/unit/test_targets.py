"""Targets: fingerprints follow content and nothing else; the hub's cache is used as it lies."""

import hashlib
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import fingerprint_target
from aerie.errors import AerieError
from aerie.targets import Target, fingerprint, locate
from tiny_targets import make_tiny_deepseek_v3, make_tiny_llama

REVISION = "0" * 39 + "1"


@pytest.fixture
def llama(tmp_path):
    return make_tiny_llama(tmp_path / "llama")


def digest(folder, cache, name="t"):
    return fingerprint(name, {"path": str(folder)}, False, cache)["digest"]


def target_of(folder):
    return Target("t", "d", {"path": str(folder)}, False)


def test_a_fingerprint_is_of_content(llama, tmp_path):
    first = digest(llama, tmp_path / "cache")
    weights = llama / "model.safetensors"
    os.utime(weights, (1, 1))
    assert digest(llama, tmp_path / "cache") == first
    moved = shutil.move(llama, tmp_path / "moved")
    assert digest(moved, tmp_path / "cache", "other name") == first
    data = bytearray((tmp_path / "moved/model.safetensors").read_bytes())
    data[-1] ^= 1
    times = (tmp_path / "moved/model.safetensors").stat()
    (tmp_path / "moved/model.safetensors").write_bytes(data)
    os.utime(tmp_path / "moved/model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(moved, tmp_path / "cache") != first


def test_golden_fingerprint(tmp_path):
    """The same files give the same fingerprint for ever, or VERSION is raised (then record the new digest with it)."""
    recorded = {1: "c7db078113c340cd6c0ccd383d44447422241fc634c2a2319542e5c2bcf0c88b"}
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not part of it")
    assert digest(folder, tmp_path / "cache") == recorded[fingerprint_target.VERSION]


def test_head_weights_are_those_of_the_model(llama):
    stored = load_file(llama / "model.safetensors")
    found = target_of(llama).head_weights()
    assert torch.equal(found["lm_head"], stored["lm_head.weight"])
    assert torch.equal(found["norm"], stored["model.norm.weight"])
    assert torch.equal(found["embed_tokens"], stored["model.embed_tokens.weight"])


def test_a_tied_head_is_the_embedding_and_a_lost_one_an_error(tmp_path):
    tied = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    found = target_of(tied).head_weights()
    assert torch.equal(found["lm_head"], found["embed_tokens"])
    lost = make_tiny_llama(tmp_path / "lost")
    stored = load_file(lost / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, lost / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AerieError, match="no lm_head among the"):
        target_of(lost).head_weights()


def rewritten(folder, rename=lambda name: name, change=lambda tensors: tensors):
    """The model's weights with other names or values; a real file of them."""
    stored = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(stored), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_head(folder, original):
    found, expected = target_of(folder).head_weights(), target_of(original).head_weights()
    return all(torch.equal(found[part], expected[part]) for part in ("embed_tokens", "norm", "lm_head"))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_wrapped_models_head_is_found(tmp_path, prefix):
    """Kimi-K2.5 puts language_model. before every name; transformers' wrappers put it between model. and the rest."""
    plain = make_tiny_llama(tmp_path / "plain")
    wrapped = make_tiny_llama(tmp_path / "wrapped")

    def rename(name):
        return prefix + (name.removeprefix("model.") if prefix.startswith("model.") and name.startswith("model.") else name)

    names = ("visual.blocks.0.norm.weight", "visual.model.norm.weight", "visual.patch_embed_tokens.weight")
    rewritten(wrapped, rename, lambda tensors: tensors | {name: torch.zeros(7) for name in names})
    assert same_head(wrapped, plain)


def test_a_sharded_models_head_is_found(tmp_path):
    from transformers import AutoModelForCausalLM

    plain = make_tiny_llama(tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(tmp_path / "sharded", max_shard_size="200kB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2 and not (tmp_path / "sharded/model.safetensors").exists()
    assert same_head(tmp_path / "sharded", plain)
    lost = next(path for path in (tmp_path / "sharded").glob("*.safetensors") if "lm_head.weight" in load_file(path))
    lost.unlink()
    with pytest.raises(AerieError, match=f"{lost.name}: .*weight is to be there and cannot be read"):
        target_of(tmp_path / "sharded").head_weights()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lm_head.weight": torch.zeros(320, 64, dtype=torch.int8)}, r"lm_head\.weight is int8 .*quantised"),
        ({"lm_head.weight": torch.zeros(320, 64).to(torch.float8_e4m3fn)}, r"lm_head\.weight is float8_e4m3fn .*quantised"),
        ({"lm_head.weight": None, "lm_head.weight_packed": torch.zeros(320, 8, dtype=torch.int32)}, r"lm_head\.weight_packed.*quantised"),
        ({"lm_head.weight": None, "lm_head.qweight": torch.zeros(8, 320, dtype=torch.int32)}, r"lm_head\.qweight.*quantised"),
        ({"model.norm.weight": None, "model.final_layernorm.weight": torch.ones(64)}, r"no norm among the .*final_layernorm"),
        ({"model.embed_tokens.weight": None, "transformer.wte.weight": torch.zeros(320, 64)}, r"no embed_tokens among the .*wte"),
        ({"lm_head.weight": torch.zeros(320, 32)}, r"lm_head\.weight is \[320, 32\], expected \[320, 64\]"),
        ({"model.embed_tokens.weight": torch.zeros(300, 64)}, r"embed_tokens\.weight is \[300, 64\], expected \[320, 64\]"),
    ],
)
def test_a_head_that_cannot_be_used_is_refused(llama, changed, message):
    rewritten(llama, change=lambda tensors: {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None})
    with pytest.raises(AerieError, match=message):
        target_of(llama).head_weights()


@pytest.mark.parametrize(("ids", "expected"), [(None, [2, 4, 5]), ([1, 3, 7], [1, 3, 7])])
def test_aux_layer_ids(llama, ids, expected):
    assert target_of(llama).aux_layer_ids(ids) == expected


@pytest.mark.parametrize("ids", [[2, 4, 8], [4, 2, 5], [2, 2, 5], [0, 2, 5]])
def test_wrong_aux_layer_ids_are_named(llama, ids):
    with pytest.raises(AerieError, match=r"aux_layer_ids are \[.*target t has 8 layers"):
        target_of(llama).aux_layer_ids(ids)


def test_too_few_layers_for_the_default(tmp_path):
    shallow = make_tiny_llama(tmp_path, num_hidden_layers=3)
    with pytest.raises(AerieError, match=r"default aux layer ids .* are \[2, 1, 0\]"):
        target_of(shallow).aux_layer_ids(None)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(AerieError, match=r"no config\.json there"):
        locate({"path": str(tmp_path)})


def test_a_cached_hub_id_asks_no_network(llama, tmp_path, monkeypatch):
    """The hub's cache as it lies on disk: blobs named by sha256, a snapshot of links to them."""
    repository = tmp_path / "hub/models--acme--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in llama.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, repository / "blobs" / name)
        (snapshot / path.name).symlink_to(repository / "blobs" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    location = {"hub_id": "acme/tiny", "revision": REVISION}
    assert locate(location) == snapshot
    found = fingerprint("t", location, False, tmp_path / "cache")
    assert found["digest"] == digest(llama, tmp_path / "cache2")
    assert not (tmp_path / "cache").exists()  # the blobs' names were the hashes
    (snapshot / "model.safetensors").unlink()  # a download cut short is not taken for the model
    with pytest.raises(AerieError, match=r"acme/tiny at revision 0+1: not .or not wholly. in the hub"):
        locate(location)


def test_deepseek_has_a_text_config_of_its_own_kind(tmp_path):
    target = target_of(make_tiny_deepseek_v3(tmp_path))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 64, 320)
