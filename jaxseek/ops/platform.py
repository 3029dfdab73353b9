"""What a program that is being traced will run on, for functions that have several forms."""

import jax


def target_platform() -> str:
    """The platform of the mesh in scope, else JAX's default: "cpu", "gpu", "tpu" and so on.

    A mesh may be one of devices that are not here, which a program is only compiled for: so a
    process without a GPU traces what a GPU runs, and a computation on CPU devices never takes a
    form for the GPU that its process has too.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
