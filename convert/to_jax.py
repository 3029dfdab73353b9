"""A Hugging Face folder to a checkpoint of jaxseek, without arithmetic and in bounded memory.

    OUT/checkpoints/0/   the parameters, as a training run's checkpoint without optimizer state
        mtp.safetensors  the tensors of MTP layers, where there are any
    OUT/hf/              tokenizer and what else travels along

The checkpoint's metadata hold config.json and the dtype of each tensor. A parameter is stored in
chunks of one tensor each, whose bytes are those of the tensor in the Hugging Face file: that the
dims stand in another order there is said by zarr's transpose codec.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.files import dtypes
from convert.files.hf_folder import open_hf_folder
from convert.files.safetensors_file import SafetensorsWriter
from convert.import_plan import DtypeChoice, ImportPlan, plan_import
from convert.names import checkpoint_leaf
from convert.pipeline import Job, run_all
from convert.progress import Progress, Summary, count_dtypes
from convert.staging import copy_files, new_folder
from jaxseek.checkpoint_arrays import chunk_file, create_raw_array, write_orbax_metadata
from jaxseek.checkpoint_files import (
    ARRAYS_FOLDER,
    Checksum,
    FileRecord,
    Leaf,
    Manifest,
    record_files,
    write_manifest,
)
from jaxseek.layout import ParamSpec, flatten_paths
from jaxseek.model import split
from jaxseek.paths import CHECKPOINTS, HF_FILES
from jaxseek.schema import to_values

STEP = 0
MTP_FILE = "mtp.safetensors"
_BLOCK = 1 << 20  # hashed and written while it is in the processor's cache


def to_jax(source: Path, out: Path, *, dtype: DtypeChoice = "keep") -> Summary:
    """Convert the folder `source` into the new folder `out`.

    Args:
        dtype: of the parameters; `keep` is the files' own, and bfloat16 for FP8.

    Raises:
        UserError: before anything is written, where the folder cannot be converted or `out` exists;
            where writing fails. Nothing is left at `out` then.
    """
    with open_hf_folder(source) as folder:
        plan = plan_import(folder, dtype=dtype)
        names = (*plan.tensors, *plan.kept)
        written = count_dtypes(
            (plan.stored_dtype(name), folder.tensors[name].size, plan.stored_bytes(name))
            for name in names
        )
        total = sum(nbytes for _, _, nbytes in written.values())
        with (
            new_folder(out, needed_bytes=total) as partial,
            Progress("to-jax", total=total) as progress,
        ):
            step = partial / CHECKPOINTS / str(STEP)
            (step / ARRAYS_FOLDER).mkdir(parents=True)
            (partial / HF_FILES).mkdir()
            copy_files(folder.carried_files(), partial / HF_FILES)
            _write_step(plan, step, progress)  # complete with its last file, the manifest
        return Summary(
            dtypes=written,
            read=sum(folder.tensors[name].nbytes for name in names),
            written=total,
            seconds=progress.seconds,
            notes=plan.notes,
        )


def _write_step(plan: ImportPlan, step: Path, progress: Progress) -> None:
    specs: dict[str, ParamSpec] = flatten_paths(split(plan.config)[1])
    tensors = {path: tensor for tensor in plan.tensors.values() for path in tensor.paths}
    leaves = {}
    for path, spec in specs.items():
        dtype = dtypes.NUMPY[plan.leaf_dtypes[path]]
        stack = tensors[path].stack_dims
        leaves[checkpoint_leaf(path)] = Leaf(shape=spec.shape, dtype=dtype.name)
        create_raw_array(
            step / ARRAYS_FOLDER,
            checkpoint_leaf(path),
            shape=spec.shape,
            dtype=dtype,
            chunk=(1,) * stack + spec.shape[stack:],
            order=tensors[path].leaf_order,
        )
    write_orbax_metadata(step / ARRAYS_FOLDER, leaves)
    known: dict[str, FileRecord] = {}
    run_all(_jobs(plan, step, known), done=progress.advance)
    if plan.kept:
        _write_mtp(plan, step / MTP_FILE, progress)
    manifest = Manifest(
        step=STEP,
        leaves=leaves,
        files=record_files(step, known=known),
        metadata={"model": to_values(plan.config), "source": plan.source},
    )
    write_manifest(step, manifest)


def _jobs(plan: ImportPlan, step: Path, known: dict[str, FileRecord]) -> Iterator[Job]:
    for name in plan.tensors:
        write = functools.partial(_write_tensor, plan, name, step, known)
        yield Job(run=write, nbytes=plan.stored_bytes(name))


def _write_tensor(plan: ImportPlan, name: str, step: Path, known: dict[str, FileRecord]) -> None:
    tensor = plan.tensors[name]
    values = plan.read(name, dtype=plan.stored_dtype(name))
    arrays = step / ARRAYS_FOLDER
    for path, part in zip(tensor.paths, tensor.file_parts(values), strict=True):
        # A tensor that holds all experts of a layer goes into a chunk per expert.
        for inner in np.ndindex(part.shape[: tensor.stack_dims - len(tensor.index)]):
            chunk = np.ascontiguousarray(part[inner])
            index = (*tensor.index, *inner)
            index += (0,) * (len(tensor.leaf_order) - len(index))
            file = chunk_file(arrays, checkpoint_leaf(path), index)
            known[file.relative_to(step).as_posix()] = _write_chunk(file, chunk)
    plan.forget(name)


def _write_chunk(file: Path, chunk: np.ndarray) -> FileRecord:
    data = chunk.reshape(-1).view(np.uint8)
    checksum = Checksum()
    buffer = np.empty(min(_BLOCK, data.size), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb", buffering=0) as out:
        for start in range(0, data.size, _BLOCK):
            # Linux writes the pages of another file's map at half the speed of other memory.
            block = buffer[: data.size - start]
            block[:] = data[start : start + _BLOCK]
            checksum.update(block)
            _write_all(out.fileno(), block)
    return FileRecord(size=data.size, checksum=checksum.text())


def _write_all(descriptor: int, data: np.ndarray) -> None:
    view = data.data
    while view:
        view = view[os.write(descriptor, view) :]


def _write_mtp(plan: ImportPlan, file: Path, progress: Progress) -> None:
    infos = plan.folder.tensors

    def write(writer: SafetensorsWriter, name: str) -> None:
        writer.write(name, np.ascontiguousarray(plan.read(name, dtype=plan.dtypes[name])))
        plan.forget(name)

    with SafetensorsWriter(file, {n: (plan.dtypes[n], infos[n].shape) for n in plan.kept}) as out:
        jobs = (
            Job(run=functools.partial(write, out, name), nbytes=plan.stored_bytes(name))
            for name in plan.kept
        )
        run_all(jobs, done=progress.advance)
