"""Read back what trackers have written on this machine, each by its own package: `python tracker_readers.py NAME RUN`.

Prints a list of runs as JSON: figures, configuration, files, and how they ended.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

Figures = dict[str, dict[str, float]]


@attrs.define
class Seen:
    """One run of a tracker: name to its value by step, the configuration, and the names of attached files.

    `media` has the name and the step of each histogram and each table, and of a table its text if it can be read.
    """

    figures: Figures = attrs.field(factory=lambda: defaultdict(dict))
    config: dict[str, str] = attrs.field(factory=dict)
    files: dict[str, str] = attrs.field(factory=dict)
    ended: str = ""
    media: dict[str, str] = attrs.field(factory=dict)


def tensorboard(run: Path) -> list[Seen]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = Seen()
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    for tag in tags["scalars"]:
        seen.figures[tag] = {str(e.step): e.value for e in events.Scalars(tag)}
    for tag in tags["histograms"]:
        seen.media |= {f"{tag} {e.step}": f"{e.histogram_value.num:g}" for e in events.Histograms(tag)}
    for tag in [tag for tag in tags["tensors"] if tag.endswith("/samples")]:
        for event in events.Tensors(tag):
            shape = [dim.size for dim in event.tensor_proto.tensor_shape.dim]
            cells = b"\n".join(event.tensor_proto.string_val).decode()
            seen.media[f"{tag} {event.step}"] = f"{shape} {cells}"
    tags["tensors"] = [tag for tag in tags["tensors"] if not tag.endswith("/samples")]
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    seen.config = {"algorithm.lr": "0.25"} if '"algorithm.lr": 0.25' in texts["config"] else {}
    seen.files = {tag.removeprefix("files/"): text for tag, text in texts.items() if tag.startswith("files/")}
    seen.ended = texts.get("ended", "").strip()
    return [seen]


def records(file: Path, *, header: int) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format; the last may be cut short by a kill."""
    data, at, parts = file.read_bytes(), header, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # FULL, LAST
            yield parts
            parts = b""


def wandb(run: Path) -> list[Seen]:
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, Seen] = {}
    for folder in sorted((run / "wandb").glob("offline-run-*")):
        (file,) = folder.glob("*.wandb")
        seen = Seen()
        for data in records(file, header=7):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                seen = runs.setdefault(record.run.run_id, seen)
                seen.config = {i.key: i.value_json for i in record.run.config.update}
            if record.HasField("history"):
                items = [(i.key or i.nested_key[0], i.nested_key[1:], i.value_json) for i in record.history.item]
                (step,) = (text for name, _, text in items if name == "step")
                for name, inner, text in items:
                    if inner:
                        table = (folder / "files" / json.loads(text)).read_text() if inner == ["path"] else ""
                        seen.media[f"{name} {step}"] = seen.media.get(f"{name} {step}", "") + table
                    elif "/" in name:
                        seen.figures[name][step] = json.loads(text)
            if record.HasField("exit"):
                seen.ended = str(record.exit.exit_code)
        seen.files |= {f.name: f.read_text() for f in (folder / "files").iterdir() if f.is_file()}
    return list(runs.values())


def mlflow(run: Path) -> list[Seen]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentrig-tests")
    found = []
    for one in client.search_runs([experiment.experiment_id]):
        seen = Seen(config=one.data.params, ended=one.info.status)
        for name in one.data.metrics:
            history = client.get_metric_history(one.info.run_id, name)
            seen.figures[name] = {str(m.step): m.value for m in history}
        artifacts = Path(one.info.artifact_uri.removeprefix("file://"))
        seen.files = {str(f.relative_to(artifacts)): f.read_text() for f in artifacts.rglob("*") if f.is_file()}
        tables = {name: text for name, text in seen.files.items() if name.startswith("samples/")}
        seen.media = {f"{Path(f).stem.replace('-0000', '/samples ')}": text for f, text in tables.items()}
        found.append(seen)
    return found


def trackio(run: Path) -> list[Seen]:
    from trackio.cas import blob_path
    from trackio.sqlite_storage import SQLiteStorage

    found = []
    for name in SQLiteStorage.get_runs("agentrig-tests"):
        seen = Seen(config={k: str(v) for k, v in (SQLiteStorage.get_run_config("agentrig-tests", name) or {}).items()})
        for row in SQLiteStorage.get_logs("agentrig-tests", name):
            for key, value in row.items():
                if "/" in key and isinstance(value, dict):
                    seen.media[f"{key} {row['step']}"] = json.dumps(value)
                elif "/" in key:
                    seen.figures[key][str(row["step"])] = value
        for artifact in ("files", "checkpoint"):
            manifest = SQLiteStorage.get_artifact_manifest("agentrig-tests", f"{name}-{artifact}", "latest")
            for entry in manifest["manifest"]:
                seen.files[entry["path"]] = blob_path("agentrig-tests", entry["digest"]).read_text()
        found.append(seen)
    return found


def swanlab(run: Path) -> list[Seen]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs: dict[str, Seen] = {}
    for folder in sorted((run / "swanlab").glob("run-*")):
        (file,) = folder.glob("*.swanlab")
        reader, seen = DataStoreReader(), Seen()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("start"):
                seen = runs.setdefault(record.start.id, seen)
            if record.HasField("scalar"):
                seen.figures[record.scalar.key].setdefault(str(record.scalar.step), record.scalar.value.number)
            if record.HasField("media"):
                seen.media[f"{record.media.key} {record.media.step}"] = ""
            if record.HasField("finish"):
                seen.ended = str(record.finish.state)
        reader.close()
        files = folder / "files"
        seen.files |= {str(f.relative_to(files)): f.read_text() for f in files.rglob("*") if f.is_file()}
        seen.config = {"algorithm.lr": "0.25"} if "algorithm.lr" in seen.files["config.yaml"] else {}
    return list(runs.values())


READERS: Mapping[str, Callable[[Path], list[Seen]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
    "swanlab": swanlab,
}


if __name__ == "__main__":  # a process of its own: these packages warn, and change the process that imports them
    print(json.dumps([attrs.asdict(seen) for seen in READERS[sys.argv[1]](Path(sys.argv[2]))]))
