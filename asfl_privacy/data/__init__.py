"""Data sets and how their records are spread over clients."""

from asfl_privacy.data.dataset import Dataset, data_digest, make_dataset
from asfl_privacy.data.holdout import hold_out
from asfl_privacy.data.own import import_object
from asfl_privacy.data.partition import PartitionScheme, parse_partition, partition_records
from asfl_privacy.data.sources import SOURCES, load_dataset

__all__ = [
    "SOURCES",
    "Dataset",
    "PartitionScheme",
    "data_digest",
    "hold_out",
    "import_object",
    "load_dataset",
    "make_dataset",
    "parse_partition",
    "partition_records",
]
