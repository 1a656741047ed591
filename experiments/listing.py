"""The experiments that come with fedpax: the module and the summary of each, by name.

`fedpax list` imports no experiment.
"""
# ruff: noqa: E501, an experiment has one line
# fmt: off

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """An experiment or a group: its module in `fedpax.experiments`, and a summary."""

    module: str
    summary: str


EXPERIMENTS: Mapping[str, Entry] = {
    "async_diloco_text": Entry("async_diloco_text", "Asynchronous DiLoCo: 4 islands of different speeds, which fail and return, in virtual time."),
    "data_parallel_text": Entry("diloco_text", "Islands of diloco_text that average their gradients at every step: data parallelism."),
    "decoupled_diloco_text": Entry("decoupled_diloco_text", "Decoupled DiLoCo: 4 islands, one device each, a merge every 8 steps."),
    "diloco_c4_1b": Entry("pretrain", "DiLoCo of a 1B model on C4: four islands of four chips, synchronized every 100 steps."),
    "diloco_llama_8b": Entry("pretrain", "DiLoCo of Llama 3.1 8B on C4: four islands of 256 chips, synchronized every 100 steps."),
    "diloco_lora_text": Entry("diloco_text", "DiLoCo of adapters (LoRA) on 4 islands, synchronized every 10 steps. Needs weights."),
    "diloco_text": Entry("diloco_text", "DiLoCo: 4 islands share the devices and train a byte-level transformer on Python's sources."),
    "fedadam_emnist": Entry("fedavg_images", "FedAdam on EMNIST by writer, 62 classes, 10 of 3,400 writers per round. Downloads once."),
    "fedadam_stackoverflow": Entry("fedavg_words", "FedAdam on Stack Overflow, next-word prediction, 50 of 342,477 users a round. Downloads once."),
    "fedavg_digits": Entry("fedavg_images", "FedAvg on handwritten digits, 30 clients with few labels each. Takes seconds."),
    "fedavg_images": Entry("fedavg_image_files", "FedAvg on images of your own, such as photos/{client}/{label}/*.jpg. Needs files."),
    "fedavg_leaf_synthetic": Entry("fedavg_synthetic", "FedAvg on LEAF's synthetic data, logistic regression of 1,000 clients. Takes seconds."),
    "fedavg_lora_text": Entry("fedavg_text", "FedAvg of adapters (LoRA) on Python's own sources, a module per client. Needs weights."),
    "fedavg_population": Entry("fedavg_images", "FedAvg on handwritten digits, 1,000 clients per round of a population of 100,000."),
    "fedavg_synthetic": Entry("fedavg_synthetic", "FedAvg on FedProx's synthetic(1, 1), logistic regression of 30 clients. Takes seconds."),
    "fedavg_table": Entry("fedavg_table", "FedAvg on tables of your own, such as CSV files: regression or classes. Needs files."),
    "fedbuff_digits": Entry("fedbuff_images", "FedBuff on the digits of fedavg_digits: 20 of 30 clients train at a time, in virtual time."),
    "fedyogi_cifar100": Entry("fedavg_images", "FedYogi on CIFAR-100 by client, 10 of 500 clients per round. Downloads once."),
    "fedyogi_shakespeare": Entry("fedavg_characters", "FedYogi on Shakespeare's plays, next-character prediction, 10 of 715 roles. Downloads once."),
    "fedyogi_stackoverflow": Entry("fedavg_words", "FedYogi with the settings of fedadam_stackoverflow, best for both. Downloads once."),
    "halos_text": Entry("halos_text", "HALoS: the islands of async_diloco_text in two regions of two, in virtual time."),
    "pretrain_c4_16b": Entry("pretrain", "Pretraining of a 16B model on C4 on 32 chips, as Pax's C4Spmd16BAdam32Replicas."),
    "pretrain_c4_1b": Entry("pretrain", "Pretraining of a 1B model on C4 on four chips, as Pax's C4Spmd1BAdam4Replicas."),
    "pretrain_llama_8b": Entry("pretrain", "Pretraining of Llama 3.1 8B on C4: one island, 256 rows of 8,192 tokens per step."),
    "pretrain_text": Entry("pretrain", "Pretraining of a byte-level transformer on Python's own sources, on one island."),
    "private_population": Entry("fedavg_images", "DP-FedAvg on fedavg_population: each client joins a round with probability 1%."),
    "single_island_text": Entry("diloco_text", "One island alone: the local batch and steps of diloco_text, a quarter of the tokens."),
    "streaming_diloco_c4_1b": Entry("streaming_diloco_text", "Streaming DiLoCo of the 1B model on C4: diloco_c4_1b in 5 fragments of 4 bits, delay 5."),
    "streaming_diloco_llama_8b": Entry("streaming_diloco_text", "Streaming DiLoCo of Llama 3.1 8B: diloco_llama_8b in 5 fragments of 4 bits, delay 5."),
    "streaming_diloco_text": Entry("streaming_diloco_text", "Streaming DiLoCo: the islands, model and data of diloco_text, in 3 fragments of 4 bits."),
    "waiting_diloco_text": Entry("async_diloco_text", "DiLoCo on the islands of async_diloco_text: each round waits for the slowest island."),
}
"""The experiments: functions without arguments that return an `Experiment`."""

GROUPS: Mapping[str, Entry] = {
    "aggregators_digits": Entry("experiment_groups", "FedAvg with each aggregator on digits, the problem of methods_digits."),
    "methods_digits": Entry("experiment_groups", "Methods for clients on digits: 100 clients with few labels each, an MLP."),
    "methods_synthetic": Entry("experiment_groups", "Methods for clients on FedProx's synthetic(1, 1): 30 clients, logistic regression."),
    "personal_digits": Entry("experiment_groups", "Methods for personal models on the problem of methods_digits."),
}
"""The groups: functions without arguments that return an `ExperimentGroup`."""
