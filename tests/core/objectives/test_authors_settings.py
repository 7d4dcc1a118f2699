"""Without settings of one's own every method is its authors': the numbers of their papers and programs, once more."""

import math

import pytest

from dltta import Aligned
from dltta.core import augmentation
from dltta.core.layer_rates import LAW, PALM
from dltta.core.objectives import cotta, eata, note, rotta, t3a, ttt_plus
from dltta.methods import METHODS, Mode, Optimizer, Predict
from dltta.models.parts import contrast
from dltta.models.parts.denoiser import Denoiser
from dltta.objectives import DTTA, EATA, NOTE, SAR, VPTTA, CoTTA, DeYO, GraTa, InTEnt, RoTTA

SETTINGS = [
    (InTEnt(), {"shares": (0, 0.2, 0.4, 0.6, 0.8, 1), "temperature": 1}),
    (VPTTA(), {"fraction": 0.01, "capacity": 40, "neighbors": 16, "temperature": 0.2}),
    (VPTTA()._progress, {"warmup": 5}),
    (GraTa(), {"lookahead": 1}),
    (CoTTA(), {"confidence": None, "momentum": 0.999, "restored": 0.01, "views": 32, "scales": None}),
    (cotta, {"OF_IMAGES": 0.92, "DENSE": 0.69}),
    (EATA(), {"margin": 0.4, "redundancy": None, "anti_forgetting": 1, "momentum": 0.9}),
    (eata, {"OF_IMAGES": 0.4}),
    (SAR(), {"margin": 0.4, "radius": 0.05, "momentum": 0.9, "recovery": pytest.approx(0.2 / math.log(1000))}),
    (DeYO(), {"certain": 0.5, "margin": 0.4, "threshold": 0.3, "blocks": 4}),
    (RoTTA(), {"capacity": None, "every": None, "follow": 0.001, "momentum": 0.05}),
    (rotta, {"OF_IMAGES": 64}),
    (NOTE(), {"capacity": None, "every": None, "k": 4, "momentum": 0.01, "temperature": 1}),
    (note, {"OF_IMAGES": 64}),
    (DTTA(Denoiser(2, 2, (2, 2))), {"every": 25, "statistics": None}),
    (ttt_plus, {"QUEUE": 1536}),
    (contrast, {"TEMPERATURE": 0.5, "SCALE": pytest.approx(0.5 / 0.07)}),
    (LAW(1e-3), {"tau": 1}),
    (PALM(5e-4), {"temperature": 50, "limit": 1, "decay": 0.5}),
    (Aligned(), {"alpha": 1e-4, "auxiliary": None}),
    (
        augmentation,
        {
            "BRIGHTNESS": (0.6, 1.4), "CONTRAST": (0.7, 1.3), "SATURATION": (0.5, 1.5), "HUE": (-0.06, 0.06),
            "GAMMA": (0.7, 1.3), "ANGLE": (-15, 15), "SHIFT": (-1 / 16, 1 / 16), "SCALE": (0.9, 1.1),
            "BLUR": (0.001, 0.5), "KERNEL": 5, "NOISE": 0.005,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "settings"), SETTINGS)
def test_settings(made, settings):
    assert {name: getattr(made, name) for name in settings} == settings


def test_settings_that_cannot_be_seen_from_an_object():
    assert ttt_plus.TTTPlus.__init__.__kwdefaults__["weights"] == (0.05, 0.2)
    assert cotta.SCALES[2] == (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2)
    assert t3a.T3A.__init__.__kwdefaults__["supports"] in (1, 5, 20, 50, 100)  # they choose among these


STEPS = {  # segmentation, classification: rate, batch, optimizer, momentum, betas of Adam, steps
    "t3a": ((0, 1, "sgd", 0, 1), (0, 32, "sgd", 0, 1)),
    "dtta": ((1e-3, 1, "adam", 0, 500), None),
    "ttt++": ((1e-4, 1, "sgd", 0.9, 1), (1e-2, 256, "sgd", 0.9, 1)),
    "cotta": ((6e-5 / 8, 1, "adam", 0, 1), (1e-3, 200, "adam", 0, 1)),
    "eata": ((2.5e-4, 1, "sgd", 0.9, 1), (2.5e-4, 64, "sgd", 0.9, 1)),
    "note": ((1e-4, 1, "adam", 0, 1), (1e-4, 64, "adam", 0, 1)),
    "rotta": ((1e-3, 1, "adam", 0, 1), (1e-3, 64, "adam", 0, 1)),
    "sar": ((2.5e-4 / 64 * 2 * 2, 1, "sgd", 0.9, 1), (2.5e-4, 64, "sgd", 0.9, 1)),
    "deyo": ((2.5e-4 / 64 * 2 * 2, 1, "sgd", 0.9, 1), (2.5e-4, 64, "sgd", 0.9, 1)),
    "intent": ((0, 1, "sgd", 0, 1), (0, 64, "sgd", 0, 1)),
    "vptta": ((0.05, 1, "adam", 0, 1), (0.05, 1, "adam", 0, 1)),
    "grata": ((1e-4, 1, "adam", 0, 1), (1e-4, 64, "adam", 0, 1)),
}
BEFORE = {"cotta", "eata", "note", "rotta", "sar", "deyo"}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    facts = METHODS[name].facts
    for task, expected in zip(("segmentation", "classification"), STEPS[name], strict=True):
        if expected is None:
            assert task not in facts.tasks
            continue
        step = facts.step(task)
        found = (step.alpha, step.batch_size, step.optimizer, step.momentum, step.updates)
        assert found == (pytest.approx(expected[0]), *expected[1:])
        if step.optimizer == Optimizer.ADAM:
            assert step.betas == ((0.9, 0.99) if name == "vptta" else (0.9, 0.999))
    assert facts.predict == (Predict.BEFORE if name in BEFORE else Predict.AFTER)
    assert facts.mode == (Mode.IMAGE_SPECIFIC if name == "dtta" else Mode.CONTINUAL)
    assert facts.rate == ("aligned" if name == "grata" else "fixed")


def test_every_newer_method_is_looked_at():
    assert set(STEPS) == {name for name, method in METHODS.items() if not method.facts.of_paper}
