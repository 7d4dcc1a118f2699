"""Rehearsal: what it records, fits and chooses, by hand; and what it is for, on small networks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dltta.evaluation.recorded
from dltta.config import make_adapter
from dltta.data.preprocessing import Preprocessing
from dltta.data.shifts import SOURCE_SITE, draw_sites
from dltta.data.shifts.contrast import Contrast
from dltta.data.shifts.site import SimulatedSite
from dltta.errors import StateError
from dltta.evaluation import conclusions, rehearsal
from dltta.evaluation.conclusions import best_way, gain_of, tuned, worth_of
from dltta.evaluation.home import enough
from dltta.evaluation.recorded import Recorded, Scored, Stream, cut, framed, predict, scores_of, sizes_of, slice_weight
from dltta.evaluation.rehearsal import affordable, best_flip, operations, refusing, rehearse, strong_and_mild
from dltta.models.io.checkpoint import Checkpoint, Reconstructions, load_checkpoint, save_checkpoint
from dltta.models.io.opening import open_checkpoint, open_model
from dltta.models.io.rehearsal import save_rehearsal
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders
from dltta.quality.candidates import Arms, Plan
from dltta.quality.choosing import Rehearsed, Yardstick, assemble, look
from dltta.quality.measures import SIGNALS
from dltta.recipes import recommended
from networks import Segmenter, trained
from streams import classifier, segmenter


def scored(predictions, labels):
    return scores_of(predictions, labels, np.full(1, 0.05))


def blob(seed, size=32):
    """A grey image with a bright box, and its mask."""
    rng = np.random.default_rng(seed)
    image = torch.tensor(rng.normal(0.3, 0.05, (1, size, size)), dtype=torch.float32)
    label = torch.zeros(size, size, dtype=torch.long)
    row, column = rng.integers(2, size // 2, 2)
    label[row : row + size // 3, column : column + size // 3] = 1
    return image + 0.4 * label, label


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory):
    """A small U-Net that finds boxes, as a model folder."""
    torch.manual_seed(0)
    architecture = Architecture("unet", 2, 1, 2, {"width": 4})
    model = architecture.build(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    pairs = [blob(seed) for seed in range(16)]
    x, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    model.train()
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(
        folder,
        Checkpoint(model.eval(), architecture, "segmentation", ("background", "box"), Preprocessing(), {"epoch": 1}),
    )
    return folder


# cases


def test_dice_of_candidates_by_hand():
    label = torch.tensor([[0, 1], [1, 0]])
    right = nn.functional.one_hot(label, 2).movedim(-1, 0).float()
    half = nn.functional.one_hot(torch.tensor([[0, 1], [0, 0]]), 2).movedim(-1, 0).float()
    nothing = torch.stack([torch.ones(2, 2), torch.zeros(2, 2)])
    stacked = torch.stack([right, half, nothing])[None]
    sizes = sizes_of([label, 0 * label], 2)
    assert sizes.tolist() == [2.0]  # where it occurs
    s = 0.05 * 2
    assert scores_of(stacked, [label], 0.05 * sizes)[0] == pytest.approx([1, (2 + s) / (3 + s), s / (2 + s)])
    assert scores_of(stacked, [0 * label], 0.05 * sizes)[0] == pytest.approx(
        [s / (2 + s), s / (1 + s), 1]
    )  # rightly nothing
    classes = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
    assert scored(classes, [torch.tensor(1)])[0].tolist() == [0, 1]


def test_an_arm_that_several_plans_have_is_scored_once_and_every_candidate_as_if_alone(monkeypatch):
    plans = [
        Plan(("source", "batch")),
        Plan(("source", "batch", "running")),
        Plan(("source", "batch"), flip=1),
        Plan(("source",)),
    ]
    x = torch.rand(2, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    labels = [torch.randint(0, 3, (8, 12), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    arms, smooth = Arms(trained(Segmenter()), plans[1].arms), np.ones(2)
    views = look(arms, plans[1].arms, 1, x, Yardstick(), turned={"source", "batch"})
    assert set(views.flipped) == {"source", "batch"}
    made = [assemble(plan, views, None) for plan in plans]
    alone = [scores_of(torch.cat([each.arms, each.mixtures], 1), labels, smooth) for each in made]
    counted = []
    monkeypatch.setattr(
        dltta.evaluation.recorded,
        "scores_of",
        lambda each, *rest: counted.append(each.shape[1]) or scores_of(each, *rest),
    )
    found = Scored(views, labels, smooth)
    for plan, each, scores in zip(plans, made, alone, strict=True):
        assert found.candidates(plan, each.mixtures).tolist() == scores.tolist()
    assert found.arm("source", flip=False).tolist() == alone[0][:, 0].tolist()
    assert sum(counted) == 3 + 2 + 3 * 2  # arms, flipped arms, and two mixtures of three plans


def test_a_candidate_scores_the_same_bits_alone_and_beside_others():
    rng = torch.Generator().manual_seed(0)
    predictions, label = torch.rand(1, 5, 9, 16, 16, generator=rng), torch.randint(0, 9, (16, 16), generator=rng)
    together = scores_of(predictions, [label], np.ones(8))[0]
    alone = [scores_of(predictions[:, k : k + 1], [label], np.ones(8))[0, 0] for k in range(5)]
    assert together.tolist() == alone


def test_slices_count_as_their_foreground_and_a_little_without_any():
    full = torch.tensor([[0, 1], [1, 0]])
    sizes = sizes_of([full, 0 * full], 2)
    assert [slice_weight(label, sizes) for label in (full, 0 * full)] == pytest.approx([1.15, 0.15])
    weighted = Recorded({}, {}, np.array([1.0, 0.0]), np.zeros(2), np.array([1.0, 3.0]))
    assert weighted.mean(weighted.source) == pytest.approx(0.25)


def test_a_stream_goes_through_its_sites_one_after_the_other():
    brighter = SimulatedSite("x", (Contrast(1.5),), variation=0.0)
    cases = [blob(seed) for seed in range(4)]
    pairs = Stream("half-way", (SOURCE_SITE, brighter)).pairs(cases, 0)
    kept = [any(torch.equal(image, other) for other, _ in cases) for image, _ in pairs]
    assert kept == [True, True, False, False]
    again = Stream("half-way", (SOURCE_SITE, brighter)).pairs(cases, 0)
    assert all(torch.equal(one[0], two[0]) for one, two in zip(pairs, again, strict=True))


def test_two_of_five_sites_have_the_changes_of_another_on_top():
    drawn = draw_sites(5, seed=1)
    found = strong_and_mild(drawn)
    assert [len(site.changes) > len(old.changes) for site, old in zip(found, drawn, strict=True)] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert found[1].changes == drawn[1].changes + drawn[2].changes
    assert found[3].severity == drawn[3].severity + drawn[4].severity


def test_framing_keeps_image_and_label_together():
    image, label = blob(0, 128)
    marked = torch.cat([image, label[None].float()])
    for framing in ("close", "anywhere"):
        cropped, mask = framed((marked, label), framing, [1])
        assert cropped.shape == (2, 96, 96)
        assert torch.equal(cropped[1].long(), mask)
    assert framed((image, label), "whole", [1])[0] is image
    cropped, mask = cut((marked, label), (64, 0), [3])
    assert cropped.shape == (2, 64, 128)
    assert torch.equal(cropped[1].long(), mask)
    padded, mask = cut((marked, label), (160, 128), [3])
    assert (padded.shape, mask.shape) == ((2, 160, 128), (160, 128))


def test_few_cases_come_again_in_other_framings():
    pairs = [blob(seed, 128) for seed in range(3)]
    assert len(enough(pairs, None)) == 9
    assert [tuple(image.shape) for image, _ in enough(pairs, (64, 64))] == [(1, 64, 64)] * 24
    assert len(enough([(torch.rand(1, 8, 8), torch.tensor(1))], None)) == 1


def test_operations_by_hand():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, stride=2))
    assert operations(model, torch.rand(1, 8, 8)) == (8 * 8 * 4 * 9 + 8 * 8 * 4 * (2 * 4), 2 * rehearsal.OVERHEAD)


def test_large_images_are_cropped_until_a_rehearsal_is_affordable(monkeypatch):
    model = nn.Conv2d(1, 2, 3, padding=1)
    pairs = [blob(seed, 256) for seed in range(9)]
    extent, kept = affordable(model, pairs, "segmentation")
    assert (extent.counts, extent.sites, kept[0][0].shape) == ({1: 9}, rehearsal.MOST_SITES, (1, 256, 256))
    monkeypatch.setattr(rehearsal, "WORK", 1.6e8)
    monkeypatch.setattr(rehearsal, "OVERHEAD", 0.0)
    extent, cropped = affordable(model, pairs, "segmentation")
    assert (extent.counts, extent.sites) == ({1: 9}, rehearsal.FEWEST_SITES)
    assert max(cropped[0][0].shape) < 128
    assert cropped[0][1].any()


def test_batches_come_first_where_one_by_one_would_take_too_long(monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    pairs = [(torch.rand(1, 8, 8), torch.tensor(i % 2)) for i in range(70)]
    assert affordable(model, pairs, "classification")[0].counts == {32: 64, 1: 16}
    monkeypatch.setattr(rehearsal, "OVERHEAD", 1.8e9)
    assert affordable(model, pairs, "classification")[0].counts == {32: 64}
    assert affordable(model, pairs[:5], "classification")[0].counts == {32: 5}


class Sided(nn.Module):
    """Finds what is bright in the left half only: flipped left and right it finds nothing there."""

    def forward(self, x):
        left = torch.zeros_like(x)
        left[..., : x.shape[-1] // 2] = 1
        found = (x > 0.5).float() * left
        return 10 * torch.cat([0.5 - found, found - 0.5], 1)

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


def test_a_flip_that_costs_source_images_is_not_used():
    image = torch.zeros(1, 8, 8)
    image[:, 2:5, 1:4] = 1.0  # only on the left
    cases = [(image, (image[0] > 0).long())]
    model = Sided()
    predictions = [predict(model, image)]
    assert best_flip(model, cases, predictions) == 0  # up and down costs nothing
    halved = Sided()
    halved.forward = lambda x: Sided.forward(model, torch.cat([x[:, :, :5], 0 * x[:, :, 5:]], 2))  # now both do
    low = torch.zeros(1, 8, 8)
    low[:, 0:3, 1:4] = 1.0
    cases = [(low, (low[0] > 0).long())]
    assert best_flip(halved, cases, [predict(halved, low)]) is None


# choosing


def recorded(site_scores, seed):
    """Three candidates of one plan with these mean scores, and signals that tell them."""
    rng = np.random.default_rng(seed)
    scores = np.clip(np.array(site_scores) + 0.01 * rng.normal(size=(10, len(site_scores))), 0, 1)
    signals = 0.1 * rng.normal(size=(10, len(site_scores), len(SIGNALS)))
    signals[..., 0] = -10 * scores  # a clear entropy
    name = "source+batch"
    return Recorded({name: signals}, {name: scores}, scores[:, 0], scores[:, 1], np.ones(10))


def test_worth_is_the_mean_less_what_is_lost_against_the_better_baseline():
    plain = {
        "a": Recorded({}, {}, np.array([0.6]), np.array([0.8]), np.ones(1)),
        "b": Recorded({}, {}, np.array([0.9]), np.array([0.1]), np.ones(1)),
    }
    given = {"a": np.array([0.7]), "b": np.array([0.95])}
    assert worth_of(given, plain) == pytest.approx(0.825 - 0.05 - 0.25 * 0.1)
    at_home = {"source": plain["a"], "b": plain["b"]}
    given = {"source": given["a"], "b": given["b"]}
    assert worth_of(given, at_home) == pytest.approx(0.825 - 0.05 - 0.25 * 0.1 - 0.5 * 0.1)


def test_signals_that_tell_the_better_candidate_lead_to_it_at_every_site():
    sites = {f"site {i}": recorded([0.9, 0.5, 0.7, 0.7] if i % 2 else [0.5, 0.9, 0.7, 0.7], i) for i in range(8)}
    sites["source"] = recorded([0.9, 0.8, 0.85, 0.85], 9)
    _, found = tuned(Plan(("source", "batch")), sites, [])
    chosen = {site: table.mean() for site, table in found.given.items()}
    assert min(chosen.values()) > 0.85
    assert found.rehearsed.radius < 0.2  # scores reach from 0.5 to 0.9


def test_without_telling_signals_the_best_on_average_is_given_everywhere():
    rng = np.random.default_rng(0)
    sites = {name: recorded([0.6, 0.5, 0.8, 0.7], i) for i, name in enumerate(["source", *"abcdef"])}
    for record in sites.values():
        record.signals["source+batch"][:] = rng.normal(size=record.signals["source+batch"].shape)
    settled, choosing = tuned(Plan(("source", "batch")), sites, [])
    assert (settled.rehearsed.policy.default, settled.rehearsed.policy.default_margin) == ("mean", conclusions.ALWAYS)
    assert np.mean([table.mean() for table in settled.given.values()]) == pytest.approx(0.8, abs=0.01)
    assert gain_of(choosing.given, settled.given, sites, list(sites)).mean <= 0.0


def test_one_candidate_is_given_whatever_is_expected_of_the_others():
    sites = {name: recorded([0.6, 0.9, 0.7, 0.7], i) for i, name in enumerate(["source", *"abcdef"])}
    settled, _ = tuned(Plan(("source", "batch")), sites, [])
    policy = settled.rehearsed.policy
    expected = np.array([[1.0, 0.0, 1.0, 1.0]])
    assert policy.default == "batch"
    assert policy.values(expected, expected, ("source", "batch", "mean", "entropy")).argmax(1).tolist() == [1]
    assert np.concatenate(list(settled.given.values())) == pytest.approx(
        np.concatenate([record.batch for record in sites.values()])
    )


def test_a_gain_is_the_mean_over_sites_with_its_standard_error():
    records = {site: Recorded({}, {}, np.zeros(2), np.zeros(2), np.array([1.0, 3.0])) for site in "abc"}
    one = {"a": np.array([0.5, 0.9]), "b": np.array([0.6, 0.6]), "c": np.array([0.4, 0.4])}
    other = {"a": np.array([0.1, 0.5]), "b": np.array([0.5, 0.5]), "c": np.array([0.4, 0.4])}
    found = gain_of(one, other, records, ["a", "b", "c"])  # gains 0.4, 0.1, 0
    assert found.mean == pytest.approx(0.5 / 3)
    assert found.error == pytest.approx(
        np.sqrt(0.13 / 3) / np.sqrt(3)
    )  # variance (7² + 2² + 5²) / 30² · 3 / 2 = 0.13 / 3
    assert gain_of(one, other, records, ["a"]).error == 1.0  # one site says nothing about others


@pytest.mark.parametrize(("differing", "chooses"), [(0.2, True), (0.7, False)])
def test_choosing_must_gain_clearly_over_the_one_best_candidate(differing, chooses):
    """Both gain 0.3 on average; at half of the sites one gains 0.1, the other loses 0.4."""
    rng = np.random.default_rng(0)
    records = {name: recorded([0.5] * 4, i) for i, name in enumerate(["source", *"abcde"])}
    settled, choosing = tuned(Plan(("source", "batch")), records, [])
    gains = [0.3 + (differing if i % 2 else -differing) for i in range(6)]
    plain = {site: rng.random(10) for site in records}
    given = {site: plain[site] + gain for site, gain in zip(records, gains, strict=True)}
    one, many = replace(settled, given=plain, worth=0.5), replace(choosing, given=given, worth=0.4)
    best, gain = best_way([(one, many)], records, list(records))
    assert gain.mean == pytest.approx(0.3)
    assert gain.error == pytest.approx(differing * np.sqrt(6 / 5) / np.sqrt(6))
    assert best is (many if chooses else one)


def test_the_review_threshold_spares_source_images_and_flags_harmful_ones():
    sites = {name: recorded([0.9, 0.8, 0.85, 0.85], i) for i, name in enumerate(["source", *"abcd"])}
    sites["noise"] = recorded([0.1, 0.1, 0.1, 0.1], 7)
    found = tuned(Plan(("source", "batch")), sites, ["noise"])[1].rehearsed
    expected = {site: found.quality.expected(record.signals["source+batch"]) for site, record in sites.items()}
    assert (expected["noise"].max(1) < found.review_below).mean() >= 0.9
    assert (expected["source"].max(1) < found.review_below).mean() <= 0.05


def test_harmful_images_are_refused_by_their_signals_even_if_they_score_well():
    """Signal 3 tells them; both kinds score the same."""
    sites = {name: recorded([0.9, 0.8, 0.85, 0.85], i) for i, name in enumerate(["source", *"abcd"])}
    for i, name in enumerate(["noise", "noise at a"]):
        sites[name] = recorded([0.9, 0.8, 0.85, 0.85], 7 + i)
        sites[name].signals["source+batch"][..., 3] += 5.0
    plan = Plan(("source", "batch"))
    fitted = tuned(plan, {site: each for site, each in sites.items() if site != "noise at a"}, ["noise"])[1].rehearsed
    found = refusing(fitted, sites, ["noise", "noise at a"], 1)
    assert replace(found, refusal=None) == fitted
    refused = {site: found.refusal.applies(record.signals["source+batch"]) for site, record in sites.items()}
    assert min(refused["noise"].mean(), refused["noise at a"].mean()) > 0.9
    below = found.quality.expected(sites["source"].signals["source+batch"]) < found.review_below
    assert not (refused["source"] & ~below)[:, 0].any()  # 5 % of ten images are none
    assert refusing(fitted, {"source": sites["source"]}, [], 1) == fitted  # nothing to tell apart


@pytest.mark.usefixtures("short_rehearsal")
def test_harmful_images_of_other_sites_decide_what_is_refused_and_nothing_else(trained_model, monkeypatch):
    opened = open_checkpoint(load_checkpoint(trained_model), "model")
    cases = [blob(seed) for seed in range(20, 24)]
    streams = rehearsal.Setup.of(opened, cases, 0).streams()
    away = [stream for stream in streams if stream.refused_only]
    drawn = [stream.sites[0] for stream in streams if stream.name.startswith("site")]
    assert [each.name for each in away] == [
        f"{harm} at {site.name}" for harm, site in zip(rehearsal.REFUSED, drawn, strict=False)
    ]
    assert all(each.harmful for each in away)
    for each, site in zip(away, drawn, strict=False):  # first the site, then the harm
        assert each.sites[0].changes[: len(site.changes)] == site.changes
        assert len(each.sites[0].changes) == len(site.changes) + 1
    found = rehearse(opened, cases)["batch_sizes"]["1"]["default"]
    assert not any(" at " in row["site"] for row in found["scores"])
    assert found["refusal"] is not None
    monkeypatch.setattr(rehearsal, "harmful_at", lambda harmful, site: replace(harmful, name=f"{harmful.name} at home"))
    other = rehearse(opened, cases)["batch_sizes"]["1"]["default"]
    assert other["refusal"] != found["refusal"]
    assert {**other, "refusal": None} == {**found, "refusal": None}


# the whole


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_an_interrupted_rehearsal_continues_and_comes_out_the_same(trained_model, tmp_path, monkeypatch):
    opened = open_model(str(trained_model))
    cases = [blob(seed) for seed in range(20, 24)]
    whole = rehearse(opened, cases)
    ran = []
    original = rehearsal.Setup._record

    def interrupted(self, stream, size):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(stream.name)
        return original(self, stream, size)

    monkeypatch.setattr(rehearsal.Setup, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rehearse(opened, cases, parts=tmp_path / "parts")
    monkeypatch.setattr(rehearsal.Setup, "_record", original)
    assert len(list((tmp_path / "parts").iterdir())) == 2
    again = rehearse(opened, cases, parts=tmp_path / "parts")
    assert json.dumps(again) == json.dumps(whole)


@pytest.mark.long
def test_recommended_improves_on_the_source_model_at_another_scanner_and_keeps_it_at_home(trained_model, monkeypatch):
    monkeypatch.setattr(rehearsal, "MOST_SITES", 6)
    opened = open_model(str(trained_model))
    opened = replace(opened, rehearsal=rehearse(opened, [blob(seed) for seed in range(20, 28)]))
    darker = [(0.4 * image + 0.5, label) for image, label in (blob(seed) for seed in range(40, 52))]
    at_home = [blob(seed) for seed in range(60, 72)]

    def score(pairs):
        adapter = make_adapter(opened, recommended())
        steps = [adapter.step(image[None]) for image, _ in pairs]
        assert all(0 <= step.decision.expected.score <= 1 for step in steps)
        given = [
            scored(step.logits.softmax(1)[None], [label])[0, 0] for step, (_, label) in zip(steps, pairs, strict=True)
        ]
        source = [scored(opened.model(image[None]).softmax(1)[None], [label])[0, 0] for image, label in pairs]
        return np.mean(given), np.mean(source)

    with torch.no_grad():
        given, source = score(darker)
        assert given > source + 0.02
        given, source = score(at_home)
        assert given >= source - 0.003


@pytest.mark.usefixtures("short_rehearsal")
def test_images_are_flipped_only_for_the_arms_that_a_plan_flips(trained_model, monkeypatch):
    opened, flipped = open_model(str(trained_model)), []
    original = Arms.flipped
    monkeypatch.setattr(Arms, "flipped", lambda self, name, *rest: flipped.append(name) or original(self, name, *rest))
    setup = rehearsal.Setup.of(opened, [blob(seed) for seed in range(20, 24)], 0)
    assert setup.flip is not None
    setup.recorded(setup.streams()[0], 1, None)
    used = {arm for plan in setup.every_plan() if plan.flip is not None for arm in plan.arms}
    assert set(flipped) == used < set(setup.arms)


@pytest.mark.usefixtures("short_rehearsal")
def test_a_model_folder_keeps_its_rehearsal_and_refuses_that_of_another_network(trained_model, tmp_path):
    checkpoint = load_checkpoint(trained_model)
    save_checkpoint(tmp_path, checkpoint)
    assert load_checkpoint(tmp_path).rehearsal is None
    opened = open_checkpoint(checkpoint, "model")
    found = rehearse(opened, [blob(seed) for seed in range(20, 24)])
    save_rehearsal(tmp_path, found)
    assert open_model(str(tmp_path)).rehearsal == json.loads(json.dumps(found))
    levels = Reconstructions(AutoEncoders({"image": (1, 32, 32)}, width=8), UNET_LEVELS, (4, 8, 16))
    with_parts = replace(checkpoint, reconstructions=levels)  # as `dltta bench` adds what another method needs
    save_checkpoint(tmp_path, with_parts)
    assert open_model(str(tmp_path)).rehearsal == json.loads(json.dumps(found))
    assert open_model(str(tmp_path)).fingerprint != opened.fingerprint
    save_rehearsal(tmp_path, {**found, "network": "0" * 64})
    with pytest.raises(StateError, match="belongs to another network"):
        open_model(str(tmp_path))
    (tmp_path / "rehearsal.json").write_text("{")
    with pytest.raises(StateError, match="is not JSON"):
        load_checkpoint(tmp_path)


@pytest.mark.usefixtures("short_rehearsal")
def test_the_mean_of_every_candidate_is_kept_over_all_sites_but_harmful_ones(trained_model):
    found = rehearse(open_model(str(trained_model)), [blob(seed) for seed in range(20, 24)])
    kept, default = found["candidates"]["1"], found["batch_sizes"]["1"]["default"]
    plan = Plan(tuple(default["plan"]["arms"]), default["plan"]["flip"])
    rows = [row["candidates"] for row in default["scores"] if row["site"] not in rehearsal.REFUSED]
    assert len(rows) == len(default["scores"]) - 3
    for full, name in zip(plan.full_names, plan.candidates, strict=True):
        assert kept[full] == pytest.approx(np.mean([row[name] for row in rows]))
    assert {"source", "batch", "blended", "running", "pooled", "tent:0.03", "tent:0.1"} <= set(kept)
    assert "entropy of source+batch+tent:0.03+tent:0.1" in kept


@pytest.mark.usefixtures("short_rehearsal")
@pytest.mark.parametrize(("axes", "kind"), [(2, "instance"), (3, "batch"), (3, "group")])
def test_volumes_and_networks_without_stored_statistics_rehearse_too(axes, kind):
    shape = (8, 12, 10)[:axes]
    rng = torch.Generator().manual_seed(0)
    cases = [(torch.rand(1, *shape, generator=rng), torch.randint(0, 3, shape, generator=rng)) for _ in range(3)]
    opened = segmenter(model=trained(Segmenter(axes=axes, kind=kind)), spatial_dims=axes)
    found = json.loads(json.dumps(rehearse(opened, cases)))
    arms = found["batch_sizes"]["1"]["default"]["plan"]["arms"]
    assert arms[:2] == ["source", "batch"] if kind == "batch" else arms[0] == "source"
    adapter = make_adapter(replace(opened, rehearsal=found, calibration=None), recommended())
    step = adapter.step(cases[0][0][None])
    assert step.logits.shape == (1, 3, *shape)
    assert step.decision.expected is not None


@pytest.mark.usefixtures("short_rehearsal")
def test_a_classification_is_rehearsed_in_batches_and_runs_with_the_nearest():
    rng = torch.Generator().manual_seed(0)
    cases = [(torch.rand(1, 8, 12, generator=rng), torch.tensor(i % 3)) for i in range(6)]
    opened = classifier()
    found = json.loads(json.dumps(rehearse(opened, cases)))
    assert set(found["batch_sizes"]) == {"1", "32"}
    opened = replace(opened, rehearsal=found)
    for size, nearest in ((200, "32"), (8, "32"), (2, "1")):
        adapter = make_adapter(opened, replace(recommended(), batch_size=size))
        assert adapter.rehearsed.as_json() == Rehearsed.from_json(found["batch_sizes"][nearest]["default"]).as_json()
        assert adapter.step(torch.stack([image for image, _ in cases])).logits.shape == (6, 3)
