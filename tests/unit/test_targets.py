"""Targets: fingerprints follow content and nothing else; the hub's cache is used as it lies."""

import hashlib
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

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
