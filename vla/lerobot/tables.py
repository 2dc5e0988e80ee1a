"""The parquet tables of a dataset as `datasets` and pandas read them: lists of fixed length, pictures as bytes, an index of tasks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mmsdk.vla.lerobot.layout import Feature

__all__ = ["data_table", "episodes_table", "tasks_table"]

_TYPES = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_(), "string": pa.string()}
_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def data_table(features: Mapping[str, Feature], columns: Mapping[str, Any]) -> pa.Table:
    """Frames as rows: a column for every feature that is no video."""
    told = {name: feature for name, feature in features.items() if feature.dtype != "video"}
    arrays = [_column(feature, columns[name]) for name, feature in told.items()]
    # how Hugging Face's datasets knows that bytes are a picture
    hints = json.dumps({"info": {"features": {name: _hint(feature) for name, feature in told.items()}}})
    return pa.table(arrays, names=list(told)).replace_schema_metadata({"huggingface": hints})


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """Tasks by number, the task being pandas' index."""
    told = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(told)})


def episodes_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Episodes as rows."""
    return pa.table({name: [row[name] for row in rows] for name in rows[0]})


def _column(feature: Feature, values: Any) -> pa.Array:
    if feature.dtype == "image":
        return pa.array(values, _PICTURE)
    kind = _TYPES[feature.dtype]
    rows = np.asarray(values)
    if feature.shape == (1,):
        return pa.array(rows.reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1), kind), feature.shape[0])


def _hint(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    return value if feature.shape == (1,) else {"feature": value, "length": feature.shape[0], "_type": "Sequence"}
