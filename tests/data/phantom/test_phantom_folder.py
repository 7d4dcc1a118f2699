"""Synthetic cases on disk are the sites that commands read, and the same cases as in memory."""

import errno
from pathlib import Path

import pytest
import torch

from dltta.data.check import check_site
from dltta.data.inbox import find_incoming
from dltta.data.phantom import phantom
from dltta.data.phantom.folder import write_site
from dltta.data.sites import open_site
from dltta.errors import DataError, SettingError

SITES = {
    "oct": phantom("oct", "cirrus", 3, seed=1, size=(96, 40)),
    "histology": phantom("histology", "hospital_2", 10, size=(32, 40)),
    "prostate": phantom("prostate", "HK", 2, size=(32, 34, 16)),
}


@pytest.mark.parametrize("task", SITES)
def test_what_is_written_is_a_sound_site_with_the_same_cases(tmp_path, task):
    made = SITES[task]
    write_site(made, tmp_path / "new" / "site")
    assert check_site(tmp_path / "new" / "site") == []
    site = open_site(tmp_path / "new" / "site")
    assert (site.site, site.task, site.classes, len(site)) == ("site", made.task, made.classes, len(made))
    for index in range(len(made)):
        read, case = site[index], made[index]
        assert torch.equal(read.label, case.label)
        scale, step = (1, 0) if task == "prostate" else (255, 0.5)  # PNG rounds
        assert read.image.shape == case.image.shape
        assert (read.image - case.image * scale).abs().max() <= step + 1e-4
        if task == "prostate":
            assert read.spacing == pytest.approx(case.spacing, rel=1e-5)
    incoming = find_incoming(tmp_path / "new" / "site")
    assert [case.name for case in incoming] == list(site.names)  # the same cases for `dltta adapt`
    assert all(case.problem is None and len(case.files) == 1 for case in incoming)
    if task == "histology":
        assert site.groups == tuple(made[index].group for index in range(len(made)))
        assert len(set(site.groups)) == 2


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for place in (tmp_path, tmp_path / "mine"):
        with pytest.raises(SettingError, match="is there already; choose a new folder"):
            write_site(SITES["oct"], place)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_site(SITES["oct"], Path())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset.json", "imagesTr", "labelsTr"]


def test_what_fails_half_way_leaves_nothing(tmp_path):
    def full(done, total):
        if done == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"site: cannot be written \(No space left on device\)"):
        write_site(SITES["oct"], tmp_path / "site", progress=full)
    assert list(tmp_path.iterdir()) == []
