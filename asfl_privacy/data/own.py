"""A user's own data set, and whatever else is named as `module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from asfl_privacy.data.dataset import Dataset, make_dataset


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


def own_dataset(reference: str) -> Dataset:
    """The data set that `module:name` names.

    Args:
        reference: `module:name` of a `Dataset`, of a pair of pairs ((train_inputs, train_labels), (test_inputs,
            test_labels)), or of a function without arguments that returns either. The module's code runs.

    Returns:
        The data set, checked, under the name of its reference.

    Raises:
        ValueError: A module, function or data that fail or are malformed.
    """
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
                train_groups=made.train_groups,
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
