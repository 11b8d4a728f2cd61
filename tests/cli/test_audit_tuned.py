"""`specllama audit` uses what `run` uses: the draft and the kernel path of the pair's profile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.cli.audit import command
from specllama.cli.screen.output import open_output
from specllama.drafters.length import DraftLength
from specllama.llama.kernel_path import AS_IN_FILE, OWN, KernelPath
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.setup import Listener, choose, prepare
from tests.cli.conftest import Pair, Result, record_of
from tests.cli.test_audit import LITTLE, NARROW
from tests.cli.test_tune import PROFILE, keep_profile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("auto")]


@pytest.mark.usefixtures("specllama")  # with the probe of the build
@pytest.mark.parametrize("named", [False, True])
def test_the_tuned_draft_is_audited_unless_one_is_named(
    pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str], named: bool
) -> None:
    """Prevents: an audit of another pair than `run` uses; a kernel path for weights that a named draft lacks."""
    derived = tmp_path / "cheaper.gguf"
    shutil.copy(pair.draft, derived)
    keep_profile(pair, replace(PROFILE, derived=derived, draft_path=AS_IN_FILE))
    out = open_output()
    names = Names(target=str(pair.target), draft=str(pair.draft), offline=True)
    ask = Ask(names=names, drafting=Drafting(length=DraftLength(2)), hardware=Hardware(n_threads=1))
    setup = command._as_run(prepare(choose(ask, Listener()), Listener()), out, keep_draft=named)
    assert setup.draft is not None
    assert setup.draft.path == (pair.draft if named else derived)
    assert setup.target_options.use_extra_bufts is False
    assert KernelPath.of(setup.draft_options(64)) == (OWN if named else AS_IN_FILE)
    assert setup.profile is not None
    assert f" as tuned 2026-01-02, with the draft {setup.draft.path.stem}\n" in capfd.readouterr().err


def test_the_report_names_the_profile(
    specllama: Callable[..., Result], short_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a report that does not name its draft and kernel path."""
    monkeypatch.setattr(command, "QUICK", LITTLE)
    args = ("audit", *short_pair.options, *NARROW, "--quick", "--spec-type", "draft-simple")
    assert "with the profile of" not in specllama(*args).out
    keep_profile(short_pair, replace(PROFILE, draft_path=AS_IN_FILE))
    told = specllama(*args)
    assert told.code == 0, told.err
    assert "with the profile of 2026-01-02\n" in told.out
    assert record_of(specllama(*args, "--json"))["tuned"] == {"made": PROFILE.made, "draft_chosen": False}
