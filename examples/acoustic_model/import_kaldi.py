r"""Imports speech that Kaldi has aligned: features of a feats.scp, and numbers of pdfs (states) as labels.

    ali-to-pdf exp/tri3/final.mdl "ark:gunzip -c exp/tri3_ali_train/ali.*.gz|" ark:train_pdf.ark
    ali-to-pdf exp/tri3/final.mdl "ark:gunzip -c exp/tri3_ali_dev/ali.*.gz|" ark:dev_pdf.ark
    python -m examples.acoustic_model.import_kaldi --train data/train/feats.scp train_pdf.ark \
        --dev data/dev/feats.scp dev_pdf.ark --out out/kaldi
    HVD_ADPSGD_SUPER_LEARNER_SIZE=1 horovodrun -np 4 python -m examples.acoustic_model.train --data out/kaldi

Features are 40 per frame (log-mel energies or high-resolution MFCCs); an utterance without an alignment, or
without features, is left out, and counted. The mean of each utterance is subtracted, deltas are computed per
batch. The trainer reports held-out loss and frame errors; words need Kaldi's own graph and decoder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.acoustic_model.speech import corpus
from examples.acoustic_model.speech.features import BINS
from examples.acoustic_model.speech.problem import Problem, new_parser, require, run

MOST_PDFS = 2**15  # labels are int16


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    for split in ("train", "dev"):
        what = f"features and alignment of the {split} split"
        add(f"--{split}", nargs=2, type=Path, required=True, metavar=("SCP", "PDF"), help=what)
    add("--out", type=Path, default=Path("out/kaldi"), help="folder (default: out/kaldi)")
    return parser.parse_args(argv)


def alignments(path: Path) -> dict[str, np.ndarray]:
    """Return the number of the pdf of each frame, by utterance.

    Args:
        path: written by ali-to-pdf, in text or binary; or its .scp.

    Raises:
        Problem: if the file is missing or damaged, or a number is out of range.
    """
    kaldi = require("kaldi_native_io", "kaldi_native_io")
    kind = "scp" if path.suffix == ".scp" else "ark"
    if not path.is_file():
        raise Problem(f"no file {path}; make it with Kaldi's ali-to-pdf")
    found: dict[str, np.ndarray] = {}
    try:
        with kaldi.SequentialInt32VectorReader(f"{kind}:{path}") as reader:
            for name, numbers in reader:
                if name in found:
                    raise Problem(
                        f"{path}: {name} is there twice; join alignments of different utterances"
                    )
                found[name] = np.array(numbers, np.int32)
            _require_end(reader, path, f"the alignment after {name}" if found else "an alignment")
    except (RuntimeError, UnicodeDecodeError) as error:
        raise Problem(
            f"{path} holds no vectors of integers ({error}); make it with ali-to-pdf"
        ) from error
    if not found:
        raise Problem(f"{path} holds no alignment; look at the log of ali-to-pdf")
    for name, numbers in found.items():
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < MOST_PDFS:
            raise Problem(
                f"{path}: {name} has pdfs {numbers.min()} to {numbers.max()}, allowed are "
                f"0 to {MOST_PDFS - 1}; make it with ali-to-pdf, not from transition numbers"
            )
    return found


def matrices(scp: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the features of each utterance, float32 (frames, 40).

    Raises:
        Problem: if a file is missing or damaged, or the features have another width.
    """
    kaldi = require("kaldi_native_io", "kaldi_native_io")
    if not scp.is_file():
        raise Problem(f"no file {scp}; make it with Kaldi's steps/make_fbank.sh or make_mfcc.sh")
    name = ""
    try:
        with kaldi.SequentialFloatMatrixReader(f"scp:{scp}") as reader:
            for name, matrix in reader:
                frames = np.asarray(matrix, np.float32)
                if frames.shape[1] != BINS:
                    raise Problem(
                        f"{scp}: {name} has {frames.shape[1]} features per frame, allowed are {BINS}; "
                        f"make them with --num-mel-bins={BINS}, or high-resolution MFCCs"
                    )
                if not np.abs(frames).max(initial=0) < np.finfo(np.float16).max:
                    raise Problem(
                        f"{scp}: {name} has features that are not finite, or above "
                        f"{np.finfo(np.float16).max:g}; compute them again"
                    )
                yield name, frames
            _require_end(reader, scp, f"the features after {name}")
    except (RuntimeError, UnicodeDecodeError) as error:
        which = f"the features after {name}" if name else "the first features"
        raise Problem(f"{scp}: {which} cannot be read ({error}); check the paths") from error


def _require_end(reader: Any, path: Path, what: str) -> None:
    """Raise Problem unless a reader is at the end of its file: it stops quietly at damage, too."""
    if not reader._impl.close():
        raise Problem(f"{path}: {what} cannot be read; the file is damaged, or a path is wrong")


def aligned(
    scp: Path, pdfs: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
    """Yield features and alignment of each utterance of `scp`; None for one without an alignment.

    Raises:
        Problem: if an utterance is there twice, or has other numbers of frames.
    """
    seen = set()
    for name, frames in matrices(scp):
        if name in seen:
            raise Problem(f"{scp}: {name} is there twice; remove one line")
        seen.add(name)
        if name not in pdfs:
            yield None
            continue
        if len(frames) != len(pdfs[name]):
            raise Problem(
                f"{scp}: {name} has {len(frames)} frames, and {len(pdfs[name])} in its alignment; align "
                "with these features, and a model without frame subsampling"
            )
        yield frames, pdfs[name]


def write_split(folder: Path, scp: Path, pdfs: dict[str, np.ndarray]) -> dict[str, int]:
    """Write one split; return counts of its utterances, its frames, and utterances that were left out.

    Raises:
        Problem: if no utterance has both, or none is long enough; see `aligned`.
    """
    folder.mkdir(parents=True)
    total = sum(len(numbers) for numbers in pdfs.values())
    features = np.lib.format.open_memmap(folder / "all.npy", "w+", np.float16, (total, BINS))
    labels, means, offsets, left_out = [], [], [0], 0
    for pair in aligned(scp, pdfs):
        if pair is None:
            left_out += 1
            continue
        frames, numbers = pair
        features[offsets[-1] : offsets[-1] + len(frames)] = frames
        labels.append(numbers.astype(np.int16))
        means.append(frames.mean(0))
        offsets.append(offsets[-1] + len(frames))
    if not labels:
        raise Problem(f"{scp}: none of its utterances has an alignment; check the names")
    if all(end - begin < corpus.SEGMENT for begin, end in itertools.pairwise(offsets)):
        raise Problem(
            f"{scp}: no utterance has {corpus.SEGMENT} frames, a whole segment; add longer ones"
        )
    corpus.write_array(folder / "features.npy", features[: offsets[-1]])
    (folder / "all.npy").unlink()
    corpus.write_array(folder / "labels.npy", np.concatenate(labels))
    corpus.write_array(folder / "offsets.npy", np.array(offsets, np.int64))
    corpus.write_array(folder / "means.npy", np.stack(means))
    return {
        "utterances": len(labels),
        "frames": offsets[-1],
        "without an alignment": left_out,
        "without features": len(pdfs) - len(labels),
    }


def write_statistics(folder: Path, states: int, scp: Path) -> None:
    """Write the statistics of the training split.

    Raises:
        Problem: if a feature is constant, so that it cannot be normalised.
    """
    found = corpus.statistics(folder / "train", states)
    constant = np.flatnonzero(found["std"] <= 0) % BINS
    if constant.size:
        raise Problem(
            f"{scp}: feature {constant[0]} is the same in all frames of each utterance; leave no column "
            "constant"
        )
    for name, numbers in found.items():
        corpus.write_array(folder / f"{name}.npy", numbers)


def imported(options: argparse.Namespace) -> dict[str, Any]:
    """Write the corpus to --out, all of it or nothing; return counts by split, and the number of pdfs."""
    if options.out.exists():
        raise Problem(f"--out {options.out} exists; name another folder, or delete it")
    aligned = {split: alignments(getattr(options, split)[1]) for split in ("train", "dev")}
    states = 1 + max(int(pdf.max(initial=0)) for pdfs in aligned.values() for pdf in pdfs.values())
    told: dict[str, Any] = {"pdfs": states}
    if not options.out.parent.is_dir() and options.out.parent.exists():
        raise Problem(f"--out {options.out}: {options.out.parent} is a file; name another folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{options.out.name}.", dir=options.out.parent))
    part.chmod(0o755)
    try:
        for split, pdfs in aligned.items():
            told[split] = write_split(part / split, getattr(options, split)[0], pdfs)
        write_statistics(part, states, options.train[0])
        (part / "states.json").write_text(json.dumps([f"pdf{i}" for i in range(states)]))
        part.replace(options.out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return told


def main() -> None:
    """Import the corpus, and print its size."""
    options = arguments()
    told = imported(options)
    print(f"{options.out}: {told['pdfs']} pdfs")
    for split in ("train", "dev"):
        print(f"{split}: {', '.join(f'{count:,} {what}' for what, count in told[split].items())}")


if __name__ == "__main__":
    run(main)
