import json
import logging
import math
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxseek import checkpoint
from jaxseek.checkpoint import CheckpointStore
from jaxseek.checkpoint_arrays import chunk_file, create_raw_array, open_array
from jaxseek.checkpoint_files import (
    Checksum,
    FileRecord,
    Leaf,
    Manifest,
    record_files,
    write_manifest,
)
from jaxseek.errors import UserError

# Name -> logical shape, dtype, placement; nothing here divides by 3.
LEAVES = {
    "kernel": ((7, 5), jnp.bfloat16, PartitionSpec("data", "tensor")),
    "experts": ((2, 4, 5), jnp.float32, PartitionSpec(None, "tensor", "data")),
    "codes": ((1, 4), jnp.uint8, PartitionSpec("data", None)),
    "bias": ((5,), jnp.float32, PartitionSpec()),
    "count": ((), jnp.int32, PartitionSpec()),
}


def make_mesh(data, tensor):
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return jax.sharding.Mesh(devices, ("data", "tensor"))


def tree(leaf_of):
    """The state's structure, with `leaf_of(name)` in the place of each leaf."""
    params = {name: leaf_of(name) for name in ("kernel", "experts", "bias")}
    return {"params": params, "opt": (leaf_of("codes"), {"count": leaf_of("count")})}


def logical_shapes():
    return tree(lambda name: jax.ShapeDtypeStruct(*LEAVES[name][:2]))


def target_on(mesh):
    """Stored shapes: every split dim rounded up to the size of its mesh axis."""

    def stored(name):
        shape, dtype, spec = LEAVES[name]
        axes = [mesh.shape[axis] if axis else 1 for axis in spec] + [1] * (len(shape) - len(spec))
        padded = [math.ceil(size / axis) * axis for size, axis in zip(shape, axes, strict=True)]
        return jax.ShapeDtypeStruct(tuple(padded), dtype, sharding=NamedSharding(mesh, spec))

    return tree(stored)


def random_values(seed=0):
    """Logical arrays of random bits: numbers of any exponent, NaNs with payload among them."""
    rng = np.random.default_rng(seed)

    def bits(name):
        shape, dtype, _ = LEAVES[name]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(rng.bytes(size), dtype).reshape(shape)

    return tree(bits)


def put(values, target, padding=0):
    def place(value, leaf):
        whole = np.full(leaf.shape, padding, leaf.dtype)
        whole[tuple(slice(size) for size in value.shape)] = value
        return jax.device_put(whole, leaf.sharding)

    return jax.tree.map(place, values, target)


def as_bits(tree):
    return jax.tree.map(lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8).tolist(), tree)


def save(store, step, state, metadata=None):
    store.save(step, state, logical_shapes=logical_shapes(), metadata=metadata or {"step": step})


def restore(store, step, target, **options):
    return store.restore(step, target, logical_shapes=logical_shapes(), **options)


@pytest.fixture
def target():
    return target_on(make_mesh(3, 1))


@pytest.fixture
def state(target):
    return put(random_values(), target)


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints", keep=5) as store:
        yield store


@pytest.fixture
def two_steps(store, state):
    """A store with the complete steps 3 and 5."""
    for step in (3, 5):
        save(store, step, state)
    store.wait()
    return store


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


@pytest.fixture(params=["one chunk a shard", "many chunks a shard"])
def chunks(request, monkeypatch):
    """Both ways to cut an array; chunks of the second do not divide its logical shape."""
    if request.param == "many chunks a shard":
        monkeypatch.setattr(checkpoint, "MIN_CHUNK", 8)
        monkeypatch.setattr(checkpoint, "MAX_CHUNK", 20)


def test_state_keeps_every_bit_from_mesh_to_mesh_and_its_padding_is_zero(tmp_path, chunks):
    values = random_values()
    state = put(values, target_on(make_mesh(3, 1)))
    for step, (data, tensor) in enumerate([(1, 1), (2, 3), (1, 4), (3, 1)]):
        with CheckpointStore(tmp_path, keep=1) as store:
            save(store, step, state)
        target = target_on(make_mesh(data, tensor))
        with CheckpointStore(tmp_path) as store:
            state = restore(store, None, target).state
        assert as_bits(state) == as_bits(put(values, target)), (data, tensor)
        for array, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
            assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
            assert array.sharding == leaf.sharding


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((3, 2, 4, 5), (1, 1, 4, 5)),  # 80 bytes each: layer by layer, expert by expert.
        ((3, 2, 4, 3), (1, 2, 4, 3)),  # 48 bytes each, too few.
        ((100, 4), (10, 4)),
        ((8, 100), (1, 50)),
        ((101, 4), (101, 4)),  # Nothing between all of it and single rows.
        ((4,), (4,)),
    ],
)
def test_a_chunk_is_one_layer_or_expert_and_neither_tiny_nor_huge(store, monkeypatch, shape, chunk):
    monkeypatch.setattr(checkpoint, "MIN_CHUNK", 64)
    monkeypatch.setattr(checkpoint, "MAX_CHUNK", 256)
    state = {"x": jnp.zeros(shape, jnp.float32)}
    store.save(1, state, logical_shapes=state, metadata={})
    store.wait()
    array = open_array(store.directory / "1" / "state", "x")
    assert array.chunk_layout.read_chunk.shape == chunk


def test_numpy_reads_each_leaf_bit_for_bit_in_its_logical_shape(store, state):
    save(store, 1, state)
    store.wait()
    arrays = jax.tree.map_with_path(
        lambda path, _: store.read_array(1, jax.tree_util.keystr(path, simple=True, separator=".")),
        random_values(),
    )
    assert jax.tree.map(np.shape, arrays) == jax.tree.map(np.shape, random_values())
    assert as_bits(arrays) == as_bits(random_values())
    with pytest.raises(UserError, match=r"no array 'params\.nothing'.*params\.kernel"):
        store.read_array(1, "params.nothing")


def test_plain_orbax_reads_the_logical_shapes(store, state):
    save(store, 1, state)
    store.wait()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    name, logical = "params.kernel", logical_shapes()["params"]["kernel"]
    args = ocp.args.PyTreeRestore(
        {name: logical},
        restore_args={name: ocp.ArrayRestoreArgs(sharding=device)},
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        read = orbax.restore(store.directory / "1" / "state", args=args)[name]
    assert (read.shape, read.dtype) == (logical.shape, logical.dtype)
    assert as_bits(read) == as_bits(random_values()["params"]["kernel"])


def test_cutting_to_logical_shapes_rewrites_the_database_once(tmp_path):
    mesh = make_mesh(3, 1)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    arrays = {f"leaf{i}": jax.device_put(jnp.ones(6), sharding) for i in range(60)}
    logical = {name: jax.ShapeDtypeStruct((5,), jnp.float32) for name in arrays}
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, arrays, logical_shapes=logical, metadata={})
    # Beside what Orbax wrote, in files of its own, more or fewer as the processor is busy.
    assert len(list((tmp_path / "1" / "state" / "d").iterdir())) < 10


def test_what_stood_in_the_padding_does_not_come_back(store, target):
    save(store, 1, put(random_values(), target, padding=1))
    on_two = target_on(make_mesh(2, 1))
    assert as_bits(restore(store, 1, on_two).state) == as_bits(put(random_values(), on_two))


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, target):
    shape, sharding = (300, 100), target["params"]["kernel"].sharding
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.device_put(np.zeros(shape, np.float32), sharding)
    with CheckpointStore(tmp_path, keep=10) as store:
        for step in range(10):
            logical = {"x": jax.ShapeDtypeStruct((299, 100), np.float32)}
            store.save(step, {"x": state}, logical_shapes=logical, metadata={})
            state = increment(state)
        store.wait()
        for step in range(10):
            np.testing.assert_array_equal(store.read_array(step, "x"), np.full((299, 100), step))


def test_restored_arrays_can_be_donated(store):
    target = target_on(make_mesh(2, 3))
    values = jax.tree.map(np.ones_like, random_values())
    save(store, 1, put(values, target))
    state = restore(store, 1, target).state
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    twice = put(jax.tree.map(lambda x: x + x, values), target)
    for array, expected in zip(jax.tree.leaves(doubled), jax.tree.leaves(twice), strict=True):
        for shard, want in zip(
            array.addressable_shards, expected.addressable_shards, strict=True
        ):  # Each device's own copy.
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(want.data))


def test_save_returns_before_the_step_is_complete_and_wait_after(store, state, caplog, monkeypatch):
    release = threading.Event()
    record_files = checkpoint.record_files
    monkeypatch.setattr(
        checkpoint, "record_files", lambda folder: release.wait(60) and record_files(folder)
    )
    save(store, 1, state)
    assert store.latest() is None
    assert not caplog.records
    release.set()
    store.wait()
    assert store.latest() == 1


def test_metadata_and_leaves_are_read_without_the_arrays(two_steps):
    metadata = {"config": {"lr": 3e-4, "name": "é"}, "data": {"rows": 7, "buffer": [1, 2]}}
    save(two_steps, 6, put(random_values(), target_on(make_mesh(1, 1))), metadata)
    two_steps.wait()
    assert two_steps.read_metadata(None) == metadata
    assert two_steps.read_metadata(5) == {"step": 5}
    leaves = two_steps.read_manifest(6).leaves
    assert list(leaves) == [
        "opt.0",
        "opt.1.count",
        "params.bias",
        "params.experts",
        "params.kernel",
    ]
    assert str(leaves["params.kernel"]) == "bfloat16[7,5]"


def test_a_restored_checkpoint_says_which_step_it_is(two_steps, target):
    restored = restore(two_steps, None, target)
    assert (restored.step, restored.metadata) == (5, {"step": 5})
    assert restore(two_steps, 3, target).step == 3


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def copy_without_manifest(folder):
    (folder / "jaxseek.json").unlink()


def lose_a_file(folder):
    largest_file(folder / "state").unlink()


def cut_a_file(folder):
    path = largest_file(folder / "state")
    path.write_bytes(path.read_bytes()[:-1])


def cut_the_manifest(folder):
    path = folder / "jaxseek.json"
    path.write_bytes(path.read_bytes()[:100])


def empty_the_manifest(folder):
    (folder / "jaxseek.json").write_text("{}")


def use_a_later_format(folder):
    path = folder / "jaxseek.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 3}))


def replace_by_another_step(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("3"), folder)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (empty, "it has no jaxseek.json"),
        (copy_without_manifest, "it has no jaxseek.json"),
        (lose_a_file, "is missing"),
        (cut_a_file, "were written"),
        (cut_the_manifest, "its jaxseek.json cannot be read"),
        (empty_the_manifest, "its jaxseek.json cannot be read"),
        (use_a_later_format, "format version 3, this jaxseek reads 1 and 2"),
        (replace_by_another_step, "its jaxseek.json is that of step 3"),
    ],
)
def test_an_incomplete_step_is_never_latest_and_is_named(
    two_steps, target, caplog, damage, complaint
):
    damage(two_steps.directory / "5")
    assert two_steps.latest() == 3
    assert two_steps.steps() == [3]
    (record,) = caplog.records
    assert str(two_steps.directory / "5") in record.message
    assert complaint in record.message
    assert restore(two_steps, None, target).step == 3
    with pytest.raises(
        UserError, match=rf"(?s)5 is not a complete.*{complaint}.*Complete steps: 3"
    ):
        restore(two_steps, 5, target)


def test_folders_that_are_no_steps_are_ignored(two_steps, caplog):
    for name in ("9.orbax-checkpoint-tmp", "007", "x"):
        shutil.copytree(two_steps.directory / "3", two_steps.directory / name)
    (two_steps.directory / "8").write_text("a file")
    assert two_steps.steps() == [3, 5]
    assert len(caplog.records) == 3


def test_a_flipped_byte_in_any_file_is_refused_by_name(two_steps, target):
    folder = two_steps.directory / "5"
    for name in two_steps.read_manifest(5).files:
        content = (folder / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (folder / name).write_bytes(flipped)
        with pytest.raises(UserError, match=rf"damaged.*{name}.*another step \(3\)"):
            restore(two_steps, 5, target)
        (folder / name).write_bytes(content)
    assert restore(two_steps, 5, target).step == 5


def test_checksums_are_left_out_on_request(two_steps, target):
    (two_steps.directory / "5/state/commit_success.txt").write_bytes(
        bytes((two_steps.directory / "5/state/commit_success.txt").stat().st_size)
    )
    assert restore(two_steps, 5, target, verify=False).step == 5


def test_an_unreadable_array_is_one_message(two_steps, target):
    for path in (two_steps.directory / "5" / "state").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"Checkpoint 5 .* could not be restored: .*steps: 3") as e:
        restore(two_steps, 5, target, verify=False)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match=r"Checkpoint 5 .* could not be restored: "):
        two_steps.read_array(5, "params.experts")


def without_bias(target, logical):
    del target["params"]["bias"], logical["params"]["bias"]


def with_another_leaf(target, logical):
    target["params"]["extra"] = target["params"]["bias"]
    logical["params"]["extra"] = logical["params"]["bias"]


def with_another_dtype(target, logical):
    bias = target["params"]["bias"]
    target["params"]["bias"] = jax.ShapeDtypeStruct((5,), jnp.bfloat16, sharding=bias.sharding)


def with_another_logical_shape(target, logical):
    # Two devices store 8 rows for 7 logical ones too: the stored shape alone does not tell.
    logical["params"]["kernel"] = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16)


def with_whole_numbers(target, logical):
    bias = target["params"]["bias"]
    target["params"]["bias"] = jax.ShapeDtypeStruct((5,), jnp.int32, sharding=bias.sharding)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (without_bias, "params.bias: only in the checkpoint"),
        (with_another_leaf, "params.extra: not in the checkpoint"),
        (with_another_dtype, r"params.bias: saved float32\[5\], wanted bfloat16\[5\]"),
        (
            with_another_logical_shape,
            r"params.kernel: saved bfloat16\[7,5\], wanted bfloat16\[8,5\]",
        ),
    ],
)
def test_a_target_that_differs_is_refused_leaf_by_leaf(two_steps, change, complaint):
    target, logical = target_on(make_mesh(2, 1)), logical_shapes()
    change(target, logical)
    with pytest.raises(UserError, match=complaint):
        two_steps.restore(5, target, logical_shapes=logical)


def change_dtypes(target, dtype):
    """Floating-point leaves in another dtype."""

    def changed(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(changed, target)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_request_floats_of_another_dtype_are_cast_to_the_nearest(store, target, dtype):
    values = jax.tree.map(  # NaNs may keep another payload.
        lambda x: np.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, random_values()
    )
    save(store, 1, put(values, target))
    wanted = change_dtypes(target_on(make_mesh(2, 2)), dtype)
    state = restore(store, 1, wanted, cast=True).state
    cast = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), values, wanted)
    assert as_bits(state) == as_bits(put(cast, wanted))
    with pytest.raises(UserError, match=r"params\.(kernel|bias): saved .*, wanted "):
        restore(store, 1, wanted)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_another_logical_shape, r"params\.kernel: saved .*\[7,5\], wanted .*\[8,5\]"),
        (with_whole_numbers, r"params\.bias: saved float32\[5\], wanted int32\[5\]"),
    ],
)
def test_a_cast_changes_neither_shapes_nor_kinds_of_numbers(two_steps, change, complaint):
    target, logical = target_on(make_mesh(2, 1)), logical_shapes()
    change(target, logical)
    with pytest.raises(UserError, match=complaint):
        two_steps.restore(5, target, logical_shapes=logical, cast=True)


def write_raw_checkpoint(folder, step, arrays):
    """A complete checkpoint as a converter writes it, its chunks' checksums made while writing."""
    leaves, known = {}, {}
    for name, array in arrays.items():
        create_raw_array(
            folder / "state",
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunk=(1, *array.shape[1:]),
            order=(0, *range(1, array.ndim)[::-1]),
        )
        for layer, part in enumerate(array):
            content, checksum = np.ascontiguousarray(part.T), Checksum()
            checksum.update(content)
            path = chunk_file(folder / "state", name, (layer,) + (0,) * (array.ndim - 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.tobytes())
            record = FileRecord(size=content.nbytes, checksum=checksum.text())
            known[path.relative_to(folder).as_posix()] = record
        leaves[name] = Leaf(shape=array.shape, dtype=array.dtype.name)
    files = record_files(folder, known=known)
    write_manifest(folder, Manifest(step=step, leaves=leaves, files=files, metadata={}))


def test_a_checkpoint_of_raw_arrays_is_verified_restored_and_cast(tmp_path):
    target = {"params": target_on(make_mesh(2, 3))["params"]}
    logical = {"params": logical_shapes()["params"]}
    values = {  # float32 numbers that bfloat16 holds too.
        "params": jax.tree.map(
            lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape), logical["params"]
        )
    }
    arrays = {f"params.{name}": x.astype(jnp.bfloat16) for name, x in values["params"].items()}
    write_raw_checkpoint(tmp_path / "3", 3, arrays)
    with CheckpointStore(tmp_path) as store:
        restored = store.restore(None, target, logical_shapes=logical, cast=True)
        assert as_bits(restored.state) == as_bits(put(values, target))
        assert as_bits(store.read_array(3, "params.experts")) == as_bits(arrays["params.experts"])
        path = chunk_file(tmp_path / "3" / "state", "params.experts", (1, 0, 0))
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        with pytest.raises(UserError, match=r"damaged.*state/params\.experts/c/1/0/0"):
            store.restore(None, target, logical_shapes=logical, cast=True)


def test_a_partial_restore_reads_the_named_leaves_only(two_steps, state, target):
    params, logical = target["params"], logical_shapes()["params"]
    restored = two_steps.restore(
        5, {"params": params}, logical_shapes={"params": logical}, partial=True
    )
    assert as_bits(restored.state) == as_bits({"params": state["params"]})
    with pytest.raises(UserError, match=r"weights\.bias: not in the checkpoint"):
        two_steps.restore(5, {"weights": params}, logical_shapes={"weights": logical}, partial=True)


def test_the_newest_steps_stay_and_interrupted_saves_go(tmp_path, state):
    (tmp_path / "1" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "notes.txt").write_text("not ours")
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in (2, 4, 6, 8):
            save(store, step, state)
        store.wait()
        assert store.steps() == [6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "6", "8"]


def test_nothing_is_deleted_before_the_newest_is_complete(tmp_path, state, monkeypatch):
    with CheckpointStore(tmp_path, keep=1) as store:
        save(store, 1, state)
        store.wait()
        monkeypatch.setattr(checkpoint, "write_manifest", raise_disk_error)
        save(store, 2, state)
        with pytest.raises(UserError, match=r"Checkpoint 2 could not.*No space left.*steps: 1"):
            store.wait()
        assert store.steps() == [1]


def raise_disk_error(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("saves", "added"), [(1, "a checkpoint of 256"), (2, "2 checkpoints of 256"), (9, "2 check")]
)
def test_room_is_missing_for_as_many_checkpoints_as_come_before_the_oldest_goes(
    tmp_path, monkeypatch, saves, added
):
    x = {"x": jnp.zeros((2, 32), jnp.float32)}
    with CheckpointStore(tmp_path / "new", keep=2) as store:
        store.save(1, x, logical_shapes=x, metadata={})
        store.wait()
        needed = 256 * min(saves, 2)  # of at most 3, one is there
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _: needed)
        assert store.missing_room(x, saves=saves) is None
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _: needed - 1)
        problem = store.missing_room(jax.eval_shape(lambda: x), saves=saves)
        assert problem is not None and problem.startswith(added)
        assert f"disk of {tmp_path / 'new'} has {needed - 1} bytes free. Make room" in problem


def test_a_checkpoint_takes_the_room_that_is_reckoned_with(tmp_path, monkeypatch):
    sharding = NamedSharding(make_mesh(3, 1), PartitionSpec("data"))
    x = {"x": jax.device_put(np.ones((3, 1 << 16), np.float32), sharding)}
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, x, logical_shapes=x, metadata={})
        store.wait()
        files = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _: files)
        assert store.missing_room(x, saves=1) is None
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _: int(0.95 * files))
        assert store.missing_room(x, saves=1) is not None


def test_steps_after_the_saved_one_are_left_alone(tmp_path, state):
    with CheckpointStore(tmp_path, keep=1) as store:
        save(store, 9, state)
        save(store, 4, state)
        save(store, 5, state)
        store.wait()
        assert store.steps() == [5, 9]


def test_an_existing_step_is_refused_and_stays_as_it_is(two_steps, state, target):
    with pytest.raises(UserError, match="Checkpoint 5 exists already"):
        save(two_steps, 5, jax.tree.map(jnp.zeros_like, state))
    assert as_bits(restore(two_steps, 5, target).state) == as_bits(state)


def test_an_interrupted_save_is_replaced_and_anything_else_moved_aside(two_steps, state):
    interrupted, damaged = two_steps.directory / "5", two_steps.directory / "3"
    (interrupted / "jaxseek.json").rename(interrupted / "jaxseek.json.tmp")
    cut_a_file(damaged)
    for step in (3, 5):
        save(two_steps, step, state)
    two_steps.wait()
    assert two_steps.steps() == [3, 5]
    names = sorted(path.name for path in two_steps.directory.iterdir())
    assert names == ["3", "3.damaged", "5"]


@pytest.fixture
def full_disk():
    """No file may grow over 64 KiB, which fails in Orbax as a full disk does. Call it to end it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    limit(1 << 16)
    yield lambda: limit(soft)
    limit(soft)


@pytest.mark.parametrize("surfaces_in", ["wait", "save", "close"])
def test_a_failed_background_save_is_one_message_and_the_next_save_works(
    tmp_path, full_disk, surfaces_in
):
    # Several shards fail at once. Their tracebacks would fail the test: pytest watches for them.
    sharding = NamedSharding(make_mesh(3, 1), PartitionSpec("data"))
    noise = np.random.default_rng(0).normal(size=(3, 1 << 15)).astype(np.float32)
    large = {"x": jax.device_put(noise, sharding), "y": jax.device_put(-noise, sharding)}
    small = {"x": large["x"][:, :9]}
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, small, logical_shapes=small, metadata={})
    store.wait()
    store.save(2, large, logical_shapes=large, metadata={})
    with pytest.raises(UserError, match=r"Checkpoint 2 .*too large.*Complete steps: 1\.") as error:
        if surfaces_in == "save":
            store.save(3, large, logical_shapes=large, metadata={})
        else:
            getattr(store, surfaces_in)()
    assert "\n" not in str(error.value)
    store.close()
    full_disk()
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(4, large, logical_shapes=large, metadata={})
    assert CheckpointStore(tmp_path).steps() == [1, 4]


def test_metadata_that_json_cannot_hold_fails_before_anything_is_written(store, state):
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(store, 1, state, {"rng": object()})
    assert not store.directory.exists()


def test_home_spaces_and_other_alphabets_in_the_path(tmp_path, state, target, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with CheckpointStore("~/läufe 1/50%#?&", keep=1) as store:
        save(store, 1, state)
        assert as_bits(restore(store, 1, target).state) == as_bits(state)
    monkeypatch.chdir(tmp_path / "läufe 1")
    assert CheckpointStore("50%#?&").latest() == 1


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep=1)
    monkeypatch.setattr("os.access", lambda *_: False)  # Root may write anywhere.
    with pytest.raises(UserError, match=f"{tmp_path} is not writable"):
        CheckpointStore(tmp_path / "checkpoints", keep=1)
    CheckpointStore(tmp_path / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_at_least_one_checkpoint_is_kept(tmp_path):
    with pytest.raises(UserError, match="Keeping 0 checkpoints"):
        CheckpointStore(tmp_path, keep=0)


def test_a_folder_without_checkpoints_is_said_so(tmp_path, target):
    store = CheckpointStore(tmp_path / "nothing")
    assert (store.steps(), store.latest()) == ([], None)
    with pytest.raises(UserError, match="nothing holds no complete checkpoint"):
        restore(store, None, target)
    with pytest.raises(UserError, match=r"4 is not a complete checkpoint.*Complete steps: none"):
        restore(store, 4, target)


def test_orbax_logs_nothing_and_others_still_do(store, state, caplog):
    with caplog.at_level(logging.DEBUG, logger="absl"):
        save(store, 1, state)
        store.wait()
        logging.getLogger("absl").warning("from someone else")
    assert [record.message for record in caplog.records if record.name == "absl"] == [
        "from someone else"
    ]
