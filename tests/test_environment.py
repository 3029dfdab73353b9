"""What the other tests take for granted about the process they run in."""

import jax


def test_six_devices_are_emulated():
    assert jax.device_count() == 6
    assert {device.platform for device in jax.devices()} == {"cpu"}
