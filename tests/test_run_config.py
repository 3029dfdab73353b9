"""`RunConfig`: what it derives and refuses, and its way to YAML and back."""

import dataclasses

import pytest

from jaxseek.config import ModelConfig, RopeScaling
from jaxseek.errors import UserError
from jaxseek.paths import configs_dir
from jaxseek.presets import load_preset
from jaxseek.run_config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimConfig,
    RouterConfig,
    RunConfig,
)
from jaxseek.run_file import dump_config, load_config, overlay
from jaxseek.schema import Setting

LLAMA = ModelConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
RUNS = {
    "defaults": RunConfig(model=LLAMA),
    "every field of the run": RunConfig(
        model=LLAMA,
        mesh="2x3",
        zero=2,
        dtype="float32",
        steps=7,
        batch_tokens=2304,
        accumulation=3,
        seq_len=128,
        remat="full",
        seed=5,
        init_from="~/3e-4",
        stop_after=4,
    ),
    "every field of the sections": RunConfig(
        model=LLAMA,
        optim=OptimConfig(
            learning_rate=4.2e-4,
            beta1=0.8,
            beta2=0.99,
            eps=1e-9,
            weight_decay=0.0,
            clip_norm=0.0,
            schedule="multi_step",
            warmup_steps=3,
            final_fraction=0.0,
            multi_step_at=(0.6, 0.9),
            max_bad_steps=3,
        ),
        router=RouterConfig(bias_update_speed=0.0, balance_alpha=1e-4),
        data=DataConfig(source="3e-4", tokenizer="~/null", validation_fraction=0.2),
        eval=EvalConfig(every=3, sequences=5),
        checkpoint=CheckpointConfig(every=2, keep=1),
    ),
    "rope scaling": RunConfig(
        model=dataclasses.replace(
            LLAMA, rope_scaling=RopeScaling(rope_type="linear", factor=4.0), rope_theta=1e5
        )
    ),
    "v3 model": RunConfig(model=load_preset("deepseek-v3")),
}


@pytest.mark.parametrize("name", RUNS)
def test_written_config_reads_back_to_an_equal_run(tmp_path, name):
    (tmp_path / "config.yaml").write_text(dump_config(RUNS[name]), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == RUNS[name]


def test_the_round_trip_cases_set_every_field_of_a_run():
    for part in ("", "optim", "router", "data", "eval", "checkpoint"):
        of = [getattr(run, part) if part else run for run in RUNS.values()]
        never = [
            field.name
            for field in dataclasses.fields(of[0])
            if all(getattr(config, field.name) == getattr(of[0], field.name) for config in of)
        ]
        # batch_tokens stands as batch once the run is made.
        assert never == ([] if part else ["batch_tokens"])


def test_default_yaml_is_the_default_run():
    default = RunConfig(model=load_preset("small-v3"))
    assert load_config(configs_dir() / "runs" / "default.yaml") == default


@pytest.mark.parametrize(
    "path", sorted((configs_dir() / "runs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_example_run_is_possible(path):
    assert load_config(path).sequences_per_micro_batch >= 1


def test_batch_in_tokens_is_the_same_run_as_in_sequences():
    in_tokens = RunConfig(model=LLAMA, batch_tokens=3072, seq_len=128)
    assert in_tokens == RunConfig(model=LLAMA, batch=24, seq_len=128)
    assert (in_tokens.sequences_per_step, in_tokens.tokens_per_step) == (24, 3072)


def test_default_batch_trains_the_same_data_on_one_to_four_and_six_devices():
    for mesh in ("1x1", "2x1", "3x1", "4x1", "6x1", "1x3"):
        assert RunConfig(model=LLAMA, mesh=mesh).sequences_per_step == 12


def test_micro_batch_is_what_one_data_device_sees_at_once():
    run = RunConfig(model=LLAMA, mesh="3x2", batch=24, accumulation=4)
    assert run.sequences_per_micro_batch == 2


@pytest.mark.parametrize(
    ("mesh", "zero", "resolved"),
    [("1x1", None, 0), ("1x3", None, 0), ("2x1", None, 3), ("3x2", 1, 1), ("1x1", 3, 3)],
)
def test_zero_defaults_to_3_from_two_data_devices_on(mesh, zero, resolved):
    assert RunConfig(model=LLAMA, mesh=mesh, zero=zero).resolved_zero == resolved


@pytest.mark.parametrize(("steps", "warmup"), [(6, 1), (100, 20), (10_000, 2000), (100_000, 2000)])
def test_warmup_defaults_to_a_fifth_of_the_steps_and_at_most_2000(steps, warmup):
    assert OptimConfig().resolved_warmup(steps) == warmup
    assert OptimConfig(warmup_steps=7).resolved_warmup(steps) == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"batch": 10, "mesh": "3x1"},
            "batch 10 is not a multiple of 3 = 3 data devices (--mesh 3x1) x accumulation 1: "
            "10 / 3 = 3.333; use 9 or 12.",
        ),
        (
            {"mesh": "5x1"},
            "batch 12 (the default) is not a multiple of 5 = 5 data devices (--mesh 5x1) x "
            "accumulation 1: 12 / 5 = 2.4; use 10 or 15.",
        ),
        (
            {"batch": 2, "mesh": "1x1", "accumulation": 4},
            "batch 2 is not a multiple of 4 = 1 data devices (--mesh 1x1) x accumulation 4: "
            "2 / 4 = 0.5; use 4.",
        ),
        (
            {"batch_tokens": 1000, "mesh": "3x1"},
            "batch_tokens 1000 is not a multiple of 768 = seq_len 256 x 3 data devices "
            "(--mesh 3x1) x accumulation 1; use 768 or 1536.",
        ),
        (
            {"batch": 6, "batch_tokens": 1536},
            "batch 6 and batch_tokens 1536 are both given; give one.",
        ),
        (
            {"seq_len": 513},
            "seq_len 513 is longer than the model's max_position_embeddings 512; give at most 512, "
            "or raise model.max_position_embeddings.",
        ),
        (
            {"steps": 5, "optim": OptimConfig(warmup_steps=6)},
            "optim.warmup_steps 6 is more than steps 5; give at most 5, or leave it out.",
        ),
        ({"steps": 5, "stop_after": 6}, "stop_after 6 is not between 1 and steps 5."),
        ({"stop_after": 0, "steps": 9}, "stop_after 0 is not between 1 and steps 9."),
        ({"batch": 0}, "batch must be at least 1, got 0."),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"accumulation": 0}, "accumulation must be at least 1, got 0."),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0."),
        ({"seed": -1}, "seed must be at least 0, got -1."),
    ],
)
def test_contradictions_are_refused_with_the_arithmetic_and_what_is_possible(fields, message):
    with pytest.raises(UserError) as error:
        RunConfig(model=LLAMA, **fields)
    assert str(error.value) == message


def test_impossible_mesh_is_refused():
    with pytest.raises(UserError, match=r"mesh: '3\*1' is not of the form AxB"):
        RunConfig(model=LLAMA, mesh="3*1")


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (OptimConfig, {"learning_rate": -1.0}, r"optim\.learning_rate must be positive, got -1\.0"),
        (OptimConfig, {"eps": 0.0}, r"optim\.eps must be positive"),
        (OptimConfig, {"beta1": 1.0}, r"optim\.beta1 must be at least 0 and below 1"),
        (OptimConfig, {"beta2": -0.1}, r"optim\.beta2 must be at least 0 and below 1"),
        (OptimConfig, {"weight_decay": -0.1}, r"optim\.weight_decay must be at least 0"),
        (OptimConfig, {"clip_norm": -1.0}, r"optim\.clip_norm must be at least 0"),
        (OptimConfig, {"warmup_steps": -1}, r"optim\.warmup_steps must be at least 0"),
        (OptimConfig, {"final_fraction": 1.5}, r"optim\.final_fraction must be between 0 and 1"),
        (OptimConfig, {"multi_step_at": (0.9, 0.8)}, r"rising shares .* got \[0\.9, 0\.8\]"),
        (OptimConfig, {"max_bad_steps": 0}, r"optim\.max_bad_steps must be at least 1"),
        (
            RouterConfig,
            {"bias_update_speed": -1.0},
            r"router\.bias_update_speed must be at least 0",
        ),
        (RouterConfig, {"balance_alpha": -1.0}, r"router\.balance_alpha must be at least 0"),
        (DataConfig, {"validation_fraction": 0.0}, r"data\.validation_fraction must be between"),
        (EvalConfig, {"every": -1}, r"eval\.every must be at least 0"),
        (EvalConfig, {"sequences": 0}, r"eval\.sequences must be at least 1"),
        (CheckpointConfig, {"every": -1}, r"checkpoint\.every must be at least 0"),
        (CheckpointConfig, {"keep": 0}, r"checkpoint\.keep must be at least 1"),
    ],
)
def test_impossible_values_of_sections_are_refused_by_dotted_key(cls, fields, message):
    with pytest.raises(UserError, match=message):
        cls(**fields)


def settings(**values):
    return {
        key.replace("__", "."): Setting(value=value, origin=key) for key, value in values.items()
    }


def test_overlay_replaces_a_batch_given_in_the_other_unit():
    assert overlay(settings(batch=3, steps=1), settings(batch_tokens=512)) == settings(
        steps=1, batch_tokens=512
    )


def test_overlay_replaces_a_sections_keys_by_null_and_null_by_keys():
    keys, null = settings(model__rope_scaling__factor=2.0), settings(model__rope_scaling=None)
    assert overlay(keys, null) == null
    assert overlay(null, keys) == keys


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optim:\n  learning-rate: 1\n", r"line 2: .*the nearest is optim\.learning_rate\."),
        ("trian.lr: 1\n", r"line 1: .*the nearest is optim\.learning_rate\."),
        ("steps: soon\n", "line 1: steps: 'soon' is not a whole number"),
        ("model: [1]\n", "line 1: model: .* is not a model's name"),
        ("model:\n  model_type: deepseek_v4\n", "line 2: .*DeepSeek-V4, is not supported yet"),
        ("model:\n  model_type: llama\n", r"model\.vocab_size is needed and not given"),
        ("model:\n  n_routed_experts: 3\n", "model: num_experts_per_tok 4 is larger than"),
    ],
)
def test_mistakes_in_a_runs_file_are_refused_with_their_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_keys_in_a_file_override_those_of_the_model_it_names(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: bench-dense-58m\nmodel.num_hidden_layers: 2\n")
    bench = load_preset("bench-dense-58m")
    assert load_config(path).model == dataclasses.replace(bench, num_hidden_layers=2)
