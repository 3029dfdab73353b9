"""Whether a folder is whole, and another copy of its weights equal: tensors first, then logits."""

import contextlib
import dataclasses
from pathlib import Path

from convert.checkpoint_source import open_checkpoint
from convert.files.hf_folder import CONFIG_FILE, open_hf_folder
from convert.import_plan import plan_import
from convert.progress import Progress, human_bytes, peak_memory, print_table
from convert.verification.comparison import Comparison, compare, total_bytes
from convert.verification.logits import check_logits
from convert.verification.weight_sources import CheckpointWeights, FolderWeights, WeightSource
from jaxseek.checkpoint_files import changed_files
from jaxseek.config import ModelConfig

_SHOWN = 20
_WIDTH = 140  # whole names, even where a terminal is narrower or there is none


def verify(source: Path, other: Path | None, *, logits: bool) -> bool:
    """Read every tensor of the folder `source` and print what was found.

    Args:
        other: a checkpoint of jaxseek or another Hugging Face folder, which must hold the same
            values, as its dtypes round them. Without it, values need only be finite.
        logits: compare the logits of jaxseek, with the weights of `other` if given, with those of
            transformers with the weights of `source`, where that is possible.

    Returns:
        whether all is as it must be.

    Raises:
        UserError: one of the two cannot be read, or is no complete model.
    """
    with contextlib.ExitStack() as stack:
        folder = _open_folder(source, stack)
        theirs = _open_other(other, stack) if other else None
        with Progress("verify", total=total_bytes(folder, theirs)) as progress:
            comparison = compare(folder, theirs, progress=progress)
        _print_rate(progress)
        sound = _report_values(folder, comparison)
        if theirs:
            sound &= _report_config(folder, theirs)
            sound &= _report_comparison(folder, theirs, comparison)
        if logits and not sound:
            print("logits: not compared, for the weights differ or are not finite already.")
        elif logits:
            ours = theirs or folder
            if comparison.rounded:  # they have other logits, and that is no mistake
                print(f"logits: both with the weights of {folder.path}, the others are rounded.")
                ours = folder
            sound &= check_logits(folder, ours)
        return sound


def _open_folder(path: Path, stack: contextlib.ExitStack) -> FolderWeights:
    return FolderWeights(plan_import(stack.enter_context(open_hf_folder(path))))


def _open_other(path: Path, stack: contextlib.ExitStack) -> WeightSource:
    if (path.expanduser() / CONFIG_FILE).is_file():
        return _open_folder(path, stack)
    return CheckpointWeights(open_checkpoint(path))


def _print_rate(progress: Progress) -> None:
    rate = progress.done / progress.seconds / 1e9 if progress.seconds else 0.0
    print(
        f"read {human_bytes(progress.done)} in {progress.seconds:.1f} s ({rate:.2f} GB/s); "
        f"peak memory {human_bytes(peak_memory())}"
    )


def _report_values(folder: FolderWeights, comparison: Comparison) -> bool:
    """What the folder is by itself; whether its values are finite."""
    plan = folder.plan
    mtp = f" and {len(plan.kept)} of MTP layers" if plan.kept else ""
    print(f"{folder.path}: all {len(plan.tensors)} tensors of the model are there{mtp}.")
    for note in plan.notes:
        print(note)
    if not comparison.not_finite:
        if not comparison.mtp_left_out:
            print("All values are finite.")
        else:
            print("All values that were read are finite.")
        return True
    print(f"Tensors with values that are not finite: {len(comparison.not_finite)}")
    for name, count in list(comparison.not_finite.items())[:_SHOWN]:
        print(f"  {name}: {count:,} infinite or not a number")
    _print_more(len(comparison.not_finite))
    return False


def _report_config(folder: FolderWeights, other: WeightSource) -> bool:
    """Whether the two are the same model: with another config equal weights are another one."""
    ours, theirs = _comparable(folder.config), _comparable(other.config)
    differing = [
        f"  {key}: {ours[key]} in {folder.path}, {theirs[key]} in {other.path}"
        for key in ours
        if ours[key] != theirs[key]
    ]
    if differing:
        print("The configs differ:", *differing, sep="\n")
    return not differing


def _comparable(config: ModelConfig) -> dict[str, object]:
    """The fields that a folder and a checkpoint of the same model agree on."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del fields["initializer_range"]  # of a config.json it is never read
    if not config.is_mla:
        fields["head_dim"] = config.attention_head_dim  # which is its default
    return fields


def _report_comparison(folder: FolderWeights, other: WeightSource, comparison: Comparison) -> bool:
    """Whether the two hold the same, rounding aside."""
    if comparison.mtp_left_out:
        holder = folder if folder.mtp else other
        print(
            f"{comparison.mtp_left_out} tensors of MTP layers are in {holder.path} only: "
            "not compared."
        )
    if comparison.rounded:
        kinds = sorted({other.dtypes[name] for name in comparison.rounded})
        print(
            f"{len(comparison.rounded)} tensors have a narrower dtype in {other.path} "
            f"({', '.join(kinds)}): compared with the rounded values."
        )
    for title, names in (
        (f"Not in {other.path}", comparison.missing),
        (f"Only in {other.path}", comparison.extra),
    ):
        if names:
            print(f"{title}: {len(names)}", *(f"  {name}" for name in names[:_SHOWN]), sep="\n")
            _print_more(len(names))
    if comparison.differences:
        _print_differences(comparison)
        print(
            f"{len(comparison.differences)} of {len(comparison.compared)} tensors differ from "
            f"{other.path}. {_why(other)}"
        )
    elif comparison.equal:
        print(
            f"{len(comparison.compared)} tensors in {folder.path} and {other.path} are equal "
            f"{'once rounded' if comparison.rounded else 'bit for bit'}."
        )
    return comparison.equal


def _why(other: WeightSource) -> str:
    """Whether damage explains differences; a checkpoint knows the checksums of its files."""
    if not isinstance(other, CheckpointWeights):
        return ""
    if changed := changed_files(other.source.folder):
        return f"It is damaged: {', '.join(changed[:3])} changed after they were written."
    return "Its files are as they were written: after training, differences are to be expected."


def _print_differences(comparison: Comparison) -> None:
    print_table(
        ("tensor", "values", "differing", "largest difference"),
        [
            (row.name, f"{row.size:,}", f"{row.differing:,}", f"{row.largest:.3g}")
            for row in comparison.differences[:_SHOWN]
        ],
        width=_WIDTH,
    )
    _print_more(len(comparison.differences))


def _print_more(number: int) -> None:
    if number > _SHOWN:
        print(f"  and {number - _SHOWN} more")
