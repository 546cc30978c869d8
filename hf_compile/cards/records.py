"""Read what `hf-compile census` wrote, and find the measurements of each encoder of each model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

__all__ = ["Census", "Encoder", "Place", "Run", "read_census", "share_inside"]

Record = Mapping[str, Any]

SCHEMA_VERSION = 1
_OTHER_RUNS = ("census_encoder.json", "census_inductor.json", "census_5.0.0.json")
"""Beside the main file, each where it exists."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the census.

    Args:
        file: name of the JSON file.
        versions: of python, torch, transformers and hf-compile.
        granularity: as it was asked for.
        backend: of torch.compile.
        seed: of weights, sizes and numbers.
        sizes: calls of each encoder.
        records: name of the case -> what was measured.
    """

    file: str
    versions: Mapping[str, str]
    granularity: str
    backend: str
    seed: int
    sizes: int
    records: Mapping[str, Record]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an encoder is in a model, what it encodes, and how it was found."""

    path: str
    modalities: tuple[str, ...]
    found_by: str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An encoder class of a model, at one place or several, with the names of the cases that measured it.

    The first case is the class as the model uses it or as its default config builds it; variants follow.
    """

    class_name: str
    places: tuple[Place, ...]
    cases: tuple[str, ...]

    @property
    def modalities(self) -> tuple[str, ...]:
        """What it encodes, at all its places."""
        return tuple(dict.fromkeys(modality for place in self.places for modality in place.modalities))


@dataclasses.dataclass(frozen=True)
class Census:
    """The main run, the runs beside it, and the models.

    Args:
        source: path of the main file.
        main: its run.
        others: the whole-encoder run, the Inductor sample, the oldest Transformers: those that exist.
        models: model type -> what was found in it.
    """

    source: str
    main: Run
    others: tuple[Run, ...]
    models: Mapping[str, Record]

    def model_types(self) -> list[str]:
        """Return the model types in which an encoder was found."""
        return [name for name, record in self.models.items() if record.get("encoders")]

    def without_encoder(self) -> list[Record]:
        """Return the records of the other models: none was found, or the model could not be built."""
        return [record for record in self.models.values() if not record.get("encoders")]

    def encoders(self, model_type: str) -> list[Encoder]:
        """Return the encoders of a model, each class once, in the order of the model's modules."""
        places: dict[str, list[Place]] = {}
        for found in self.models[model_type]["encoders"]:
            place = Place(found["path"], tuple(found["modalities"]), found["found_by"])
            places.setdefault(found["class_name"], []).append(place)
        return [Encoder(name, tuple(where), self._cases(name, model_type)) for name, where in places.items()]

    def unused(self) -> list[Record]:
        """Return the measurements that no card shows: encoders without a text side, projectors, parts."""
        shown = {
            case
            for model_type in self.model_types()
            for encoder in self.encoders(model_type)
            for case in encoder.cases
        }
        return [record for name, record in self.main.records.items() if name not in shown]

    def _cases(self, class_name: str, model_type: str) -> tuple[str, ...]:
        """Return the cases of a class: those named after the model, else those of the class by itself, else all."""
        own = model_type.replace("-", "_")
        groups: dict[str, list[str]] = {}
        alone = set()
        for name, record in self.main.records.items():
            group, built = name.partition("[")[0], str(record.get("class", "")).partition(".")[2]
            # an encoder may be found inside what was built, and a worker that died leaves nothing but a name
            if class_name in (record.get("class_name"), built) or (not built and group == own):
                groups.setdefault(group, []).append(name)
                if built == class_name:
                    alone.add(group)
        named = [group for group in groups if group == own or group.startswith(f"{own}.")]
        cases = [case for group in named or sorted(alone) or sorted(groups) for case in groups[group]]
        return tuple(sorted(cases, key=lambda case: ("[" in case, case)))


def share_inside(record: Record) -> float:
    """Return the share of an encoder's parameters inside regions, at the size of the default config where it is known.

    In a tiny encoder single layers and tables weigh as much as the blocks.
    """
    share: float = record.get("coverage_at_full_size") or record["coverage"]
    return share


def read_census(source: Path) -> Census:
    """Read the main file, and what lies beside it.

    Raises:
        ConfigurationError: there is no such file, it is no census, or it lists no models.
    """
    if not source.is_file():
        raise ConfigurationError(
            f"there is no {source}; `hf-compile census --output {source}` writes it, or name another: --census FILE"
        )
    content = _content(source)
    if not content.get("models"):
        raise ConfigurationError(f"{source} lists no models; write it without --no-models and without names")
    beside = [source.with_name(name) for name in _OTHER_RUNS if name != source.name]
    return Census(
        source=source.as_posix(),
        main=_run(source, content),
        others=tuple(_run(path, _content(path)) for path in beside if path.is_file()),
        models={each["model_type"]: each for each in sorted(content["models"], key=lambda each: each["model_type"])},
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION or "encoders" not in content:
        raise ConfigurationError(f"{path} is no census of schema version {SCHEMA_VERSION}; write it with this release")
    return dict(content)


def _run(path: Path, content: Mapping[str, Any]) -> Run:
    records = {each["name"]: each for each in sorted(content["encoders"], key=lambda each: each["name"])}
    options = {name: content[name] for name in ("versions", "granularity", "backend", "seed", "sizes")}
    return Run(file=path.name, records=records, **options)
