"""`--mesh AxB`: what it means and what is said where it cannot be."""

import jax
import pytest

from jaxseek.errors import UserError
from jaxseek.mesh import MeshShape, emulate_devices, make_mesh


def test_a_mesh_is_data_x_tensor_and_reads_back():
    shape = MeshShape.parse("2x3")
    assert (shape.data, shape.tensor, shape.devices, str(shape)) == (2, 3, 6, "2x3")
    mesh = make_mesh(shape)
    assert dict(mesh.shape) == {"data": 2, "tensor": 3}
    assert list(mesh.devices.flat) == jax.devices()[:6]


@pytest.mark.parametrize("text", ["3", "3x", "x3", "0x1", "3x0", "-1x3", "3x1x1", "3*1", "", "axb"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UserError, match="for example 3x1"):
        MeshShape.parse(text)


def test_a_mesh_larger_than_the_machine_names_those_that_fit():
    with pytest.raises(UserError, match=r"needs 7 devices, but JAX sees 6 .* --mesh 6x1"):
        make_mesh(MeshShape(data=7, tensor=1))


def test_devices_asked_for_after_jax_started_are_refused_and_not_ignored():
    emulate_devices(6)
    with pytest.raises(UserError, match="7 emulated devices were asked for, but JAX shows 6"):
        emulate_devices(7)
