"""A trained model in the layout of the Hugging Face Hub: model.safetensors, config.json and the model card README.md."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment

from pipeline.core.errors import JobError
from trainer.home.place import Place
from trainer.inference.classifier import Classifier
from trainer.models.metadata import ENTRY, ModelMetadata
from trainer.models.own import is_reference
from trainer.report.settings import plan_in_words
from trainer.run_files import BEST, METRICS, MODEL, RESULT
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.result import read_result
from trainer.runlog.thinned import thinned_log

CONFIG = "config.json"
CARD = "README.md"
# The front matter is YAML, in which every value is JSON.
TEMPLATE = """\
---
{% for key, value in front.items() %}
{{ key }}: {{ value | tojson }}
{% endfor %}
---

# {{ name }}{% if facts.shards %} on {{ facts.shards }}{% endif %}


| | |
|---|---|
| network | {{ name }}{{ options }}, {{ "{:,}".format(parameters) }} parameters |
| images | {{ images }} |
| normalisation | {{ normalisation }} |
| classes | {{ classes }} |
{% if facts.accuracy is not none %}
| accuracy on evaluation rows | {{ "%.2f %%" % (100 * facts.accuracy) }} |
{% endif %}
| SHA-256 of model.safetensors | {{ digest }} |

{% if facts.class_accuracy %}
## Accuracy by class

| class | accuracy |
|---|---|
{% for share in facts.class_accuracy %}
| {{ class_names[loop.index0] }} | {{ "no rows" if share is none else "%.2f %%" % (100 * share) }} |
{% endfor %}

{% endif %}
{% if facts.plan %}
## Training

| | |
|---|---|
{% for key, text in facts.plan.items() %}
| {{ key }} | {{ text }} |
{% endfor %}

{% endif %}
## Use

```python
from trainer import load  # of the package distribution-aware-sharding[trainer]

classifier = load(".")  # this folder; huggingface_hub.snapshot_download("USER/NAME") downloads it
outputs = classifier(images)  # {{ images }}
```

The same without `load`:

```python
import json

import torch
from safetensors.torch import load_file
{{ import_network }}

config = json.load(open("config.json"))
network = {{ make_network }}(tuple(config["shape"]), config["classes"] or 1)
network.load_state_dict(load_file("model.safetensors"), strict=False)  # BatchNorm's count of batches is not stored
network.eval()
{% if is_real %}
outputs = network(images)
{% else %}
outputs = network((images.float() - torch.tensor(config["mean"]){{ "" if has_mean_image else "[:, None, None]" }}) / 255)
{% endif %}
{% if metadata.classes == 2 %}
if outputs.shape[1] == 1:  # the logit of the second class
    outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
{% endif %}
```
"""


@dataclass(frozen=True)
class CardFacts:
    """The facts of a run that a model card shows; none of them for a model file alone.

    Attributes:
        accuracy: of the model on the evaluation rows; None if it was not measured.
        class_accuracy: the same by class; None for a model that is not the final one.
        plan: names and sentences about the training.
        shards: last part of the address of the shard set.
    """

    accuracy: float | None = None
    class_accuracy: list[float | None] | None = None
    plan: dict[str, str] = field(default_factory=dict)
    shards: str = ""


def make_hub_files(classifier: Classifier, model: Place) -> dict[str, bytes]:
    """Return the content of the files by name, the model card last. Raises DataError for a damaged result of the run.

    Raises JobError if the model has been replaced since it was loaded, as the best one of a run that trains.

    model: the file of the model, whose folder is the run's, or has no result."""
    data = model.read_bytes()
    if hashlib.sha256(data).hexdigest() != classifier.digest:
        raise JobError(f"{model} changed while it was exported; run the same command again")
    config = classifier.metadata.to_header()[ENTRY]
    card = write_card(classifier, _read_facts(model))
    return {MODEL: data, CONFIG: f"{config}\n".encode(), CARD: card.encode()}


def _read_facts(model: Place) -> CardFacts:
    """Return the facts of the run in whose folder a model is; none if its result is not there."""
    folder = model.parent
    if model.name not in (MODEL, BEST) or not (folder / RESULT).exists():
        return CardFacts()
    result = read_result(folder)
    # The last start, because a resume may have changed the length, the workers and other settings.
    starts = [event for event in thinned_log(folder / METRICS) if isinstance(event, StartEvent)]
    start = starts[-1] if starts else StartEvent()
    plan = {"seed": str(result.seed), **plan_in_words(start.plan)}
    shards = str(start.config.get("data", {}).get("shards", "")).rstrip("/").rpartition("/")[2]
    if model.name == BEST:
        return CardFacts(result.best_accuracy, None, plan, shards)
    return CardFacts(result.final_accuracy, result.class_accuracy, plan, shards)


def write_card(classifier: Classifier, facts: CardFacts) -> str:
    """Return the text of the model card: metadata of the Hub, then the model, its classes, its training and its use."""
    metadata = classifier.metadata
    name = str(metadata.network["name"])
    options = ", ".join(f"{key} {value}" for key, value in metadata.network.items() if key != "name")
    module, _, function = name.partition(":")
    is_own = is_reference(name)
    names = [" ".join(text.replace("|", "\\|").split()) for text in metadata.class_names]
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["tojson"] = json.dumps  # jinja's own escapes characters for HTML
    return environment.from_string(TEMPLATE).render(
        front=_front_matter(metadata, facts),
        facts=facts,
        metadata=metadata,
        name=name,
        options=f" ({options})" if options else "",
        parameters=sum(parameter.numel() for parameter in classifier.network.parameters()),
        images=f"{metadata.training_dtype} {['N', *metadata.shape]}".replace("'", ""),
        is_real=metadata.training_dtype == "float32",
        normalisation=_normalisation_in_words(metadata),
        has_mean_image=metadata.has_mean_image,
        classes=": ".join(filter(None, (str(metadata.classes or "none, a real number"), ", ".join(names)))),
        class_names=names + [str(label) for label in range(len(names), metadata.classes or 0)],
        digest=classifier.digest,
        # The code of a user's network is not in the folder, so its module must be importable.
        import_network=f"from {module} import {function}" if is_own else "from trainer.models import model_from_json",
        make_network=function if is_own else 'model_from_json(config["network"]).make',
    )


def _normalisation_in_words(metadata: ModelMetadata) -> str:
    """Return the line of the card about the inputs of the network."""
    if metadata.training_dtype == "float32":
        return "none"
    if metadata.has_mean_image:
        return f"(image - mean image of the training set) / 255; `{CONFIG}` holds the mean image"
    return f"(image - {metadata.mean}) / 255, by channel" if any(metadata.mean) else "image / 255"


def _front_matter(metadata: ModelMetadata, facts: CardFacts) -> dict[str, Any]:
    """Return the metadata that the Hub reads from a model card."""
    kind = "tabular" if metadata.chw[1:] == (1, 1) else "image"
    # The Hub has no name for the regression of images.
    task = f"{kind}-classification" if metadata.classes else "tabular-regression" if kind == "tabular" else None
    front: dict[str, Any] = {"tags": ["pytorch", "safetensors"]}
    if task:
        front["pipeline_tag"] = task
    if facts.accuracy is not None:
        dataset = dict.fromkeys(("name", "type"), facts.shards or "shards")
        metrics = [{"type": "accuracy", "value": facts.accuracy}]
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": metrics}]
        front |= {"metrics": ["accuracy"], "model-index": [{"name": metadata.network["name"], "results": results}]}
    return front
