"""Configuration: the file and the flags say the same things, and every rule has one clear line."""

import pytest

from asfl_privacy.config import SweepConfig, load_config


def refused(**overrides):
    with pytest.raises(ValueError) as caught:
        load_config(None, overrides=overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text('rounds = 7\nepsilon = [1, 2.5]\nmech = "laplace"\nradius = ["any", 0.5]\nclip = 4\n')
    config = load_config(file, overrides={"rounds": "9"})
    assert config.rounds == 9
    assert config.epsilon == (1.0, 2.5)
    assert config.mech == ("laplace",)
    assert config.radius == ("any", 0.5)
    assert config.tail_steps == SweepConfig().tail_steps


def test_an_unknown_key_lists_the_valid_ones(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text("epsilons = [1]\n")
    with pytest.raises(ValueError, match="config key 'epsilons' is unknown; the valid keys are mech, data") as caught:
        load_config(file, overrides={})
    assert all(name in str(caught.value) for name in SweepConfig.model_fields)


@pytest.mark.parametrize("content", [b"rounds = ", b"\xff\xfe", b"rounds = 3\nrounds = 4"])
def test_a_broken_file_is_one_line(tmp_path, content):
    file = tmp_path / "sweep.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"give a readable TOML file") as caught:
        load_config(file, overrides={})
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        load_config(tmp_path / "absent.toml", overrides={})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("epsilon", ["0", "-1", "nan", "inf", "x"]),
        ("total_epsilon", ["0", "-1", "nan", "inf", "x"]),
        ("delta", ["0", "1", "1.5", "-1e-5", "nan", "x"]),
        ("radius", ["0", "-1", "nan", "inf", "x", ""]),
        ("norm", ["0", "3", "two"]),
        ("mech", ["gauss", ""]),
        ("method", ["fedprox"]),
        ("placement", ["after:", "output", ""]),
        ("noise", ["twice"]),
        ("own", ["noised"]),
        ("partition", ["dirichlet:0", "shards:x"]),
        ("clip", ["0", "-1", "nan", "inf"]),
        ("lr", ["0", "-1", "nan", "inf"]),
        ("clients", ["0", "-1", "1.5", "x"]),
        ("cohort", ["0", "21"]),
        ("rounds", ["0"]),
        ("tail_steps", ["-1"]),
        ("full_steps", ["-1"]),
        ("batch_size", ["0"]),
        ("seeds", ["0", "-3"]),
        ("seed", ["-1"]),
        ("evaluate_every", ["0"]),
        ("last_evaluations", ["0"]),
        ("device", ["tpu"]),
        ("executor", ["flower"]),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_by_name(field, values):
    for value in values:
        line = refused(**{field: [value] if field in ("epsilon", "delta", "radius") else value})
        assert field in line, (value, line)
        assert any(fix in line for fix in ("give", "use", "sample fewer")), line


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"radius": "any"}, "radius any needs a clip"),
        ({"noise": "once", "placement": "exchange"}, "noise once with placement exchange"),
        ({"mech": "laplace", "delta": "1e-5"}, "has no effect"),
        ({"tail_steps": 0, "full_steps": 0}, "train nothing"),
        ({"cohort": 30}, "cohort 30 must lie in 1 to 20"),
        ({"noisy_training": "yes", "calibration": "paper", "epsilon": 4}, "has no effect with calibration paper"),
        ({"noisy_training": "yes", "mech": "none"}, "belongs to private activation sharing"),
        ({"noisy_training": "yes", "method": "fedavg"}, "belongs to private activation sharing"),
        ({"noisy_training": "yes", "tail_steps": 0}, "belongs to private activation sharing"),
        ({"noisy_training": "yes", "updates": "dp-sgd", "total_epsilon": 8}, "through noise twice"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(overrides, match):
    assert match in refused(**overrides)


def test_an_empty_list_is_refused_where_one_value_is_needed():
    assert "list is empty" in refused(radius=[])


def test_a_configuration_survives_its_own_toml(tmp_path):
    from asfl_privacy.run_files import config_toml

    config = load_config(None, overrides={"radius": ["any", "0.1"], "clip": "0.3", "norm": ["inf", "1"], "lr": "0.07"})
    file = tmp_path / "config.toml"
    file.write_text(config_toml(config))
    assert load_config(file, overrides={}) == config
