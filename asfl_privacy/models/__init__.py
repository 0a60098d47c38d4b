"""Networks of named blocks and the head/tail split."""

from asfl_privacy.models.build import block_names, build_model
from asfl_privacy.models.nets import NETS, Normalize
from asfl_privacy.models.split import Split, split_model

__all__ = ["NETS", "Normalize", "Split", "block_names", "build_model", "split_model"]
