"""`sensitivity` needs torch, numpy and scipy, and nothing else of what happens to be installed."""

import importlib.metadata
import json
import re
import subprocess
import sys

ALLOWED = ("torch", "numpy", "scipy")

PROGRAM = """
import json, sys

allowed = set(json.loads(sys.argv[1]))

class Bare:
    # Finds nothing but what a bare environment holds.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        is_bare = top in allowed or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        return self.finder.find_spec(name, path, target) if is_bare else None

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Bare(finder) for finder in sys.meta_path]
before = set(sys.modules)
import sensitivity
from torch import nn
head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
certificate = sensitivity.certify(head, p=2, q=2, input_shape=(1, 8, 8), search=True)
certificate.check(head)
tops = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
print(json.dumps({"value": certificate.value, "tops": tops}))
"""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def import_names(distributions):
    """Top-level modules that distributions install."""
    return {
        top
        for top, owners in importlib.metadata.packages_distributions().items()
        if {normal(owner) for owner in owners} & distributions
    }


def with_requirements(names):
    """Distributions with what their installed metadata requires, extras left out, and what that requires."""
    found, waiting = set(), list(names)
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        waiting += [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines if "extra ==" not in line]
    return found


def run_bare(program=PROGRAM):
    allowed = import_names(with_requirements(ALLOWED)) | {"sensitivity"}
    assert {"torch", "numpy", "scipy"} <= allowed
    assert not {"torchvision", "asfl_privacy", "pandas", "sklearn", "pydantic", "typer", "rich", "opacus"} & allowed
    return subprocess.run(
        [sys.executable, "-c", program, json.dumps(sorted(allowed))], capture_output=True, text=True, check=False
    )


def test_import_and_certify_work_with_torch_numpy_and_scipy_alone():
    """Catches an import of torchvision, pandas or our own application, which the developer's machine hides."""
    done = run_bare()
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["value"] > 0.0
    assert {"sensitivity", "torch", "numpy", "scipy"} <= set(seen["tops"])
    assert not {"torchvision", "asfl_privacy"} & set(seen["tops"])


def test_the_bare_finder_hides_what_is_installed():
    """A mutant that imports torchvision must fail, or the test above proves nothing."""
    done = run_bare(PROGRAM.replace("import sensitivity\n", "import torchvision, sensitivity\n"))
    assert done.returncode != 0
    assert "No module named 'torchvision'" in done.stderr
