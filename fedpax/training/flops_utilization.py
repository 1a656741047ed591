"""Model FLOPs utilization (MFU) of a run, where the peak of its chips is known."""

from typing import NamedTuple

from fedpax.chips import chip_of
from fedpax.training.experiment import Run


class Utilization(NamedTuple):
    """The terms of MFU = items/s x FLOPs per item / (chips x peak FLOPs per second)."""

    flops_per_item: float
    convention: str
    num_chips: int
    chip: str
    peak_flops: float  # dense bfloat16 matmul FLOPs per second of one chip

    def mfu(self, items_per_second: float) -> float:
        """Return the fraction of the peak that the model uses."""
        # Here: it loads flax, which not every experiment needs.
        from fedpax.models.transformer_config import model_flops_utilization

        return model_flops_utilization(
            items_per_second, self.flops_per_item, self.num_chips, self.peak_flops
        )

    def describe(self, item_unit: str) -> str:
        """Describe the convention in one line."""
        return (
            f"MFU counts {self.flops_per_item:.4g} FLOPs per {item_unit.removesuffix('s')} "
            f"({self.convention}), of {self.num_chips} {self.chip} with "
            f"{self.peak_flops / 1e12:.4g} bfloat16 TFLOP/s each"
        )


def utilization_of(run: Run) -> Utilization | None:
    """Return the terms of a run's MFU; None if its FLOPs or its chips' peak are unknown."""
    chip = chip_of(run.mesh.devices.flat[0].device_kind)
    if run.flops_per_item is None or chip is None:
        return None
    return Utilization(
        run.flops_per_item,
        run.flops_convention,
        run.mesh.size // chip.devices_per_chip,
        chip.name,
        chip.peak_flops,
    )
