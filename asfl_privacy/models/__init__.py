"""Networks of named blocks and the head/tail split."""

from asfl_privacy.models.build import block_names, build_model
from asfl_privacy.models.nets import NETS, OWN_LAYERS, Normalize
from asfl_privacy.models.projection import add_projection, read_projection
from asfl_privacy.models.split import Split, split_model

__all__ = [
    "NETS",
    "OWN_LAYERS",
    "Normalize",
    "Split",
    "add_projection",
    "block_names",
    "build_model",
    "read_projection",
    "split_model",
]
