"""Epsilon against the accountants of Opacus: `pip install opacus`."""

import importlib

import pytest

from fedpax.aggregators import privacy_spent

pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")
accountants = importlib.import_module("opacus.accountants")

# Noise multiplier, sampling probability, rounds.
SETTINGS = [(1.0, 0.01, 200), (0.7, 0.02, 50), (3.0, 0.3, 100), (5.0, 1.0, 10)]


def peers_epsilon(accountant, noise_multiplier, probability, rounds, **options):
    accountant.history = [(noise_multiplier, probability, rounds)]
    return accountant.get_epsilon(delta=1e-5, **options)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_epsilon_is_between_opacus_prv_bounds_and_below_its_rdp(settings):
    noise_multiplier, probability, rounds = settings
    ours = privacy_spent(
        noise_multiplier=noise_multiplier,
        num_rounds=rounds,
        delta=1e-5,
        sampling_probability=probability,
    )
    if probability < 1:  # opacus' PRV accountant has no form without sampling
        # Its figure is an upper bound, at most twice the error above the true epsilon.
        prv = peers_epsilon(accountants.PRVAccountant(), *settings, eps_error=0.01)
        assert prv - 0.03 < ours < prv + 0.01
    # Renyi differential privacy is a looser bound of the same mechanism.
    rdp = peers_epsilon(accountants.RDPAccountant(), *settings)
    assert 0.5 * rdp < ours < rdp
