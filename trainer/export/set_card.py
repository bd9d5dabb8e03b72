"""The card of an exported shard set: what the files hold, and how to read the rows of one worker."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment

from trainer.data.shards import Shards
from trainer.export.dataset import class_names
from trainer.export.formats import DATASET
from trainer.export.samples import are_pictures

# The front matter is YAML, in which every value is JSON.
TEMPLATE = """\
{% if front %}
---
{% for key, value in front.items() %}
{{ key }}: {{ value | tojson }}
{% endfor %}
---

{% endif %}
# {{ name }}

| | |
|---|---|
| training examples | {{ "{:,}".format(shards.rows) }}{{ copies }} |
| workers | {{ shards.num_workers }} |
| evaluation examples | {{ "{:,}".format(evaluation) }} |
| strategy | {{ shards.manifest.strategy }} |
| images | {{ images }} |
{% if shards.has_labels %}
| classes | {{ shards.num_classes }}: {{ classes }} |
{% endif %}

The files of worker w, counted from 0, begin with `data/worker-` and w in three digits. `data/test-*` are evaluation
examples.
{% if front %}

```python
from datasets import load_dataset

everything = load_dataset(".", split="train")  # this folder, or the name of a repository of the Hub
shard = load_dataset(".", "{{ worker_name }}", split="train")  # the rows of one worker
```
{% if copies %}

Copies of rows have `copy` > 0; every example is there once among the rows with `copy` 0.
{% endif %}
{% elif kind == "mds" %}

```python
from streaming import StreamingDataset

shard = StreamingDataset(local="data/{{ worker_name }}", batch_size=32)  # the rows of one worker
print(shard[0])
```

A sample has `id`, `copy` (0 for the row itself), `image`{{ ", `label`" if shards.has_labels }}, and other columns if
there are any.
{% else %}

```python
from glob import glob

import webdataset

samples = webdataset.WebDataset(sorted(glob("data/{{ worker_name }}-*.tar")), shardshuffle=False).decode({{ decode }})
```

A sample has `__key__`, the id of the row (and for a copy a dash and its number), {{ members }}.
{% endif %}
"""


def worker_name(worker: int) -> str:
    """Return the beginning of the names of a worker's files, which is also its configuration in load_dataset."""
    return f"worker-{worker:03d}"


def write_card(shards: Shards, kind: str) -> str:
    """Return the text of the card. kind: a key of ``SET_FORMATS``."""
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["tojson"] = json.dumps  # jinja's own escapes characters for HTML
    names = [" ".join(name.replace("|", "\\|").split()) for name in class_names(shards)]
    copies = shards.manifest.copies
    image = "png" if are_pictures(shards) else "npy"
    members = [f"`{image}`", *["`cls`"] * shards.has_labels]
    channels, height, width = shards.shape
    return environment.from_string(TEMPLATE).render(
        front=_front_matter(shards) if kind == DATASET else {},
        kind=kind,
        shards=shards,
        name=shards.uri.rstrip("/").rpartition("/")[2],
        copies=f", and {copies:,} copies" if copies else "",
        evaluation=sum(file.rows for file in shards.eval_files()),
        images=f"{channels} channels, {height} x {width}, {shards.layout.dtype}",
        classes=", ".join(names[:100]) + (", ..." if len(names) > 100 else ""),
        worker_name=worker_name(0),
        decode='"rgb8"' if image == "png" else "",
        members=", ".join(members) + ", and `json` with other columns if there are any",
    )


def _front_matter(shards: Shards) -> dict[str, Any]:
    """Return the metadata from which load_dataset finds the files: a configuration of all rows, and one for each worker."""
    test = [{"split": "test", "path": "data/test-*.parquet"}] if shards.eval_files() else []
    # The first configuration is read if none is named.
    everything = {
        "config_name": "default",
        "data_files": [{"split": "train", "path": "data/worker-*.parquet"}, *test],
    }
    workers = [
        {
            "config_name": worker_name(worker),
            "data_files": [{"split": "train", "path": f"data/{worker_name(worker)}-*.parquet"}, *test],
        }
        for worker in range(shards.num_workers)
    ]
    return {"configs": [everything, *workers]}
