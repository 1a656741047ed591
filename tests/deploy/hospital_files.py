"""Files of hospitals of different sizes, each a client."""

import csv

import numpy as np

SIZES = (31, 18, 40, 9, 25, 3, 12)


def write_hospitals(folder):
    """Write a CSV file for each hospital; return the arguments of a run on them."""
    random = np.random.default_rng(0)
    for k, size in enumerate(SIZES):
        with (folder / f"hospital {k}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["age", "lab", "sex", "score", "outcome"])
            for _ in range(size):
                age, lab = random.normal(55 + k, 12), random.normal(1, 3)
                ill = 1 / (1 + np.exp(-0.1 * (age - 60) - 0.5 * lab)) > random.random()
                score = 0.2 * age + lab + random.normal()
                sex, outcome = random.choice(["f", "m"]), "ill" if ill else "well"
                writer.writerow([f"{age:.2f}", f"{lab:.3f}", sex, f"{score:.3f}", outcome])
    return ["--exp=fedavg_table", f"--data.files={folder}/*.csv", "--training.rounds=3"]
