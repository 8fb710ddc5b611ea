"""Reads a run's event files with TensorBoard's own reader: every step of metrics.jsonl is there, with its loss.

usage: check-tensorboard.py FOLDER-OF-EVENTS METRICS.jsonl      (needs the package tensorboard)
"""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(folder, metrics):
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    with open(metrics, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    train = [r for r in records if r["kind"] == "train" and r["skipped"] is None]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    assert train and evaluations, "the run has steps and evaluations"
    expected = {
        "train/loss": [(r["step"], r["loss"]) for r in train],
        "train/learning_rate": [(r["step"], r["learning_rate"]) for r in train],
        "validation/loss": [(r["step"], r["loss"]) for r in evaluations],
    }
    for tag, points in expected.items():
        found = [(s.step, s.value) for s in events.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in points], (tag, found)
        for (_, a), (step, b) in zip(found, points):
            assert abs(a - b) <= 1e-6 * abs(b), (tag, step, a, b)
        print(f"{tag}: {len(found)} points, as in the metrics")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
