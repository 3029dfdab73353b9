"""The configurations that come with jaxseek are found."""

from jaxseek.paths import configs_dir


def test_configs_dir_holds_the_model_presets():
    assert sorted((configs_dir() / "models").glob("*.yaml"))
