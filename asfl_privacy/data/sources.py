"""Where data sets come from: bundled, installed on the system, downloaded, or the user's own."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asfl_privacy.data.dataset import Dataset, make_dataset

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_dataset(name: str, *, root: Path) -> Dataset:
    """Load a data set by name.

    Args:
        name: `digits`, `fashion-mnist`, or `module:name` for your own: a `Dataset`, a pair of pairs
            ((train_inputs, train_labels), (test_inputs, test_labels)), or a function without arguments that returns
            either. Naming a module runs its code.
        root: Folder in which torchvision looks for files and into which it downloads.

    Returns:
        The data set.

    Raises:
        ValueError: An unknown name, or data that cannot be found or is malformed; the line says what to do.

    Example:
        >>> load_dataset("digits", root=Path("data")).input_shape
        (1, 8, 8)
    """
    if name in SOURCES:
        return SOURCES[name](root)
    if ":" in name:
        return _own_dataset(name)
    raise ValueError(f"data {name!r} is unknown; use one of {', '.join(sorted(SOURCES))}, or your own as module:name")


def digits(root: Path) -> Dataset:
    """1,797 8×8 grey digits bundled with scikit-learn; a fixed stratified third is held out for testing.

    The mean and standard deviation are the rounded figures of the public set, fixed here as constants.
    """
    from sklearn.datasets import load_digits  # seconds to import, which other data sets need not pay
    from sklearn.model_selection import train_test_split

    del root  # bundled
    bunch = load_digits()
    images = (bunch.images / 16.0)[:, None].astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, bunch.target, test_size=1 / 3, random_state=0, stratify=bunch.target
    )
    return make_dataset(
        "digits", train=(train_x, train_y), test=(test_x, test_y), num_classes=10, mean=(0.305,), std=(0.376,)
    )


def fashion_mnist(root: Path) -> Dataset:
    """70,000 28×28 grey images of clothing: from Debian's package, a torchvision folder, or torchvision's download."""
    from torchvision.datasets import FashionMNIST

    raw = root / "FashionMNIST" / "raw"
    here = all((raw / file).is_file() for file in FASHION_MNIST_FILES)
    packaged = not here and DEBIAN_FASHION_MNIST.is_dir()
    with tempfile.TemporaryDirectory() as scratch:
        folder = root
        if packaged:
            # Debian recompresses the files, so torchvision's checksum refuses them; it reads the unpacked ones.
            folder = Path(scratch)
            _unpack(folder / "FashionMNIST" / "raw")
        made = [parent for parent in (raw, *raw.parents) if not parent.exists()]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                parts = [
                    FashionMNIST(str(folder), train=train, download=not (here or packaged)) for train in (True, False)
                ]
        except (RuntimeError, OSError, ValueError) as error:
            for parent in made:  # a failed download leaves no empty folders behind
                with contextlib.suppress(OSError):
                    parent.rmdir()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = folder if packaged else raw
            raise ValueError(
                f"data fashion-mnist: nothing readable in {DEBIAN_FASHION_MNIST} or {where} and no download ({reason}); run "
                "apt-get install dataset-fashion-mnist, or put torchvision's files there"
            ) from None
        train, test = ((part.data.numpy()[:, None] / np.float32(255.0), part.targets.numpy()) for part in parts)
    return make_dataset("fashion-mnist", train=train, test=test, num_classes=10, mean=(0.286,), std=(0.353,))


def _unpack(raw: Path) -> None:
    """Debian's files, unpacked where torchvision looks for them."""
    raw.mkdir(parents=True)
    for file in FASHION_MNIST_FILES:
        packed = DEBIAN_FASHION_MNIST / f"{file}.gz"
        try:
            with gzip.open(packed, "rb") as source, (raw / file).open("wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, EOFError) as error:
            raise ValueError(
                f"data fashion-mnist: {packed} cannot be read ({error}); reinstall with apt-get install "
                "dataset-fashion-mnist"
            ) from None


def import_object(reference: str, *, what: str) -> object:
    """The object that `module:name` names, looked for in the working directory first, as `python -m` does.

    Args:
        reference: `module:name`; the module is imported, so its code runs.
        what: What it is for, used in the message.

    Returns:
        The object.

    Raises:
        ValueError: The module or the name does not exist, or importing it fails.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{what} {reference!r} is not module:name; give for example my_file:my_function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may fail in any way; the line says how
        raise ValueError(
            f"{what} {reference!r}: importing {module_name!r} failed ({type(error).__name__}: {' '.join(str(error).split())}); "
            "run from the folder that holds it, or install it"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{what} {reference!r}: module {module_name!r} has no {attribute!r}; check the name")
    return getattr(module, attribute)


def _own_dataset(reference: str) -> Dataset:
    made = import_object(reference, what="data")
    if callable(made):
        try:
            made = made()
        except (Exception, SystemExit) as error:  # the user's function may fail in any way; the line says how
            raise ValueError(
                f"data {reference!r}: the function failed ({type(error).__name__}: {' '.join(str(error).split())}); it is "
                "called without arguments"
            ) from error
    if isinstance(made, Dataset):
        try:
            return make_dataset(
                reference,
                train=(made.train_inputs, made.train_labels),
                test=(made.test_inputs, made.test_labels),
                num_classes=made.num_classes,
                input_box=made.input_box,
                mean=made.mean,
                std=made.std,
            )
        except TypeError as error:
            raise ValueError(
                f"data {reference!r}: a field has the wrong type ({error}); make it with asfl_privacy.data.make_dataset"
            ) from None
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(pair, tuple) and len(pair) == 2 for pair in made):
        return make_dataset(reference, train=made[0], test=made[1])
    raise ValueError(
        f"data {reference!r} gives a {type(made).__name__}; it must be an asfl_privacy.data.Dataset or "
        "((train_inputs, train_labels), (test_inputs, test_labels))"
    )


SOURCES: dict[str, Callable[[Path], Dataset]] = {"digits": digits, "fashion-mnist": fashion_mnist}
